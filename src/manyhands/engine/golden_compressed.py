"""Golden digests of what deepseek_v4 and hy_v4 alone ask of operations: residual streams, entries, attention over positions and
entries, or over latents with sinks, experts by square roots and by ids."""

from collections.abc import Callable
from typing import Final

import numpy as np

from manyhands.engine import library
from manyhands.engine.golden_cases import BackEnd, Op, product, reals

ROWS: Final = 150
# Heads, columns of a key, positions of an entry, whether doubled, window; heads of an index, their columns, entries chosen.
SHAPES: Final = (
    (3, 40, 4, 1, 20, 5, 24, 7),
    (20, 33, 16, 0, 70, 0, 0, 0),
    (5, 16, 1, 1, 3, 33, 20, 70),
    (2, 48, 128, 0, 9, 0, 0, 0),
)


def streams(machine: BackEnd) -> bytes:
    """Rows of several streams, and of what is not theirs, collapsed and spread, in one turn and many; the last collapse
    alone."""
    found = []
    for count, width, iterations in ((4, 40, 20), (1, 17, 1), (3, 300, 2), (8, 16, 7)):
        mixes, x = (2 + count) * count, reals(110, 33, count * width + 4)
        ops: list[Op] = [
            product(111, 0, 1, mixes, count * width + 4),
            (library.COLLAPSE, (0, 1, 2, 1, count, iterations), (1e-6, 1e-3), (reals(113, mixes), reals(114, 3))),
            (library.SPREAD, (2, 1, 0, 1, count), (), ()),
            product(115, 0, 3, count, count * width + 4),
            (library.COLLAPSE, (0, 3, 2, 0, count, 1), (1e-6, 1e-6), (reals(117, count), reals(118, 1))),
        ]
        for out in range(4):
            found += [machine.run(x, kind, [mixes, width, count], ops, out).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def streams_apart(machine: BackEnd) -> bytes:
    """Streams that each go on as they are, of which some have a magnitude above one."""
    found = []
    for count, width, magnitude in ((4, 40, 2.0), (1, 17, 0.7), (8, 300, 3.0)):
        x = reals(160, 33, count * width)
        ops: list[Op] = [
            product(161, 0, 1, 2 * count, count * width),
            (library.COLLAPSE, (0, 1, 2, 2, count, 1), (1e-6, 1e-3, magnitude), (reals(163, 2 * count), reals(164, 2))),
            (library.SPREAD, (2, 1, 0, 1, count), (), ()),
        ]
        for out in range(3):
            found += [machine.run(x, kind, [2 * count, width], ops, out).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def latents(machine: BackEnd) -> bytes:
    """Attention over latents with sinks, of all positions and of those that an index chooses."""
    heads, key, rank, many, wide, chosen = 5, 24, 17, 3, 8, 20
    found, x = [], reals(170, 150, 24)
    for is_chosen in (False, True):
        widths = [heads * key, key, heads * rank, many * wide, wide, many, chosen]
        places = ((171, 1, 0), (173, 2, 1), (175, 4, 3), (177, 5, 4), (179, 6, 5))
        ops: list[Op] = [product(seed, 0, target, widths[place], 24) for seed, target, place in places]
        ops += [(library.INDEX, (4, 5, 6, 7, many, wide), (), ())] if is_chosen else []
        shape = (1, 2, 2, 3, heads, 1, key, rank, 0, 1, 0, 7 * is_chosen)
        ops.append((library.ATTENTION, shape, (0.2, 0.0), (reals(181, heads),)))
        found += [machine.run(x, kind, widths, ops, 3).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def entries(row_type: str) -> Callable[[BackEnd], bytes]:
    """Entries of few positions and many, of which an index chooses some or all are seen; rows of what is no number."""

    def case(machine: BackEnd) -> bytes:
        found, x = [], np.tile(reals(120, ROWS // 3, 24), (3, 1))
        x[40, 3], x[110, 5] = np.inf, np.nan
        for heads, width, rate, doubled, window, many, wide, chosen in SHAPES:
            n = width * (1 + doubled)
            widths = [heads * width, width, n, n, width, heads * width]
            ops: list[Op] = [product(121 + 2 * i, 0, i + 1, columns, 24) for i, columns in enumerate(widths[:4])]
            ops.append((library.COMPRESS, (3, 4, 5, rate, doubled), (), (reals(130, rate, n),)))
            numbers: tuple[int, ...] = (1, 2, 5, 6, heads, window, rate)
            if many:
                widths += [many * wide, wide, many, chosen]
                ops += [product(131 + 2 * i, 0, i + 7, columns, 24) for i, columns in enumerate(widths[6:9])]
                ops.append((library.INDEX, (7, 8, 9, 10, many, wide, rate), (), ()))
                numbers = (*numbers, 10)
            ops.append((library.ATTEND_ENTRIES, numbers, (0.02,), (reals(140, heads) if many else None,)))
            found += [machine.run(x, row_type, widths, ops, out).tobytes() for out in ((5, 6, 10) if many else (5, 6))]
        return b"".join(found)

    return case


def choices(machine: BackEnd) -> bytes:
    """Experts by square roots of positive numbers, ranked with a correction; by ids, some of which are none."""
    found, count, top_k = [], 40, 3
    x = np.abs(reals(150, 64, count + 4))
    x[:, count:] = np.arange(256).reshape(64, 4) % 5 / 256
    x[:3, count:] = np.array([[np.nan, 0, 0, 0], [2, 0, 0, 0], [255 / 256] * 4])
    table = (np.arange(300 * top_k, dtype=np.int32) * 7 % count).reshape(300, top_k)
    for vectors in ((reals(151, count),), (None, None, table)):
        ops: list[Op] = [
            (library.COPY, (0, 1, 0, 0, count, 1, 0, 0), (), ()),
            (library.ROUTE, (1, 2, count, top_k, 3, 1, 1, 1, 0), (1.5, 1e-20), vectors),
        ]
        found += [machine.run(x, kind, [count, 2 * top_k], ops, 2).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


CASES: Final[dict[str, Callable[[BackEnd], bytes]]] = {
    "streams": streams,
    "entries bf16": entries("bf16"),
    "entries f32": entries("f32"),
    "roots and ids": choices,
    "streams apart": streams_apart,
    "latents with sinks": latents,
}
