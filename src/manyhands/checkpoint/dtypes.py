"""Types of stored tensors by name: those of safetensors, and the block types of GGUF, which share a name space.

A tensor of a block type is a row after row of blocks; each block is some numbers of one row with their scales.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from manyhands.errors import ModelError

GGUF_SUFFIX: Final = ".gguf"
GGUF_METHOD: Final = "gguf"  # quantization_config.quant_method of a config that is made of a header
PLAIN_BITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F4", "E2M1"), 4),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64"), 64),
}
# Numbers of a block, and its bytes. Q4_Z is no type of GGUF: a scale in fp16, a byte with a zero of 4 bit, 32 codes as in Q4_0.
# Nor is NVFP4_32: the matrix's scale in fp32, those of 16 numbers each in E4M3, 32 codes of E2M1 as in MXFP4.
BLOCKS: Final[Mapping[str, tuple[int, int]]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "MXFP4": (32, 17),
    "Q4_Z": (32, 19),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "Q3_K": (256, 110),
    "Q2_K": (256, 84),
    "NVFP4_32": (32, 22),
    "IQ3_S": (256, 110),
    "IQ3_XXS": (256, 98),
    "IQ2_S": (256, 82),
    "IQ2_XS": (256, 74),
    "IQ2_XXS": (256, 66),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "Q1_0": (128, 18),
    "Q2_0": (64, 18),
    "PQ2_0": (128, 34),
    "NVFP4": (64, 36),
}
# Types that are held as blocks of another type, with the same numbers (engine/rearranged.py).
REARRANGED: Final[Mapping[str, str]] = {
    "TQ1_0": "Q2_K",
    "TQ2_0": "Q2_K",
    "Q1_0": "Q4_0",
    "Q2_0": "Q4_0",
    "PQ2_0": "Q4_0",
    "NVFP4": "NVFP4_32",
}
# Of types whose numbers are entries of a grid: how many entries, of how many numbers each. The package gguf has the grids.
GRIDS: Final[Mapping[str, tuple[int, int]]] = {
    "IQ3_S": (512, 4),
    "IQ3_XXS": (256, 4),
    "IQ2_S": (1024, 8),
    "IQ2_XS": (512, 8),
    "IQ2_XXS": (256, 8),
    "IQ1_S": (2048, 8),
    "IQ1_M": (2048, 8),
}
# Of GGUF, of a table whose rows are read from their file.
TABLE_BLOCKS: Final = tuple(name for name in BLOCKS if name not in {*GRIDS, *REARRANGED, "Q4_Z", "NVFP4_32"})
_NOT_FLOATS: Final = ("BOOL", "U", "I")


class Described(Protocol):
    """A tensor by name, safetensors dtype and shape."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def is_known(dtype: object) -> bool:
    """Whether a tensor of this type has a size that is known here."""
    return isinstance(dtype, str) and (dtype in PLAIN_BITS or dtype in BLOCKS)


def is_float(dtype: str) -> bool:
    """Whether its numbers are weights (not indices, masks or bytes)."""
    return dtype in BLOCKS or not dtype.startswith(_NOT_FLOATS)


def alignment(dtype: str) -> int:
    """Bits that an address of it is a multiple of; wider types are laid out before narrower ones."""
    return PLAIN_BITS.get(dtype, 0)


def stored_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor. Raises ModelError if its rows are no whole blocks, or it is no whole bytes."""
    count = math.prod(shape)
    if dtype not in BLOCKS:
        size, rest = divmod(count * PLAIN_BITS[dtype], 8)
        if rest:
            raise ModelError(f"{dtype} {list(shape)} is no whole number of bytes")
        return size
    numbers, size = BLOCKS[dtype]
    if not shape or shape[-1] % numbers:
        raise ModelError(f"{dtype} {list(shape)} has rows of no whole blocks: a multiple of {numbers} is needed")
    return count // numbers * size
