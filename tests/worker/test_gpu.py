"""--device cuda through the worker, on a GPU made of this CPU: its class is the native engine's, and hops on it are repaired by
CPUs and the other way round, with the same text."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Thread, current_thread
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.cli import checks
from manyhands.config import WorkerConfig
from manyhands.core import Precision, Span
from manyhands.engine import library
from manyhands.engine.cuda.operations import check
from manyhands.engine.cuda.span import CudaEnds, CudaSpan
from manyhands.engine.library import FORCED
from manyhands.engine.states import DELTA_SCAN
from manyhands.errors import DeviceLost, ModelError
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Close, Opened, Step
from manyhands.worker import gpu, runner
from manyhands.worker.runner import describe, device_name, load_ends, load_span, precision_note
from tests.engine.cuda_host import HostDevice, HostMemory
from tests.kill import Bench, kept_models
from tests.worker.hop import ORIGIN, hidden, hop, session_id
from tests.worker.pipeline import Loader, forced, random_ids

LAYERS = 3
IDS = random_ids(20, seed=3)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HostDevice]:
    made = HostDevice()
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(runner, "open_gpu", lambda index: made)
    yield made
    assert all(memory.is_whole() for memory in made.memories)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("gpu") / "qwen3", layers=LAYERS, seed=4)


def test_a_gpu_serves_in_the_class_of_the_cpu(
    folder: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = describe(folder, "bf16")
    monkeypatch.setenv(FORCED, "cuda")
    on_gpu = describe(folder, "bf16")
    assert on_gpu.arithmetic == on_cpu.arithmetic and (on_gpu.back_end, on_cpu.back_end) == (
        "cuda:0",
        library.supported()[0],
    )
    assert device_name() == "cuda:0 a GPU made of this CPU"
    assert precision_note((folder / "config.json").read_bytes(), "bf16") == ""
    assert isinstance(load_span(folder, Span(0, 1), "bf16", 1), CudaSpan)
    ends = load_ends(folder, "bf16", 1)
    assert isinstance(ends, CudaEnds) and ends.back_end == "cuda:0"


@pytest.mark.parametrize("precision", ["bf16", "fp32", "w8", "w4"])
def test_a_pipeline_of_spans_and_ends_is_the_cpus(precision: Precision, folder: Path, device: HostDevice) -> None:
    wanted = Loader(folder, precision, library.supported()[0]).cut(0, LAYERS).run(IDS, [20])
    assert np.array_equal(Loader(folder, precision, "cuda").cut(0, 1, LAYERS).run(IDS, [7, 13]), wanted)
    assert "attend_BF16" in device.launched or "attend_F32" in device.launched


@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid_mamba"])
def test_models_with_states_are_served_in_the_class_of_the_cpu(
    family: str, tmp_path: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leases count on what its caches take."""
    folder = make_tiny(family, tmp_path / family, seed=4)
    on_cpu, count = describe(folder, "bf16"), 6
    wanted = Loader(folder, "bf16", library.supported()[0]).cut(0, count).run(IDS, [20])
    assert np.array_equal(Loader(folder, "bf16", "cuda").cut(0, 2, count).run(IDS, [7, 1, 12]), wanted)
    assert "delta_128" in device.launched
    monkeypatch.setenv(FORCED, "cuda")
    on_gpu, span = describe(folder, "bf16"), load_span(folder, Span(1, count), "bf16", 1)
    assert on_gpu.arithmetic == on_cpu.arithmetic and on_gpu.state_bytes == on_cpu.state_bytes
    assert span.session_bytes == sum(on_gpu.state_bytes[1:]) > 0
    assert span.bytes_per_token == sum(on_gpu.position_bytes[1:])


def test_what_it_cannot_hold_is_refused_before_weights_are_read(
    folder: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED, "cuda:0")
    refused: list[Precision] = ["bf16+c8", "w4+c8"]
    for precision in refused:
        with pytest.raises(ModelError, match="cuda:0 holds no caches of 8 bit: leave --cache-dtype out, or --device"):
            describe(folder, precision)


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text", "glm_moe_dsa_shared"])
def test_a_model_with_an_indexer_is_refused(
    family: str, tmp_path: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its config, and by the kernels where they are asked all the same."""
    folder = make_tiny(family, tmp_path)
    monkeypatch.setenv(FORCED, "cuda:0")
    with pytest.raises(ModelError, match=r"has an indexer .* cuda:0 does not compute: leave --device out"):
        describe(folder, "bf16")
    with pytest.raises(ModelError, match="a GPU does not compute an indexer"):
        check(library.INDEX, (1, 2, 3, 4, 5, 6))
    for kind, numbers in ((library.SCALE, (0, 1, 0, 0, 2)), (library.CONVOLVE, (0, 1, 4, 0, 1))):
        with pytest.raises(ModelError, match="a GPU neither pools entries of positions nor scales heads"):
            check(kind, numbers)


def test_a_model_with_streams_and_entries_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny("deepseek_v4", tmp_path)
    monkeypatch.setenv(FORCED, "cuda:0")
    with pytest.raises(
        ModelError, match=r"deepseek_v4 has residual streams .* cuda:0 does not compute: leave --device out"
    ):
        describe(folder, "bf16")


def test_a_model_with_selective_scans_is_refused(
    tmp_path: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("jamba", tmp_path)
    monkeypatch.setenv(FORCED, "cuda:0")
    with pytest.raises(
        ModelError, match="jamba has selective scans, which cuda:0 does not compute: leave --device out"
    ):
        describe(folder, "bf16")
    with pytest.raises(ModelError, match="a GPU does not compute selective scans"):
        check(library.DELTA, (1, 2, 3, 4, 4, 5, 1, 1, 16, 32, DELTA_SCAN, 0))


def test_a_model_of_several_streams_is_refused(
    tmp_path: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its config, and by the kernels where they are asked all the same."""
    folder = make_tiny("gemma3n_text", tmp_path)
    monkeypatch.setenv(FORCED, "cuda:0")
    with pytest.raises(ModelError, match=r"gemma3n_text has streams .* cuda:0 does not compute: leave --device out"):
        describe(folder, "bf16")
    for kind, numbers in (
        (library.MIX, (0, 1, 2, 8, 1, 1, 0, 0)),
        (library.RESCALE, (0, 1, 0)),
        (library.SPARSIFY, (0,)),
    ):
        with pytest.raises(ModelError, match="a GPU does not compute streams"):
            check(kind, numbers)


def test_a_parked_session_goes_on_in_the_blocks_that_it_has(
    tmp_path: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a span has no room for twice is not there twice, and its rows are the CPU's."""
    folder, kept, config = make_tiny("llama", tmp_path / "llama", seed=4), session_id(9), WorkerConfig(cache_tokens=390)

    async def scenario() -> tuple[bytes, int]:
        async with hop(folder, config) as one:
            await one.open(1, 200)
            one.step(1, 0, hidden(150), reply_from=150)
            await one.until(lambda: bool(one.after.of(Step, session_id(1))))
            one.host.close(Close(session_id(1), kept, 150), ORIGIN)
            before = len(device.memories)
            await one.open(2, 200, resume=kept, resume_until=150)
            assert one.origin.of(Opened, session_id(2))[-1].cached == 150 and len(one.host.parking) == 0
            one.step(2, 150, hidden(20, 1), reply_from=170)
            await one.until(lambda: bool(one.after.of(Step, session_id(2))))
            return one.rows(2).view(torch.uint16).numpy().tobytes(), len(device.memories) - before

    rows, made = run_virtual(scenario())
    monkeypatch.setenv(FORCED, "cuda")
    assert made == 0 and run_virtual(scenario()) == (rows, 2)  # a copy of the third block, and a table


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid_mamba"])
def test_opens_take_no_memory_of_the_gpu_on_the_event_loop(
    family: str, tmp_path: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may take its time, behind what the GPU runs. (A session's last states were allocated there.)"""
    folder, kept = make_tiny(family, tmp_path / family, seed=4), session_id(9)
    monkeypatch.setenv(FORCED, "cuda")
    threads, plain = list[Thread](), device.allocate

    def allocate(num_bytes: int) -> HostMemory:
        threads.append(current_thread())
        return plain(num_bytes)

    monkeypatch.setattr(device, "allocate", allocate)

    async def scenario() -> None:
        async with hop(folder, WorkerConfig(cache_tokens=600)) as one:
            await one.host.engine.ensure_loaded()
            threads.clear()
            await one.open(1, 200)
            assert not threads
            one.step(1, 0, hidden(40))
            await one.until(lambda: bool(one.after.of(Step, session_id(1))))
            one.host.close(Close(session_id(1), kept, 40), ORIGIN)
            await one.open(2, 200, resume=kept, resume_until=40)
            one.step(2, 40, hidden(3, 1))
            await one.until(lambda: bool(one.after.of(Step, session_id(2))))
            assert threads and current_thread() not in threads

    run_virtual(scenario())


def test_caches_get_most_of_what_the_gpu_has_free(
    folder: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED, "cuda")
    span = load_span(folder, Span(0, 1), "bf16", 1)
    monkeypatch.setattr(device, "free_bytes", lambda: 1000)
    assert span.cache_room == 750


def test_a_machine_without_a_gpu_says_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's packages, its driver, or the GPU: whichever it is here."""
    monkeypatch.setenv(FORCED, "cuda:3")
    gpu.open_gpu.cache_clear()
    with pytest.raises(
        ModelError, match=r"pip install 'manyhands\[cuda\]'|no driver of NVIDIA's|has no NVIDIA GPU"
    ) as said:
        load_span(folder, Span(0, 1), "bf16", 1)
    assert "\n" not in str(said.value)


def test_a_gpu_with_other_bits_is_not_used(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.engine.cuda.proof.failures", lambda device, team: ["norms", "rotary"])
    with pytest.raises(ModelError, match="does not reproduce the golden digests of norms, rotary: leave --device out"):
        gpu.proven(device)


def test_doctor_says_what_gpus_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "cuda" else None)
    monkeypatch.setattr(gpu, "found", lambda: [("cuda:0", "NVIDIA H100 80GB HBM3", 80 * 10**9)])
    (said,) = [check for check in checks.check_device(2, 0.0) if check.name == "gpu"]
    assert said.level == "ok" and said.said == "--device may be cuda:0 (NVIDIA H100 80GB HBM3, 80 GB)"
    monkeypatch.setattr(gpu, "found", lambda: [])
    assert [check.said for check in checks.check_device(2, 0.0) if check.name == "gpu"] == ["no NVIDIA GPU"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [check.said[:16] for check in checks.check_device(2, 0.0) if check.name == "gpu"] == ["no --device cuda"]


@pytest.mark.parametrize(
    ("lost", "taking", "family"),
    [("cuda", "scalar", "gemma2"), ("scalar", "cuda", "gemma2"), ("cuda", "scalar", "qwen3_next")],
)
def test_a_hop_on_a_gpu_is_repaired_by_a_cpu_and_the_other_way_round(
    lost: str, taking: str, family: str, tmp_path: Path, device: HostDevice
) -> None:
    """The kill matrix of back ends (test_kill_matrix.py), with a GPU among them: same text, class E0."""
    found: list[Any] = []

    async def main(mixed: Bench) -> None:
        async with mixed.scene() as scene:
            found[:] = [(await node.hosts[0].engine.ensure_loaded()).runner.back_end for node in scene.hops]
            victim = scene.hops[1]
            scene.faults.at("decode", victim, lambda: scene.faults.die(victim), 7)
            launched = len(device.launched)
            assert await scene.ask("hot", 0, path="ring") == mixed.wanted["hot", 0]
            assert len(scene.answers[0].repairs) == 1 and scene.answers[0].exactness == "E0"
            assert len(device.launched) > launched

    others = library.supported()[0]
    with forced(others), kept_models([others, lost, others, taking]) as models:
        mixed = Bench(make_tiny(family, tmp_path / family, seed=21), models)
        mixed.play(lambda: main(mixed))
    assert found == [name if name != "cuda" else "cuda:0" for name in (others, lost, others, taking)]


def test_a_gpu_that_failed_is_not_on_offer_and_its_streams_go_on_elsewhere(
    tmp_path: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After some errors CUDA answers every call of the process with the same one."""
    usual, failing = device.wait, [False]

    def wait() -> None:
        if failing[0]:
            raise DeviceLost("CUDA failed: an illegal memory access was encountered")
        usual()

    monkeypatch.setattr(device, "wait", wait)

    async def main(mixed: Bench) -> None:
        async with mixed.scene() as scene:
            victim = scene.hops[1]
            scene.faults.at("decode", victim, lambda: failing.__setitem__(0, True), 7)
            tokens, *_ = await asyncio.gather(*(scene.ask("hot", number, path="ring") for number in range(3)))
            assert tokens == mixed.wanted["hot", 0]
            assert [answer.token_ids for answer in scene.answers] == [mixed.wanted["hot", n] for n in range(3)]
            assert all(answer.exactness == "E0" for answer in scene.answers)
            assert victim.worker.spans == () and not victim.hosts
            assert await scene.ask("greedy", 1) == mixed.wanted["greedy", 1]
            assert scene.answers[-1].repairs == []

    others = library.supported()[0]
    with forced(others), kept_models([others, "cuda", others, others]) as models:
        mixed = Bench(make_tiny("gemma2", tmp_path / "gemma2", seed=21), models)
        mixed.play(lambda: main(mixed))
    said = [record.getMessage() for record in caplog.records if "served any more" in record.getMessage()]
    assert said == [
        "layers=2-3 are not served any more: CUDA failed: an illegal memory access was encountered; start this process anew"
    ]
