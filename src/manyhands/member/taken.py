"""Layers that a member serves beside its own because no other node did: given back when others serve them again."""

import asyncio
import math
from typing import TYPE_CHECKING, Final

from manyhands.core import Span
from manyhands.member.room import rebound
from manyhands.place.balance import may_leave
from manyhands.place.strategy import Holding
from manyhands.worker.serve import SpanHost

if TYPE_CHECKING:
    from manyhands.member.hosting import Hosting

# For so long others must have served the layers without a break: a node that comes and goes has them loaded here only once.
HELD_S: Final = 30.0


class TakenSpans:
    """Spans that filled a gap (`add`), and those that were loaded on demand (--can-load).

    One goes when others, which links are open to, have served all its layers for HELD_S: it takes no new session, its origins
    move the running ones to the others, and when the last has gone or ended it is dropped from memory. If the others vanish
    before, it stays.
    """

    def __init__(self, hosting: "Hosting") -> None:
        self._hosting = hosting
        self._filling: list[SpanHost] = []
        self._held_since: dict[SpanHost, float] = {}  # by the loop's clock
        self._given_back: set[SpanHost] = set()  # drained by this, not by a move or a node that leaves

    def add(self, host: SpanHost) -> None:
        """`host` fills a gap."""
        self._filling.append(host)

    def holds(self, host: SpanHost) -> bool:
        """Whether `host` is one of these."""
        return host in self._filling or host in self._hosting.member.node.worker.loaded_on_demand()

    def review(self) -> None:
        """Call it now and then, while the member neither moves nor leaves."""
        worker, now = self._hosting.member.node.worker, asyncio.get_running_loop().time()
        self._filling = [host for host in self._filling if host in worker.hosts]
        taken = [*self._filling, *worker.loaded_on_demand()]
        self._held_since = {host: since for host, since in self._held_since.items() if host in taken}
        self._given_back.intersection_update(taken)
        if taken:
            holdings = self._hosting.linked_holdings()
            for host in taken:
                self._review(host, holdings, now)

    def _review(self, host: SpanHost, holdings: list[Holding], now: float) -> None:
        hosting, span = self._hosting, host.info.span
        if not may_leave(Holding(hosting.member.id, span), None, holdings):
            self._held_since.pop(host, None)
            if host in self._given_back:
                self._given_back.remove(host)
                host.resume()
                self._say(f"serving layers {span} again: no other node does")
        elif host in self._given_back:
            if host.is_empty:
                hosting.member.node.worker.drop(host)
                rebound(hosting)
                self._say(f"layers {span} are given back and out of memory")
        elif now - self._held_since.setdefault(host, now) >= HELD_S:
            self._given_back.add(host)
            host.drain(math.inf)
            self._say(f"giving layers {span} back: {self._others(span, holdings)} serves them again")

    def _others(self, span: Span, holdings: list[Holding]) -> str:
        nodes = {h.node for h in holdings if h.node != self._hosting.member.id and h.is_ready and h.span.overlaps(span)}
        return ", ".join(sorted({record.name for record in self._hosting.records() if record.node in nodes}))

    def _say(self, line: str) -> None:
        self._hosting.say(line)
        self._hosting.member.directory.announce()
