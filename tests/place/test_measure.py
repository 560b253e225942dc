"""What is measured of this machine is plausible, kept for a day, and bounded by control groups."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manyhands.place import measure
from manyhands.place.measure import Overheads, Speed, measured_speed, this_machine
from manyhands.place.shape import Checkpoint, look_up
from manyhands.resources import available_memory, num_cores
from manyhands.testing.tiny import make_tiny

SPEED = Speed(0.001, 0.0001, 0.002, 0.0005, 1.25, 0.0015, "layers")


@pytest.fixture
def model(llama: Path, home: Path) -> Checkpoint:
    return look_up(str(llama), "bf16", home)


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    """Measuring sets the compute threads of its thread, which here is the tests' own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def is_plausible(speed: Speed) -> bool:
    return 0 < speed.layer_s < 1 and 0 < speed.row_s < 1 and 0 < speed.ends_s < 1 and 0 <= speed.step_s < 1


def test_layers_on_disk_are_run(model: Checkpoint) -> None:
    speed = measure.measure_speed(model)
    assert is_plausible(speed) and speed.source == "layers"


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_layers_that_are_not_here_are_made(model: Checkpoint, family: str, tmp_path: Path, home: Path) -> None:
    found = look_up(str(make_tiny(family, tmp_path / family)), "bf16", home)
    speed = measure.measure_speed(replace(found, folder=None))
    assert is_plausible(speed) and speed.source == "layers"


@pytest.mark.parametrize("large", [{"hidden_size": 8192, "intermediate_size": 1 << 16}, {"vocab_size": 1 << 22}])
def test_what_the_config_asks_for_is_not_made_where_memory_does_not_hold_it(
    model: Checkpoint, large: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest of tensors of one number each passed for a small model, and 275 GB were asked for."""
    config = json.dumps({**json.loads(model.config), "num_key_value_heads": 2, **large}).encode()
    monkeypatch.setattr(measure, "available_memory", lambda: 500 << 20)
    monkeypatch.setattr(measure, "_speed_of_likeness", None)
    speed = measure.measure_speed(replace(model, config=config, folder=None))
    assert speed.source == "bandwidth"


@pytest.mark.parametrize("context", [1, 2, 16, 256])
def test_models_of_few_positions_are_measured_within_them(tmp_path: Path, home: Path, context: int) -> None:
    found = look_up(str(make_tiny("llama", tmp_path / "llama", context=context)), "bf16", home)
    speed = measure.measure_speed(found)
    assert speed.source == "layers" and speed.layer_s > 0 and speed.row_s >= 0  # a row more may take no longer


def test_steps_that_are_measured_are_within_the_context() -> None:
    assert measure.steps_within(4096) == measure.steps_within(320) == (64, 32, 256)
    for context in range(1, 320):
        start, few, many = measure.steps_within(context)
        assert 0 <= start and 1 <= few <= many and start + many <= context
        assert few < many or context < 3


def test_what_does_not_fit_follows_from_bandwidth(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "available_memory", lambda: 1000)
    speed = measure.measure_speed(model)
    twice = replace(model.shape, layer_bytes=tuple(2 * n for n in model.shape.layer_bytes))
    assert is_plausible(speed) and speed.source == "bandwidth"
    monkeypatch.setattr(
        measure, "paired", lambda *_, **__: (0.01, 0.001)
    )  # what a busy machine measures varies by more
    one, two = measure.measure_speed(model), measure.measure_speed(replace(model, shape=twice))
    assert two.layer_s == pytest.approx(2 * one.layer_s) and two.row_s == pytest.approx(2 * one.row_s)


def test_a_chunk_takes_something_however_few_its_rows() -> None:
    """32 rows in 9 ms and 256 in 54 ms; what contradicts itself is laid to the rows."""
    assert measure.of_chunks(0.009, 0.0538) == pytest.approx((0.0026, 0.0002))
    for few_s, many_s in ((0.009, 0.008), (0.009, 0.009), (0.0001, 0.0256), (0.0, 0.0256)):
        assert measure.of_chunks(few_s, many_s) == pytest.approx((0.0, many_s / 256))
    assert measure.of_chunks(0.0, 0.0) == (0.0, 0.0)
    assert measure.of_chunks(0.009, 0.01, 1, 1) == (0.0, 0.01)


def test_figures_are_kept_for_a_day(model: Checkpoint, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Checkpoint] = []

    def once(wanted: Checkpoint) -> Speed:
        runs.append(wanted)
        return SPEED

    monkeypatch.setattr(measure, "measure_speed", once)
    assert [measured_speed(model, home, now_s) for now_s in (0.0, 10.0, 86399.0)] == [SPEED] * 3
    assert len(runs) == 1
    measured_speed(model, home, 86400.0)
    assert len(runs) == 2
    measured_speed(replace(model, shape=replace(model.shape, precision="w8")), home, 86401.0)
    assert len(runs) == 3


@pytest.mark.parametrize(
    "damage", [b"", b"[]", b"{", b'{"KEY": 3}', b'{"KEY": {"layer_s": -1}}', b'{"KEY": {"at": "x"}}', b"\xff"]
)
def test_a_damaged_file_is_measured_again(
    model: Checkpoint, home: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    monkeypatch.setattr(measure, "measure_speed", lambda _: SPEED)
    home.mkdir(exist_ok=True)
    (home / "measured.json").write_bytes(damage.replace(b"KEY", measure._key(model.shape).encode()))
    assert measured_speed(model, home, 5.0) == SPEED
    assert len(json.loads((home / "measured.json").read_text())) == 1


def test_a_home_that_cannot_be_written_is_no_obstacle(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_speed", lambda _: SPEED)
    assert measured_speed(model, Path("/proc/nowhere"), 5.0) == SPEED


def test_overheads_are_rehearsed_once_a_day(model: Checkpoint, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the model; and they add to what its compute takes."""
    monkeypatch.setattr(measure, "measure_speed", lambda _: SPEED)
    clock, held = [0.0], list[float]()
    monkeypatch.setattr("manyhands.place.measure.time.time", lambda: clock[0])

    def rehearse() -> Overheads:
        held.append(clock[0])
        return Overheads(0.001, 0.002, 0.003, 0.0005, 0.0007)

    for clock[0] in (0.0, 10.0, 86400.0):
        here = this_machine("here", model, home, rehearse=rehearse)
        assert (here.overhead_s, here.ends_s, here.begin_s) == (0.0015, 0.004, 0.003)
        assert (here.open_s, here.new_s, here.pass_s) == (0.0005, 0.0007, 0.0015)
        other = replace(model, shape=replace(model.shape, precision="w8"))
        assert this_machine("here", other, home, rehearse=rehearse).begin_s == 0.003
    assert held == [0.0, 86400.0]


def test_a_rehearsal_that_could_not_be_held_is_tried_again(
    model: Checkpoint, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measure_speed", lambda _: SPEED)
    assert this_machine("here", model, home).begin_s == Overheads().begin_s
    assert this_machine("here", model, home, rehearse=lambda: Overheads(begin_s=0.5)).begin_s == 0.5


def test_this_machine_is_a_machine(model: Checkpoint, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_speed", lambda _: SPEED)
    here = this_machine("here", model, home)
    assert here.memory_bytes > 1 << 20 and here.cores >= 1 and here.layer_s == 0.001
    assert this_machine("here", model, home, 12345).memory_bytes == 12345


def group(folder: Path, limit: str, current: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(str(current))
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    """Version 2: this process's own group and those above it."""
    proc, top = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   8000000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/box/inner\n")
    assert available_memory(proc, top) == 8_192_000_000
    group(top / "box" / "inner", "max\n", 5)
    group(top / "box", "3000000000\n", 2_500_000_000, cache=100_000_000)
    assert available_memory(proc, top) == 600_000_000
    group(top / "box" / "inner", "1000", 5000)
    assert available_memory(proc, top) == 0


def test_version_1_groups_count_too(tmp_path: Path) -> None:
    proc, top = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("5:cpu,memory:/box\n0::/\n")
    folder = top / "memory" / "box"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("5000\n")
    (folder / "memory.usage_in_bytes").write_text("2000\n")
    (folder / "memory.stat").write_text("inactive_file 10\n")
    assert available_memory(proc, top) == 3010


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                3000.
Pages active:                            900000.
Pages inactive:                           20000.
Pages speculative:                          100.
Pages wired down:                        150000.
Pages purgeable:                            700.
"Translation faults":                 500000000.
"""


@pytest.mark.parametrize(("told", "free"), [(VM_STAT, 23_100 * 16384), ("no such format", None), (None, None)])
def test_macos_is_asked_by_its_command(
    told: str | None, free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is not there, or says something else, it may be all there is."""
    monkeypatch.setenv("PATH", str(tmp_path))
    if told is not None:
        (tmp_path / "vm_stat").write_text(f"#!/bin/sh\necho '{told}'\n")
        (tmp_path / "vm_stat").chmod(0o755)
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available_memory(tmp_path / "proc", tmp_path / "none") == (free or everything)


def test_cores_are_those_of_the_quota(tmp_path: Path) -> None:
    everything = num_cores(tmp_path)
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert num_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert num_cores(tmp_path) == everything
    (tmp_path / "cpu.max").write_text("5000 100000\n")
    assert num_cores(tmp_path) == 1
