"""Small weights: matrices of 4 to 8 bit in groups of 32 inputs, packed by panels of 16 outputs (native/quants.h).

A checkpoint's numbers are rounded to "w8" (codes of 8 bit and a scale a group) or "w4" (of 4 bit, less 8); blocks of
files are taken as they are, in the types of KEPT: docs/arithmetic.md has what each of them means.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.dtypes import BLOCKS, GRIDS, REARRANGED, TABLE_BLOCKS
from manyhands.engine import grids, library
from manyhands.engine.library import BACK_ENDS, TYPES, WIDE, Array, check
from manyhands.engine.rearranged import rearranged
from manyhands.errors import ModelError

KEPT: Final = {  # types of blocks -> how they are held as they are
    "Q8_0": "w8",
    "Q4_0": "w4",
    "Q4_1": "w4m",
    "Q5_0": "w5",
    "Q5_1": "w5m",
    "Q4_K": "w4k",
    "Q5_K": "w5k",
    "Q6_K": "w6k",
    "MXFP4": "w4f",
    "Q4_Z": "w4z",
    "IQ4_NL": "w4n",
    "IQ4_XS": "w4x",
    "Q3_K": "w3k",
    "Q2_K": "w2k",
    "NVFP4_32": "w4h",
    "IQ3_S": "w4s",
    "IQ3_XXS": "w4t",
    "IQ2_S": "w3s",
    "IQ1_S": "w2s",
    "IQ2_XS": "w3s",
    "IQ2_XXS": "w3s",
    "IQ1_M": "w2s",
}
HELD: Final = {
    **KEPT,
    **{name: KEPT[form] for name, form in REARRANGED.items()},
}  # types of blocks -> how they are held
FORMS: Final = {form: TYPES["w8"] + i for i, form in enumerate(KEPT)}  # by the number that C gives them
# Types of a table whose rows stay in their file, by the number that C gives them.
IN_TABLES: Final = {name: TYPES[name] for name in WIDE} | {name: FORMS[name] for name in TABLE_BLOCKS}
SMALL: Final = frozenset(KEPT.values())
GROUP: Final = 32  # inputs that share a scale


def packed_bytes(type_name: str, n: int, k: int) -> int:
    """Bytes that a matrix [n, k] takes when packed, of any type in TYPES. Raises ModelError for impossible shapes."""
    size = int(library.load().mh_packed_bytes(TYPES[type_name], n, k))
    if size < 0:
        raise ModelError(f"a matrix of {n} x {k} cannot be packed")
    return size


def round_weights(
    back_end: str,
    weight_NK: Array,
    type_name: str,
    small: str,
    rows: NDArray[np.int64] | None = None,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """A matrix of `type_name` rounded to `small` ("w8" or "w4"), packed; K is filled up with zeros.

    As library.pack. The same bytes come of every back end. Raises ModelError for impossible shapes.
    """
    given, (n, k) = library.view_of(weight_NK, rows)
    out = np.empty(packed_bytes(small, n, k), np.uint8) if out is None else out
    types = (BACK_ENDS.index(back_end), TYPES[small], TYPES[type_name])
    check(library.load().mh_round(*types, *given, library.address(rows), library.address(out), out.nbytes))
    return out


def pack_blocks(
    blocks: NDArray[np.uint8],
    form: str,
    rows: NDArray[np.int64] | None = None,
    out: NDArray[np.uint8] | None = None,
    grid: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Rows of blocks [rows, bytes of a row] of type `form` (HELD), packed: the same codes and factors.

    `rows` takes some of its rows, in that order; `grid`: another than the type's own (grids.py). Raises ModelError for
    impossible shapes.
    """
    numbers, size = BLOCKS[form]
    if blocks.ndim != 2 or blocks.shape[1] % size or not blocks.flags.c_contiguous:
        raise ModelError(f"blocks of {form} lie row by row, {size} bytes each, not as {list(blocks.shape)}")
    if form in REARRANGED:
        return pack_blocks(rearranged(blocks if rows is None else blocks[rows], form), REARRANGED[form], None, out)
    small, n, width = KEPT[form], len(blocks) if rows is None else len(rows), blocks.shape[1] // size * numbers
    out = np.empty(packed_bytes(small, n, width), np.uint8) if out is None else out
    given = (FORMS[form], library.address(blocks), blocks.nbytes, n, width // GROUP, library.address(rows))
    places = _places(form, grid)
    entries = (library.address(places), 0 if places is None else places.nbytes // 4)
    check(library.load().mh_pack_blocks(*given, library.address(out), out.nbytes, *entries))
    return out


def _places(form: str, grid: NDArray[np.uint8] | None) -> NDArray[np.uint8] | None:
    """The grid of a type that has one, as C reads it: a byte a number. Raises ModelError as grids.grid."""
    if form not in GRIDS:
        return None
    return np.ascontiguousarray(grids.grid(form) if grid is None else grid)
