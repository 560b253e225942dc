"""Golden digests of what qwen4_exp alone asks of operations: rows of tables by the last tokens, values that streams admit,
attention of several key heads to the positions of chosen entries."""

from collections.abc import Callable
from typing import Final

import numpy as np

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.engine import library
from manyhands.engine.filed import TableParts
from manyhands.engine.golden_cases import BackEnd, Op, product, reals, stored
from manyhands.engine.golden_small import blocks
from manyhands.engine.library import Array
from manyhands.engine.quants import IN_TABLES

ROWS: Final = 150
MIXED: Final = ("Q8_0", "Q4_K", "Q5_1")  # of the parts of a table in blocks
# Heads, key heads, columns of a key, of a value, positions of an entry; heads of an index, their columns, entries chosen.
SHAPES: Final = ((6, 2, 40, 33, 4, 5, 24, 7), (5, 5, 17, 64, 1, 2, 20, 70), (20, 1, 32, 16, 32, 3, 8, 2))


def table(kind: str, rows: int, width: int) -> tuple[TableParts, Array]:
    """Three parts as they are stored, and the type of each; those that are rounded to small weights are of fp32."""
    if kind == "blocks":
        parts = tuple(blocks(150, rows, width // BLOCKS[name][0], name) for name in MIXED)
        return TableParts(parts), np.array([IN_TABLES[name] for name in MIXED], np.int64)
    named = "f32" if kind == "w8" else kind
    parts = tuple(stored(part, named) for part in reals(150, 3, rows, width))
    return TableParts(parts), np.full(3, library.TYPES[named], np.int64)


def shift(taps: int) -> Op:
    """The row taps - 1 positions before, into the register of that number."""
    one = np.zeros((taps, 4), np.float32)
    one[0] = 1
    return library.CONVOLVE, (1, taps, taps, 0), (), (one, None)


def words(kind: str, stored_as: str = "", width: int = 40) -> Callable[[BackEnd], bytes]:
    """Of three tokens; ids of all digits, the end among them."""

    def case(machine: BackEnd) -> bytes:
        rows = 48
        ids = np.resize(np.array([3, 70_000, 9, 9, 1, 65_536, 256, 9, 3]), ROWS)
        digits = (ids[:, None] >> np.array([0, 8, 16, 24]) & 255).astype(np.float32) / np.float32(256)
        sizes, firsts = np.array([37, 41, 31, 29], np.int64), np.array([0, 37, 78, 109], np.int64)
        by, shape = np.array([23703573157769, 20109073645365, 8052911324071]), (3, 2, library.TYPES[kind], rows, 9)
        op = (
            library.NGRAMS,
            (1, 4, *shape, 1 << 17, 2, 3),
            (),
            (by, sizes, firsts, *table(stored_as or kind, rows, width)),
        )
        ops: list[Op] = [(library.COPY, (0, 1, 2, 0, 4, 1, 0, 0), (), ()), *map(shift, (2, 3)), op]
        x = np.concatenate([reals(151, ROWS, 2), digits], 1)
        widths = [4, 4, 4, 4 * width]
        return b"".join(machine.run(x, row_type, widths, ops, 4).tobytes() for row_type in ("bf16", "f32"))

    return case


def admitted(machine: BackEnd) -> bytes:
    """Values that streams admit by their likeness, none, and what is no number."""
    found = []
    for streams, width in ((3, 40), (1, 7), (8, 33)):
        whole, x = streams * width, reals(152, 33, 24)
        x[1], x[2, 3], x[3, 1] = 0, np.inf, np.nan
        ops = [product(153 + 2 * i, 0, i + 1, n, 24) for i, n in enumerate((whole, whole, width))]
        ops.append((library.ADMIT, (1, 2, 3, 4, streams), (0.3,), ()))
        found += [machine.run(x, kind, [whole, whole, width, whole], ops, 4).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def chosen(row_type: str) -> Callable[[BackEnd], bytes]:
    """Attention to chosen entries and the positions behind the last; rows of what is no number."""

    def case(machine: BackEnd) -> bytes:
        found, x = [], np.tile(reals(160, ROWS // 3, 24), (3, 1))
        x[40, 3], x[110, 5] = np.inf, np.nan
        for heads, key_heads, width, value, rate, many, wide, count in SHAPES:
            keys = key_heads * width, key_heads * value, many * wide, wide, many
            widths = [heads * width, *keys, count, heads * value]
            ops: list[Op] = [product(161 + 2 * i, 0, i + 1, columns, 24) for i, columns in enumerate(widths[:6])]
            ops.append((library.INDEX, (4, 5, 6, 7, many, wide, rate), (), ()))
            shape = (1, 2, 3, 8, heads, key_heads, width, value, rate, 0, 0, 7)
            ops.append((library.ATTENTION, shape, (0.02, 0.0), (reals(175, heads),)))
            found += [machine.run(x, row_type, widths, ops, out).tobytes() for out in (7, 8)]
        return b"".join(found)

    return case


CASES: Final[dict[str, Callable[[BackEnd], bytes]]] = {
    **{f"n-grams {kind}": words(kind) for kind in ("bf16", "f32")},
    "admitted": admitted,
    **{f"attention to chosen entries {row_type}": chosen(row_type) for row_type in ("bf16", "f32")},
}
SMALL: Final[dict[str, Callable[[BackEnd], bytes]]] = {
    "small n-grams": words("w8"),
    **{f"n-grams of blocks {kind}": words(kind, "blocks", 256) for kind in ("bf16", "w4")},
}
