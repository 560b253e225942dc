"""Weights as the native engine holds them: matrices packed, in bf16, fp16 or fp32; vectors in fp32."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.core import Precision
from manyhands.engine import library
from manyhands.engine.library import Array
from manyhands.errors import ModelError
from manyhands.program.ops import Rows, Weight


class Stored(NamedTuple):
    """A tensor's numbers: `type` is "bf16" or "f16" (as uint16) or "f32"."""

    type: str
    array: Array


Read = Callable[[str], Stored]  # the tensor of that name, as the checkpoint stores it; KeyError if there is none


def take(weight: Weight, read: Read, expert: int = 0) -> Stored:
    """The outputs that `weight` names, of one expert where there are several. Raises ModelError."""
    name = weight.stored_name(expert)
    try:
        found = read(name)
    except KeyError:
        raise ModelError(f"the checkpoint lacks {name}") from None
    if found.array.shape != weight.shape:
        raise ModelError(f"{name} is stored as {list(found.array.shape)}, needed is {list(weight.shape)}")
    array = found.array[expert] if weight.stacked else found.array
    array = array.T if weight.transposed else array
    return Stored(found.type, array if weight.rows is None else array[_indices(weight.rows)])


def _indices(rows: Rows) -> NDArray[np.int64]:
    starts = np.arange(rows.groups) * rows.stride + rows.start
    return np.asarray((starts[:, None] + np.arange(rows.count)).reshape(-1))


def as_fp32(stored: Stored) -> NDArray[np.float32]:
    """The same numbers, exactly."""
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


def held(stored: Stored, precision: Precision) -> Stored:
    """A matrix in the type in which it is kept: as stored, but fp32 rounded to bf16 where the precision is bf16."""
    if precision == "bf16" and stored.type == "f32":
        return Stored("bf16", as_bf16(stored.array))
    return Stored(stored.type, np.ascontiguousarray(stored.array))


def matrix(stored: Stored, precision: Precision) -> Stored:
    """A matrix [outputs, inputs], held and packed."""
    kept = held(stored, precision)
    return Stored(kept.type, library.pack(kept.array, kept.type))
