"""Layers and ends with the sizes of a Program and random weights, which stand in for those that are not on this machine."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Final

from manyhands.core import Precision, weight_precision

if TYPE_CHECKING:
    from manyhands.engine.weights import Read
    from manyhands.program.ops import Program

WEIGHT_BYTES: Final[Mapping[Precision, float]] = {"fp32": 4, "bf16": 2, "fp16": 2, "w8": 1.0625, "w4": 0.5625}


def program_bytes(program: "Program", precision: Precision) -> tuple[int, int]:
    """Of the largest layer of a Program, and of its ends, at a precision."""
    from manyhands.program.tensors import ends_tensors, layer_tensors

    def num_bytes(tensors: Mapping[str, tuple[int, ...]]) -> int:
        return int(sum(map(prod, tensors.values())) * WEIGHT_BYTES[weight_precision(precision)])

    ends = num_bytes(ends_tensors(program, embed=True, head=True))
    return max(num_bytes(layer_tensors(layer)) for layer in program.layers), ends


def random_reader(shapes: Mapping[str, tuple[int, ...]], whole: Mapping[str, Sequence[int]]) -> "Read":
    """Reads tensors of these shapes, in bf16: small numbers of either sign, the same for all; those that `whole` says of
    those that it names."""
    import numpy as np

    from manyhands.engine.weights import Stored

    some = np.random.default_rng(0).integers(0, 1 << 16, 1 << 20, np.uint16) & np.uint16(0x80FF) | np.uint16(0x3C00)

    def read(name: str) -> Stored:
        if name in whole:
            return Stored("i64", np.resize(np.array(whole[name]), shapes[name]))
        return Stored("bf16", np.resize(some, shapes[name]))

    return read
