"""Who becomes a standby (standby.py), and when it is fed.

Every FEED_ROWS committed tokens: one step of that many rows costs about what one row costs.
"""

from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Literal, Protocol

from manyhands.core import NodeId, Span
from manyhands.errors import ManyhandsError
from manyhands.origin.route import Hop, Lease
from manyhands.origin.session import Session
from manyhands.origin.standby import Standby
from manyhands.route.search import Offer, Terms
from manyhands.worker.feeding import MAX_FEED_ROWS

FEED_ROWS = 16
Pick = Callable[[Sequence[Offer]], Offer]
# Committed positions after which a hop without a standby looks for one again.
LOOK_AGAIN_ROWS = 64


class RouteServices(Protocol):
    """What repairs and standbys need of the node."""

    async def offers(self, excluded: Collection[NodeId]) -> Sequence[Offer]:
        """Spans on nodes that can be reached now."""

    def terms(self) -> Terms:
        """What is known of the ways between nodes, and what the request asks of its route."""

    def learn(self, session: Session) -> None:
        """Note what its hops said they take, which is forgotten when the route changes."""

    def note_star(self) -> None:
        """Hops cannot reach each other: the route is a star from here on."""

    def note_fallback(self) -> None:
        """No other node can go on: the origin computes alone from here on."""

    async def look_around(self) -> bool:
        """Try to reach nodes that no link is open to: they may have come back. Takes at most a second or two. Returns whether
        there are any."""

    async def connect(self, index: int, offer: Offer, num_hops: int, lease: Lease) -> Hop:
        """Links to a new hop. Raises ShardUnavailable."""

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which does not raise, beside the request."""


class Followers:
    """Finds standbys for one session and says when to feed which. Nothing here waits; nothing can fail the request."""

    def __init__(self, session: Session, around: RouteServices) -> None:
        self._session, self._around = session, around
        self._looked: dict[tuple[Span, bool], int] = {}  # where the search for a standby of a span last began
        self._looking: set[Span] = set()

    def follow_all(self, committed: int, excluded: Collection[NodeId]) -> None:
        """Look for a standby for every hop that lacks one."""
        for hop in list(self._session.route.hops):
            self.recruit(hop.offer.info.span, committed, excluded)

    def recruit(
        self, span: Span, committed: int, excluded: Collection[NodeId], *, is_for_good: bool = False
    ) -> Literal["ready", "following", "none"]:
        """See to a standby for the hop of `span`, on a node that is no spare if `is_for_good`. "ready": it lags by less than
        two feeds; "none": none was found lately."""
        standby = self._session.standbys.by_span.get(span)
        if standby is not None:
            return "ready" if standby.is_open and committed - standby.computed < 2 * FEED_ROWS else "following"
        if self.looks_for(span):
            return "following"
        if committed - self._looked.get((span, is_for_good), -LOOK_AGAIN_ROWS) < LOOK_AGAIN_ROWS:
            return "none"
        self._looked[span, is_for_good] = committed
        self.look(span, excluded, is_for_good=is_for_good)
        return "following"

    def looks_for(self, span: Span) -> bool:
        """Whether a look for a standby for the hop of `span` is under way."""
        return span in self._looking

    def look(self, span: Span, excluded: Collection[NodeId], *, is_for_good: bool = False) -> None:
        """Look for a standby for the hop of `span`, which has none, now."""
        if not self.looks_for(span):
            self._looking.add(span)
            self._around.start(self.find(span, set(excluded), is_for_good=is_for_good))

    def due(self, committed: int) -> list[tuple[Span, Standby, int]]:
        """The standbys that have computed all they got and lag, with the position up to which to feed them now."""
        session = self._session
        return [
            (span, standby, min(committed, standby.leased, standby.fed + MAX_FEED_ROWS))
            for span, standby in session.standbys.by_span.items()
            if standby.hop.epoch == session.route.epoch
            and standby.computed == standby.fed <= min(committed, standby.leased) - FEED_ROWS
        ]

    async def find(
        self, span: Span, excluded: set[NodeId], *, is_for_good: bool = False, pick: Pick | None = None
    ) -> None:
        """Ask a node to stand by for the hop of `span`: the one that `pick` says, of those that can; by itself spares first,
        then most free cache. A node that was full comes after those that were so less often."""
        try:
            offer, route = await self._choose(span, excluded, is_for_good=is_for_good, pick=pick), self._session.route
            index = route.index_of(span)
            if offer is not None and index is not None:
                hop = await self._around.connect(index, offer, len(route.hops), route.lease)
                if self._is_wanted(span, offer) and not self._session.is_closed:
                    self._session.standbys.open(hop)
        except (ManyhandsError, TimeoutError):
            pass  # the hop stays without a standby until the next look
        finally:
            self._looking.discard(span)

    def _is_wanted(self, span: Span, offer: Offer) -> bool:
        """Whether `offer` may still be the standby of `span`: the route may have changed meanwhile."""
        route = self._session.route
        in_route = any(hop.offer.node == offer.node for hop in route.hops)
        return route.index_of(span) is not None and span not in self._session.standbys.by_span and not in_route

    async def _choose(self, span: Span, excluded: set[NodeId], *, is_for_good: bool, pick: Pick | None) -> Offer | None:
        """The whole of `span` on one node outside the route."""
        session, full = self._session, self._session.standbys.full
        model = session.route.hops[0].offer.info
        offers = await self._around.offers(excluded | session.standbys.refused | session.untrusted_nodes)
        able = [
            o.part(span)
            for o in offers
            if o.info.span.covers(span)
            and o.info.is_loaded
            and not (is_for_good and o.info.is_spare)
            and (o.info.model, o.info.precision) == (model.model, model.precision)
            and (o.info.has_ends or not session.route.needs_ends or not is_edge(o, span))
            and self._is_wanted(span, o)
        ]
        if pick is not None:
            return pick(able) if able else None
        return min(able, key=lambda o: (full[o.node], not o.info.is_spare, -o.info.free_tokens, o.node), default=None)


def is_edge(offer: Offer, span: Span) -> bool:
    """Whether `span` is the first or the last of a route, so that it may have to come with the ends."""
    return span.start == 0 or span.end == offer.info.num_layers
