"""Memory that sessions lease for their caches, bounded for all spans of a node together. Pure.

    CacheBudget, one for a node ◄─ SpanLeases, one for each span ◄─ take, give_back, park

Parked sessions live in what no lease covers: what a lease needs they give up, on whichever span, the least recently used first.
"""

from typing import Final

from manyhands.core import NodeId, SessionId, Span
from manyhands.engine.library import BLOCK
from manyhands.worker.parking import OWNER_SHARE, Parked, Parking

# After a lease could not grow as far as asked, for so long no new one takes what becomes free: its origin asks again every
# second (origin/growth.py).
SHORT_S: Final = 2.0

Place = tuple[SessionId, Span]


class CacheBudget:
    """What the caches on all spans of a node may take, in bytes.

    Leases beyond a limit that was lowered stay; there are no new ones until it holds them again.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._spans: list[SpanLeases] = []

    def __repr__(self) -> str:
        return f"<CacheBudget {self.leased_bytes} of {self.limit_bytes} bytes leased>"

    @property
    def leased_bytes(self) -> int:
        return sum(span.leased_bytes for span in self._spans)

    def free(self, bytes_per_token: int, session_bytes: int) -> int:
        """Positions that a new lease may have on a span, loaded or not, whose caches take so much for one, and for each session
        beside. (`session_bytes` 0: that a lease may have more.)"""
        block_bytes = max(1, BLOCK * bytes_per_token)
        return max(0, self.limit_bytes - self.leased_bytes - session_bytes) // block_bytes * BLOCK

    def limit(self, limit_bytes: int) -> None:
        """From now on so much."""
        self.limit_bytes = limit_bytes
        self.shrink()

    def join(self, span: "SpanLeases") -> None:
        """Count `span`, which has its first lease."""
        if span not in self._spans:
            self._spans.append(span)

    def leave(self, span: "SpanLeases") -> None:
        """The node lets go of `span`: what it had is free."""
        self._spans = [other for other in self._spans if other is not span]

    def shrink(self, last: SessionId | None = None) -> None:
        """Take from parked sessions what they have beyond the limit; from that which `last` names or proves in the end."""
        self._shed(self.leased_bytes + sum(span.parked_bytes() for span in self._spans) - self.limit_bytes, last)

    def shrink_owner(self, owner: NodeId) -> None:
        """Take from the parked sessions of one owner what they have beyond its share."""
        held = sum(span.parked_bytes(owner) for span in self._spans)
        self._shed(held - int(OWNER_SHARE * self.limit_bytes), owner=owner)

    def _shed(self, excess: int, last: SessionId | None = None, owner: NodeId | None = None) -> None:
        if excess <= 0:
            return
        going = [(*one, span) for span in self._spans for one in span.parking.going(last, owner)]
        for _, _, key, span in sorted(going, key=lambda one: one[:2]):
            if excess <= 0:
                break
            excess -= span.bytes_of(span.parking.give_up(key))


class SpanLeases:
    """The leases of one span, whose caches take `bytes_per_token` for a position, and `session_bytes` each whatever their
    length. `tokens`, where it is asked for, are the positions that this span may lease whatever the node has."""

    def __init__(self, budget: CacheBudget, parking: Parking, bytes_per_token: int, session_bytes: int = 0) -> None:
        self.parking = parking
        self._budget, self._bytes_per_token, self._session_bytes = budget, bytes_per_token, session_bytes
        self._block_bytes = max(1, BLOCK * bytes_per_token)
        self._leased: dict[Place, int] = {}  # positions of each place
        self._short: dict[Place, float] = {}  # which lacks some: until when it is heeded
        self._num_positions = self.leased_bytes = 0  # of them all

    def __repr__(self) -> str:
        return f"<SpanLeases {self.leased_bytes} bytes of {len(self._leased)} places>"

    def bytes_of(self, positions: int) -> int:
        """What a cache of so many positions, at least one, takes: whole blocks, and what each session takes."""
        return -(-positions // BLOCK) * self._block_bytes + self._session_bytes

    def parked_bytes(self, owner: NodeId | None = None) -> int:
        """Cache bytes of parked sessions; of one owner's, if it is given."""
        return sum([self.bytes_of(size) for size in self.parking.sizes(owner) if size])

    def most(self, tokens: int) -> int:
        """Positions that a lease may have on an idle node."""
        return min(tokens, max(0, self._budget.limit_bytes - self._session_bytes) // self._block_bytes * BLOCK)

    def free(self, tokens: int) -> int:
        """Positions that a new lease may have. Parked sessions may have their caches there."""
        left = self._budget.free(self._bytes_per_token, self._session_bytes)
        return max(0, min(tokens - self._num_positions, left))

    def offered(self, tokens: int, now: float) -> int:
        """Positions that a new session may have: as `free`, and none while one that runs here lacks some."""
        return 0 if any(until > now for until in self._short.values()) else self.free(tokens)

    def take(self, place: Place, positions: int, tokens: int, last: SessionId | None) -> None:
        """Lease `positions`, which are free, to `place`; parked sessions give up what that needs, `last` in the end."""
        self._leased[place] = positions
        self._count(positions, 1)
        self._budget.join(self)
        self.parking.shrink(self.free(tokens), last)
        self._budget.shrink(last)

    def extend(self, place: Place, positions: int, tokens: int, now: float) -> int:
        """Let the lease of `place` have `positions`, or as many as there is room for, with what is left of its last block; how
        many it has now."""
        self._short.pop(place, None)
        leased = self._leased[place]
        free = -leased % BLOCK + self._budget.free(self._bytes_per_token, 0)
        if (more := min(positions - leased, tokens - self._num_positions, free)) > 0:
            self._count(leased, -1)
            self.take(place, leased + more, tokens, None)
        if self._leased[place] < positions:
            self._short[place] = now + SHORT_S
        return self._leased[place]

    def give_back(self, place: Place) -> None:
        """The place is gone."""
        self._short.pop(place, None)
        self._count(self._leased.pop(place), -1)

    def _count(self, positions: int, sign: int) -> None:
        self._num_positions += sign * positions
        self.leased_bytes += sign * self.bytes_of(positions)

    def park(self, name: SessionId, parked: Parked, tokens: int, now: float) -> None:
        """Keep what a place without a lease has left, as Parking.park, and within what the node has."""
        self.parking.park(name, parked, self.free(tokens), self.most(tokens), now)
        self._budget.shrink_owner(parked.owner)
        self._budget.shrink()
