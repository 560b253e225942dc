"""Sessions that ended and whose caches are kept for the next request of the same conversation. Pure: times are arguments.

    Close(parked_as) ─► park ─► find ─► a copy for a new session     shrink: what live sessions need goes first, oldest first

One of these for each span. A parked session belongs to the key that opened it, and its name is a secret of that origin;
another origin may go on with it that knows the handle of its stream (wire/handle.py). What is kept for that alone, because its
client or its origin is gone or it has no tenant, ages faster and goes before the rest. From the rows that a last hop has sent
another origin draws the tokens again, so of such a session they stay, in the log, when the cache has to go.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from manyhands.core import EndsAt, NodeId, SessionId, Span
from manyhands.engine.span import Cache
from manyhands.wire.handle import adopted_name
from manyhands.worker.bounds import RowBounds
from manyhands.worker.leaves import HopLeaves
from manyhands.worker.log import LogBudget, OutputLog

# How long a session stays parked at most, and how many there may be on one span: of one owner, and of all.
PARKED_S = 600.0
ORPHANED_S = 120.0  # one that is kept for adoption alone
MAX_PARKED_PER_OWNER = 32
MAX_PARKED = 256
# The share of a span's cache positions that the parked sessions of one owner may have.
OWNER_SHARE = 0.5


@dataclass(eq=False, slots=True)
class Parked:
    """What is kept of one place: positions [0, `positions`) of its cache, which has memory for `capacity`, and up to `logged`
    of its log. None of them is a guess.

    `ids` are those of the positions where this hop draws tokens. `ends` says what the log holds beside rows. `cache` is None,
    `positions` and `capacity` are 0, once only the log is left.
    """

    owner: NodeId
    span: Span
    ends: EndsAt
    positions: int
    capacity: int
    cache: Cache | None
    log: OutputLog
    logged: int
    bounds: RowBounds
    ids: tuple[int, ...]
    adoption: SessionId | None = None  # what another origin's proof must hash to (wire/handle.py)
    leaves: HopLeaves | None = None
    is_kept: bool = True  # until it is dropped; who copies it then stops

    def hashes(self, origin: NodeId, positions: int) -> HopLeaves | None:
        """Those of the first `positions`. None to any `origin` but that which sent their rows: it may have sent others."""
        return self.leaves.first(positions) if self.leaves is not None and origin == self.owner else None


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
        return sum([size for _, size in self.sizes()])

    def held_by(self, owner: NodeId) -> int:
        """Cache positions that the parked sessions of one owner have memory for."""
        return sum([size for _, size in self.sizes(owner)])

    def sizes(self, owner: NodeId | None = None) -> list[tuple[Span, int]]:
        """The layers of each, of those of one owner if it is given, and the cache positions that it has memory for."""
        return [(parked.span, parked.capacity) for parked, _ in self._parked.values() if owner in (None, parked.owner)]

    def park(self, name: SessionId, parked: Parked, room: int, total: int, now: float) -> None:
        """Keep `parked`, as the newest unless it is named for adoption. `room`: positions of `total` without a lease.

        What exceeds a bound goes, the oldest first: of its owner beyond the owner's share, of all beyond `room`.
        """
        self._logs.park(parked.log)
        key = name, parked.span
        before, _ = self._parked.get(key, (None, 0.0))
        if before is not None and name == parked.adoption and before.positions > parked.positions:
            return self._logs.close(parked.log)  # both begin with the same text
        self._drop(lambda other, _: other == key)
        self._parked[key] = parked, now
        if name == parked.adoption:
            self._age(lambda other, _: other == key, now)
        mine = [other for other, (kept, _) in self._parked.items() if kept.owner == parked.owner]
        for oldest in mine[: max(0, len(mine) - MAX_PARKED_PER_OWNER)]:
            self._remove(oldest)
        self._shed(mine[-MAX_PARKED_PER_OWNER:], self.held_by(parked.owner) - int(OWNER_SHARE * total))
        while len(self._parked) > MAX_PARKED:
            self._remove(next(iter(self._parked)))
        self.shrink(room)

    def find(self, name: SessionId, span: Span, owner: NodeId, ends: EndsAt, now: float) -> Parked | None:
        """What `owner` parked as `name`, or the longest of what `name` is the proof for; it counts as used now.

        None if it is gone, or was never there.
        """
        self.expire(now)
        meant, adopted = list[Key](), adopted_name(name)
        for key, (parked, _) in self._parked.items():
            is_own = key[0] == name and parked.owner == owner
            if (is_own or parked.adoption == adopted) and (parked.span, parked.ends) == (span, ends):
                meant.append(key)
        if not meant:
            return None
        key = max(meant, key=lambda key: self._parked[key][0].positions)
        parked, _ = self._parked.pop(key)
        self._parked[key] = parked, now
        if key[0] == parked.adoption:  # a use makes it no more than that
            self._age(lambda other, _: other == key, now)
        return parked

    def shrink(self, room: int, last: SessionId | None = None) -> None:
        """Drop the oldest until the rest has memory for at most `room` positions; what `last` names or proves goes last."""
        if (excess := self.num_positions - room) > 0:
            self._shed([key for _, _, key in sorted(self.going(last), key=lambda one: one[:2])], excess)

    def going(self, last: SessionId | None = None, owner: NodeId | None = None) -> list[tuple[bool, float, Key]]:
        """Those with memory, of one owner if it is given: the least of them goes first (what `last` names or proves is the
        largest, and then what was used of late)."""
        adopted = None if last is None else adopted_name(last)
        return [
            (last is not None and (key[0] in (last, adopted) or parked.adoption == adopted), used_at, key)
            for key, (parked, used_at) in self._parked.items()
            if parked.capacity and owner in (None, parked.owner)
        ]

    def _shed(self, keys: Sequence[Key], excess: int) -> None:
        """Give back memory for `excess` positions: the caches of `keys`, one after another."""
        for key in keys:
            if excess <= 0:
                break
            excess -= self.give_up(key)

    def give_up(self, key: Key) -> int:
        """Drop a cache, and with it all but the rows from which another origin draws the tokens again. Returns for how many
        positions there was memory."""
        parked, used_at = self._parked[key]
        if parked.capacity and parked.adoption is not None and parked.log.is_of_rows_sent:
            parked.is_kept = False
            bare = replace(
                parked, cache=None, capacity=0, positions=0, bounds=RowBounds(), ids=(), leaves=None, is_kept=True
            )
            self._parked[key] = bare, used_at
        elif parked.capacity:
            self._remove(key)
        return parked.capacity

    def expire(self, now: float) -> None:
        """Drop what nothing has used for PARKED_S."""
        self._drop(lambda _, used_at: used_at + PARKED_S <= now)

    def expires_at(self) -> float:
        """When the oldest is to be dropped."""
        return next((used_at + PARKED_S for _, used_at in self._parked.values()), math.inf)

    def forget(self, name: SessionId, owner: NodeId) -> None:
        """Drop what `owner` parked as `name`; another's is not touched."""
        self._drop(lambda key, _: key[0] == name and self._parked[key][0].owner == owner)

    def orphan(self, owner: NodeId, now: float) -> None:
        """`owner` is gone: what no other origin can adopt goes, the rest is kept for adoption alone."""
        self._drop(lambda key, _: self._parked[key][0].owner == owner and self._parked[key][0].adoption is None)
        self._age(lambda key, _: self._parked[key][0].owner == owner, now)

    def _age(self, is_meant: Callable[[Key, float], bool], now: float) -> None:
        """End these within ORPHANED_S, and before what may stay for longer."""
        latest = now - PARKED_S + ORPHANED_S
        aged = [
            (key, (parked, min(used_at, latest) if is_meant(key, used_at) else used_at))
            for key, (parked, used_at) in self._parked.items()
        ]
        self._parked = dict(sorted(aged, key=lambda one: one[1][1]))

    def clear(self) -> None:
        self._drop(lambda *_: True)

    def _drop(self, is_meant: Callable[[Key, float], bool]) -> None:
        for key in [key for key, (_, used_at) in self._parked.items() if is_meant(key, used_at)]:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        parked, _ = self._parked.pop(key)
        parked.is_kept = False
        self._logs.close(parked.log)
