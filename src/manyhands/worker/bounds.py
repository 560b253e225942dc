"""Which hidden states can be: bounds on the norms of rows that others sent.

A model's rows at one boundary between layers have much the same norm. Over the families of testing/tiny.py and tales,
greedy and with long prompts, no row after the first eight was more than 1.5 times larger than the largest, or smaller
than the smallest, before it, and no two differed by more than a factor of 8 (tests/worker/test_bounds.py). Pretrained
models have rows hundreds of times larger than the rest (attention sinks), above all that of the first position, which
the holder of a cache has seen. So the bound is generous: it finds zeros and numbers of another order, never a factor of
1.5. That would take computing it again.
"""

import ctypes
import math
from typing import Final

from manyhands.engine.library import TYPES, check, load
from manyhands.errors import Corruption
from manyhands.wire.message import DType

# No model has larger rows, whatever came before.
MAX_NORM = 1e6
# A row may be so many times larger than the largest of its session before, or smaller than the smallest ...
MAX_DRIFT = 64.0
# ... once so many were seen: after a sink alone, every row would be too small.
MIN_SEEN = 8


_TYPES: Final[dict[DType, int]] = {"bf16": TYPES["bf16"], "fp16": TYPES["f16"], "fp32": TYPES["f32"]}
_Pair = ctypes.c_double * 2


def norms(rows: bytes, count: int, dtype: DType, name: str) -> tuple[float, float]:
    """The smallest and the largest norm of `count` rows, one or more.

    Raises Corruption, naming the rows `name`, if a row is not finite or larger than MAX_NORM. (In C:
    with numpy's calls the row of a decode step took 60 us of a hop, whose caches are cold.)
    """
    squares = _Pair()
    if code := load().mh_norms(_TYPES[dtype], rows, len(rows), count, squares):
        check(code)
    least, most = math.sqrt(squares[0]), math.sqrt(squares[1])  # both NaN if one is
    if not most <= MAX_NORM:  # also NaN
        raise Corruption(f"{name} are not finite or beyond {MAX_NORM:g}")
    return least, most


class RowBounds:
    """What the norms of one session's rows may be where they cross one boundary between hops: learnt from those admitted.

    Rows that come again (rollback, replay, another epoch) are as they were, so a place keeps its bounds when the route changes,
    and a replacement learns its own from the replay. Who taught them may have been replaced: they refuse no first rows of an
    epoch (`renewed`), and a place that begins anew learns anew.
    """

    def __init__(self) -> None:
        self._least, self._most = math.inf, 0.0
        self._num_seen = 0

    def __repr__(self) -> str:
        return f"<RowBounds {self._least:g} to {self._most:g} over {self._num_seen} rows>"

    def copy(self) -> "RowBounds":
        """The same, to learn on from here."""
        copied = self.renewed()
        copied._num_seen = self._num_seen
        return copied

    def renewed(self) -> "RowBounds":
        """For another epoch: its first rows widen what was learnt, whatever they are."""
        renewed = RowBounds()
        renewed._least, renewed._most = self._least, self._most
        return renewed

    def admit(self, rows: bytes, count: int, dtype: DType, name: str) -> None:
        """Learn from rows that can be; raise Corruption, naming them, and learn nothing, if one cannot."""
        least, most = norms(rows, count, dtype, name)
        if least == 0.0:
            raise Corruption(f"{name} are all zeros in one row or more")
        if self._num_seen >= MIN_SEEN and self._drift(least, most) > MAX_DRIFT:
            raise Corruption(
                f"{name} have norms from {least:.3g} to {most:.3g}; those before, from {self._least:.3g} to {self._most:.3g}, "
                f"and {MAX_DRIFT:g} times more or less is no model's"
            )
        self._least, self._most = min(least, self._least), max(most, self._most)
        self._num_seen += count

    def _drift(self, least: float, most: float) -> float:
        """How far rows lie outside of what was seen, as a factor (1 or less: inside)."""
        return max(most / self._most, self._least / least)
