"""Memory that sessions lease for their caches, bounded for all spans of a node together. Pure.

    CacheBudget, one for a node ◄─ SpanLeases, one for each span ◄─ take, give_back, park

Parked sessions live in what no lease covers: what a lease needs they give up, on whichever span, the least recently used first.
A place on some layers of a span leases positions of these alone: so the places of one session on a span, which share no layer,
need no more than one place on all of it.
"""

from collections.abc import Sequence
from itertools import accumulate
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
        _shed(self._spans, excess, last, owner)


def _shed(spans: "Sequence[SpanLeases]", excess: int, last: SessionId | None, owner: NodeId | None) -> None:
    """Take so many bytes from sessions that are parked on these spans, the least recently used first."""
    if excess <= 0:
        return
    going = [(*one, span) for span in spans for one in span.parking.going(last, owner)]
    for _, _, key, span in sorted(going, key=lambda one: one[:2]):
        if excess <= 0:
            break
        excess -= span.bytes_of(span.parking.give_up(key), key[1])


class SpanLeases:
    """The leases of `span`, whose layers cache so many `position_bytes` for a position each, and `state_bytes` for a session
    whatever its length. `tokens`, where it is asked for, are the positions that each layer may lease whatever the node has;
    `part`, the layers that a place is on (default: all). `room_bytes`: what the device that the span is on has for its caches,
    parked ones too, once it is loaded there; None: whatever the node has."""

    def __init__(
        self,
        budget: CacheBudget,
        parking: Parking,
        span: Span,
        position_bytes: Sequence[int],
        state_bytes: Sequence[int],
    ) -> None:
        self.parking, self._span, self._budget = parking, span, budget
        # Of the layers before each: sizes are asked for at every Open, once for each session that is parked.
        self._position_bytes, self._state_bytes = (
            [*accumulate(sizes, initial=0)] for sizes in (position_bytes, state_bytes)
        )
        self._leased: dict[Place, int] = {}  # positions of each place
        self._short: dict[Place, float] = {}  # which lacks some: until when it is heeded
        self._positions = [0] * (span.end - span.start)  # that are leased on each layer
        self.leased_bytes = 0
        self.room_bytes: int | None = None

    def tell_room(self, room_bytes: int | None) -> None:
        """The span was loaded."""
        self.room_bytes = room_bytes

    def __repr__(self) -> str:
        return f"<SpanLeases {self.leased_bytes} bytes of {len(self._leased)} places>"

    def _layers(self, part: Span | None) -> slice:
        span, start = part or self._span, self._span.start
        return slice(span.start - start, span.end - start)

    def _sizes(self, part: Span | None) -> tuple[int, int]:
        """Cache bytes of a position on `part`, and of a session there beside."""
        start, end = (layers := self._layers(part)).start, layers.stop
        positions, states = self._position_bytes, self._state_bytes
        return positions[end] - positions[start], states[end] - states[start]

    def bytes_of(self, positions: int, part: Span | None = None) -> int:
        """What a cache of so many positions, at least one, takes: whole blocks, and what each session takes."""
        position_bytes, state_bytes = self._sizes(part)
        return -(-positions // BLOCK) * max(1, BLOCK * position_bytes) + state_bytes

    def parked_bytes(self, owner: NodeId | None = None) -> int:
        """Cache bytes of parked sessions; of one owner's, if it is given."""
        return sum([self.bytes_of(size, span) for span, size in self.parking.sizes(owner) if size])

    def most(self, tokens: int, part: Span | None = None) -> int:
        """Positions that a lease may have on an idle node."""
        position_bytes, state_bytes = self._sizes(part)
        limit_bytes = min(self._budget.limit_bytes, self._room())
        blocks = max(0, limit_bytes - state_bytes) // max(1, BLOCK * position_bytes)
        return min(tokens, blocks * BLOCK)

    def _room(self) -> int:
        return self._budget.limit_bytes if self.room_bytes is None else self.room_bytes

    def _left(self, position_bytes: int, session_bytes: int) -> int:
        """Positions that a new lease may have by the bytes that the node has, and the device."""
        here = max(0, self._room() - self.leased_bytes - session_bytes) // max(1, BLOCK * position_bytes) * BLOCK
        return min(here, self._budget.free(position_bytes, session_bytes))

    def free(self, tokens: int, part: Span | None = None) -> int:
        """Positions that a new lease may have. Parked sessions may have their caches there."""
        return max(0, min(tokens - self._most_leased(part), self._left(*self._sizes(part))))

    def _most_leased(self, part: Span | None = None) -> int:
        return max(self._positions[self._layers(part)])

    def offered(self, tokens: int, now: float, part: Span | None = None) -> int:
        """Positions that a new session may have: as `free`, and none while one that runs here lacks some."""
        return 0 if any(until > now for until in self._short.values()) else self.free(tokens, part)

    def take(self, place: Place, positions: int, tokens: int, last: SessionId | None) -> None:
        """Lease `positions`, which are free, to `place`; parked sessions give up what that needs, `last` in the end."""
        self._leased[place] = positions
        self._count(place, 1)
        self._budget.join(self)
        self.parking.shrink(tokens - self._most_leased(), last)
        self._shrink(last)

    def _shrink(self, last: SessionId | None = None) -> None:
        if self.room_bytes is not None:
            _shed([self], self.leased_bytes + self.parked_bytes() - self.room_bytes, last, None)
        self._budget.shrink(last)

    def extend(self, place: Place, positions: int, tokens: int, now: float) -> int:
        """Let the lease of `place` have `positions`, or as many as there is room for, with what is left of its last block; how
        many it has now."""
        self._short.pop(place, None)
        leased = self._leased[place]
        free = -leased % BLOCK + self._left(self._sizes(place[1])[0], 0)
        if (more := min(positions - leased, tokens - self._most_leased(place[1]), free)) > 0:
            self._count(place, -1)
            self.take(place, leased + more, tokens, None)
        if self._leased[place] < positions:
            self._short[place] = now + SHORT_S
        return self._leased[place]

    def give_back(self, place: Place) -> None:
        """The place is gone."""
        self._short.pop(place, None)
        self._count(place, -1)
        del self._leased[place]

    def _count(self, place: Place, sign: int) -> None:
        positions, layers = self._leased[place], self._layers(place[1])
        self._positions[layers] = [leased + sign * positions for leased in self._positions[layers]]
        self.leased_bytes += sign * self.bytes_of(positions, place[1])

    def park(self, name: SessionId, parked: Parked, tokens: int, now: float) -> None:
        """Keep what a place without a lease has left, as Parking.park, and within what the node has."""
        self.parking.park(name, parked, tokens - self._most_leased(), self.most(tokens), now)
        self._budget.shrink_owner(parked.owner)
        self._shrink()
