"""Golden digests of an index that chooses positions, or blocks of them, and of attention over these (golden.json)."""

from collections.abc import Callable
from typing import Final

import numpy as np

from manyhands.engine import library
from manyhands.engine.golden_cases import BackEnd, Op, product, reals

POSITIONS: Final = 150
ALIKE: Final = 50  # positions after which inputs come again, so that scores are equal


def index(row_type: str) -> Callable[[BackEnd], bytes]:
    """Fewer and more positions than a block, heads than a tile; equal scores, and rows of what is no number."""

    def case(machine: BackEnd) -> bytes:
        found, k = [], 24
        x = np.tile(reals(80, ALIKE, k), (POSITIONS // ALIKE, 1))
        x[40, 3], x[110, 5] = np.inf, np.nan
        for heads, rank, rotary, index_heads, width, top_k in ((3, 33, 7, 5, 20, 10), (20, 48, 16, 35, 40, 70)):
            key = rank + rotary
            widths = [heads * key, key, index_heads * width, width, index_heads, top_k, heads * rank]
            ops: list[Op] = [product(81 + 2 * i, 0, i + 1, n, k) for i, n in enumerate(widths[:5])]
            ops.append((library.INDEX, (3, 4, 5, 6, index_heads, width), (), ()))
            numbers = (1, 2, 2, 7, heads, 1, key, rank, 0, 1, 0, 6)
            ops.append((library.ATTENTION, numbers, (0.02, 0.0), (None,)))
            found += [machine.run(x, row_type, widths, ops, out).tobytes() for out in (6, 7)]
        return b"".join(found)

    return case


def blocks(row_type: str) -> Callable[[BackEnd], bytes]:
    """Blocks of the cache and of several of these, the last ones always or not; equal scores, and what is no number."""

    def case(machine: BackEnd) -> bytes:
        found, k, rows = [], 24, 400
        x = np.tile(reals(95, ALIKE, k), (rows // ALIKE, 1))
        x[40, 3], x[310, 5] = np.inf, np.nan
        for heads, width, value, wide, block, top_k, local in (
            (2, 33, 17, 20, 64, 2, 1),
            (5, 40, 48, 48, 128, 2, 0),
            (1, 16, 16, 70, 64, 3, 3),
        ):
            many, each = 3 * heads, top_k * block // 64
            widths = [many * width, heads * width, heads * value, heads * wide, wide, heads * each, many * value]
            ops: list[Op] = [product(96 + 2 * i, 0, i + 1, n, k) for i, n in enumerate(widths[:5])]
            ops.append((library.INDEX, (4, 5, 4, 6, heads, wide, 0, block, local), (), ()))
            numbers = (1, 2, 3, 7, many, heads, width, value, 0, 0, 0, 6)
            ops.append((library.ATTENTION, numbers, (0.02, 0.0), (None,)))
            found += [machine.run(x, row_type, widths, ops, out).tobytes() for out in (6, 7)]
        return b"".join(found)

    return case


CASES: Final[dict[str, Callable[[BackEnd], bytes]]] = {
    **{f"index {row_type}": index(row_type) for row_type in ("bf16", "f32")},
    **{f"blocks {row_type}": blocks(row_type) for row_type in ("bf16", "f32")},
}
