"""Tensors of a checkpoint folder as the native engine reads them: mapped from its files, whichever files hold them."""

import errno
import mmap
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from manyhands.checkpoint.dtypes import BLOCKS, stored_bytes
from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.gguf_scales import FLOAT4, SCALE
from manyhands.checkpoint.header import TensorEntry
from manyhands.checkpoint.partition import is_filed
from manyhands.checkpoint.verify import Add
from manyhands.engine.library import Array
from manyhands.engine.nvfp4 import check_signs, scaled
from manyhands.engine.weights import Stored
from manyhands.errors import ModelError

_TYPES: Final[dict[str, tuple[str, type[Any]]]] = {
    "BF16": ("bf16", np.uint16),
    "F16": ("f16", np.uint16),
    "F32": ("f32", np.float32),
    "I64": ("i64", np.int64),
    "I32": ("i32", np.int32),
}
_PARTS: Final[dict[str, type[Any]]] = {  # of quantised matrices (engine/quantised.py)
    **{name: dtype for name, (_, dtype) in _TYPES.items() if name != "F16"},
    "F16": np.float16,
    "I8": np.int8,
    "U8": np.uint8,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I32": np.int32,
}


class MappedTensors:
    """What `folder` holds, to be read while this is entered. `use` is told each tensor that is read, once.

    Arrays are views of the files: copy what is to be kept beyond the block. Of tensors that begin at no multiple of the size of
    their numbers, as in files of safetensors before 0.3, they are copies. Raises ModelError for damaged folders.
    """

    def __init__(self, folder: Path, use: Add) -> None:
        self._folder, self._use = folder, use
        self._entries = {entry.name: entry for entry in read_entries(folder)}
        self._maps: dict[str, mmap.mmap] = {}
        self._read: dict[str, Stored] = {}
        self._last: tuple[str, Stored] | None = None
        self._used: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Let go of the files; they are unmapped when the last array of them is gone."""
        self._read.clear()
        self._last = None
        self._maps.clear()

    def read(self, name: str) -> Stored:
        """The tensor `name`. Raises KeyError if there is none, ModelError for a type that the engine does not read."""
        if name not in self._read:
            if self._last is not None and self._last[0] == name:
                return self._last[1]
            entry = self._entries[name]
            raw = self._bytes(entry)
            if entry.dtype in _TYPES and _is_misaligned(raw, np.dtype(_TYPES[entry.dtype][1])):
                return self._made(name, lambda: _copied(entry, raw))
            stored = _stored(entry, raw)
            if entry.dtype == FLOAT4 and f"{name}{SCALE}" in self._entries:
                return self._made(name, lambda: scaled(name, stored, self.raw(f"{name}{SCALE}")))
            self._read[name] = stored
        return self._read[name]

    def _made(self, name: str, make: Callable[[], Stored]) -> Stored:
        """What is no view of a file. The last is kept, of which several products may have parts."""
        self._last = None
        self._last = name, make()
        return self._last[1]

    @property
    def entries(self) -> list[TensorEntry]:
        """Every tensor that lies there, in no particular order."""
        return list(self._entries.values())

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._entries

    def entry(self, name: str) -> TensorEntry:
        """What the header says of a tensor. Raises KeyError."""
        return self._entries[name]

    def raw(self, name: str) -> Array:
        """A part of a quantised matrix as it is stored (BF16 as uint16). Raises KeyError, ModelError for other types."""
        entry = self._entries[name]
        if entry.dtype not in _PARTS:
            raise ModelError(f"{entry.file}: tensor {name} is stored as {entry.dtype}; read are {', '.join(_PARTS)}")
        dtype, raw = np.dtype(_PARTS[entry.dtype]), self._bytes(entry)
        return (raw.copy() if _is_misaligned(raw, dtype) else raw).view(dtype).reshape(entry.shape)

    def _bytes(self, entry: TensorEntry) -> "np.typing.NDArray[np.uint8]":
        raw = np.frombuffer(self._map(entry.file), np.uint8, len(entry), entry.start)
        if entry.name not in self._used:
            self._used.add(entry.name)
            self._use(entry, raw)
        return raw

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            try:
                with (self._folder / file).open("rb") as handle:
                    self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:  # it was whole when its header was read
                is_unmapped = isinstance(error, OSError) and error.errno == errno.ENODEV
                why = f"{error}" + is_unmapped * "; its file system maps no file into memory: copy the model to another"
                raise ModelError(f"{self._folder / file} cannot be read: {why}") from error
        return self._maps[file]


def _is_misaligned(raw: "np.typing.NDArray[np.uint8]", dtype: "np.dtype[Any]") -> bool:
    """Whether numbers begin at no multiple of their size."""
    return bool(raw.ctypes.data % dtype.itemsize)


def _copied(entry: TensorEntry, raw: "np.typing.NDArray[np.uint8]") -> Stored:
    if is_filed(entry.name):
        raise ModelError(
            f"{entry.file}: tensor {entry.name} begins at byte {entry.start}, no multiple of the size of its numbers, and is "
            "too large to be copied: write the file anew with safetensors"
        )
    return _stored(entry, raw.copy())


def _stored(entry: TensorEntry, raw: "np.typing.NDArray[np.uint8]") -> Stored:
    if entry.dtype == FLOAT4:
        check_signs(entry.name, raw)
    if entry.dtype in BLOCKS:
        return Stored(entry.dtype, raw.reshape(*entry.shape[:-1], stored_bytes(entry.dtype, entry.shape[-1:])))
    known = _TYPES.get(entry.dtype)
    if known is None:
        known_types = ", ".join((*_TYPES, *BLOCKS))
        raise ModelError(
            f"{entry.file}: tensor {entry.name} is stored as {entry.dtype}; the native engine reads {known_types}"
        )
    name, dtype = known
    return Stored(name, raw.view(dtype).reshape(entry.shape))
