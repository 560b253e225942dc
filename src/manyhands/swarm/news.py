"""What two nodes send each other when they compare their directories. Values and bytes; gossip.py decides what is sent.

    news    number of wants u16 · number of beats u16 · wants (tag 8 · version u16, 0: it has nothing) ...
            · beats (tag 8 · version u16 · value 8) ... · statements (length u16 · bytes) ...            big endian

Versions travel as their low 16 bits and are compared as serial numbers (RFC 1982), but for the window: what is up to BEHIND
behind is older, all else may be newer. A run of a node gives each thing that it says a number one higher; the next run begins
at the clock (announce.py), any distance ahead, so half of that was taken for older where the window was in the middle. A
false match delays a record until its next beat.
"""

import struct
from dataclasses import dataclass, field

from manyhands.swarm.record import ANCHOR_BYTES, TAG_BYTES
from manyhands.swarm.record_store import HeldRecord
from manyhands.swarm.statement import MAX_BYTES

NEWS_BYTES = 8 << 10  # at most 45 signatures to check: less than 10 ms of the event loop (0.2 ms each)
VERSION = struct.Struct(f">{TAG_BYTES}sH")
# More numbers than 14 records of a node are given while one of them can be held (180 s; a beat takes one). Where a list is
# further behind, what is older is sent in vain beside what is newer.
BEHIND = 1 << 9
_BEAT = struct.Struct(f">{TAG_BYTES}sH{ANCHOR_BYTES}s")
_COUNTS = struct.Struct(">HH")
_LENGTH = struct.Struct(">H")


def is_newer(version: int, other: int) -> bool:
    """Whether `version` may come after `other`, by their low 16 bits. Of two runs both may: the whole numbers decide."""
    return 0 < (version - other) & 0xFFFF <= 0xFFFF - BEHIND


def expand(version: int, near: int) -> int:
    """The whole number with the low 16 bits of `version` that is `near`, after it, or at most BEHIND before it."""
    return near - BEHIND + ((version - near + BEHIND) & 0xFFFF)


@dataclass(slots=True)
class News:
    """What one node has to tell another: versions it would like to see exceeded, beats and statements."""

    wants: list[tuple[bytes, int]] = field(default_factory=list)
    beats: list[tuple[bytes, int, bytes]] = field(default_factory=list)
    statements: list[bytes] = field(default_factory=list)
    size: int = _COUNTS.size
    is_full: bool = False  # something did not fit, and waits for the next round

    def want(self, tag: bytes, version: int) -> None:
        if self._fits(VERSION.size):
            self.wants.append((tag, version))

    def tell(self, entry: HeldRecord, theirs: int) -> None:
        """What brings a node from version `theirs` (0: it has nothing) to that of `entry`."""
        record = entry.record
        if theirs and record.beats and (record.version - theirs) & 0xFFFF <= record.beats:
            if self._fits(_BEAT.size):
                self.beats.append((entry.tag, record.version & 0xFFFF, entry.value))
        elif self._fits(_LENGTH.size + len(entry.data)):
            self.statements.append(entry.data)

    def _fits(self, size: int) -> bool:
        """Nothing does once something did not."""
        self.is_full = self.is_full or self.size + size > NEWS_BYTES
        self.size += 0 if self.is_full else size
        return not self.is_full

    def encode(self, kind: int) -> bytes:
        parts = [bytes([kind]), _COUNTS.pack(len(self.wants), len(self.beats))]
        parts += [VERSION.pack(*want) for want in self.wants]
        parts += [_BEAT.pack(*beat) for beat in self.beats]
        parts += [_LENGTH.pack(len(data)) + data for data in self.statements]
        return b"".join(parts)

    @classmethod
    def decode(cls, content: bytes) -> "News":
        """Read what `encode` wrote, without its kind. Raises ValueError or struct.error."""
        if len(content) > NEWS_BYTES:
            raise ValueError(f"news of {len(content)} bytes, limit {NEWS_BYTES}")
        num_wants, num_beats = _COUNTS.unpack_from(content)
        beats_at = _COUNTS.size + num_wants * VERSION.size
        rest_at = beats_at + num_beats * _BEAT.size
        if rest_at > len(content):
            raise ValueError("news is truncated")
        return cls(
            list(VERSION.iter_unpack(content[_COUNTS.size : beats_at])),
            list(_BEAT.iter_unpack(content[beats_at:rest_at])),
            _read_statements(content, rest_at),
            len(content),
        )

    def __bool__(self) -> bool:
        return bool(self.wants or self.beats or self.statements)


def _read_statements(content: bytes, at: int) -> list[bytes]:
    found = []
    while at < len(content):
        (length,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size + length
        if length > MAX_BYTES or at > len(content):
            raise ValueError("a statement is oversized or truncated")
        found.append(content[at - length : at])
    return found
