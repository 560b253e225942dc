"""The header of a GGUF file (versions 2 and 3): its metadata, and which tensor lies where. Checks all that it reads.

Layout, little-endian: "GGUF", version, number of tensors, number of keys; the keys with their values; each tensor's name,
sizes (the innermost first), type and offset; then the data, which begins at the next multiple of general.alignment.
Every count is held against the bytes that are left before anything is made of it. The file is read by ranges, so that a
header on the hub is read as one on disk is. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from manyhands.checkpoint.dtypes import GGUF_SUFFIX, GRIDS, stored_bytes
from manyhands.errors import ModelError
from manyhands.refusals import installing

MAGIC: Final = b"GGUF"
SUFFIX: Final = GGUF_SUFFIX
FIRST_BYTES: Final = 4 << 20  # of a header that are read at first; four times as many each time that they are too few
PART_BYTES: Final = 64 << 10  # of parts after the first, which have no vocabulary
MAX_HEADER_BYTES: Final = 64 << 20  # the largest known has 16 MB: gemma's 262,000 tokens
MAX_TEXTS: Final = 1 << 21  # in lists of all keys together: tokens and merges
MAX_KEYS: Final = 4096
MAX_TENSORS: Final = 1 << 17
MAX_NAME: Final = 1 << 10  # bytes of a key's or a tensor's name
_MAX_SHOWN: Final = 60  # characters of a value
_MAX_SIZES: Final = 4
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _LIST = 8, 9
# ggml's number of a type -> its name here, and the names of those that are refused.
TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0", 42: "Q2_0", 142: "PQ2_0",
}  # fmt: skip
REFUSED: Final = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    36: "I2_S", 38: "TL1", 143: "PTQ1_0",
}  # fmt: skip

_OLD: Final = ("Q2_0", "PQ2_0")  # older files of PrismML have blocks of the latter under the number of the former
WHOLE: Final = 26  # I32, of no weights
_TABLE: Final = ".ffn_gate_tid2eid.weight"  # which experts a token's id chooses

Described = tuple[str, str, tuple[int, ...], int]  # name, type, shape, and offset in the data
ReadRange = Callable[[int, int], bytes]  # bytes [start, end) of the file; fewer where it ends before


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor by its name in `file`; `shape` outermost first; bytes [start, end) of that file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    file: str


@dataclass(frozen=True, slots=True)
class Gguf:
    """A header. `facts`: the metadata; lists of numbers are numpy arrays. `tensors`: by offset. `data_start`: bytes of it.

    Or the headers of the files of one model, joined (gguf_parts.py): `file` is then the first.
    """

    file: str
    facts: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    data_start: int
    places: dict[str, int] = field(default_factory=dict)  # where the numbers of a list begin in the file

    def one(self, key: str, default: Any = None) -> Any:
        """The value of a key that holds no list, `default` where it is absent. Raises ModelError."""
        value = self.facts.get(key, default)
        if isinstance(value, list | np.ndarray):
            raise ModelError(f"{self.file} refused: the key {key[:80]!a} is a list; one value is needed")
        return value


def shown(value: Any) -> str:
    """A value on one line, and not long: that of an array has several."""
    if isinstance(value, list):
        return f"a list of {len(value)} texts"
    return " ".join(repr(value[:_MAX_SHOWN] if isinstance(value, str) else value).split())[:_MAX_SHOWN]


class _Short(Exception):
    """The header goes on behind the bytes that were read."""


def parse_gguf(read: ReadRange, file: str, size: int, number: int = 0) -> Gguf:
    """The header of a file of `size` bytes, of which `read` gives ranges; `number`: of the part that it is, from 0.

    Raises ModelError naming the flaw.
    """
    raw, length = b"", FIRST_BYTES if number == 0 else min(FIRST_BYTES, PART_BYTES)
    while True:
        end = min(length, size, MAX_HEADER_BYTES)
        raw += read(len(raw), end)
        try:
            return _Reader(raw, file, size).header()
        except _Short:
            if len(raw) < end or end == size:
                raise ModelError(f"{file} is truncated: its header goes on behind byte {len(raw)}, its last") from None
            if end == MAX_HEADER_BYTES:
                raise ModelError(f"{file} refused: its header has more than {MAX_HEADER_BYTES} bytes") from None
        length *= 4


class _Reader:
    """Walks over the first bytes of a file. Raises _Short behind their end, ModelError."""

    def __init__(self, raw: bytes, file: str, size: int) -> None:
        self._raw, self._file, self._size = raw, file, size
        self._at = 0
        self._texts = 0
        self._places: dict[str, int] = {}

    def header(self) -> Gguf:
        self._check_magic()
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        self._limit("tensors", num_tensors, MAX_TENSORS)
        self._limit("keys", num_keys, MAX_KEYS)
        facts: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._name("a key")
            if key in facts:
                raise self._refused(f"the key {key[:80]!a} occurs twice")
            facts[key] = self._value(self._number("<I"), key)
        described = [self._tensor() for _ in range(num_tensors)]
        self._check_grids(described)
        align = facts.get("general.alignment", 32)
        if type(align) is not int or not 8 <= align <= 1 << 16 or align & (align - 1):
            raise self._refused(f"general.alignment is {shown(align)}; it must be a power of two from 8 to 65536")
        start = -(-self._at // align) * align
        if self._has_old_blocks(described, start, align):
            old, own = _OLD
            described = [(name, own if dtype == old else dtype, shape, at) for name, dtype, shape, at in described]
        return Gguf(self._file, facts, self._place(described, start, align), start, self._places)

    def _check_magic(self) -> None:
        if self._take(4) != MAGIC:
            raise self._refused('it does not begin with "GGUF"')
        version = self._number("<I")
        if version not in _VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "big"), "little") in _VERSIONS
            what = "it is big-endian" if is_swapped else f"its version is {version}, this program reads 2 and 3"
            raise self._refused(f"{what}: convert it again with llama.cpp")

    def _refused(self, what: str) -> ModelError:
        return ModelError(f"{self._file} refused: {what}")

    def _limit(self, what: str, count: int, limit: int) -> None:
        if count > limit:
            raise self._refused(f"it claims {count} {what}; the limit is {limit}")

    def _take(self, length: int) -> bytes:
        end = self._at + length
        if end > self._size:
            raise ModelError(f"{self._file} is truncated: its header needs {end} bytes, the file has {self._size}")
        if end > MAX_HEADER_BYTES:
            raise self._refused(f"its header needs more than {MAX_HEADER_BYTES} bytes")
        if end > len(self._raw):
            raise _Short
        found, self._at = self._raw[self._at : end], end
        return found

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _name(self, what: str) -> str:
        length = self._number("<Q")
        if not 0 < length <= MAX_NAME:
            raise self._refused(f"the name of {what} has {length} bytes; 1 to {MAX_NAME} are allowed")
        return self._decoded(self._take(length))

    def _decoded(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._refused(f"a text before byte {self._at} is not UTF-8") from error

    def _text(self) -> str:
        self._texts += 1
        return self._decoded(self._take(self._number("<Q")))

    def _value(self, kind: int, key: str) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _LIST:
            return self._list(key)
        if kind not in _SCALARS:
            raise self._refused(f"the key {key[:80]!a} has a value of the unknown type {kind}")
        value = self._number(_SCALARS[kind])
        if isinstance(value, float) and not math.isfinite(value):
            raise self._refused(f"the key {key[:80]!a} is {value}; it must be finite")
        return value

    def _list(self, key: str) -> Any:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _TEXT:
            self._limit("texts in lists", self._texts + count, MAX_TEXTS)
            return [self._text() for _ in range(count)]
        if kind not in _SCALARS:
            raise self._refused(
                f"the key {key[:80]!a} is a list of the type {kind}: lists of numbers and texts are read"
            )
        dtype = np.dtype(_SCALARS[kind])
        self._limit(f"bytes of {key[:80]!a}", count * dtype.itemsize, MAX_HEADER_BYTES)
        self._places[key] = self._at
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _tensor(self) -> Described:
        """Name, type, shape, and offset in the data."""
        name, count = self._name("a tensor"), self._number("<I")
        if not 0 < count <= _MAX_SIZES:
            raise self._refused(f"tensor {name[:80]!a} has {count} dimensions; 1 to {_MAX_SIZES} are allowed")
        sizes = struct.unpack(f"<{count}Q", self._take(8 * count))
        if 0 in sizes:
            raise self._refused(f"tensor {name[:80]!a} has the empty shape {list(sizes[::-1])}")
        kind, offset = self._number("<I"), self._number("<Q")
        if kind == WHOLE and name.endswith(_TABLE):
            return name, "I32", sizes[::-1], offset
        if kind not in TYPES:
            what = REFUSED.get(kind, f"type {kind}")
            known = ", ".join(TYPES.values())
            raise self._refused(f"tensor {name[:80]!a} is stored as {what}; held exactly are {known}: take such a file")
        return name, TYPES[kind], sizes[::-1], offset

    def _check_grids(self, described: Sequence[Described]) -> None:
        """Told before anything is downloaded. The package is looked for once: that takes longer than reading a tensor."""
        name, dtype = next(((name, dtype) for name, dtype, *_ in described if dtype in GRIDS), ("", ""))
        if dtype and find_spec("gguf") is None:
            what = f"tensor {name[:80]!a} is stored as {dtype}, which is read with the package gguf"
            raise self._refused(f"{what}: {installing('gguf')}")

    def _has_old_blocks(self, described: Sequence[Described], start: int, align: int) -> bool:
        """Whether tensors of Q2_0 lie as far apart as those of PQ2_0 do, each of them, and one at least nearer than its own."""
        ordered = sorted(described, key=lambda tensor: tensor[3])
        ends = [*(tensor[3] for tensor in ordered[1:]), self._size - start]
        is_short = False
        for (_, dtype, shape, offset), end in zip(ordered, ends, strict=False):  # of no tensors one end
            if dtype != _OLD[0]:
                continue
            try:
                own, other = (stored_bytes(each, shape) for each in _OLD)
            except ModelError:  # rows of no whole blocks
                return False
            if end - offset not in (other, -(-other // align) * align):
                return False
            is_short = is_short or end - offset < own
        return is_short

    def _place(self, described: Sequence[Described], start: int, align: int) -> tuple[GgufTensor, ...]:
        """The tensors by offset, each within the file and none over another."""
        tensors: list[GgufTensor] = []
        reached, seen = start, set[str]()
        for name, dtype, shape, offset in sorted(described, key=lambda tensor: tensor[3]):
            where = f"tensor {name[:80]!a}"
            if name in seen:
                raise self._refused(f"{where} occurs twice")
            seen.add(name)
            if offset % align:
                raise self._refused(f"{where} lies at {offset}, no multiple of the alignment {align}")
            try:
                length = stored_bytes(dtype, shape)
            except ModelError as error:
                raise self._refused(f"{where}: {error}") from error
            if start + offset < reached:
                raise self._refused(f"{where} overlaps the one before it at byte {start + offset}")
            if start + offset + length > self._size:
                raise ModelError(
                    f"{self._file} is truncated: {where} ends at byte {start + offset + length}, the file at {self._size}"
                )
            reached = start + offset + length
            tensors.append(GgufTensor(name, dtype, shape, start + offset, reached, self._file))
        return tuple(tensors)
