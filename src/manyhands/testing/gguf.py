"""Writes GGUF files, for tests and benchmarks: metadata and tensors as they are given, version 3, little-endian."""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.gguf import MAGIC, TYPES, WHOLE

ALIGN: Final = 32
_NUMBERS: Final = {name: number for number, name in TYPES.items()} | {"I32": WHOLE}
_TYPES: Final = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "uint32": 4,
    "int32": 5,
    "float32": 6,
    "bool": 7,
    "uint64": 10,
    "int64": 11,
    "float64": 12,
}

Written = tuple[str, str, tuple[int, ...], NDArray[Any]]  # name, type, shape (outermost first), stored bytes


def write_gguf(path: Path, facts: Mapping[str, Any], tensors: Iterable[Written]) -> Path:
    """A file with this metadata (bools, ints, floats, texts, lists of texts, arrays and numbers of numpy) and these tensors,
    in order."""
    listed = list(tensors)
    with path.open("wb") as out:
        out.write(MAGIC + struct.pack("<IQQ", 3, len(listed), len(facts)))
        for key, value in facts.items():
            out.write(text(key) + _value(value))
        at = 0
        for name, dtype, shape, raw in listed:
            sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
            out.write(text(name) + sizes + struct.pack("<IQ", _NUMBERS[dtype], at))
            at += -(-raw.nbytes // ALIGN) * ALIGN
        _pad(out)
        for _, _, _, raw in listed:
            out.write(np.ascontiguousarray(raw).view(np.uint8).data)
            _pad(out)
    return path


def text(value: str) -> bytes:
    """A text with its length before it."""
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + text(value)
        case np.generic():
            return struct.pack("<I", _TYPES[value.dtype.name]) + value.tobytes()
        case np.ndarray():
            return struct.pack("<IIQ", 9, _TYPES[value.dtype.name], len(value)) + value.tobytes()
        case _:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))


def _pad(out: BinaryIO) -> None:
    out.write(bytes(-out.tell() % ALIGN))
