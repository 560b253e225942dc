"""A stretch of a file that is given away only as it was when it was proven. Blocking.

The first read hashes the whole stretch against what it must be and keeps the hash of each block; later reads hash the blocks
that they touch. So one changed bit is never sent, for 64 bytes of memory a MiB and 0.3 ms a block (SHA instructions).
"""

import hashlib
import os
from itertools import pairwise
from pathlib import Path
from typing import Final

from manyhands.errors import Damaged, ModelError

BLOCK_BYTES: Final = 512 << 10  # what peers ask for at a time (provider.py: CHUNK_BYTES)


class ProvenStretch:
    """Bytes [start, end) of `path`, called `name`, whose SHA-256 is `sha256`. One thread at a time."""

    def __init__(self, path: Path, start: int, end: int, name: str, sha256: str) -> None:
        self._path, self._start, self._size = path, start, end - start
        self._name, self._sha256 = name, sha256
        self._blocks: list[bytes] | None = None
        self._damage: Damaged | None = (
            None  # found once, said again: to look anew would cost a hash of all for each request
        )

    def __len__(self) -> int:
        return self._size

    def reads(self, offset: int, length: int) -> int:
        """Bytes that `read` reads and hashes for that, once the whole was."""
        end = min(self._size, -(-min(self._size, offset + length) // BLOCK_BYTES) * BLOCK_BYTES)
        return end - offset // BLOCK_BYTES * BLOCK_BYTES

    def read(self, offset: int, length: int) -> bytes:
        """At most `length` bytes at `offset`. Raises Damaged if they are wrong, ModelError if they cannot be read."""
        if self._damage is not None:
            raise self._damage
        blocks = self._blocks = self._blocks if self._blocks is not None else self._prove()
        first, end = offset // BLOCK_BYTES, min(self._size, offset + length)
        raw = self._read(first * BLOCK_BYTES, min(self._size, -(-end // BLOCK_BYTES) * BLOCK_BYTES))
        if _hashes(raw) != blocks[first : first + -(-len(raw) // BLOCK_BYTES)]:
            raise self._damaged("it has changed since it was proven")
        return raw[offset - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def _prove(self) -> list[bytes]:
        whole, blocks = hashlib.sha256(), []
        for at in range(0, self._size, BLOCK_BYTES):
            block = self._read(at, min(self._size, at + BLOCK_BYTES))
            whole.update(block)
            blocks += _hashes(block)
        if whole.hexdigest() != self._sha256:
            raise self._damaged(
                f"SHA-256 {whole.hexdigest()[:16]}..., the model's manifest says {self._sha256[:16]}..."
            )
        return blocks

    def _damaged(self, why: str) -> Damaged:
        message = f"{self._path}: {self._name} is damaged and not given to peers: {why}; start again to fetch it anew"
        self._damage = Damaged(message, str(self._path.parent), (self._name,))
        return self._damage

    def _read(self, start: int, end: int) -> bytes:
        """Raises ModelError if the file ends early, is a link or cannot be read."""
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
            try:
                data = os.pread(handle, end - start, self._start + start)
            finally:
                os.close(handle)
        except OSError as error:
            raise ModelError(f"{self._path} cannot be read: {error.strerror}") from error
        if len(data) != end - start:
            raise ModelError(f"{self._path} ended early: it was changed while it is offered")
        return data


def _hashes(raw: bytes) -> list[bytes]:
    edges = [*range(0, len(raw), BLOCK_BYTES), len(raw)]
    return [hashlib.sha256(raw[a:b]).digest() for a, b in pairwise(edges)]
