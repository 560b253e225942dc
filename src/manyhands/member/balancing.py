"""What a member does by itself while it serves: fills gaps and gives them back, and moves where a move helps the swarm."""

import asyncio
from typing import TYPE_CHECKING, NoReturn

from manyhands.member.gaps import LayerGaps
from manyhands.member.taken import TakenSpans
from manyhands.member.view import holdings_of, missing_spans
from manyhands.place.balance import LoadHistory, Move, decide
from manyhands.worker.serve import SpanHost

if TYPE_CHECKING:
    from manyhands.core import Span
    from manyhands.member.hosting import Hosting

WATCH_S = 0.5


class Balancer:
    """Moves the span of a Hosting where it is needed more. Nothing happens before `keep` runs."""

    def __init__(self, hosting: "Hosting") -> None:
        self._hosting = hosting
        self._gaps = LayerGaps()
        self._taken = TakenSpans(hosting)
        self._history = LoadHistory()
        self._period_seen = self._period()

    @property
    def moved_at_s(self) -> float:
        """When the member last moved, or was told to, by its clock."""
        return self._history.moved_at_s

    def note_move(self) -> None:
        """It moves now: the balance leaves it there for its cool-down."""
        self._history = LoadHistory(0, self._hosting.member.clock())

    def is_taken(self, host: SpanHost) -> bool:
        """Whether `host` serves layers only because no other node did."""
        return self._taken.holds(host)

    async def keep(self) -> NoReturn:
        """Keep looking, until it is cancelled. A failure is reported, and tried again later (backoff.py)."""
        member = self._hosting.member
        while True:
            await asyncio.sleep(WATCH_S)
            if member.node.worker.is_off or self._hosting.is_moving:
                continue
            try:
                self._taken.review()
                await self._balance()
            except Exception as error:  # what the machine refuses too: the node serves on
                self._hosting.note_failure(error)

    async def _balance(self) -> None:
        """Load again what a failed move dropped, fill a gap, or move, if it is time. Raises what loading does."""
        hosting, config, now = self._hosting, self._hosting.member.config, asyncio.get_running_loop().time()
        gap = self._lasting_gap(now)
        if hosting.is_lost or not hosting.backoff.is_over(now):
            return
        if hosting.dropped:
            await hosting.restore()
            return
        if config.span is not None or config.is_spare:
            return
        if gap is not None and (host := await hosting.fill(gap)) is not None:
            self._taken.add(host)
        if (period := self._period()) != self._period_seen:
            self._period_seen = period
            if (move := self._decide(period)) is not None:
                await hosting.move(move[0].target, move[1])

    def _period(self) -> int:
        """The number of the present period, the same on all nodes with right clocks; a wrong one costs this node turns."""
        member = self._hosting.member
        return int(member.unix_clock() / member.config.balance.period_s)

    def _decide(self, period: int) -> tuple[Move, str] | None:
        hosting, member = self._hosting, self._hosting.member
        holdings = hosting.linked_holdings()
        mine = [h for h in holdings if h.node == member.id]
        if len(mine) != 1:
            return None
        num_layers, rules = hosting.weights.shape.num_layers, member.config.balance
        decision = decide(mine[0], holdings, num_layers, self._history, period, member.clock(), rules)
        self._history = decision.history
        return None if decision.move is None else (decision.move, decision.why)

    def _lasting_gap(self, now: float) -> "Span | None":
        """Layers that no node has served for some seconds, and no node is loading."""
        kind, records = self._hosting.kind, self._hosting.records()
        claimed = [h.span for h in holdings_of(kind, records) if not h.is_ready]
        gaps = missing_spans(kind, records, with_spares=False)
        return self._gaps.first_lasting(gaps, claimed, now, self._hosting.member.config.gap_s)
