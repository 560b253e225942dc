"""Golden digests of caches of 8 bit (golden_cache.json): attention over keys and values that are held as codes."""

from collections.abc import Callable
from typing import Final

import numpy as np

from manyhands.engine import library
from manyhands.engine.golden_cases import EDGES, BackEnd, Op, product, reals

SHAPES: Final = (  # heads, key heads, width, value width, window, soft cap, sinks
    (4, 2, 16, 16, 0, 0.0, False),
    (3, 1, 40, 24, 70, 0.0, True),
    (2, 2, 33, 17, 5, 2.5, False),
    (9, 1, 64, 64, 0, 0.0, False),
)


def attention(row_type: str) -> Callable[[BackEnd], bytes]:
    """Grouped heads, odd widths, windows, sinks and soft caps over several blocks of keys."""

    def case(machine: BackEnd) -> bytes:
        found = []
        for heads, key_heads, width, value_width, window, cap, sinks in SHAPES:
            widths = [heads * width, key_heads * width, key_heads * value_width, heads * value_width]
            ops = [product(20 + i, 0, i + 1, n, 24) for i, n in enumerate(widths[:3])]
            numbers = (1, 2, 3, 4, heads, key_heads, width, value_width, window, 0, 1)
            ops.append((library.ATTENTION, numbers, (width**-0.5 / 16, cap), (reals(30, heads) if sinks else None,)))
            found.append(machine.run(reals(12, 150, 24), row_type, widths, ops, 4).tobytes())
        return b"".join(found)

    return case


def edges(machine: BackEnd) -> bytes:
    """Keys and values that are infinite, no numbers, denormal, zero, or of very different sizes."""
    n = 32
    x = reals(5, 70, n, around=0, spread=20)
    x[3], x[64] = 0, np.float32(2.0**-105)
    numbers = np.array([bits | sign for bits in EDGES for sign in (0, 1 << 31)], np.uint32).view(np.float32)
    x[5, : len(numbers)], x[66, 7] = numbers, np.inf
    ops: list[Op] = [(library.COPY, (0, 1, 0, 0, n, 1, 0, 0), (), ())]
    ops.append((library.ATTENTION, (1, 0, 0, 2, 1, 1, n, n, 0, 0, 1), (2.0**-40, 0.0), (None,)))
    return machine.run(x, "f32", [n, n], ops, 2).tobytes()


CASES: Final[dict[str, Callable[[BackEnd], bytes]]] = {
    "cache codes bf16": attention("bf16"),
    "cache codes f32": attention("f32"),
    "cache codes edges": edges,
}
