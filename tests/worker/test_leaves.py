"""Hashes of rows: the same whatever steps brought them, and those of the last rows where some were taken back."""

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.worker import leaves as module
from manyhands.worker.leaves import LEAF_BYTES, Leaves

WIDTH = 6


def row(position: int, guess: int = 0) -> bytes:
    return hashlib.sha256(b"%d %d" % (position, guess)).digest()[:WIDTH]


def noted(*steps: tuple[int, int, int]) -> Leaves:
    """Leaves after steps of (position, count, guess)."""
    leaves = Leaves()
    for position, count, guess in steps:
        leaves.note(position, b"".join(row(position + i, guess) for i in range(count)), count)
    return leaves


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_a_root_does_not_depend_on_the_steps(counts: list[int]) -> None:
    steps, position = [], 0
    for count in counts:
        steps.append((position, count, 0))
        position += count
    whole, parts = noted((0, position, 0)), noted(*steps)
    for start in range(position):
        for until in range(start, position + 2):
            root = parts.root(start, until)
            assert root == whole.root(start, until)
            assert (root is None) == (until in (start, position + 1))


def test_what_is_taken_back_is_forgotten() -> None:
    leaves = noted((0, 4, 0), (4, 3, 1), (5, 1, 2))
    assert leaves.end == 6 and leaves.root(0, 7) is None
    assert leaves.root(0, 6) == noted((0, 4, 0), (4, 1, 1), (5, 1, 2)).root(0, 6) != noted((0, 6, 0)).root(0, 6)


def test_rows_behind_a_gap_begin_anew() -> None:
    leaves = noted((0, 3, 0), (7, 2, 0))
    assert (leaves.begin, leaves.end) == (7, 9) and leaves.root(0, 9) is None
    assert leaves.root(7, 9) == noted((7, 2, 0)).root(7, 9) is not None
    before = noted((5, 2, 0), (3, 1, 0))
    assert (before.begin, before.end) == (3, 4)


def test_order_matters() -> None:
    one, other = Leaves(), Leaves()
    one.note(0, row(0) + row(1), 2)
    other.note(0, row(1) + row(0), 2)
    assert one.root(0, 2) != other.root(0, 2) and one.root(0, 1) == other.root(1, 2)


def test_a_copy_of_the_beginning_is_its_own() -> None:
    leaves = noted((0, 6, 0))
    copy = leaves.first(4)
    leaves.note(2, row(2, 9), 1)
    assert (copy.begin, copy.end) == (0, 4) and copy.root(0, 4) == noted((0, 4, 0)).root(0, 4)
    assert len(copy._hashes) == 4 * LEAF_BYTES and leaves.first(100).end == 3 and noted((5, 2, 0)).first(3).end == 5


def test_rows_are_noted_while_a_root_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """An origin may ask while its steps run. (The device step failed, and with it those of other sessions.)"""
    leaves, wanted = noted((0, 200, 0)), noted((0, 200, 0)).root(0, 200)

    def meanwhile(data: Any, **options: Any) -> Any:
        monkeypatch.undo()
        leaves.note(200, row(200), 1)
        return hashlib.blake2b(data, **options)

    monkeypatch.setattr(module, "blake2b", meanwhile)
    assert leaves.root(0, 200) == wanted and leaves.end == 201
