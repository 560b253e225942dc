"""The folder that a download fills: sparse files, and a journal of the tensors in them that are whole and right.

Only what the journal names counts as present, and it is written after the bytes are on disk; so a kill at any moment
costs at most the bytes since the last entry. One process at a time: the caller holds the folder's lock.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, Final

from manyhands.checkpoint.folder import JOURNAL
from manyhands.checkpoint.header import TensorEntry
from manyhands.checkpoint.manifest import TensorDigest
from manyhands.errors import DiskFull, ModelError
from manyhands.files import is_full, write_atomic
from manyhands.plain import size_of

# A journal entry costs two fsyncs (5-20 ms on a disk); at 100 MB/s this is one every 0.6 s.
COMMIT_BYTES: Final = 64 << 20


class Store:
    """What has arrived of one commit of one repository."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError if the journal cannot be read."""
        self.folder = folder
        self.held: dict[str, set[str]] = {}  # file -> tensors that are whole and right
        self.hashes: dict[str, list[TensorDigest]] = {}  # of files read to their end, while there is no manifest
        self.revisions: set[str] = set()  # names under which this commit was asked for
        self._unwritten = 0  # bytes marked since the last commit
        self._read()

    def _read(self) -> None:
        try:
            body = json.loads((self.folder / JOURNAL).read_bytes())
            self.held = {file: set(names) for file, names in body["tensors"].items()}
            self.hashes = {file: [_digest(row) for row in rows] for file, rows in body["hashes"].items()}
            self.revisions = set(body["revisions"])
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{self.folder / JOURNAL} is corrupt: remove {self.folder} and fetch again") from error

    def settle(self, file: str, entries: Mapping[str, TensorEntry]) -> None:
        """Forget tensors that `file` has lost since: it is shorter, or gone. `entries` are those it shall have, by name."""
        path = self.folder / file
        size = path.stat().st_size if path.exists() else 0
        for name in sorted(self.held.get(file, ())):
            if name not in entries or entries[name].end > size:
                self.held[file].discard(name)

    def has(self, entry_file: str, name: str) -> bool:
        return name in self.held.get(entry_file, ())

    @contextmanager
    def filling(self, file: str, size: int, header: bytes) -> Iterator[BinaryIO]:
        """The sparse file, open for writing at its full size, with its header in place; journaled on leaving."""
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "w+b") as handle:
            handle.truncate(size)
            handle.write(header)
            try:
                yield handle
            finally:
                self.commit(handle)

    def mark(self, handle: BinaryIO, entry: TensorEntry) -> None:
        """Take note that `entry` is whole; on disk with the next commit, which this does every 64 MiB."""
        self.held.setdefault(entry.file, set()).add(entry.name)
        self._unwritten += len(entry)
        if self._unwritten >= COMMIT_BYTES:
            self.commit(handle)

    def commit(self, handle: BinaryIO | None = None) -> None:
        """Bytes first, then the journal. Raises OSError, and then the journal on disk is the previous one."""
        if handle is not None:
            handle.flush()
            os.fsync(handle.fileno())
        body = {
            "tensors": {file: sorted(names) for file, names in sorted(self.held.items())},
            "hashes": {file: [digest.row() for digest in rows] for file, rows in sorted(self.hashes.items())},
            "revisions": sorted(self.revisions),
        }
        write_atomic(self.folder / JOURNAL, json.dumps(body).encode())
        self._unwritten = 0


def _digest(row: list[str | list[int]]) -> TensorDigest:
    name, dtype, shape, sha256 = row
    return TensorDigest(str(name), str(dtype), tuple(int(size) for size in shape), str(sha256))


class Sink:
    """Takes consecutive bytes of one file; hashes `entries` (by offset) and writes those in `wanted` to `handle`. Several of
    the same bytes are hashed once."""

    def __init__(self, handle: BinaryIO, entries: Iterable[TensorEntry], wanted: set[str]) -> None:
        self._handle = handle
        places = groupby(entries, lambda entry: (entry.start, entry.end))
        self._left = [list(same) for _, same in places][::-1]
        self._wanted = wanted
        self._sha256 = hashlib.sha256()

    def feed(self, at: int, block: bytes) -> Iterator[tuple[TensorEntry, TensorDigest]]:
        """`block` begins at byte `at` of the file. Yields the tensors that it completes. Exhaust it before the next."""
        end = at + len(block)
        while self._left and self._left[-1][0].start <= end:
            same = self._left[-1]
            entry = same[0]
            low, high = max(at, entry.start), min(end, entry.end)
            if low < high:
                self._take(same, low, memoryview(block)[low - at : high - at])
            if high < entry.end:
                return
            self._left.pop()
            for one in same:
                yield one, TensorDigest(one.name, one.dtype, one.shape, self._sha256.hexdigest())
            self._sha256 = hashlib.sha256()

    def _take(self, same: list[TensorEntry], at: int, piece: memoryview) -> None:
        self._sha256.update(piece)
        if any(entry.name in self._wanted for entry in same):
            self._handle.seek(at)
            self._handle.write(piece)


def begins_with(path: Path, header: bytes) -> bool:
    """Whether there is a file at `path` with this header."""
    try:
        with path.open("rb") as handle:
            return handle.read(len(header)) == header
    except FileNotFoundError:
        return False


def erase(handle: BinaryIO, entry: TensorEntry) -> None:
    """Overwrite a tensor's bytes by zeros, so that wrong ones are never mistaken for weights."""
    handle.seek(entry.start)
    left = len(entry)
    while left:
        left -= handle.write(bytes(min(left, 1 << 20)))


def check_free(folder: Path, needed: int) -> None:
    """Raise DiskFull unless `folder`'s disk has `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        needs, more = (size_of(each, is_limit=True) for each in (needed, needed - free))
        raise DiskFull(f"{folder}: needs {needs}, {more} more than are free; make room or set MANYHANDS_HOME")


@contextmanager
def disk_errors(folder: Path, needed: int) -> Iterator[None]:
    """Turn "no space left" from writing into DiskFull naming path, needed and free bytes."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        free = shutil.disk_usage(folder).free
        needs = size_of(needed, is_limit=True)
        message = (
            f"{folder}: the disk is full; needed {needs}, {size_of(free)} are free. Make room or set MANYHANDS_HOME"
        )
        raise DiskFull(message) from error
