"""What is said of a model's speed at each precision follows from its bytes and what was measured of each kind of weights."""

import json
import math
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.folder import read_config, read_entries
from manyhands.place import kernels
from manyhands.place.kernels import Kernels, measure_kernels, measured_kernels, predict_here
from manyhands.place.measure import MAX_AGE_S, Overheads, measured_overheads
from manyhands.resources import num_cores
from manyhands.testing.tiny import make_tiny
from tests.quantised_cases import CASES
from tests.quantised_files import quantised_tiny

NOW = 1e9


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The types that were measured, call by call; each byte takes a microsecond, each product a millisecond."""
    found: list[set[str]] = []

    def measure(threads: int, types: Collection[str]) -> Kernels:
        found.append(set(types))
        return Kernels(dict.fromkeys(types, 1e-6 / threads), 1e-3)

    monkeypatch.setattr(kernels, "measure_kernels", measure)
    return found


def predicted(folder: Path, home: Path) -> dict[str, tuple[int, float]]:
    found = predict_here(parse_config(read_config(folder)), read_entries(folder), home)
    return {name: (each.token_bytes, each.tokens_per_s) for name, each in found.items()}


def test_each_precision_takes_its_bytes(tmp_path: Path, home: Path, asked: list[set[str]]) -> None:
    folder = make_tiny("llama", tmp_path / "llama", layers=2, hidden=256, intermediate_size=512)
    found = predicted(folder, home)
    assert set(found) == {"bf16", "fp32", "w8", "w4"} and asked[0] == {"bf16", "w8", "w4"}
    layers = (entry for entry in read_entries(folder) if ".layers." in entry.name and len(entry.shape) == 2)
    matrices, head = sum(math.prod(entry.shape) for entry in layers), 264 * 256
    rows = -(-264 // 16) * 16 * 256  # panels of 16 outputs
    assert matrices + head <= found["bf16"][0] / 2 <= matrices + rows
    assert found["w4"][0] == pytest.approx(matrices * 4.5 / 8 + rows * 8.5 / 8, rel=0.1)
    beside_s = Overheads().hop_s + Overheads().origin_s
    for size, speed in found.values():
        assert 1 / speed == pytest.approx(size * 1e-6 / num_cores() + 15 * 1e-3 + beside_s)


def test_overheads_count_as_they_were_rehearsed(tmp_path: Path, home: Path, asked: list[set[str]]) -> None:
    """So that `model inspect` says what `plan` does."""
    folder = make_tiny("llama", tmp_path / "llama", layers=2)
    usual = predicted(folder, home)["bf16"][1]
    measured_overheads(home, time.time(), lambda: Overheads(hop_s=0.5, origin_s=0.25))
    rehearsed = predicted(folder, home)["bf16"][1]
    assert 1 / rehearsed - 1 / usual == pytest.approx(0.75 - Overheads().hop_s - Overheads().origin_s)


def test_experts_count_as_they_are_routed_to(tmp_path: Path, home: Path, asked: list[set[str]]) -> None:
    two = make_tiny("mixtral", tmp_path / "two", layers=1, hidden=64)
    four = make_tiny("mixtral", tmp_path / "four", layers=1, hidden=64, num_experts_per_tok=4)
    inner = json.loads((two / "config.json").read_text())["intermediate_size"]
    assert predicted(four, home)["bf16"][0] - predicted(two, home)["bf16"][0] == 2 * 3 * 64 * inner * 2


def test_quantised_files_count_as_they_are_held(tmp_path: Path, home: Path, asked: list[set[str]]) -> None:
    config, pack, _, facts = CASES["awq"]
    folder, _ = quantised_tiny(tmp_path / "q", config, pack, layers=1, **facts)
    found = predicted(folder, home)
    assert "w4z" in asked[0] and found["w4"] == found["w8"] and found["w4"][0] < found["bf16"][0]


def test_a_model_without_a_program_has_none(tmp_path: Path, home: Path, asked: list[set[str]]) -> None:
    assert predict_here({"model_type": "unheard_of"}, (), home) == {} and not asked


def test_a_type_is_measured_once_a_day(home: Path, asked: list[set[str]]) -> None:
    each = len({1, num_cores()})
    assert len(measured_kernels({"w8"}, home, NOW)) == each and asked == each * [{"w8"}]
    measured_kernels({"w8"}, home, NOW + 1)
    assert len(asked) == each
    both = measured_kernels({"w8", "w4"}, home, NOW + 2)
    assert asked[each:] == each * [{"w4"}] and all(of.byte_s.keys() == {"w8", "w4"} for of in both)
    measured_kernels({"w8", "w4"}, home, NOW + 2 + MAX_AGE_S)
    assert asked[2 * each :] == each * [{"w8", "w4"}]


@pytest.mark.parametrize(
    "entry",
    [[], {"at": NOW}, {"at": NOW, "kernels": []}, {"at": NOW, "kernels": [{"byte_s": [], "product_s": 1}]},
     {"at": NOW, "kernels": 2 * [{"byte_s": {"w8": -1}, "product_s": 1e-6}]}, {"at": "now", "kernels": {}}],
)  # fmt: skip
def test_a_damaged_file_is_measured_anew(home: Path, asked: list[set[str]], entry: object) -> None:
    home.mkdir(parents=True, exist_ok=True)
    (home / "measured.json").write_text(json.dumps({kernels._key(): entry}))
    assert measured_kernels({"w8"}, home, NOW)[0].byte_s == {"w8": 1e-6} and asked


def test_real_kernels_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WIDTH", 512)
    monkeypatch.setattr(kernels, "LARGE_BYTES", 1 << 20)
    found = measure_kernels(1, {"w8", "w5", "bf16"})
    assert found.byte_s.keys() == {"w8", "w5", "bf16"}
    assert all(0 < value < 1e-3 for value in (*found.byte_s.values(), found.product_s))
