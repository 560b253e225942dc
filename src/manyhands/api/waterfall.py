"""Where a token's time goes: queue and compute as the hops say, wire and wait as the origin measures. Pure.

token_s = the turn (window sent ─► its row is back) + wait (drawing, and a consumer that pulls late)
turn    = the hops' queue + the hops' compute + wire (links, and waking the processes at their ends)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from manyhands.core import NodeId
from manyhands.route.search import Offer
from manyhands.wire.timings import HopTiming

Millis = dict[str, float]


class TokenTime(NamedTuple):
    """One token's time. `hops` are those of the route in their order; none for a token that came with the one before it."""

    hops: tuple[HopTiming, ...] = ()
    turn_s: float = 0.0
    token_s: float = 0.0

    def parts_ms(self) -> "Parts":
        """What hops say counts only as far as the turn was long."""
        queue_us = compute_us = 0
        for hop in self.hops:
            queue_us += hop.queue_us
            compute_us += hop.compute_us
        turn_ms = 1e3 * self.turn_s
        queue_ms = min(queue_us / 1e3, turn_ms)
        compute_ms = min(compute_us / 1e3, turn_ms - queue_ms)
        return Parts(queue_ms, compute_ms, turn_ms - queue_ms - compute_ms, max(0.0, 1e3 * self.token_s - turn_ms))


NO_TURN: Final = TokenTime()


class Parts(NamedTuple):
    """Where the time of a turn went."""

    queue_ms: float = 0.0
    compute_ms: float = 0.0
    wire_ms: float = 0.0
    wait_ms: float = 0.0


@dataclass(slots=True)
class _HopSum:
    """The turns of one hop."""

    name: str
    turns: int = 0
    queue_us: int = 0
    compute_us: int = 0


@dataclass(slots=True)
class Waterfall:
    """The turns of an answer, added up; the first token's, which has the prompt in it, is left out."""

    last: TokenTime = NO_TURN
    num_turns: int = 0
    _queue_ms: float = 0.0
    _compute_ms: float = 0.0
    _wire_ms: float = 0.0
    _wait_ms: float = 0.0
    _hops: dict[NodeId, _HopSum] = field(default_factory=dict)

    def note(self, hops: Sequence[Offer], turn: TokenTime, *, is_first: bool) -> None:
        """A token came."""
        self.last = turn
        if is_first or not turn.hops:
            return
        self.num_turns += 1
        queue_ms, compute_ms, wire_ms, wait_ms = turn.parts_ms()
        self._queue_ms += queue_ms
        self._compute_ms += compute_ms
        self._wire_ms += wire_ms
        self._wait_ms += wait_ms
        for hop, said in zip(hops, turn.hops, strict=False):
            total = self._hops.get(hop.node) or self._hops.setdefault(hop.node, _HopSum(hop.name))
            total.turns += 1
            total.queue_us += said.queue_us
            total.compute_us += said.compute_us

    def mean(self) -> Millis | None:
        """Of one turn, in ms; None if there was none yet."""
        if not self.num_turns:
            return None
        totals = Parts(self._queue_ms, self._compute_ms, self._wire_ms, self._wait_ms)
        return {name: round(total / self.num_turns, 3) for name, total in totals._asdict().items()}

    def hop_ms(self, node: NodeId) -> float | None:
        """What a turn took at a node, its queue included; None if there was none yet."""
        total = self._hops.get(node)
        return None if total is None else round((total.queue_us + total.compute_us) / total.turns / 1e3, 3)

    def hops(self) -> list[dict[str, str | float]]:
        """The same of every hop there was, by its own turns."""
        return [
            {
                "name": total.name,
                "node": node,
                "queue_ms": round(total.queue_us / total.turns / 1e3, 3),
                "compute_ms": round(total.compute_us / total.turns / 1e3, 3),
            }
            for node, total in self._hops.items()
        ]
