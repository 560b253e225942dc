"""Weights as the native engine holds them: matrices packed, in bf16, fp16, fp32 or small (quants.py); vectors in fp32."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.core import SMALL_WEIGHTS, Precision
from manyhands.engine import library
from manyhands.engine.blocks import dequantise
from manyhands.engine.library import SIDE, Array
from manyhands.engine.memory import Memory
from manyhands.engine.quants import HELD, SMALL, pack_blocks, packed_bytes, round_weights
from manyhands.errors import ModelError
from manyhands.program.ops import Blend, ChannelDecay, Convolution, Decay, Rope, Rows, Taps, Weight, Xielu

STRETCH: Final = 1 << 20  # numbers that a thread packs at a time: as fp32 4 MB, and some three times that on the way


class Stored(NamedTuple):
    """A tensor's numbers: `type` is "bf16" or "f16" (as uint16), "f32", or a block type (checkpoint/dtypes.py); "i64" or
    "i32" of whole numbers, which no matrix or vector is of.

    Of a block type `array` is the stored bytes [..., rows, bytes of a row], as whatever computes with blocks wants them.
    Once packed, `type` is a name in library.TYPES. order: column i of the blocks is input order[i]; None: input i.
    """

    type: str
    array: Array
    order: NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """In numbers."""
        if self.type not in BLOCKS:
            return self.array.shape
        numbers, size = BLOCKS[self.type]
        return (*self.array.shape[:-1], self.array.shape[-1] // size * numbers)


WHOLE: Final = ("i64", "i32")  # types of whole numbers
Read = Callable[[str], Stored]  # the tensor of that name, as the checkpoint stores it; KeyError if there is none


Found = tuple[Stored, NDArray[np.int64] | None]  # a tensor as a view, and which of its outputs are meant if not all


def find(weight: Weight, read: Read, expert: int = 0) -> Found:
    """The matrix or vector that `weight` names, of one expert where there are several, not copied. Raises ModelError."""
    name = weight.stored_name(expert)
    found = _found(name, weight, read)
    if found.type in WHOLE:
        raise ModelError(f"{name} is stored as whole numbers ({found.type}): bf16, fp16, fp32 or blocks are needed")
    found = Stored(found.type, found.array[expert + weight.part], found.order) if weight.stacked else found
    if found.array.ndim == 1:  # a vector, whose outputs are numbers and no rows of blocks
        found = as_numbers(found)
    if weight.transposed:
        found = as_numbers(found)
        found = Stored(found.type, found.array.T)
    return found, None if weight.rows is None else _indices(weight.rows)


def _found(name: str, weight: Weight, read: Read) -> Stored:
    try:
        found = read(name)
    except KeyError:
        raise ModelError(f"the checkpoint lacks {name}") from None
    if found.shape != weight.shape:
        raise ModelError(f"{name} is stored as {list(found.shape)}, needed is {list(weight.shape)}")
    return found


def whole_numbers(weight: Weight, read: Read, limit: int) -> NDArray[np.int32]:
    """A table of numbers from 0 to below `limit`. Raises ModelError where it has others, or is stored as floats."""
    found = _found(weight.name, weight, read)
    if found.type not in WHOLE:
        raise ModelError(f"{weight.name} is stored as {found.type}: whole numbers (I64 or I32) are needed")
    if found.array.size and not (found.array.min() >= 0 and found.array.max() < limit):
        raise ModelError(
            f"{weight.name} has numbers from {found.array.min()} to {found.array.max()}: 0 to {limit - 1} are needed"
        )
    return np.array(found.array, np.int32, order="C")


def take(weight: Weight, read: Read, expert: int = 0) -> Stored:
    """The outputs that `weight` names; a copy where they are not all. Raises ModelError."""
    found, rows = find(weight, read, expert)
    return found if rows is None else Stored(found.type, found.array[rows], found.order)


def _indices(rows: Rows) -> NDArray[np.int64]:
    starts = np.arange(rows.groups) * rows.stride + rows.start
    return np.repeat((starts[:, None] + np.arange(rows.count)).reshape(-1), rows.copies)


def as_numbers(stored: Stored) -> Stored:
    """Blocks as the fp32 numbers that they store; anything else as it is."""
    if stored.type not in BLOCKS:
        return stored
    numbers = dequantise(stored.array, stored.type)
    return Stored("f32", numbers if stored.order is None else numbers[..., np.argsort(stored.order)])


def as_fp32(stored: Stored) -> NDArray[np.float32]:
    """The same numbers, exactly; a view of them where they are stored so."""
    stored = as_numbers(stored)
    if stored.type == "bf16":
        return (stored.array.astype(np.uint32) << 16).view(np.float32)
    return stored.array.view(np.float16).astype(np.float32) if stored.type == "f16" else stored.array


def as_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest even; NaN as 0x7FC0."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def vector(weights: Sequence[Weight], read: Read) -> NDArray[np.float32] | None:
    """Vectors one behind the other in fp32; None if there are none."""
    if not weights:
        return None
    return np.ascontiguousarray(np.concatenate([as_fp32(take(weight, read)) for weight in weights]))


def kernel(op: Convolution, read: Read) -> NDArray[np.float32]:
    """Its weights [length, columns], zeros between taps."""
    out = np.zeros((op.length, op.weight.outputs), np.float32)
    if isinstance(op.weight, Taps):
        out[:: op.step] = np.array(op.weight.values, np.float32)[:, None]
    else:
        out[:: op.step] = as_fp32(take(op.weight, read)).reshape(-1, op.taps).T
    return out


def rope_rates(rope: Rope, exponents: Weight | None, read: Read) -> NDArray[np.float32]:
    """The frequencies of a table, each times exp (in double, rounded to fp32) of its exponent, if it has one."""
    rates = np.array(rope.frequencies, np.float32)
    if exponents is None:
        return rates
    stored = as_fp32(take(exponents, read)).astype(np.float64)
    return rates * library.double("exp", stored).astype(np.float32)


def decay_rates(op: Decay | ChannelDecay, width: int, read: Read) -> NDArray[np.float64] | NDArray[np.float32]:
    """Of each of `width` columns; those of channels are in fp32."""
    stored = as_fp32(take(op.rate, read)).astype(np.float64).reshape(-1)
    rates = library.double("exp", stored) if op.is_log else np.abs(stored)
    return rates.astype(np.float32).repeat(width // len(stored)) if isinstance(op, ChannelDecay) else rates


def xielu_numbers(op: Xielu, read: Read) -> NDArray[np.float32]:
    """What its function multiplies with (native/plan.c): both alphas, beta, epsilon."""
    rise, fall, beta, epsilon = (float(as_fp32(take(weight, read)).reshape(-1)[0]) for weight in op.numbers)
    grown = library.double("log", 1.0 + library.double("exp", np.array([rise, fall])))  # softplus of both
    return np.array([grown[0], beta + grown[1], beta, epsilon], np.float32)


def blend_numbers(op: Blend, read: Read) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What keeps of the target, and what is added of the source, column by column."""
    w = as_fp32(take(op.gate, read)) / np.float32(op.temperature)
    added, rest = (_sigmoid(each) for each in (w, -w))
    return np.sqrt(np.maximum(rest * (np.float32(1.0) + added), np.float32(op.least))), added


def _sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """In double, rounded to fp32."""
    return (1.0 / (1.0 + library.double("exp", -x.astype(np.float64)))).astype(np.float32)


def kept_type(stored_type: str, precision: Precision) -> str:
    """The type in which a matrix is kept. At w8 and w4: blocks as they are (HELD), all else as the precision says. Else as
    stored, blocks as fp32; where the precision is bf16, fp32 is rounded to it."""
    if precision in SMALL_WEIGHTS:
        return HELD.get(stored_type, precision)
    exact = "f32" if stored_type in BLOCKS else stored_type
    return "bf16" if precision == "bf16" and exact == "f32" else exact


def ends_precision(precision: Precision) -> Precision:
    """How the head and a table of embeddings are held: with 8 bits where layers have 4."""
    return "w8" if precision == "w4" else precision


def held(stored: Stored, precision: Precision) -> Stored:
    """A matrix in the type in which it is kept, row by row, in memory of its own."""
    if stored.type in BLOCKS and stored.order is None:
        return _held_blocks(stored, precision)
    stored = as_numbers(stored)
    if kept_type(stored.type, precision) != stored.type:
        return Stored("bf16", as_bf16(stored.array))
    return Stored(stored.type, stored.array.copy())


def _held_blocks(stored: Stored, precision: Precision) -> Stored:
    kept = kept_type(stored.type, precision)
    out = np.empty(stored.shape, np.float32 if kept == "f32" else np.uint16)
    for rows in _stretches(len(out), out.shape[1]):
        numbers = dequantise(stored.array[rows], stored.type)
        out[rows] = numbers if kept == "f32" else as_bf16(numbers)
    return Stored(kept, out)


def rows_held(stored: Stored, rows: NDArray[np.int64], precision: Precision, back_end: str) -> Stored:
    """Some rows of a matrix, packed where it is kept in a small type, else row by row: what all of it would have there."""
    kept = kept_type(stored.type, precision)
    if kept not in SMALL:
        return held(Stored(stored.type, stored.array[rows]), precision)
    out = np.empty(packed_bytes(kept, len(rows), stored.shape[1]), np.uint8)
    _pack_part(stored, rows, kept, out, back_end)
    return Stored(kept, out)


def _stretches(rows: int, width: int) -> Iterator[slice]:
    """All rows, in stretches of whole panels with some STRETCH numbers."""
    step = max(SIDE, STRETCH // width // SIDE * SIDE)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def matrix(found: Found, precision: Precision, memory: Memory, back_end: str, *, may_order: bool = False) -> Stored:
    """A matrix [outputs, inputs], packed into `memory`: no other copy is made. may_order: its inputs may have an order."""
    return matrices(1, lambda _: found, precision, memory, back_end, may_order=may_order)


def matrices(
    count: int,
    part: Callable[[int], Found],
    precision: Precision,
    memory: Memory,
    back_end: str,
    *,
    may_order: bool = False,
) -> Stored:
    """`count` matrices of one shape, each read as it is packed, one behind the other. Raises ModelError.

    back_end: what rounds to small weights; it enters no bit.
    """
    kept, packed, size, order = "", np.empty(0), 0, None
    for i in range(count):
        stored, rows = part(i)
        if stored.order is not None and kept_type(stored.type, precision) not in SMALL:
            stored = as_numbers(stored)
        order = stored.order
        if order is not None and not may_order:
            raise ModelError(
                "experts and tables with inputs in an order of their own (act-order) take --dtype fp32 or bf16"
            )
        if not i:
            kept, n = kept_type(stored.type, precision), len(stored.array) if rows is None else len(rows)
            dtype = np.uint8 if kept in SMALL else np.float32 if kept == "f32" else np.uint16
            size = packed_bytes(kept, n, stored.shape[1]) // np.dtype(dtype).itemsize
            packed = memory.array(count * size, dtype)
        elif (other := kept_type(stored.type, precision)) != kept:
            why = f"experts of one layer would be held as {kept} and as {other}"
            either = "take --dtype bf16, or " if precision in SMALL_WEIGHTS else "take "
            raise ModelError(f"{why}, which no product reads: {either}a checkpoint that stores them in one type")
        _pack((stored, rows), kept, packed[i * size : (i + 1) * size], memory, back_end)
    return Stored(kept, packed, order)


def _pack(found: Found, kept: str, out: Array, memory: Memory, back_end: str) -> None:
    """A matrix into `out`, which lies in `memory`, a stretch of rows at a time. Threads enter no bit."""
    stored, rows = found
    n, width = stored.shape[0] if rows is None else len(rows), stored.shape[1]
    panel = packed_bytes(kept, SIDE, width) // out.itemsize
    parts = list(_stretches(n, width))
    left = iter(parts)  # of a list: threads may share it

    def work() -> None:
        for part in left:
            view = stored if rows is not None else stored._replace(array=stored.array[part])
            start, end = part.start // SIDE * panel, -(-part.stop // SIDE) * panel
            _pack_part(view, None if rows is None else rows[part], kept, out[start:end], back_end)

    memory.fill(work, len(parts))


def _pack_part(stored: Stored, rows: NDArray[np.int64] | None, kept: str, out: Array, back_end: str) -> None:
    """Rows of a matrix into `out`. Blocks that are not kept as they are go by way of fp32."""
    if HELD.get(stored.type) == kept:
        pack_blocks(stored.array, stored.type, rows, out)
    elif stored.type in BLOCKS:
        raw = stored.array if rows is None else stored.array[rows]
        _pack_numbers(Stored("f32", dequantise(raw, stored.type)), kept, None, out, back_end)
    else:
        _pack_numbers(stored, kept, rows, out, back_end)


def _pack_numbers(stored: Stored, kept: str, rows: NDArray[np.int64] | None, out: Array, back_end: str) -> None:
    if kept in SMALL:
        round_weights(back_end, stored.array, stored.type, kept, rows, out)
    else:
        library.pack(stored.array, stored.type, kept, rows, out)
