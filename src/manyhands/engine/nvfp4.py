"""Matrices in NVFP4 as blocks (dtypes.py): floats of 4 bit (E2M1), a scale of 8 bit (E4M3) for 16 inputs, one for the matrix.

modelopt stores what the scales are multiplied with, compressed-tensors what they are divided by: there the matrix's scale is
one by that, rounded to fp32. A number is float * (scale * the matrix's scale), each product rounded to fp32.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.dtypes import BLOCKS, REARRANGED
from manyhands.checkpoint.folded import Folded
from manyhands.checkpoint.quantised import FLOAT4_GROUP, STEP
from manyhands.engine.blocks import dequantise
from manyhands.engine.library import Array
from manyhands.engine.rearranged import SCALES, rearranged
from manyhands.engine.weights import STRETCH, Stored
from manyhands.errors import ModelError

Bytes = NDArray[np.uint8]

LEAST: Final = 2.0**-100  # of a matrix's scale: products with it are no denormals
MOST: Final = 2.0**100
DAMAGED: Final = "the file is damaged, take another copy of the model"


def nvfp4(folded: Folded, arrays: dict[str, Array], *, is_divided: bool, needs_blocks: bool) -> Stored:
    """The blocks of a matrix [outputs, inputs]; its numbers in fp32 where inputs are no multiple of 32.

    arrays: by role, "codes" or "bytes" [outputs, inputs / 2], uint8, the low half of a byte first; "scales" [outputs, inputs /
    16], bytes of E4M3; "global" one float. Raises ModelError for others, and with `needs_blocks` where blocks hold them not.
    """
    pairs, inputs = arrays["codes" if is_divided else "bytes"], folded.shape[1]
    scales, whole = _group_scales(folded, arrays), _whole_scale(folded.name, arrays, is_divided)
    if needs_blocks and inputs % STEP:
        why = f"{inputs} inputs are no multiple of {STEP}; --dtype fp32 holds it, bf16 rounds it"
        raise ModelError(f"{folded.name} is not held exactly at w4 or w8: {why}")
    rows = max(1, STRETCH // inputs)
    parts = [_blocks(pairs[at : at + rows], scales[at : at + rows], whole) for at in range(0, len(pairs), rows)]
    if inputs % STEP == 0:
        return Stored("NVFP4_32", np.concatenate(parts))
    return Stored("f32", np.concatenate([dequantise(part, "NVFP4_32")[:, :inputs] for part in parts]))


def check_signs(name: str, raw: Bytes) -> None:
    """Raise ModelError for a scale with a sign in blocks of GGUF's NVFP4, whose scales have none."""
    scales = raw.reshape(-1, BLOCKS["NVFP4"][1])[:, :SCALES]
    if scales.size and (code := scales.max()) > 127:
        raise ModelError(f"{name}: a scale is negative (byte {code}): {DAMAGED}")


def scaled(name: str, stored: Stored, scales: Array) -> Stored:
    """A matrix in GGUF's NVFP4, or a stack of them, times its scale, or the scale of each: one fp32 number or more."""
    count = math.prod(stored.shape[:-2])
    if scales.dtype != np.float32 or scales.size != count:
        needed = f"a scale of fp32 for each of {count} matrices is needed"
        raise ModelError(f"{name}: its scales are {scales.dtype} {list(scales.shape)}; {needed}")
    for scale in scales.reshape(-1):
        _check_whole(name, scale)
    return Stored(REARRANGED["NVFP4"], rearranged(stored.array, "NVFP4", scales.reshape(-1)))


def _blocks(pairs: Bytes, scales: Bytes, whole: np.float32) -> Bytes:
    """[rows, bytes of a row]; rows are filled up with zeros to whole blocks."""
    lacking = scales.shape[1] % 2
    pairs, scales = np.pad(pairs, ((0, 0), (0, 8 * lacking))), np.pad(scales, ((0, 0), (0, lacking)))
    given = pairs.reshape(len(pairs), -1, STEP // 2)
    codes = np.stack([given & np.uint8(15), given >> np.uint8(4)], -1).reshape(*given.shape[:-1], STEP)
    out = np.empty((*given.shape[:-1], BLOCKS["NVFP4_32"][1]), np.uint8)
    out[..., :4] = whole.reshape(1).view(np.uint8)
    out[..., 4:6] = scales.reshape(*given.shape[:-1], 2)
    out[..., 6:] = codes[..., :16] | codes[..., 16:] << np.uint8(4)
    return out.reshape(len(out), -1)


def _group_scales(folded: Folded, arrays: dict[str, Array]) -> Bytes:
    outputs, inputs = folded.shape
    if (found := arrays.get("scales")) is None:
        raise ModelError(f"the checkpoint lacks the scales of {folded.name}")
    needed = (outputs, inputs // FLOAT4_GROUP)
    if inputs % FLOAT4_GROUP or found.dtype != np.uint8 or found.shape != needed:
        given = f"{folded.name} [{outputs}, {inputs}]: its scales are {found.dtype} {list(found.shape)}"
        raise ModelError(f"{given}; one byte of E4M3 for {FLOAT4_GROUP} inputs is needed, {list(needed)}")
    if (wrong := found > 126).any():
        code = int(found[wrong][0])
        what = "no number" if code & 127 == 127 else "negative"
        raise ModelError(f"{folded.name}: a scale is {what} (byte {code}): {DAMAGED}")
    return found


def _whole_scale(name: str, arrays: dict[str, Array], is_divided: bool) -> np.float32:
    if (given := arrays.get("global")) is None:
        raise ModelError(f"the checkpoint lacks the scale of the whole matrix {name}")
    if given.dtype != np.float32 or given.size != 1:
        raise ModelError(f"{name}: the matrix's scale is {given.dtype} {list(given.shape)}; one fp32 number is needed")
    scale = np.float32(given.reshape(-1)[0])
    _check_whole(name, scale)
    return np.float32(np.float32(1) / scale if is_divided else scale)


def _check_whole(name: str, scale: np.float32) -> None:
    if not LEAST <= scale <= MOST:
        needed = f"a number from 2^-100 to 2^100 is needed: {DAMAGED}"
        raise ModelError(f"{name}: the matrix's scale is {scale:g}; {needed}")
