"""Block types whose numbers are entries of a grid: IQ3_S, IQ3_XXS, IQ2_S, IQ2_XS, IQ2_XXS, IQ1_S, IQ1_M.

An index names some numbers at once, a bit each their signs; those of IQ1 have signs, and a bit moves eight of them. Which
numbers, the package gguf knows: llama.cpp's own, loaded where such a file is, and held to a digest. The grids enter only what
is read: packed weights (native/kernels.h) hold codes that name numbers.
"""

import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.dtypes import GRIDS
from manyhands.errors import ModelError
from manyhands.refusals import installing

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

SIZES: Final = {  # of numbers without their signs; of IQ1 with them
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    **dict.fromkeys(("IQ2_S", "IQ2_XS", "IQ2_XXS"), (8, 25, 43)),
    **dict.fromkeys(("IQ1_S", "IQ1_M"), (-1, 0, 1)),
}
# Of the bytes of each grid: another one would give a file other numbers, in the same arithmetic class.
_DIGESTS: Final[Mapping[str, str]] = {
    "IQ3_S": "acb8a458f699e571",
    "IQ3_XXS": "e86540e4e7b2d337",
    "IQ2_S": "1d4ca1e2fbd2be07",
    "IQ2_XS": "e9567eb15257b717",
    "IQ2_XXS": "886814bc08b03100",
    **dict.fromkeys(("IQ1_S", "IQ1_M"), "bf92c60e2ed15644"),
}
_SEVENS: Final = np.arange(4, dtype=np.uint32) * np.uint32(7)


@cache
def grid(form: str) -> Bytes:
    """The entries of a type's grid, each number by its place in SIZES. Raises ModelError without a fitting package gguf."""
    try:
        from gguf import quants
    except ImportError as error:
        raise ModelError(
            f"{form} is read with the package gguf, which is not installed here: {installing('gguf')}"
        ) from error
    theirs: Any = getattr(quants, form, None)
    try:
        theirs.init_grid()
        found = np.asarray(theirs.grid).reshape(GRIDS[form])
    except (AttributeError, TypeError, ValueError) as error:
        raise _unknown(form) from error
    sizes = np.array(SIZES[form], np.float32)
    places = np.searchsorted(sizes, found).clip(max=len(sizes) - 1).astype(np.uint8)
    digest = hashlib.sha256(places.tobytes()).hexdigest()[:16]
    if digest != _DIGESTS[form] or not np.array_equal(sizes[places], found):
        raise _unknown(form)
    return places


def _unknown(form: str) -> ModelError:
    return ModelError(
        f"the installed package gguf has another grid of {form} than is known: install gguf 0.17 or newer"
    )


def stand_in(form: str) -> Bytes | None:
    """A grid of the same shape that is no file's, for what must not need the package: each place in turn. None: it has none."""
    if form not in GRIDS:
        return None
    entries, width = GRIDS[form]
    at = np.arange(entries * width)
    return ((at * 5 + at // 7) % len(SIZES[form])).astype(np.uint8).reshape(entries, width)


def _half(blocks: Bytes) -> Floats:
    """The fp16 that blocks begin with."""
    return np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)


def _even_signs(sevens: NDArray[np.uint32]) -> Bytes:
    """Seven bits of signs each -> eight: the number of negative ones is even."""
    seven = sevens & np.uint32(127)
    odd = seven ^ seven >> np.uint32(4)
    odd ^= odd >> np.uint32(2)
    odd ^= odd >> np.uint32(1)
    return (seven | (odd & np.uint32(1)) << np.uint32(7)).astype(np.uint8)


def _numbers(form: str, entries: NDArray[np.integer[Any]], signs: Bytes) -> Floats:
    """Entries of the grid [blocks, any], and a bit of sign for each of their numbers -> [blocks, 256]."""
    sizes = np.array(SIZES[form], np.float32)[grid(form)]
    is_less = np.unpackbits(np.ascontiguousarray(signs), axis=1, bitorder="little")
    found = sizes[entries].reshape(len(entries), 256)
    return np.asarray(np.where(is_less, -found, found), np.float32)


def _scaled(d: Floats, scales: Bytes, unit: float, numbers: Floats) -> Floats:
    """d (1 + 2 scale) unit number, with as many scales a block as `scales` has; all but the last product is exact."""
    factor = d * (1 + 2 * scales.astype(np.float32)) * np.float32(unit)
    found: Floats = factor[:, :, None] * numbers.reshape(len(d), scales.shape[1], -1)
    return found.reshape(len(d), -1)


def _nibbles(packed: Bytes) -> Bytes:
    """The low half of each byte, then its high half."""
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1).reshape(len(packed), -1)


def iq3_s(b: Bytes) -> Floats:
    """Blocks of IQ3_S: indices of 9 bits, the ninth apart; a scale for 32 numbers."""
    ninth = np.unpackbits(np.ascontiguousarray(b[:, 66:74]), axis=1, bitorder="little").astype(np.uint16)
    numbers = _numbers("IQ3_S", b[:, 2:66] | ninth << np.uint16(8), b[:, 74:106])
    return _scaled(_half(b), _nibbles(b[:, 106:110]), 1, numbers)


def iq3_xxs(b: Bytes) -> Floats:
    """Blocks of IQ3_XXS: indices of a byte; words of a scale for 32 numbers and four times seven signs."""
    words = np.ascontiguousarray(b[:, 66:98]).view("<u4")
    signs = _even_signs(words[:, :, None] >> _SEVENS).reshape(len(b), 32)
    numbers = _numbers("IQ3_XXS", b[:, 2:66], signs)
    return _scaled(_half(b), (words >> np.uint32(28)).astype(np.uint8), 0.25, numbers)


def iq2_s(b: Bytes) -> Floats:
    """Blocks of IQ2_S: indices of 10 bits, the highest two apart; a scale for 16 numbers."""
    highs = (b[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)).reshape(len(b), 32)
    numbers = _numbers("IQ2_S", b[:, 2:34] | highs.astype(np.uint16) << np.uint16(8), b[:, 34:66])
    return _scaled(_half(b), _nibbles(b[:, 74:82]), 0.125, numbers)


def iq2_xs(b: Bytes) -> Floats:
    """Blocks of IQ2_XS: indices of 9 bits, seven signs with each; a scale for 16 numbers."""
    both = np.ascontiguousarray(b[:, 2:66]).view("<u2").astype(np.uint32)
    numbers = _numbers("IQ2_XS", both & np.uint32(511), _even_signs(both >> np.uint32(9)))
    return _scaled(_half(b), _nibbles(b[:, 66:74]), 0.125, numbers)


def iq2_xxs(b: Bytes) -> Floats:
    """Blocks of IQ2_XXS: for 32 numbers four indices of a byte, then a word of a scale and four times seven signs."""
    words = np.ascontiguousarray(b[:, 2:66]).view("<u4").reshape(len(b), 8, 2)
    signs = _even_signs(words[:, :, 1:] >> _SEVENS).reshape(len(b), 32)
    entries = b[:, 2:66].reshape(len(b), 8, 8)[:, :, :4].reshape(len(b), 32)
    scales = (words[:, :, 1] >> np.uint32(28)).astype(np.uint8)
    return _scaled(_half(b), scales, 0.125, _numbers("IQ2_XXS", entries, signs))


def _ones(d: Floats, scales: Bytes, entries: NDArray[np.integer[Any]], is_less: Bytes) -> Floats:
    """Of entries [blocks, 32] of IQ1's grid: d (1 + 2 scale) / 8 times (8 number + 1, or - 1 where `is_less`); all is exact."""
    numbers = np.array(SIZES["IQ1_S"], np.float32)[grid("IQ1_S")][entries] * np.float32(8)
    moved = numbers + np.where(is_less, np.float32(-1), np.float32(1))[..., None]
    return _scaled(d, scales, 0.125, moved.reshape(len(entries), 256))


def iq1_s(b: Bytes) -> Floats:
    """Blocks of IQ1_S: indices of 11 bits, the highest three in words of them, a scale and the moving bit for 32 numbers."""
    words = np.ascontiguousarray(b[:, 34:50]).view("<u2")
    highs = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)).reshape(len(b), 32)
    is_less = np.repeat((words >> np.uint16(15)).astype(np.uint8), 4, axis=1)
    scales = (words >> np.uint16(12) & np.uint16(7)).astype(np.uint8)
    return _ones(_half(b), scales, b[:, 2:34] | highs << np.uint16(8), is_less)


def iq1_m(b: Bytes) -> Floats:
    """Blocks of IQ1_M: as IQ1_S, with the moving bit for 8 numbers; words of four scales for 16 and 4 bits of the fp16."""
    highs = _nibbles(b[:, 32:48])
    words = np.ascontiguousarray(b[:, 48:56]).view("<u2")
    d = (words >> np.uint16(12) << np.array([0, 4, 8, 12], np.uint16)).sum(1, dtype=np.uint16)
    scales = (
        (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)).astype(np.uint8).reshape(len(b), 16)
    )
    entries = b[:, :32] | (highs & np.uint8(7)).astype(np.uint16) << np.uint16(8)
    return _ones(d.view(np.float16).astype(np.float32)[:, None], scales, entries, highs >> np.uint8(3))
