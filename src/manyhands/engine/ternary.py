"""Matrices of bitnet as blocks, or as fp32 numbers: each number is -1, 0 or 1 times the matrix's scale.

Packed ones have four codes to a byte, those of outputs a quarter of all apart, the first in the lowest bits, and one scale,
which codes are multiplied with ("times") or divided by ("over"). Others ("mean") are the weights that were trained, which the
model rounds: w by the scale, to the nearest even, at most 1; the scale is the mean of |w|. That is summed exactly here, and
rounded to double and then to fp32; all else is in fp32.
"""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.folded import TERNARY_BLOCK, Folded
from manyhands.checkpoint.quantised import STEP, TERNARY_EACH, Ternary
from manyhands.engine.nvfp4 import DAMAGED
from manyhands.engine.weights import STRETCH, Stored, as_fp32
from manyhands.errors import ModelError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_LEAST: Final = np.float32(1e-5)  # of a mean
_SMALLEST: Final = 2.0**-14  # of a scale in fp16: below it loses bits
_LARGEST: Final = 65504.0
_TWOS: Final = np.array([0, 2, 4, 6], np.uint8)


def packed(folded: Folded, codes: Bytes, scales: Floats, how: Ternary, *, needs_blocks: bool) -> Stored:
    """A matrix [outputs, inputs] of `codes` [outputs / 4, inputs] and one number of `scales`. Raises ModelError."""
    scale = np.float32(scales.reshape(-1)[0])
    if scales.size != 1 or not 0 < scale < np.inf:
        given = f"{scale:g}" if scales.size == 1 else f"{scales.size} numbers"
        raise ModelError(f"{folded.name}: its scale is {given}; one number above 0 is needed: {DAMAGED}")

    def part(rows: slice) -> Bytes:
        places = np.arange(rows.start, rows.stop)
        found: Bytes = codes[places % len(codes)] >> _TWOS[places // len(codes)][:, None] & np.uint8(3)
        if found.max() > 2:
            raise ModelError(f"{folded.name}: a code is 3; 0, 1 and 2 stand for -1, 0 and 1: {DAMAGED}")
        return found

    return _stored(folded, part, np.float32(1) / scale if how == "over" else scale, needs_blocks)


def rounded(folded: Folded, stored: Stored, *, needs_blocks: bool) -> Stored:
    """A matrix of trained weights. Raises ModelError where one is no number."""
    inverse = np.float32(1) / np.maximum(_mean(folded, stored), _LEAST)

    def part(rows: slice) -> Bytes:
        nearest = np.rint(_numbers(stored, rows) * inverse)
        return np.asarray(np.clip(nearest, -1, 1) + np.float32(1), np.uint8)

    return _stored(folded, part, np.float32(1) / inverse, needs_blocks)


def _stretches(folded: Folded) -> Iterator[slice]:
    outputs, inputs = folded.shape
    step = max(1, STRETCH // inputs)
    return (slice(start, min(start + step, outputs)) for start in range(0, outputs, step))


def _numbers(stored: Stored, rows: slice) -> Floats:
    return as_fp32(Stored(stored.type, stored.array[rows]))


def _mean(folded: Folded, stored: Stored) -> np.float32:
    """Of the sizes of all numbers: whole numbers of 24 bits, summed exponent by exponent."""
    total = 0  # in units of the smallest number that fp32 has, 2^-149
    for rows in _stretches(folded):
        bits = np.ascontiguousarray(_numbers(stored, rows)).view(np.uint32).reshape(-1) & np.uint32(0x7FFFFFFF)
        exponents = (bits >> np.uint32(23)).astype(np.int64)
        if exponents.max() == 255:
            raise ModelError(f"{folded.name}: a weight is no finite number: {DAMAGED}")
        whole = (bits & np.uint32(0x7FFFFF)) | ((exponents > 0).astype(np.uint32) << np.uint32(23))
        sums = np.bincount(exponents, whole.astype(np.float64))  # exact: fewer than 2^29 numbers below 2^24
        total += sum(int(one) << max(exponent - 1, 0) for exponent, one in enumerate(sums.tolist()))
    return np.float32(total / (stored.array.size << 149))


def _stored(folded: Folded, codes: Callable[[slice], Bytes], scale: np.float32, needs_blocks: bool) -> Stored:
    """In blocks, whose scale is in fp16; in fp32 where blocks are not needed and their scale would be another."""
    inputs, half = folded.shape[1], np.float16(min(float(scale), _LARGEST))
    if not needs_blocks and (inputs % STEP or np.float32(half) != scale):
        parts = [(codes(rows).astype(np.float32) - np.float32(1)) * scale for rows in _stretches(folded)]
        return Stored("f32", np.concatenate(parts))
    if inputs % STEP or not _SMALLEST <= scale <= _LARGEST:
        why = f"{inputs} inputs are no multiple of {STEP}" if inputs % STEP else f"its scale {scale:g} is none of fp16"
        raise ModelError(f"{folded.name} is not held at w4 or w8: {why}; --dtype fp32 holds it, bf16 rounds it")
    make, raw = _tq2_0 if inputs % TERNARY_BLOCK == 0 else _q4_0, half.reshape(1).view(np.uint8)
    return Stored(folded.dtype, np.concatenate([make(codes(rows), raw) for rows in _stretches(folded)]))


def _tq2_0(codes: Bytes, half: Bytes) -> Bytes:
    """Rows of blocks of 256 numbers: 64 bytes of four codes that are 32 apart, and the scale."""
    fours = codes.reshape(len(codes), -1, 2, TERNARY_EACH, STEP) << _TWOS[:, None]
    out = np.empty((*fours.shape[:2], 66), np.uint8)
    out[..., :64] = np.bitwise_or.reduce(fours, axis=3).reshape(*fours.shape[:2], 64)
    out[..., 64:] = half
    return out.reshape(len(codes), -1)


def _q4_0(codes: Bytes, half: Bytes) -> Bytes:
    """Rows of blocks of 32 numbers: the scale, and 16 bytes of two codes that are 16 apart, 7 to 9."""
    eights = codes.reshape(len(codes), -1, STEP) + np.uint8(7)
    out = np.empty((*eights.shape[:2], 18), np.uint8)
    out[..., :2] = half
    out[..., 2:] = eights[..., :16] | eights[..., 16:] << np.uint8(4)
    return out.reshape(len(codes), -1)
