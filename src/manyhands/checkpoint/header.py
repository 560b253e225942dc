"""The header of a safetensors file: which tensor lies where. Files are untrusted: every number is checked.

Layout: 8 bytes little-endian length, that many bytes of JSON, then the data, which the tensors tile exactly. Parts of a GGUF
model that were split off or fetched lie in such files too: with the block types of dtypes.py beside those of safetensors.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final, TypeGuard

from manyhands.checkpoint.dtypes import is_known, stored_bytes
from manyhands.checkpoint.plain_file import file_size
from manyhands.checkpoint.text_part import text_name
from manyhands.errors import ModelError

MAX_HEADER_BYTES: Final = 100_000_000  # the limit of safetensors itself
LENGTH_BYTES: Final = 8
MAX_NAME: Final = 1 << 10  # characters of a tensor's name
MAX_SIZES: Final = 8  # of a tensor's shape
MAX_NUMBERS: Final = 1 << 58  # of a tensor: numpy counts its bytes in 63 bits
# Of a table's JSON, which become a value of Python's each: the largest manifest has 2,485,000. The bytes alone would be 6 GB
# of lists.
MAX_COMMAS: Final = 3 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor and its bytes: [start, end) counted from the start of the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


def header_length(prefix: bytes, file: str, size: int) -> int:
    """Bytes of JSON that follow the 8-byte `prefix` of a file of `size` bytes. Raises ModelError."""
    if len(prefix) < LENGTH_BYTES:
        raise ModelError(f"{file} is truncated: {size} bytes are too few for a safetensors file")
    if prefix.startswith(b"version "):
        raise ModelError(f"{file} is a pointer of Git LFS and no weights: `git lfs pull` in its folder fetches them")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise ModelError(f"{file} is no safetensors file: its header claims {length} bytes (limit {MAX_HEADER_BYTES})")
    if LENGTH_BYTES + length > size:
        raise ModelError(f"{file} is truncated: its header ends at {LENGTH_BYTES + length}, the file has {size} bytes")
    return length


def parse_header(raw: bytes, file: str, size: int) -> list[TensorEntry]:
    """The tensors of a file of `size` bytes from the JSON `raw`, by offset; of a multimodal model those of its text part.

    Raises ModelError naming the flaw.
    """
    check_values(raw, file)
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: the safetensors header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file}: the safetensors header is not an object")
    base = LENGTH_BYTES + len(raw)
    entries = [_entry(name, facts, file, base) for name, facts in header.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    _check_tiling(entries, file, base, size)
    return list(_of_text(entries))


def _of_text(entries: Iterable[TensorEntry]) -> Iterator[TensorEntry]:
    for entry in entries:
        name = text_name(entry.name)
        if name is not None:
            yield entry if name == entry.name else replace(entry, name=name)


def check_tensor_name(name: object, where: str) -> str:
    """`name` itself if it can stand in a line: names are in what people are told of tensors. Raises ModelError."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > MAX_NAME:
        needed = f"a text of at most {MAX_NAME} printable characters is needed"
        raise ModelError(f"{where} refused: the name of a tensor is {name!a:.80}; {needed}")
    return name


def check_values(raw: bytes, file: str) -> None:
    """Raise ModelError for JSON of more values than tables of tensors have, before it is parsed."""
    if (count := raw.count(b",")) > MAX_COMMAS:
        raise ModelError(f"{file} refused: its table has {count} commas; at most {MAX_COMMAS} are read")


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors of the file at `path`; their `file` is its name. Raises ModelError."""
    try:
        size = file_size(path)
        with path.open("rb") as handle:
            length = header_length(handle.read(LENGTH_BYTES), path.name, size)
            raw = handle.read(length)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_header(raw, path.name, size)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def _entry(name: str, facts: object, file: str, base: int) -> TensorEntry:
    check_tensor_name(name, file)
    if not isinstance(facts, dict) or not {"dtype", "shape", "data_offsets"} <= facts.keys():
        raise ModelError(f"{file}: tensor {name} lacks dtype, shape or offsets")
    dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(dtype, str) or not is_known(dtype):
        raise ModelError(f"{file}: tensor {name} has the unknown dtype {dtype!a:.40}")
    if not are_sizes(shape) or not _are_numbers(offsets) or len(offsets) != 2:
        raise ModelError(f"{file}: tensor {name} has the impossible shape {shape!a:.80} or offsets {offsets!a:.80}")
    entry = TensorEntry(name, file, dtype, tuple(shape), base + offsets[0], base + offsets[1])
    if offsets[1] - offsets[0] != _size(name, dtype, shape, file):
        raise ModelError(f"{file}: tensor {name} ({dtype} {shape}) does not fit offsets {offsets}")
    return entry


def _size(name: str, dtype: str, shape: list[int], file: str) -> int:
    try:
        return stored_bytes(dtype, shape)
    except ModelError as error:
        raise ModelError(f"{file}: tensor {name}: {error}") from error


def are_sizes(value: object) -> bool:
    """Whether a value from JSON can be a tensor's shape. One without numbers, of a size 0, has no impossible sizes either."""
    return _are_numbers(value) and len(value) <= MAX_SIZES and prod(n or 1 for n in value) < MAX_NUMBERS


def _are_numbers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _check_tiling(entries: list[TensorEntry], file: str, base: int, size: int) -> None:
    reached = base
    for entry in entries:
        if entry.start < reached:
            raise ModelError(f"{file}: tensor {entry.name} overlaps the one before it at byte {entry.start}")
        if entry.start > reached:
            raise ModelError(f"{file}: bytes {reached} to {entry.start} before tensor {entry.name} belong to no tensor")
        reached = entry.end
    if reached != size:
        state = "truncated" if size < reached else "too long"
        raise ModelError(f"{file} is {state}: its tensors end at byte {reached}, the file has {size}")
