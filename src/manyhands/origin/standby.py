"""Standbys: standbys that follow the hops of one session, so that a repair takes one short step instead of a whole replay.

A standby is a place on a node outside the route. The hop before it sends it committed rows out of its output log (the origin:
embeds them again for the first hop's; in a star it passes on the others' as well), which it computes when its device is idle.
Only committed positions are fed, so what it holds is never wrong. Promoted (repair_plan.py), it lacks only the rows since:
one step of its predecessor's log. Who becomes a standby, and when it is fed, is decided in standby_search.py.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from manyhands.core import NodeId, Span
from manyhands.errors import Busy, Detour, LinkClosed, StateGone
from manyhands.net.transport import Link, try_send
from manyhands.origin.repair_plan import Slot
from manyhands.origin.route import Hop, Route
from manyhands.wire.message import STANDBY, Close, Extend, Extended, Fault, Feed, Ids, Opened, Payload, Progress, Step


@dataclass(slots=True)
class Standby:
    """A standby for the hop with the same span. Positions [0, fed) were sent to it, all committed; it has computed some.

    In a star those of [passed, fed) have yet to come by here on their way to it, from the hop before. `leased`: positions of
    its lease. `asked`: the epoch of the last Open sent to it.
    """

    hop: Hop
    leased: int = 0
    asked: int = 0
    fed: int = 0
    computed: int = 0
    passed: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it has had a place in the session."""
        return self.hop.epoch > 0

    def send(self, step: Step) -> None:
        assert self.hop.data is not None
        try_send(self.hop.data, step)


class Standbys:
    """The standbys of one session, each under the span of the hop that it stands by for.

    `refused`: nodes that would not, or could not, go on being a standby. `full`: how often others had no room, or could not go
    back.
    """

    def __init__(self, route: Route) -> None:
        self.by_span: dict[Span, Standby] = {}
        self.refused: set[NodeId] = set()
        self.full: Counter[NodeId] = Counter()
        self._route = route

    def open(self, hop: Hop) -> None:
        """Ask `hop`, whose node is not in the route, to stand by for the hop of its span, which is."""
        self.by_span[hop.offer.info.span] = standby = Standby(hop)
        self._place(standby)

    def promote(self, hops: Collection[Hop]) -> None:
        """`hops` are to be the route. What is on their nodes are no standbys now: places beside the route's are freed when it
        stands, and before it opens where no hop takes one over, for they may have the room that it needs."""
        controls = {hop.offer.node: hop.control for hop in hops}
        joining = {s.hop.offer.node for s in self.by_span.values()} & controls.keys()
        warm = {(s.hop.offer.node, span) for span, s in self.by_span.items()}
        for node in joining - {hop.offer.node for hop in hops if (hop.offer.node, hop.offer.info.span) in warm}:
            try_send(controls[node], Close(self._route.session))
        self.by_span = {span: s for span, s in self.by_span.items() if s.hop.offer.node not in joining}

    def move(self) -> None:
        """The route has changed: standbys of hops that stayed get their place in the new epoch, others are let go.

        What was on its way to them is dropped there, so it is to be fed again.
        """
        for span, standby in list(self.by_span.items()):
            if self._route.index_of(span) is None:
                self._drop(span)
            elif standby.asked < self._route.epoch:  # else it was found while the route changed, and has its place
                standby.fed = standby.passed = standby.computed
                self._place(standby)

    def dismiss(self, span: Span) -> None:
        """Let the standby of the hop of `span` go."""
        self._drop(span)

    def let_go(self, spans: Collection[Span]) -> None:
        """As `dismiss`, of the hops of `spans` that have one."""
        for span in self.by_span.keys() & spans:
            self._drop(span)

    def found_full(self, span: Span) -> None:
        """The standby of the hop of `span` has no room, or cannot go back: it is let go, and may be asked again."""
        self.full[self.by_span[span].hop.offer.node] += 1
        self._drop(span)

    def has_room(self, span: Span) -> bool:
        """Whether the hop of `span` has a standby whose lease is as large as the hops' was asked to be."""
        standby, route = self.by_span.get(span), self._route
        is_placed = standby is not None and standby.hop.epoch == route.epoch
        return standby is not None and is_placed and standby.leased >= route.standby_capacity

    def extend(self, capacity: int) -> None:
        """Ask all of them for a lease of so many positions."""
        for standby in self.by_span.values():
            self._extend(standby, capacity)

    def close(self) -> None:
        """Tell all of them to free the session."""
        for standby in self.by_span.values():
            try_send(standby.hop.control, Close(self._route.session))

    def feed(self, span: Span, until: int) -> None:
        """Have the hop before `span` (not the first) send its standby the committed positions it lacks, up to `until`.

        Only after results came back in this epoch: whatever else that hop had to send of these positions came before.
        """
        route, standby, index = self._route, self.by_span[span], self._route.index_of(span)
        assert index
        order = Feed(route.session, route.epoch, index - 1, standby.hop.offer.addr, standby.fed, until)
        try_send(route.hops[index - 1].control, order)
        standby.passed, standby.fed = standby.fed, until

    def feed_first(self, standby: Standby, position: int, count: int, ids: Ids | None, payload: Payload | None) -> None:
        """Send the standby of the first hop one step of committed positions, which this origin alone knows."""
        route, until = self._route, position + count
        standby.send(Step(route.session, route.epoch, 0, position, count, until, 0, "hidden", ids, payload, b"", until))

    def pass_on(self, step: Step) -> bool:
        """In a star: whether `step` is for a standby (`feed`), and not for the route; it costs no credit.

        It is sent on if it is the next; else it is dropped, and the standby falls behind.
        """
        if self._route.lease.path != "star" or (standby := self._of(step.hop)) is None:
            return False
        end = step.position + step.count
        if not standby.passed < standby.fed >= end:
            return False
        if step.position == standby.passed:
            standby.passed = end
            standby.send(step)
        return True

    def is_from(self, hop: int, link: Link) -> bool:
        """Whether `link` leads to the node of the standby of hop `hop`."""
        standby = self._of(hop)
        return standby is not None and link.peer == standby.hop.offer.node

    def on_answer(self, message: Opened | Progress | Extended | Fault) -> None:
        """What the standby of hop `message.hop` says. It is worth no repair: one that is in trouble is let go."""
        standby = self._of(message.hop)
        if standby is None or message.epoch != self._route.epoch:
            return
        match message:
            case Opened() if standby.hop.epoch < message.epoch:  # once: what it has it would get again
                standby.hop.epoch, standby.hop.arithmetic = message.epoch, message.arithmetic
                standby.fed = standby.passed = standby.computed = min(standby.computed, message.cached)
                self._extend(standby, self._route.asked)  # which may be more than as its Open was sent
            case Extended():
                standby.leased = max(standby.leased, message.capacity)
                if standby.leased < self._route.asked:
                    self.found_full(standby.hop.offer.info.span)
            case Progress():
                standby.computed = max(standby.computed, min(message.computed, standby.fed))
            case Fault(code=LinkClosed.code | Detour.code):
                pass  # of a link that it needs once it is promoted; then its Open finds a way
            case Fault(code=Busy.code | StateGone.code):
                self.found_full(standby.hop.offer.info.span)
            case Fault():
                self.refused.add(node := standby.hop.offer.node)
                for span in [span for span, each in self.by_span.items() if each.hop.offer.node == node]:
                    self._drop(span)  # a host that fails in one place ends all that the session has there

    def on_lost(self, link: Link) -> None:
        """One of our links is gone: the standbys behind it are let go, which they hear of where another link stands."""
        for span in [span for span, standby in self.by_span.items() if link in standby.hop.links]:
            self._drop(span)

    def _of(self, hop: int) -> Standby | None:
        hops = self._route.hops
        return self.by_span.get(hops[hop].offer.info.span) if hop < len(hops) else None

    def _place(self, standby: Standby) -> None:
        hop, route = standby.hop, self._route
        if route.lease.path == "star" and hop.data is None:  # found for a ring: what is for it has no way from here
            return self._drop(hop.offer.info.span)
        standby.leased, standby.asked = max(standby.leased, route.standby_capacity), route.epoch
        index = route.index_of(hop.offer.info.span)
        assert index is not None
        slot = Slot(hop.offer, None, emit_from=STANDBY, resume_until=standby.computed)
        try_send(hop.control, route.open_message(index, slot, hop.control))

    def _extend(self, standby: Standby, capacity: int) -> None:
        if standby.is_open and capacity > standby.leased:
            try_send(standby.hop.control, Extend(self._route.session, self._route.epoch, capacity))

    def _drop(self, span: Span) -> None:
        gone = self.by_span.pop(span).hop
        if all(standby.hop.offer.node != gone.offer.node for standby in self.by_span.values()):
            try_send(gone.control, Close(self._route.session))
