"""Files of machines come from people: every mistake is one line that names it."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import BadRequest
from manyhands.place.machines import (
    Fleet,
    Machine,
    fleet_of,
    needs_measuring,
    parse_bytes,
    parse_what_if,
    read_machines_file,
)

HERE = Machine("here", 8 << 30, 0.002, 1e-5, 0.004, 0.001, cores=4, pass_s=3e-4)
DESK = '[[machine]]\nname = "desk"\nmemory = "16GB"\nlayer_ms = 1.5\n'
NAS = '[[machine]]\nname = "nas"\nmemory = 4_000_000_000\nspeed = 0.5\nrtt_ms = 12\nuplink_mbit = 40\ncores = 2\n'


def read(tmp_path: Path, text: str, here: Machine | None = HERE) -> Fleet:
    path = tmp_path / "machines.toml"
    path.write_text(text)
    return fleet_of(read_machines_file(path), here)


def test_a_file_says_what_machines_can_do(tmp_path: Path) -> None:
    fleet = read(tmp_path, f'origin = "nas"\n{DESK}{NAS}[[link]]\nbetween = ["nas", "desk"]\nrtt_ms = 3')
    desk, nas = fleet.machines
    assert (desk.memory_bytes, desk.layer_s, desk.uplink_Bps) == (16_000_000_000, 0.0015, math.inf)
    assert (nas.layer_s, nas.row_s, nas.ends_s, nas.overhead_s) == (0.004, 2e-5, 0.008, 0.002)
    assert (nas.rtt_s, nas.uplink_Bps, nas.cores, nas.begin_s) == (0.012, 5e6, 2, 2 * HERE.begin_s)
    assert (nas.open_s, nas.new_s, nas.pass_s) == (2 * HERE.open_s, 2 * HERE.new_s, 6e-4)
    assert fleet.origin == "nas" and fleet.leg(desk, nas).rtt_s == 0.003


def test_a_row_that_is_stated_is_all_that_a_chunk_takes(tmp_path: Path) -> None:
    desk, laptop = read(tmp_path, f"{DESK}row_ms = 0.05\n{DESK.replace('desk', 'laptop')}").machines
    assert (desk.row_s, desk.pass_s) == (5e-5, 0.0) and (laptop.row_s, laptop.pass_s) == (HERE.row_s, HERE.pass_s)


def test_what_was_not_measured_is_the_sum_of_both_ways(tmp_path: Path) -> None:
    laptop = NAS.replace("nas", "laptop")
    desk, nas, far = (fleet := read(tmp_path, DESK + NAS + laptop)).machines
    assert fleet.origin == "desk" and fleet.leg(desk, desk).rtt_s == 0
    assert fleet.leg(desk, nas).rtt_s == 0.012 and fleet.leg(nas, far).rtt_s == 0.024
    assert fleet.leg(nas, desk).uplink_Bps == 5e6 and fleet.leg(desk, nas).uplink_Bps == math.inf


def test_only_relative_speeds_need_a_measurement(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(DESK)
    assert not needs_measuring(read_machines_file(path)["machine"])
    path.write_text(DESK + NAS)
    assert needs_measuring(read_machines_file(path)["machine"])
    assert read(tmp_path, DESK, here=None).machines[0].row_s == 0


@pytest.mark.parametrize(
    "text, said",
    [
        ("", r"no machines: list at least one \[\[machine\]\]"),
        ("machine = 3", r"machine is written as \[\[machine\]\]"),
        ("[[machine]\n", "is not TOML"),
        ("speed = 2\n" + DESK, "'speed' is unknown"),
        (DESK + DESK, "machine desk is listed twice"),
        (DESK + "vram = 3", "machine desk: 'vram' is unknown"),
        (DESK.replace('"16GB"', '"lots"'), "memory 'lots' is not a size"),
        (DESK.replace('"16GB"', "0"), "machine desk: memory is 0; give"),
        (DESK.replace('"16GB"', "-5"), "memory '-5' is not a size"),
        (DESK.replace('"16GB"', "true"), "memory 'True' is not a size"),
        (DESK.replace('memory = "16GB"\n', ""), "machine desk has no memory"),
        (DESK.replace('name = "desk"\n', ""), r"a \[\[machine\]\] has no name"),
        (DESK.replace('"desk"', '""'), "machine name ''"),
        (DESK.replace('"desk"', r'"a\u001bb"'), "printable"),
        (DESK.replace("1.5", "nan"), "machine desk: layer_ms is nan"),
        (DESK.replace("1.5", "inf"), "machine desk: layer_ms is inf"),
        (DESK.replace("1.5", "-1"), "machine desk: layer_ms is -1"),
        (DESK.replace("1.5", "0"), "layer_s is 0; leave it out"),
        (DESK.replace("1.5", '"fast"'), "layer_ms is 'fast'; it must be a number"),
        (DESK + "rtt_ms = nan", "rtt_ms is nan"),
        (DESK + "rtt_ms = -1", "rtt_ms is -1"),
        (DESK + "uplink_mbit = 0", "its uplink is 0.0 bytes/s"),
        (DESK + "cores = 0", "cores is 0"),
        (NAS.replace("0.5", "0"), "machine nas: speed is 0"),
        (NAS.replace("0.5", "nan"), "machine nas: speed is nan"),
        ('origin = "moon"\n' + DESK, "'moon' is no machine listed: there are desk"),
        (DESK + '[[link]]\nbetween = ["desk", "moon"]\nrtt_ms = 1', "'moon' is no machine"),
        (DESK + '[[link]]\nbetween = ["desk", "desk"]\nrtt_ms = 1', "two machines"),
        (DESK + '[[link]]\nbetween = "desk"', "a .*link.* is between two machines"),
        (DESK + NAS + '[[link]]\nbetween = ["desk", "nas"]\nrtt_ms = -1', "link desk - nas: rtt_ms is -1"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"nowhere\.toml cannot be read: No such file"):
        read_machines_file(tmp_path / "nowhere.toml")
    (tmp_path / "m").write_bytes(b"\xff\xfe")
    with pytest.raises(BadRequest, match="is not TOML"):
        read_machines_file(tmp_path / "m")
    with pytest.raises(BadRequest, match="nothing was measured"):
        read(tmp_path, NAS, here=None)


@given(st.binary(max_size=200))
def test_no_file_is_more_than_refused(raw: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.toml"
        path.write_bytes(raw)
        with pytest.raises(BadRequest):
            fleet_of(read_machines_file(path), HERE)


@pytest.mark.parametrize(
    "text, num_bytes",
    [("8GB", 8_000_000_000), ("1.5 GiB", 3 << 29), ("512MiB", 512 << 20), ("3G", 3_000_000_000), ("77", 77), (77, 77)],
)
def test_sizes_are_read(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "8 QB", "-8GB", "nan", "1e9", "8GB8", "٣GB", "9" * 30])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="is not a size"):
        parse_bytes(text)


def test_what_ifs_are_read() -> None:
    laptop = parse_what_if("laptop:8GB@40ms", HERE)
    assert (laptop.name, laptop.memory_bytes, laptop.rtt_s, laptop.layer_s) == ("laptop", 8 * 10**9, 0.04, 0.002)
    assert parse_what_if("big one:1TB*2.5", HERE).layer_s == pytest.approx(0.0008)


@pytest.mark.parametrize(
    "text", ["", "laptop", "laptop:", "laptop:8GB@40", "laptop:8GB@-1ms", "a:8GB@nanms", "a:8GB*x", "a:0"]
)
def test_what_ifs_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_what_if(text, HERE)


@given(st.text(max_size=40))
def test_no_what_if_does_more_than_be_refused(text: str) -> None:
    try:
        parse_what_if(text, HERE)
    except BadRequest as error:
        assert str(error)
