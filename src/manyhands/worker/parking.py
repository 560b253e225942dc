"""Sessions that ended and whose caches are kept for the next request of the same conversation. Pure: times are arguments.

    Close(parked_as) ─► park ─► find ─► a copy for a new session     shrink: what live sessions need goes first, oldest first

One of these for each span. A parked session belongs to the key that opened it, and its name is a secret of that origin.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from manyhands.core import EndsAt, NodeId, SessionId, Span
from manyhands.engine.span import Cache
from manyhands.worker.bounds import RowBounds
from manyhands.worker.log import LogBudget, OutputLog

# How long a session stays parked at most, and how many there may be on one span: of one owner, and of all.
PARKED_S = 600.0
MAX_PARKED_PER_OWNER = 32
MAX_PARKED = 256
# The share of a span's cache positions that the parked sessions of one owner may have.
OWNER_SHARE = 0.5


@dataclass(eq=False, slots=True)
class Parked:
    """What is kept of one place: positions [0, `positions`) of its cache, which has memory for `capacity`, and of its log.

    `ids` are those of the positions where this hop draws tokens. `ends` says what the log holds beside rows.
    """

    owner: NodeId
    span: Span
    ends: EndsAt
    positions: int
    capacity: int
    cache: Cache
    log: OutputLog
    bounds: RowBounds
    ids: tuple[int, ...]
    is_kept: bool = True  # until it is dropped; who copies it then stops


Key = tuple[SessionId, Span]


class Parking:
    """The parked sessions of a span, least recently used first. Their logs count in `logs`, and go when they go."""

    def __init__(self, logs: LogBudget) -> None:
        self._logs = logs
        self._parked: dict[Key, tuple[Parked, float]] = {}  # and when it was last used

    def __repr__(self) -> str:
        return f"<Parking of {len(self._parked)} sessions, {self.num_positions} positions>"

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def num_positions(self) -> int:
        """Cache positions that parked sessions have memory for."""
        return sum(parked.capacity for parked, _ in self._parked.values())

    def held_by(self, owner: NodeId) -> int:
        """Those of one owner."""
        return sum(parked.capacity for parked, _ in self._parked.values() if parked.owner == owner)

    def park(self, name: SessionId, parked: Parked, room: int, total: int, now: float) -> None:
        """Keep `parked` as the newest. `room`: positions that no live session leases, of `total`.

        What exceeds a bound goes, the oldest first: of its owner beyond the owner's share, of all beyond `room`.
        """
        self._logs.park(parked.log)
        self._drop(lambda key, _: key == (name, parked.span))
        self._parked[name, parked.span] = parked, now
        mine = [key for key, (other, _) in self._parked.items() if other.owner == parked.owner]
        while mine and (len(mine) > MAX_PARKED_PER_OWNER or self.held_by(parked.owner) > OWNER_SHARE * total):
            self._remove(mine.pop(0))
        while len(self._parked) > MAX_PARKED:
            self._remove(next(iter(self._parked)))
        self.shrink(room)

    def find(self, name: SessionId, span: Span, owner: NodeId, ends: EndsAt, now: float) -> Parked | None:
        """What `owner` parked as `name`, which counts as used now. None if it is gone, or was never there."""
        self.expire(now)
        parked, _ = self._parked.get((name, span), (None, 0.0))
        if parked is None or (parked.owner, parked.ends) != (owner, ends):
            return None
        del self._parked[name, span]
        self._parked[name, span] = parked, now
        return parked

    def shrink(self, room: int, last: SessionId | None = None) -> None:
        """Drop the oldest until the rest has memory for at most `room` positions; the session `last` goes last."""
        keys = sorted(self._parked, key=lambda key: key[0] == last)  # stable: the oldest first
        excess = self.num_positions - room
        for key in keys:
            if excess <= 0:
                break
            excess -= self._parked[key][0].capacity
            self._remove(key)

    def expire(self, now: float) -> None:
        """Drop what nothing has used for PARKED_S."""
        self._drop(lambda _, used_at: used_at + PARKED_S <= now)

    def expires_at(self) -> float:
        """When the oldest is to be dropped."""
        return next((used_at + PARKED_S for _, used_at in self._parked.values()), math.inf)

    def forget(self, name: SessionId, owner: NodeId) -> None:
        """Drop what `owner` parked as `name`; another's is not touched."""
        self._drop(lambda key, _: key[0] == name and self._parked[key][0].owner == owner)

    def forget_owner(self, owner: NodeId) -> None:
        """Drop all that `owner` parked."""
        self._drop(lambda key, _: self._parked[key][0].owner == owner)

    def clear(self) -> None:
        self._drop(lambda *_: True)

    def _drop(self, is_meant: Callable[[Key, float], bool]) -> None:
        for key in [key for key, (_, used_at) in self._parked.items() if is_meant(key, used_at)]:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        parked, _ = self._parked.pop(key)
        parked.is_kept = False
        self._logs.close(parked.log)
