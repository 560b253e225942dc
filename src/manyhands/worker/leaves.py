"""Hashes of the rows of a session, one for each position, by which nodes compare what they have without sending it.

    rows ─ note ─► 16 bytes a position ─ root(start, until) ─► 32 bytes, the same on each node that has the same rows

A hash is BLAKE2b of a row's bytes as the model computes them, a root BLAKE2b over the hashes in order of position.
"""

from hashlib import blake2b
from typing import Final, NamedTuple, Self

from manyhands.wire.attest_message import Root

LEAF_BYTES: Final = 16
ROOT_BYTES: Final = 32


class Leaves:
    """Of rows at positions [`begin`, `end`). Like a cache, it ends where the last rows ended."""

    def __init__(self) -> None:
        self.begin = 0
        self._hashes = bytearray()

    @property
    def end(self) -> int:
        return self.begin + len(self._hashes) // LEAF_BYTES

    def note(self, position: int, rows: bytes | bytearray | memoryview, count: int) -> None:
        """`count` rows, one or more, are those from `position` on; what was noted from there on is dropped. Rows that do not
        follow what was noted begin anew."""
        if not self.begin <= position <= self.end:
            self.begin = position
        width = len(rows) // count
        hashes = [blake2b(rows[at : at + width], digest_size=LEAF_BYTES).digest() for at in range(0, len(rows), width)]
        self._hashes[(position - self.begin) * LEAF_BYTES :] = b"".join(hashes)

    def root(self, start: int, until: int) -> Root | None:
        """Over positions [start, until); None if not all of them were noted."""
        if not self.begin <= start < until <= self.end:
            return None
        # A copy: a step may note rows on the device's thread meanwhile, and what is exported cannot grow.
        hashes = self._hashes[(start - self.begin) * LEAF_BYTES : (until - self.begin) * LEAF_BYTES]
        return Root(blake2b(hashes, digest_size=ROOT_BYTES).hexdigest())

    def first(self, positions: int) -> Self:
        """A copy of those before `positions`."""
        copy = type(self)()
        copy.begin = self.begin
        copy._hashes = self._hashes[: max(0, positions - self.begin) * LEAF_BYTES]
        return copy


class HopLeaves(NamedTuple):
    """Of the rows that came to a hop, and of those that its layers made of them."""

    given: Leaves
    made: Leaves

    @classmethod
    def new(cls) -> Self:
        return cls(Leaves(), Leaves())

    def note(self, position: int, given: bytes, made: bytes, count: int) -> None:
        """As Leaves.note, of both. Only of a step that was computed: else what is signed (attesting.py) would be false."""
        self.given.note(position, given, count)
        self.made.note(position, made, count)

    def first(self, positions: int) -> Self:
        """A copy of those before `positions`."""
        return type(self)(self.given.first(positions), self.made.first(positions))
