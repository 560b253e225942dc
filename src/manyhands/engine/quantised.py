"""Matrices of quantised safetensors (checkpoint/folded.py) as blocks that store the same numbers, or as fp32 numbers.

A number is (code - zero) * scale. With a zero in the middle, codes of 4 and 8 bit are those of Q4_0 and Q8_0; of 4 bit with any
other zero, those of Q4_Z, which holds the zero; the scale is the stored one. Inputs whose groups lie in an order of their own
(GPTQ's act-order) are put into the order of their groups, which Stored.order holds. What no block holds is given as numbers in
fp32, or refused: groups that cut blocks, zeros at 8 bit, scales that fp16 lacks. FP8 is always given as numbers, float times
scale rounded to fp32: small weights then round them as those of an unquantised matrix. NVFP4: nvfp4.py;
bitnet: ternary.py.
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.checkpoint.folded import Folded, describe, is_ternary
from manyhands.checkpoint.quantised import BYTES, FLOAT8, MXFP4_BYTES, STEP, WORD, Quantised
from manyhands.engine import ternary
from manyhands.engine.blocks import E4M3
from manyhands.engine.library import Array
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.nvfp4 import DAMAGED, nvfp4
from manyhands.engine.weights import STRETCH, Read, Stored, as_fp32
from manyhands.errors import ModelError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_UNREAD: Final = ("shape", "rows", "global rows")  # how to round activations is not followed
NO_NUMBER: Final = 255  # of E8M0
_AWQ: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the code of output 0, 1, ... of its eight lies


class _Matrix(NamedTuple):
    """codes(rows): [n, inputs] of outputs `rows`; zeros and scales [outputs, groups]; which group an input is in."""

    folded: Folded
    codes: Callable[[slice], NDArray[np.int16]]
    zeros: NDArray[np.int16]
    scales: Floats
    groups: NDArray[np.int64]


def reader(tensors: MappedTensors, how: Quantised | None, *, needs_blocks: bool) -> Read:
    """Reads the tensors of a checkpoint, quantised matrices by their unquantised names.

    `needs_blocks`: a matrix that no blocks hold exactly is refused (ModelError says why and what to do), not given as numbers.
    """
    return tensors.read if how is None else _Reader(tensors, how, needs_blocks).read


class _Reader:
    def __init__(self, tensors: MappedTensors, how: Quantised, needs_blocks: bool) -> None:
        self._tensors, self._how, self._needs_blocks = tensors, how, needs_blocks
        self._last: tuple[str, Stored] | None = None  # a fused matrix is read once for each of its parts

    def read(self, name: str) -> Stored:
        """As MappedTensors.read."""
        roles = {role: part for role, part in self._how.parts(name).items() if self._tensors.has(part)}
        if self._is_plain(name, roles):
            return self._tensors.read(name)
        if self._last is None or self._last[0] != name:
            self._last = name, self._quantised(name, roles)
        return self._last[1]

    def _is_plain(self, name: str, roles: dict[str, str]) -> bool:
        if "bytes" in roles and self._how.method == "bitnet":
            return not is_ternary(name, self._tensors.entry(name).dtype, self._how, has_scale="scales" in roles)
        return "codes" not in roles and not ("bytes" in roles and self._tensors.entry(name).dtype in BYTES)

    def _quantised(self, name: str, roles: dict[str, str]) -> Stored:
        folded = describe(name, {role: self._tensors.entry(part) for role, part in roles.items()}, self._how)
        if self._how.ternary == "mean":
            return ternary.rounded(folded, self._tensors.read(name), needs_blocks=self._needs_blocks)
        arrays = {role: self._tensors.raw(part) for role, part in roles.items() if role not in _UNREAD}
        if self._how.method == "mxfp4":
            return _mxfp4(folded, arrays, expert=int(name.removesuffix(".weight").split(".")[-2]))
        if self._how.method == "bitnet":
            scales = _scales(arrays, folded)
            return ternary.packed(folded, arrays["bytes"], scales, self._how.ternary, needs_blocks=self._needs_blocks)
        if folded.dtype == "MXFP4":
            return _pairs(folded, arrays)
        if "codes" not in roles and self._tensors.entry(name).dtype == FLOAT8:
            return Stored("f32", _floats(folded, arrays, self._how.tile))
        if self._how.has_float4:
            return nvfp4(folded, arrays, is_divided="codes" in roles, needs_blocks=self._needs_blocks)
        matrix = _MATRICES[self._how.method](folded, arrays, self._how)
        if problem := _unheld(matrix):
            if self._needs_blocks:
                raise ModelError(
                    f"{name} is not held exactly at w4 or w8: {problem}; --dtype fp32 holds it, bf16 rounds it"
                )
            return Stored("f32", np.concatenate([_numbers(matrix, rows) for rows in _stretches(folded)]))
        order = _order(matrix.groups)
        return Stored(
            folded.dtype, np.concatenate([_blocks(matrix, rows, order) for rows in _stretches(folded)]), order
        )


def _stretches(folded: Folded) -> Iterator[slice]:
    outputs, inputs = folded.shape
    step = max(STEP, STRETCH // inputs // STEP * STEP)
    return (slice(start, min(start + step, outputs)) for start in range(0, outputs, step))


def _unheld(matrix: _Matrix) -> str:
    """Why no blocks hold it; "" if they do."""
    inputs, groups, scales = matrix.folded.shape[1], matrix.groups, matrix.scales
    if inputs % STEP:
        return f"{inputs} inputs are no multiple of {STEP}"
    if matrix.folded.dtype not in BLOCKS:
        return "its codes of 8 bit have zeros of their own"
    ordered = np.sort(groups)
    if (ordered.reshape(-1, STEP) != ordered[::STEP, None]).any():
        return f"its groups cut blocks of {STEP} inputs"
    with np.errstate(over="ignore"):
        lost = scales.astype(np.float16).astype(np.float32) != scales
    return f"its scale {scales[lost][0]:g} is no number of fp16" if lost.any() else ""


def _order(groups: NDArray[np.int64]) -> NDArray[np.int32] | None:
    """The inputs in the order of their groups, those of one group as they are stored; None if all are."""
    is_sorted = bool((np.diff(groups) >= 0).all())
    return None if is_sorted else np.argsort(groups, kind="stable").astype(np.int32)


def _blocks(matrix: _Matrix, rows: slice, order: NDArray[np.int32] | None) -> Bytes:
    dtype, (numbers, size) = matrix.folded.dtype, BLOCKS[matrix.folded.dtype]
    codes, groups = matrix.codes(rows), matrix.groups
    if order is not None:
        codes, groups = codes[:, order], groups[order]
    groups, zeros = groups[::numbers], matrix.zeros[rows]
    codes = codes.reshape(len(codes), len(groups), numbers)
    out = np.empty((len(codes), len(groups), size), np.uint8)
    scales = matrix.scales[rows].astype(np.float16)[:, groups]
    out[..., :2] = np.ascontiguousarray(scales)[..., None].view(np.uint8)
    if dtype == "Q8_0":
        out[..., 2:] = (codes - zeros[:, groups, None]).astype(np.int8).view(np.uint8)
        return out.reshape(len(codes), -1)
    low = codes.astype(np.uint8)
    out[..., -16:] = low[..., :16] | low[..., 16:] << np.uint8(4)
    if dtype == "Q4_Z":
        out[..., 2] = zeros[:, groups]
    return out.reshape(len(codes), -1)


def _numbers(matrix: _Matrix, rows: slice) -> Floats:
    """Exact in fp32: codes less zeros have at most 9 bits, scales of fp16 and bf16 at most 11."""
    groups = matrix.groups
    return np.asarray((matrix.codes(rows) - matrix.zeros[rows][:, groups]) * matrix.scales[rows][:, groups], np.float32)


def _mxfp4(folded: Folded, arrays: dict[str, Array], expert: int) -> Stored:
    """Blocks of one expert. Codes lie in pairs of neighbours there, here number j with j + 16."""
    codes, scales = arrays["codes"], _needed(arrays, "scales", folded)
    if codes.dtype != np.uint8 or scales.dtype != np.uint8 or codes.shape != (*scales.shape, MXFP4_BYTES):
        shapes = f"{codes.dtype} {list(codes.shape)} and {scales.dtype} {list(scales.shape)}"
        raise ModelError(
            f"{folded.name}: blocks and scales are {shapes}; uint8 [..., {MXFP4_BYTES}] and [...] are needed"
        )
    if expert >= len(codes):
        raise ModelError(f"the checkpoint lacks {folded.name}: it has {len(codes)} experts")
    return _blocks_of(folded, codes[expert], scales[expert])


def _pairs(folded: Folded, arrays: dict[str, Array]) -> Stored:
    """Blocks of a matrix [outputs, inputs / 2] of pairs, with a power of two for 32 inputs: of deepseek_v4's "bytes" and
    "powers", or of compressed-tensors' "codes" and "scales"."""
    groups, codes = (folded.shape[0], folded.shape[1] // STEP), arrays["codes" if "codes" in arrays else "bytes"]
    powers = arrays["powers"] if "powers" in arrays else _needed(arrays, "scales", folded)
    _check_shape(folded, "powers", powers.shape, groups)
    if powers.dtype != np.uint8:
        raise ModelError(f"{folded.name}: its powers are {powers.dtype}; F8_E8M0 is needed")
    return _blocks_of(folded, codes.view(np.uint8).reshape(*groups, MXFP4_BYTES), powers)


def _check_powers(folded: Folded, powers: Array) -> None:
    if (powers == NO_NUMBER).any():
        raise ModelError(f"{folded.name}: a power of two is no number (byte {NO_NUMBER}): {DAMAGED}")


def _blocks_of(folded: Folded, given: Array, powers: Array) -> Stored:
    """Codes [outputs, groups, 16], in pairs of neighbours, and their powers of two."""
    _check_powers(folded, powers)
    pairs = np.stack([given & np.uint8(15), given >> np.uint8(4)], -1).reshape(*given.shape[:-1], 2 * MXFP4_BYTES)
    out = np.empty((*given.shape[:-1], MXFP4_BYTES + 1), np.uint8)
    out[..., 0] = powers
    out[..., 1:] = pairs[..., :16] | pairs[..., 16:] << np.uint8(4)
    return Stored("MXFP4", out.reshape(len(given), -1))


def _floats(folded: Folded, arrays: dict[str, Array], tile: tuple[int, int] | None) -> Floats:
    """[outputs, inputs]: bytes [outputs, inputs] times scales, one of the matrix, one a row or one a tile."""
    (outputs, inputs), scales = folded.shape, _scales(arrays, folded)
    high, wide = (outputs, inputs) if scales.size == 1 else tile or (1, inputs)
    _check_shape(folded, "scales", scales.shape, (-(-outputs // high), -(-inputs // wide)))
    out = np.empty((outputs, inputs), np.float32)
    for rows in _stretches(folded):
        by = scales[np.arange(rows.start, rows.stop) // high]
        np.multiply(E4M3[arrays["bytes"][rows]], np.repeat(by, wide, 1)[:, :inputs], out=out[rows])
    return out


def _awq(folded: Folded, arrays: dict[str, Array], how: Quantised) -> _Matrix:
    """Words [inputs, outputs / 8] of eight outputs each, zeros [groups, outputs / 8], scales [groups, outputs]."""
    outputs = folded.shape[0]
    words, scales = _words(arrays["codes"], folded), _scales(arrays, folded).T
    zeros = _unpacked(_zeros(arrays, folded, (scales.shape[1], outputs // 8)), 4, _AWQ).T
    groups = _groups(folded, scales.shape[1], how.group)
    _check_shape(folded, "scales", scales.shape, (outputs, scales.shape[1]))

    def codes(rows: slice) -> NDArray[np.int16]:
        first, end = rows.start // 8, -(-rows.stop // 8)
        found = _unpacked(words[:, first:end], 4, _AWQ)[:, rows.start - 8 * first : rows.stop - 8 * first]
        return np.ascontiguousarray(found.T)

    return _Matrix(folded, codes, zeros, scales, groups)


def _gptq(folded: Folded, arrays: dict[str, Array], how: Quantised) -> _Matrix:
    """Words [inputs / 8, outputs] of eight inputs each (8 bit: four), zeros [groups, outputs / 8], scales [groups, outputs]."""
    outputs, each = folded.shape[0], WORD // how.bits
    words, scales = _words(arrays["codes"], folded), _scales(arrays, folded).T
    _check_shape(folded, "scales", scales.shape, (outputs, scales.shape[1]))
    stored = _zeros(arrays, folded, (scales.shape[1], -(-outputs // each)))
    zeros = _gptq_zeros(stored, folded, how)[:outputs]
    groups = _ordered(arrays.get("order"), folded, scales.shape[1], how.group)

    def codes(rows: slice) -> NDArray[np.int16]:
        return _unpacked(np.ascontiguousarray(words[:, rows].T), how.bits)

    return _Matrix(folded, codes, zeros, scales, groups)


def _gptq_zeros(stored: NDArray[np.uint32], folded: Folded, how: Quantised) -> NDArray[np.int16]:
    """[outputs, groups]. The first version stores words that are less by 1 in each of their numbers."""
    one, middle = np.uint32(0 if how.is_next else 0x11111111 if how.bits == 4 else 0x01010101), 1 << (how.bits - 1)
    zeros = _unpacked(stored + one, how.bits).T
    if how.symmetric and (wrong := zeros[: folded.shape[0]] != middle).any():
        found = zeros[: folded.shape[0]][wrong][0]
        raise ModelError(f"{folded.name}: a zero is {found}, where `sym` in config.json asks for {middle}")
    return zeros


def _compressed(folded: Folded, arrays: dict[str, Array], how: Quantised) -> _Matrix:
    """Rows of bytes, or of words [outputs, inputs / 8] with codes plus 8 (8 bit: 128); scales and zeros [outputs, groups]."""
    outputs = folded.shape[0]
    scales = _scales(arrays, folded)
    scales = np.repeat(scales, outputs, 0) if scales.size == 1 else scales
    _check_shape(folded, "scales", scales.shape, (outputs, scales.shape[-1]))
    groups = _ordered(arrays.get("order"), folded, scales.shape[1], how.group)
    zeros = _compressed_zeros(arrays.get("zeros"), folded, scales.shape[1], how)
    if "codes" not in arrays:
        middle = np.int16(1 << (how.bits - 1))
        return _Matrix(folded, lambda rows: arrays["bytes"][rows].astype(np.int16) + middle, zeros, scales, groups)
    words = _words(arrays["codes"], folded)
    return _Matrix(folded, lambda rows: _unpacked(words[rows], how.bits), zeros, scales, groups)


def _compressed_zeros(stored: Array | None, folded: Folded, count: int, how: Quantised) -> NDArray[np.int16]:
    """[outputs, groups], more by the middle of the codes, as the words are: of bytes, or of words of eight outputs each."""
    outputs, each, middle = folded.shape[0], WORD // how.bits, 1 << (how.bits - 1)
    if stored is None:
        return np.full((outputs, count), middle, np.int16)
    if stored.dtype != np.int8:
        _check_shape(folded, "zero points", stored.shape, (-(-outputs // each), count))
        return _unpacked(np.ascontiguousarray(_words(stored, folded).T), how.bits).T[:outputs]
    _check_shape(folded, "zero points", stored.shape, (outputs, count))
    found = stored.astype(np.int16)
    if (wrong := (found < -middle) | (found >= middle)).any():
        raise ModelError(
            f"{folded.name}: a zero point is {found[wrong][0]}; codes of {how.bits} bit go from {-middle} to {middle - 1}"
        )
    return found + np.int16(middle)


_MATRICES: Final = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}


def _unpacked(words: NDArray[np.uint32], bits: int, order: tuple[int, ...] = ()) -> NDArray[np.int16]:
    """The codes in each word of a row, from the lowest bits up or at the places `order`: [n, words] -> [n, codes]."""
    codes = np.ascontiguousarray(words)[..., None].view(np.uint8)
    if bits == 4:
        codes = np.stack([codes & np.uint8(15), codes >> np.uint8(4)], -1).reshape(*words.shape, 8)
    if order:
        codes = codes[..., order]
    return codes.reshape(len(words), -1).astype(np.int16)


def _words(array: Array, folded: Folded) -> NDArray[np.uint32]:
    if array.dtype != np.int32:
        raise ModelError(f"{folded.name}: its codes are stored as {array.dtype}; int32 is needed")
    return array.view(np.uint32)


def _needed(arrays: dict[str, Array], role: str, folded: Folded) -> Array:
    if role not in arrays:
        raise ModelError(f"the checkpoint lacks the {role} of {folded.name}")
    return arrays[role]


def _scales(arrays: dict[str, Array], folded: Folded) -> Floats:
    """In fp32. (bf16 is read as uint16; a byte is a power of two.)"""
    given = arrays["powers"] if "powers" in arrays and "scales" not in arrays else _needed(arrays, "scales", folded)
    if given.dtype == np.uint8 and given.ndim == 2:
        _check_powers(folded, given)
        return np.ldexp(np.float32(1), given.astype(np.int32) - 127)
    if given.ndim > 2 or not given.size or given.dtype not in (np.uint16, np.float16, np.float32):
        raise ModelError(f"{folded.name}: its scales are {given.dtype} {list(given.shape)}; floats in rows are needed")
    found = as_fp32(Stored("bf16", given)) if given.dtype == np.uint16 else given.astype(np.float32)
    return found if found.ndim == 2 else found.reshape(-1, 1)


def _zeros(arrays: dict[str, Array], folded: Folded, shape: tuple[int, int]) -> NDArray[np.uint32]:
    stored = _needed(arrays, "zeros", folded)
    _check_shape(folded, "zeros", stored.shape, shape)
    return _words(stored, folded)


def _check_shape(folded: Folded, what: str, shape: tuple[int, ...], needed: tuple[int, ...]) -> None:
    if tuple(shape) != needed:
        raise ModelError(
            f"{folded.name} [{folded.shape[0]}, {folded.shape[1]}]: its {what} are {list(shape)}, needed are {list(needed)}"
        )


def _groups(folded: Folded, count: int, group: int) -> NDArray[np.int64]:
    """Of each input the group, where `count` groups lie one behind the other; `group`: what config.json says, 0 if nothing."""
    inputs = folded.shape[1]
    size = group or max(1, inputs // max(1, count))
    if -(-inputs // size) != count:
        raise ModelError(
            f"{folded.name}: {inputs} inputs in groups of {size} make {-(-inputs // size)} groups; stored are {count}"
        )
    return np.arange(inputs) // size


def _ordered(order: Array | None, folded: Folded, count: int, group: int) -> NDArray[np.int64]:
    """As _groups, or as g_idx says."""
    if order is None or (order.ndim == 1 and len(order) and bool((order == -1).all())):
        return _groups(folded, count, group)
    if order.dtype != np.int32 or order.shape != folded.shape[1:] or order.min() < 0 or order.max() >= count:
        raise ModelError(
            f"{folded.name}: g_idx must name one of {count} groups for each of its {folded.shape[1]} inputs"
        )
    return order.astype(np.int64)
