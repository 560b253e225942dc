"""Packed weights that are kept: every byte is proven at each load, within stated bounds; whatever is wrong is made anew."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.core import ModelId
from manyhands.weights import packed
from manyhands.weights.packed import PackedShelf, Part, packed_folder

MODEL = ModelId("ab" * 32)
PART: Part = [
    ("w4", np.arange(3000, dtype=np.uint8)),
    ("bf16", np.arange(500, dtype=np.uint16)),
    ("f32", np.ones(7, np.float32)),
]


def allocate(count: int, dtype: type[Any]) -> NDArray[Any]:
    return np.zeros(count, dtype)


def file_of(home: Path) -> Path:
    (path,) = packed_folder(home, MODEL).iterdir()
    return path


def check_same(found: Any) -> None:
    assert found is not None and [name for name, _ in found] == ["w4", "bf16", "f32"]
    for (_, ours), (_, given) in zip(found, PART, strict=True):
        np.testing.assert_array_equal(ours, given)
        assert ours.dtype == given.dtype


def test_what_is_kept_comes_back_under_its_key_alone(tmp_path: Path) -> None:
    shelf = PackedShelf(tmp_path, MODEL)
    assert shelf.load("layer 0", allocate) is None
    assert shelf.keep("layer 0", PART)
    check_same(shelf.load("layer 0", allocate))
    assert shelf.load("layer 1", allocate) is None
    assert PackedShelf(tmp_path, ModelId("cd" * 32)).load("layer 0", allocate) is None


@pytest.mark.parametrize("at", [0, 31, 33, 45, 200, 400, -1, -14, -2000])
def test_a_changed_byte_is_found_and_the_file_removed(tmp_path: Path, at: int) -> None:
    shelf = PackedShelf(tmp_path, MODEL)
    shelf.keep("layer 0", PART)
    path = file_of(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    assert shelf.load("layer 0", allocate) is None
    assert not path.exists()
    assert shelf.keep("layer 0", PART)
    check_same(shelf.load("layer 0", allocate))


@pytest.mark.parametrize("cut", [0, 10, 39, 100, 3000, -1])
def test_a_file_cut_short_or_grown_is_found(tmp_path: Path, cut: int) -> None:
    shelf = PackedShelf(tmp_path, MODEL)
    shelf.keep("layer 0", PART)
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    assert shelf.load("layer 0", allocate) is None
    shelf.keep("layer 0", PART)
    path.write_bytes(path.read_bytes() + b"\0")
    assert shelf.load("layer 0", allocate) is None


def test_a_head_that_lies_allocates_nothing(tmp_path: Path) -> None:
    """Also one with a hash that fits it: lengths are held to the file's own."""
    import hashlib

    shelf = PackedShelf(tmp_path, MODEL)
    shelf.keep("layer 0", PART)
    path, asked = file_of(tmp_path), list[int]()

    def watched(count: int, dtype: type[Any]) -> NDArray[Any]:
        asked.append(count)
        return np.zeros(count, dtype)

    for length in (1 << 40, 1 << 62):
        head = json.dumps({"key": "layer 0", "arrays": [["w4", "u1", length, "00" * 32]]}).encode()
        path.write_bytes(hashlib.sha256(head).digest() + len(head).to_bytes(8, "little") + head + b"x" * 100)
        assert shelf.load("layer 0", watched) is None
        path.write_bytes(b"\0" * 32 + (1 << 40).to_bytes(8, "little") + b"x")
        assert shelf.load("layer 0", watched) is None
    for head in (
        b"[]",
        b"{",
        b'{"key": "layer 0", "arrays": [["w4", "u3", 1, ""]]}',
        b'{"key": "layer 0", "arrays": [[1]]}',
    ):
        path.write_bytes(hashlib.sha256(head).digest() + len(head).to_bytes(8, "little") + head + b"x")
        assert shelf.load("layer 0", watched) is None
    assert not asked


def test_the_least_used_go_where_the_bound_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LIMIT_BYTES", 10_000)
    shelf, other = PackedShelf(tmp_path, MODEL), PackedShelf(tmp_path, ModelId("cd" * 32))

    def total() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "packed").rglob("*.pack"))

    other.keep("old", PART)
    for number in range(8):
        assert shelf.keep(f"layer {number}", PART)
        assert total() <= 10_000 + 1000  # heads
    assert other.load("old", allocate) is None
    check_same(shelf.load("layer 7", allocate))
    assert not shelf.keep("large", [("w4", np.zeros(10_001, np.uint8))])
    monkeypatch.setattr(packed, "FREE_BYTES", 1 << 62)
    assert not shelf.keep("layer 9", PART)
    check_same(shelf.load("layer 7", allocate))


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    shelf = PackedShelf(tmp_path, MODEL)
    shelf.keep("layer 0", PART)
    left, new = (file_of(tmp_path).with_name(f".x.{n}.tmp") for n in range(2))
    left.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(left, (0, 0))
    shelf.keep("layer 1", PART)
    assert new.exists() and not left.exists()


def test_a_home_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "packed").write_text("a file")
    shelf = PackedShelf(tmp_path, MODEL)
    assert not shelf.keep("layer 0", PART)
    assert shelf.load("layer 0", allocate) is None
