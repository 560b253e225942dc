"""Golden digests of caches of 8 bit (golden_cache.json): attention over keys and values that are held as codes."""

from collections.abc import Callable
from typing import Final

import numpy as np

from manyhands.engine import library
from manyhands.engine.golden_biases import biased, sloped
from manyhands.engine.golden_cases import ATTENTION_SHAPES, EDGES, BackEnd, Op, attention, reals

SHAPES: Final = (*ATTENTION_SHAPES, (9, 1, 64, 64, 0, 0.0, False))


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
    "cache codes bf16": attention("bf16", SHAPES, has_codes=True),
    "cache codes f32": attention("f32", SHAPES, has_codes=True),
    "cache codes edges": edges,
    "cache codes by distance": biased("bf16", has_codes=True),
    "cache codes with slopes": sloped("bf16", has_codes=True),
}
