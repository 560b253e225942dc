"""Golden digests of what rows of several streams ask of operations: mixes, sizes of other rows, cuts of the lower values,
columns that are replaced, a stored number for each column (golden.json)."""

from collections.abc import Callable
from typing import Final

import numpy as np

from manyhands.engine import library
from manyhands.engine.golden_cases import BackEnd, Op, product, reals
from manyhands.engine.library import Array

WIDTHS: Final = (24, 7, 16, 1)


def odd(seed: int, rows: int, n: int) -> Array:
    """Rows around zero; of zeros, of equal numbers, of tiny and huge ones, and of what is no number."""
    x = reals(seed, rows, n)
    x[1], x[2], x[3], x[4] = 0, 3, x[3] * np.float32(1e-18), x[4] * np.float32(1e18)
    x[5, 0], x[6, n // 2] = np.inf, np.nan
    return x


def mixes(machine: BackEnd) -> bytes:
    """Four streams and what is beside them, predicted, corrected and added to; back in the row, rounded."""
    found = []
    for width in WIDTHS:
        k = 4 * width + 3
        ops: list[Op] = [product(110 + i, 0, i + 1, n, k) for i, n in enumerate((16, 4, width))]
        ops.append((library.COPY, (0, 4, 0, 0, 4 * width, 1, 0, 0), (), ()))
        ops.append((library.MIX, (0, 1, 4, width, 4, 4, 0, 0), (0.0,), ()))
        ops.append((library.MIX, (3, 2, 4, width, 1, 4, 0, 0), (1.0,), ()))
        ops.append((library.MIX, (3, -1, 4, width, 1, 3, 0, width), (0.0,), ()))
        ops.append((library.COPY, (4, 0, 0, 3, 4 * width, 1, 0, 0, 1), (), ()))
        given = [16, 4, width, 4 * width]
        found += [machine.run(reals(26, 33, k), kind, given, ops, 0).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def sizes(machine: BackEnd) -> bytes:
    """Rows that get the size of others, in place and not, with sizes below the least."""
    found = []
    for width in WIDTHS:
        for target, least in ((1, 1e-5), (2, 1e-5), (1, 2.0)):
            ops = [product(120, 0, 1, width, 40), (library.RESCALE, (1, 0, target), (least,), ())]
            found.append(machine.run(odd(27, 33, 40), "f32", [width, width], ops, target).tobytes())
    return b"".join(found)


def cuts(machine: BackEnd) -> bytes:
    """What is so many deviations above the mean, less that."""
    found = []
    for width in (40, *WIDTHS):
        for by in (-1.25, 0.0, 1.6448537):
            ops: list[Op] = [(library.SPARSIFY, (0,), (by,), ())]
            found += [machine.run(odd(28, 33, width), kind, [1], ops, 0).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def columns(machine: BackEnd) -> bytes:
    """Rows times a stored number for each column."""
    found = []
    for width in WIDTHS:
        ops: list[Op] = [(library.MULTIPLY, (0, 0, 1), (), (reals(130, width),))]
        found.append(machine.run(odd(29, 33, width), "f32", [width], ops, 1).tobytes())
    return b"".join(found)


def attended(machine: BackEnd) -> bytes:
    """Streams weighed by their norms times a vector: one, some and all of them."""
    found = []
    for width in (*WIDTHS, 40):
        for streams, epsilon in ((1, 1e-5), (3, 1e-5), (5, 0.5)):
            ops: list[Op] = [(library.ATTEND_STREAMS, (0, 1, streams), (epsilon,), (reals(131, width),))]
            found += [machine.run(odd(31, 33, 5 * width), kind, [width], ops, 1).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def situ(machine: BackEnd) -> bytes:
    """Gates of the kind situ, with a limit of ups and without, in place and not."""
    found = []
    for width in WIDTHS:
        for alpha, limit, target in ((4.0, 25.0, 1), (0.3, 0.7, 2), (1.0, 0.0, 2)):
            ops: list[Op] = [product(140, 0, 1, width, 40), product(141, 0, 2, width, 40)]
            ops.append((library.GATE, (1, 2, target, library.SITU), (alpha, limit, 0.0), ()))
            found.append(machine.run(odd(32, 33, 40), "f32", [width, width], ops, target).tobytes())
    return b"".join(found)


CASES: Final[dict[str, Callable[[BackEnd], bytes]]] = {
    "mixes of streams": mixes,
    "sizes of streams": sizes,
    "cuts": cuts,
    "numbers of columns": columns,
    "attention over streams": attended,
    "gates of the kind situ": situ,
}
