"""Shadows: standbys that follow the hops of one session, so that a repair takes one short step instead of a whole replay.

A shadow is a place on a node outside the route. The hop before it sends it committed rows out of its output log (the origin:
embeds them again for the first hop's; in a star it passes on the others' as well), which it computes when its device is idle.
Only committed positions are fed, so what it holds is never wrong. Promoted (repair_plan.py), it lacks only the rows since:
one step of its predecessor's log. Who becomes a shadow, and when it is fed, is decided in standby_search.py.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from manyhands.core import NodeId, Span
from manyhands.errors import Draining
from manyhands.net.transport import Link, try_send
from manyhands.origin.repair_plan import Slot
from manyhands.origin.route import Hop, Route
from manyhands.wire.message import SHADOW, Close, Fault, Feed, Opened, Payload, Progress, Step


@dataclass(slots=True)
class Shadow:
    """A standby for the hop with the same span. Positions [0, fed) were sent to it, all committed; it has computed some.

    In a star those of [passed, fed) have yet to come by here on their way to it, from the hop before.
    """

    hop: Hop
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


class Shadows:
    """The shadows of one session, each under the span of the hop that it stands by for.

    `refused`: nodes that would not, or could not, go on being a shadow.
    """

    def __init__(self, route: Route) -> None:
        self.by_span: dict[Span, Shadow] = {}
        self.refused: set[NodeId] = set()
        self._route, self._is_star = route, route.lease.path == "star"

    def open(self, hop: Hop) -> None:
        """Ask `hop`, whose node is not in the route, to stand by for the hop of its span, which is."""
        self.by_span[hop.offer.info.span] = Shadow(hop)
        self._place(hop)

    def promote(self, nodes: Collection[NodeId]) -> None:
        """Those on `nodes` are no shadows any more, but in the route; places beside the route's are closed with the session."""
        self.by_span = {span: s for span, s in self.by_span.items() if s.hop.offer.node not in nodes}

    def move(self) -> None:
        """The route has changed: shadows of hops that stayed get their place in the new epoch, others are let go.

        What was on its way to them is dropped there, so it is to be fed again.
        """
        for span, shadow in list(self.by_span.items()):
            if self._route.index_of(span) is None:
                self._drop(span)
            else:
                shadow.fed = shadow.passed = shadow.computed
                self._place(shadow.hop)

    def close(self) -> None:
        """Tell all of them to free the session."""
        for shadow in self.by_span.values():
            try_send(shadow.hop.control, Close(self._route.session))

    def feed(self, span: Span, until: int) -> None:
        """Have the hop before `span` (not the first) send its shadow the committed positions it lacks, up to `until`.

        Only after results came back in this epoch: whatever else that hop had to send of these positions came before.
        """
        route, shadow, index = self._route, self.by_span[span], self._route.index_of(span)
        assert index
        order = Feed(route.session, route.epoch, index - 1, shadow.hop.offer.addr, shadow.fed, until)
        try_send(route.hops[index - 1].control, order)
        shadow.passed, shadow.fed = shadow.fed, until

    def feed_first(self, shadow: Shadow, position: int, ids: Sequence[int], payload: Payload | None) -> None:
        """Send the shadow of the first hop one step of committed positions, which this origin alone knows."""
        route, count, carried = self._route, len(ids), None if payload is not None else tuple(ids)
        shadow.send(
            Step(route.session, route.epoch, 0, position, count, position + count, 0, "hidden", carried, payload)
        )

    def pass_on(self, step: Step) -> bool:
        """In a star: whether `step` is for a shadow (`feed`), and so no affair of the route's; it costs no credit.

        It is sent on if it is the next; else it is dropped, and the shadow falls behind.
        """
        if not self._is_star or (shadow := self._of(step.hop)) is None:
            return False
        end = step.position + step.count
        if not shadow.passed < shadow.fed >= end:
            return False
        if step.position == shadow.passed:
            shadow.passed = end
            shadow.send(step)
        return True

    def is_from(self, hop: int, link: Link) -> bool:
        """Whether `link` leads to the node of the shadow of hop `hop`."""
        shadow = self._of(hop)
        return shadow is not None and link.peer == shadow.hop.offer.node

    def on_answer(self, message: Opened | Progress | Fault) -> None:
        """What the shadow of hop `message.hop` says. It is worth no repair: one that is in trouble is let go."""
        shadow = self._of(message.hop)
        if shadow is None or message.epoch != self._route.epoch:
            return
        match message:
            case Opened():
                shadow.hop.epoch, shadow.hop.arithmetic = message.epoch, message.arithmetic
            case Progress():
                shadow.computed = max(shadow.computed, min(message.computed, shadow.fed))
            case Fault(blame=None) | Fault(code=Draining.code):
                self.refused.add(shadow.hop.offer.node)
                self._drop(shadow.hop.offer.info.span)

    def on_lost(self, link: Link) -> None:
        """One of our links is gone: so are the shadows behind it."""
        self.by_span = {span: shadow for span, shadow in self.by_span.items() if link not in shadow.hop.links}

    def _of(self, hop: int) -> Shadow | None:
        hops = self._route.hops
        return self.by_span.get(hops[hop].offer.info.span) if hop < len(hops) else None

    def _place(self, hop: Hop) -> None:
        index = self._route.index_of(hop.offer.info.span)
        assert index is not None
        try_send(hop.control, self._route.open_message(index, Slot(hop.offer, None, emit_from=SHADOW), hop.control))

    def _drop(self, span: Span) -> None:
        gone = self.by_span.pop(span).hop
        if all(shadow.hop.offer.node != gone.offer.node for shadow in self.by_span.values()):
            try_send(gone.control, Close(self._route.session))
