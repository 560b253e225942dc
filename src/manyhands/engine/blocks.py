"""Block types in numbers: raw blocks -> fp32, the values that are stored, each by the format's own formula.

A row of blocks is bytes; `raw` [..., bytes of a row] -> fp32 [..., numbers of a row]. Scales are fp16 (MXFP4: a power of two).
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.engine.grids import iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs
from manyhands.engine.rearranged import NO_NUMBER, SCALES, nvfp4, q1_0, q2_0, tq1_0, tq2_0

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_NIBBLES: Final = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
_MXFP4: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice the values of E2M1
_IQ4: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def dequantise(raw: Bytes, dtype: str) -> Floats:
    """The numbers of rows of blocks of type `dtype` (dtypes.BLOCKS)."""
    numbers, size = BLOCKS[dtype]
    blocks = np.ascontiguousarray(raw).reshape(-1, size)
    with np.errstate(all="ignore"):  # scales may be infinite or NaN: then so are the numbers
        found = _FORMULAS[dtype](blocks)
    return found.reshape(*raw.shape[:-1], raw.shape[-1] // size * numbers)


def _half(blocks: Bytes, at: int) -> Floats:
    """The fp16 at byte `at` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(quants: Bytes, run: int = 16) -> Bytes:
    """Low halves of `run` bytes, then their high halves, and so on."""
    parts = quants.reshape(len(quants), -1, 1, run) >> _NIBBLES
    return (parts & np.uint8(15)).reshape(len(quants), -1)


def _bits(high: Bytes) -> Bytes:
    """The 32 bits of four bytes, the lowest first, each as 16 or 0: the fifth bit of a number."""
    return np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(b: Bytes) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 2:]).astype(np.int8) - np.int8(8)).astype(np.float32)


def _q4_1(b: Bytes) -> Floats:
    return _half(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + _half(b, 2)


def _q4_z(b: Bytes) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 3:]).astype(np.int8) - (b[:, 2:3] & np.uint8(15)).astype(np.int8)).astype(
        np.float32
    )


def _q5_0(b: Bytes) -> Floats:
    quants = _nibbles(b[:, 6:]) | _bits(b[:, 2:6])
    return _half(b, 0) * (quants.astype(np.int8) - np.int8(16)).astype(np.float32)


def _q5_1(b: Bytes) -> Floats:
    quants = _nibbles(b[:, 8:]) | _bits(b[:, 4:8])
    return _half(b, 0) * quants.astype(np.float32) + _half(b, 2)


def _q8_0(b: Bytes) -> Floats:
    return b[:, 2:].view(np.int8).astype(np.float32) * _half(b, 0)


def _mxfp4(b: Bytes) -> Floats:
    """Half of two to the (e - 127), times twice the value; e of 0 and 1 give fp32 denormals."""
    e = b[:, :1].astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x200000) << e, (e - np.uint32(1)) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32) * _MXFP4[_nibbles(b[:, 1:])].astype(np.float32)


def _scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minima of 6 bits in 12 bytes."""
    low, mins, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    return scale, np.concatenate([mins & 63, (high >> 4) | ((mins >> 2) & 48)], axis=1)


def _with_minima(b: Bytes, quants: Bytes) -> Floats:
    """Q4_K and Q5_K: d * scale * quant - dmin * minimum, each for 32 numbers."""
    scale, least = _scales(b[:, 4:16])
    d = (_half(b, 0) * scale.astype(np.float32))[:, :, None]
    m = (_half(b, 2) * least.astype(np.float32))[:, :, None]
    return (d * quants.reshape(len(b), 8, 32).astype(np.float32) - m).reshape(len(b), 256)


def _q4_k(b: Bytes) -> Floats:
    return _with_minima(b, _nibbles(b[:, 16:], 32))


def _q5_k(b: Bytes) -> Floats:
    high = (b[:, 16:48].reshape(len(b), 1, 32) >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    return _with_minima(b, _nibbles(b[:, 48:], 32) | (high << np.uint8(4)).reshape(len(b), 256))


def _q6_k(b: Bytes) -> Floats:
    high = b[:, 128:192].reshape(len(b), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    quants = _nibbles(b[:, :128], 64) | ((high & np.uint8(3)) << np.uint8(4)).reshape(len(b), 256)
    d = (_half(b, 208) * np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32))[:, :, None]
    centred = (quants.astype(np.int8) - np.int8(32)).reshape(len(b), 16, 16)
    return (d * centred.astype(np.float32)).reshape(len(b), 256)


def _iq4_nl(b: Bytes) -> Floats:
    return _half(b, 0) * _IQ4[_nibbles(b[:, 2:])].astype(np.float32)


def _iq4_xs(b: Bytes) -> Floats:
    """d * (scale - 32) * number, a scale of 6 bits for 32 numbers: four bits of a nibble, two of 16 bits for all."""
    low = _nibbles(b[:, 4:8, None].reshape(-1, 1), 1).reshape(len(b), 8)
    high = (b[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8)).reshape(len(b), 8) & np.uint8(3)
    d = (_half(b, 0) * ((low | high << np.uint8(4)).astype(np.int8) - np.int8(32)).astype(np.float32))[:, :, None]
    numbers = _IQ4[_nibbles(b[:, 8:])].reshape(len(b), 8, 32)
    return (d * numbers.astype(np.float32)).reshape(len(b), 256)


def _q3_k(b: Bytes) -> Floats:
    """d * (scale - 32) * (quant - 4), a scale of 6 bits for 16 numbers; the third bits of quants lie apart."""
    two = b[:, 32:96].reshape(len(b), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    third = (b[:, :32].reshape(len(b), 1, 32) >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    quants = (two & np.uint8(3)).reshape(len(b), 256) | (third << np.uint8(2)).reshape(len(b), 256)
    high = (b[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None]).reshape(len(b), 16) & np.uint8(3)
    scale = (_nibbles(b[:, 96:104], 8) | high << np.uint8(4)).astype(np.int8) - np.int8(32)
    d = (_half(b, 108) * scale.astype(np.float32))[:, :, None]
    return (d * (quants.astype(np.int8) - np.int8(4)).reshape(len(b), 16, 16).astype(np.float32)).reshape(len(b), 256)


def _q2_k(b: Bytes) -> Floats:
    """d * scale * quant - dmin * minimum, a scale and a minimum of 4 bits for 16 numbers."""
    two = b[:, 16:80].reshape(len(b), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    d = (_half(b, 80) * (b[:, :16] & np.uint8(15)).astype(np.float32))[:, :, None]
    m = (_half(b, 82) * (b[:, :16] >> np.uint8(4)).astype(np.float32))[:, :, None]
    return (d * (two & np.uint8(3)).reshape(len(b), 16, 16).astype(np.float32) - m).reshape(len(b), 256)


def _float8() -> Floats:
    """The numbers of E4M3 by their codes: 4 bits of exponent, 3 behind the point; no infinities, 127 and 255 are no numbers."""
    code = np.arange(256)
    exponent, rest = code >> 3 & 15, code & 7
    found = np.where(exponent == 0, rest / 8 * 2.0**-6, (1 + rest / 8) * 2.0 ** (exponent - 7.0))
    return np.where(code & 127 == 127, np.nan, np.where(code > 127, -found, found)).astype(np.float32)


E4M3: Final = _float8()


def _nvfp4_32(b: Bytes) -> Floats:
    """float * (scale * the matrix's scale), a scale in E4M3 for 16 numbers."""
    scales = E4M3[b[:, 4:6]] * np.ascontiguousarray(b[:, :4]).view(np.float32)
    floats = _MXFP4[_nibbles(b[:, 6:])].astype(np.float32) / np.float32(2)
    return (floats.reshape(-1, 2, 16) * scales[..., None]).reshape(-1, 32)


def _nvfp4(b: Bytes) -> Floats:
    """float * scale. A scale has no sign; no number is zero."""
    codes = b[:, :SCALES] & np.uint8(127)
    scales = np.where(codes == NO_NUMBER, np.float32(0), E4M3[codes])
    return ((_MXFP4[nvfp4(b)].astype(np.float32) / np.float32(2)).reshape(-1, 4, 16) * scales[..., None]).reshape(
        -1, 64
    )


def _less(half: Floats, codes: Bytes, middle: int) -> Floats:
    return half * (codes.astype(np.int8) - np.int8(middle)).astype(np.float32)


_FORMULAS: Final[Mapping[str, Callable[[Bytes], Floats]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_Z": _q4_z,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "Q3_K": _q3_k,
    "Q2_K": _q2_k,
    "NVFP4_32": _nvfp4_32,
    "IQ3_S": iq3_s,
    "IQ3_XXS": iq3_xxs,
    "IQ2_S": iq2_s,
    "IQ2_XS": iq2_xs,
    "IQ2_XXS": iq2_xxs,
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
    "TQ1_0": lambda b: _less(_half(b, 52), tq1_0(b), 1),
    "TQ2_0": lambda b: _less(_half(b, 64), tq2_0(b), 1),
    "Q1_0": lambda b: _less(_half(b, 0), q1_0(b), 8),
    "Q2_0": lambda b: _less(_half(b, 0), q2_0(b), 8),
    "PQ2_0": lambda b: _less(_half(b, 0), q2_0(b), 8),
    "NVFP4": _nvfp4,
}
