"""Packed weights on this disk: what a node made of a checkpoint at its first load, so that the next one only reads it.

`home`/packed has a folder for each model and in it a file for each part (a layer, the ends) in one precision. A file is a head
and arrays. The head states the types, bytes and SHA-256 of the arrays, and begins with its own SHA-256: every byte is proven
each time that it is loaded, and a file that is damaged is removed and made anew. Together they take at most LIMIT_BYTES, and
leave the disk FREE_BYTES; those that were not used for the longest time go first. Blocking.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.verify import MAX_THREADS
from manyhands.core import ModelId

logger = logging.getLogger(__name__)

PACKED: Final = "packed"  # the folder in `home`
SUFFIX: Final = ".pack"
LIMIT_BYTES: Final = 64 << 30
FREE_BYTES: Final = 4 << 30
MAX_HEAD_BYTES: Final = 1 << 20
DRAFT_S: Final = 3600.0  # no write takes as long
_HASH_BYTES, _LENGTH_BYTES = 32, 8
_DTYPES: Final[dict[str, type[Any]]] = {"u1": np.uint8, "u2": np.uint16, "i4": np.int32, "f4": np.float32}

Array = NDArray[Any]
Part = Sequence[tuple[str, Array]]  # arrays, each with the name of its type
Allocate = Callable[[int, type[Any]], Array]  # an array of so many numbers of a dtype


class _Spoiled(Exception):
    """A file is not what was written."""


def packed_folder(home: Path, model: ModelId) -> Path:
    """Where the packed weights of a model lie."""
    return home / PACKED / model


class PackedShelf:
    """The packed weights of one model. A key names a part, a precision and how it is packed."""

    def __init__(self, home: Path, model: ModelId) -> None:
        self._home, self._folder = home, packed_folder(home, model)

    def load(self, key: str, allocate: Allocate) -> list[tuple[str, Array]] | None:
        """The arrays kept under `key`, proven; None if there are none. A damaged file is removed."""
        path = self._path(key)
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                found = _read(file, key, allocate)
            os.utime(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, _Spoiled) as error:
            logger.warning("%s is damaged and made anew: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return found

    def keep(self, key: str, part: Part) -> bool:
        """Write arrays, whole or not at all; whether there was room. What fails is logged: they are only to save time."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not _make_room(self._home / PACKED, sum(array.nbytes for _, array in part)):
                return False
            with _replacing(self._path(key)) as file:
                _write(file, key, part)
        except OSError as error:
            logger.warning("packed weights are not kept, the next start packs again: %s", error)
            return False
        return True

    def _path(self, key: str) -> Path:
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{SUFFIX}"


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when it is written. No fsync: what a power cut leaves is found by its hash."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            yield file
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _write(file: BinaryIO, key: str, part: Part) -> None:
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        hashes = list(pool.map(_sha256, (array for _, array in part)))
    rows = [
        [name, array.dtype.str[1:], array.nbytes, digest] for (name, array), digest in zip(part, hashes, strict=True)
    ]
    head = json.dumps({"key": key, "arrays": rows}).encode()
    file.write(hashlib.sha256(head).digest() + len(head).to_bytes(_LENGTH_BYTES, "little") + head)
    for _, array in part:
        file.write(_bytes(array))


def _read(file: BufferedReader, key: str, allocate: Allocate) -> list[tuple[str, Array]]:
    size = _file_size(file)
    rows = _rows(_head(file), key)
    if size != file.tell() + sum(count for _, _, count, _ in rows):
        raise _Spoiled("it is of another length")
    found = []
    for name, dtype, count, _ in rows:
        array = allocate(count // np.dtype(dtype).itemsize, dtype)
        if file.readinto(_bytes(array)) != count:
            raise _Spoiled("it ends early")
        found.append((name, array))
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        if list(pool.map(_sha256, (array for _, array in found))) != [digest for _, _, _, digest in rows]:
            raise _Spoiled("its bytes have changed")
    return found


def _file_size(file: BufferedReader) -> int:
    stat = os.fstat(file.fileno())
    if not S_ISREG(stat.st_mode):
        raise _Spoiled("it is no file")
    return stat.st_size


def _head(file: BufferedReader) -> bytes:
    digest, length = file.read(_HASH_BYTES), int.from_bytes(file.read(_LENGTH_BYTES), "little")
    head = file.read(length) if length <= MAX_HEAD_BYTES else b""
    if len(head) != length or hashlib.sha256(head).digest() != digest:
        raise _Spoiled("its head has changed")
    return head


def _rows(head: bytes, key: str) -> list[tuple[str, type[Any], int, str]]:
    """Type, dtype, bytes and SHA-256 of each array."""
    try:
        told = json.loads(head)
        if told["key"] != key:
            raise _Spoiled("it is of another key")
        return [
            (str(name), _DTYPES[dtype], _size(count, dtype), str(digest))
            for name, dtype, count, digest in told["arrays"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Spoiled(f"its head is none: {error}") from error


def _size(count: Any, dtype: str) -> int:
    """Bytes of an array. Raises ValueError for what no array has."""
    if type(count) is not int or count < 0 or count % np.dtype(_DTYPES[dtype]).itemsize:
        raise ValueError(f"an array of {count!r:.40} bytes")
    return count


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _sha256(array: Array) -> str:
    return hashlib.sha256(_bytes(array)).hexdigest()


def _make_room(folder: Path, needed: int) -> bool:
    """Remove what was not used for the longest time until `needed` bytes more are within both limits; whether they are."""
    files = _files(folder)
    held, free = sum(size for _, size, _ in files), shutil.disk_usage(folder).free
    if needed > LIMIT_BYTES or needed + FREE_BYTES > free + held:
        return False
    for _, size, path in files:
        if held + needed <= LIMIT_BYTES and needed + FREE_BYTES <= free:
            break
        with contextlib.suppress(OSError):
            path.unlink()
        held, free = held - size, free + size
    return True


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    """Packed weights by their last use, with their bytes. What killed processes left half written is removed."""
    files = []
    own = [model for model in folder.iterdir() if model.is_dir() and not model.is_symlink()]
    for path in [path for model in own for path in model.iterdir()]:
        with contextlib.suppress(OSError):
            stat = path.lstat()
            if path.name.endswith(SUFFIX):
                files.append((stat.st_mtime_ns, stat.st_size, path))
            elif path.name.endswith(".tmp") and stat.st_mtime < time.time() - DRAFT_S:
                path.unlink()
    return sorted(files)
