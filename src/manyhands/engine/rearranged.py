"""Block types of GGUF that are held as blocks of another type (dtypes.REARRANGED), which store the same numbers.

TQ1_0 and TQ2_0: (code - 1) d, d in fp16 of 256 numbers, codes of 2 bit, which TQ1_0 has five to a byte; as Q2_K, which has
code (d i) - j e, with i and j of 1 and e = d. Q1_0, Q2_0 and PQ2_0: -d or d of 128 numbers, (code - 1) d of 64 and of 128; as
Q4_0, whose codes are 8 more. NVFP4: floats of 4 bit and a scale of 8 bit (E4M3 without a sign) for 16 numbers, in blocks of 64;
as NVFP4_32.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.dtypes import BLOCKS, REARRANGED

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

SCALES: Final = 4  # of a block of NVFP4, before its codes
NO_NUMBER: Final = 127  # of E4M3: in a file of GGUF a scale of zero
_TWOS: Final = np.array([0, 2, 4, 6], np.uint8)
# By byte: the four codes of Q4_0 that its codes of 2 bit are.
_FOURS: Final = ((np.arange(256, dtype=np.uint8)[:, None] >> _TWOS & np.uint8(3)) + np.uint8(7)).view(np.uint32)[:, 0]
_ONES: Final = 0x11  # i and j of 16 numbers of Q2_K
_FIVES: Final = np.array([1, 3, 9, 27, 81], np.uint8)  # what moves each of a byte's five numbers to its top


def rearranged(raw: Bytes, dtype: str, scales: Floats | None = None) -> Bytes:
    """Rows of blocks [..., bytes of a row] of type `dtype` as rows of REARRANGED[dtype].

    `scales`: of NVFP4, what its numbers are multiplied with: one number, or one for each of its matrices.
    """
    blocks = np.ascontiguousarray(raw).reshape(-1, BLOCKS[dtype][1])
    if dtype == "NVFP4":
        made = _float4(blocks, np.ones(1, np.float32) if scales is None else scales)
    else:
        made = _MADE[dtype](blocks)
    return made.reshape(*raw.shape[:-1], -1)


def tq1_0(b: Bytes) -> Bytes:
    """Codes [blocks, 256]: of 32 bytes five each, of 16 five each, of 4 four each, the top digit of base 3 first."""
    runs = (b[:, :32], _FIVES), (b[:, 32:48], _FIVES), (b[:, 48:52], _FIVES[:4])
    tops = [(run[:, None] * powers[:, None]).reshape(len(b), -1) for run, powers in runs]
    return (np.concatenate(tops, 1).astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8)


def tq2_0(b: Bytes) -> Bytes:
    """Codes [blocks, 256], in the order of Q2_K: four of a byte are 32 apart."""
    return (b[:, :64].reshape(-1, 2, 1, 32) >> _TWOS[:, None] & np.uint8(3)).reshape(len(b), 256)


def q1_0(b: Bytes) -> Bytes:
    """Codes [blocks, 128] of Q4_0: 7 and 9."""
    return np.unpackbits(b[:, 2:], axis=1, bitorder="little") * np.uint8(2) + np.uint8(7)


def q2_0(b: Bytes) -> Bytes:
    """Codes [blocks, 64] of Q4_0, of PQ2_0 [blocks, 128]: 7 to 10."""
    return _FOURS[b[:, 2:]].view(np.uint8)


def nvfp4(b: Bytes) -> Bytes:
    """Codes [blocks, 64] of E2M1: of 16 numbers the first eight are the low halves of eight bytes."""
    pairs = b[:, SCALES:].reshape(-1, 4, 8)
    return np.concatenate([pairs & np.uint8(15), pairs >> np.uint8(4)], -1).reshape(len(b), 64)


def _halves(codes: Bytes) -> Bytes:
    """Codes [..., numbers] of 4 bit as blocks of 32 have them: [..., groups, 16]."""
    groups = codes.reshape(*codes.shape[:-1], -1, 32)
    return groups[..., :16] | groups[..., 16:] << np.uint8(4)


def _q2_k(twos: Bytes, half: Bytes) -> Bytes:
    """Of bytes of four codes [blocks, 64]; `half`: d."""
    return np.concatenate([np.full((len(twos), 16), _ONES, np.uint8), twos, half, half], 1)


def _of_tq1_0(b: Bytes) -> Bytes:
    fours = np.bitwise_or.reduce(tq1_0(b).reshape(-1, 2, 4, 32) << _TWOS[:, None], axis=2)
    return _q2_k(fours.reshape(len(b), 64), b[:, 52:])


def _q4_0(half: Bytes, codes: Bytes) -> Bytes:
    held = _halves(codes)
    return np.concatenate([np.broadcast_to(half[:, None], (*held.shape[:2], 2)), held], -1)


def _float4(b: Bytes, wholes: Floats) -> Bytes:
    """A scale that is no number is zero."""
    scales = np.where(b[:, :SCALES] == NO_NUMBER, np.uint8(0), b[:, :SCALES]).reshape(-1, 2, 2)
    whole = np.repeat(wholes, 2 * len(b) // len(wholes)).view(np.uint8).reshape(len(b), 2, 4)
    return np.concatenate([whole, scales, _halves(nvfp4(b))], -1)


_MADE: Final[Mapping[str, Callable[[Bytes], Bytes]]] = {
    "TQ1_0": _of_tq1_0,
    "TQ2_0": lambda b: _q2_k(b[:, :64], b[:, 64:]),
    "Q1_0": lambda b: _q4_0(b[:, :2], q1_0(b)),
    "Q2_0": lambda b: _q4_0(b[:, :2], q2_0(b)),
    "PQ2_0": lambda b: _q4_0(b[:, :2], q2_0(b)),
}
assert {*_MADE, "NVFP4"} == REARRANGED.keys()
