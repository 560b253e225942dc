"""Where a token's time goes: queue and compute as the hops say, wire and wait as the origin measures. Pure.

token_s = the turn (window sent ─► its row is back) + wait (drawing, and a consumer that pulls late)
turn    = the hops' queue + the hops' compute + wire (links, and waking the processes at their ends)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from manyhands.core import NodeId
from manyhands.route.search import Offer
from manyhands.wire.message import HopTiming

Millis = dict[str, float]


@dataclass(frozen=True, slots=True)
class Turn:
    """One token's time. `hops` are those of the route in their order; none for a token that came with the one before it."""

    hops: tuple[HopTiming, ...] = ()
    turn_s: float = 0.0
    token_s: float = 0.0

    def parts_ms(self) -> Millis:
        """Queue, compute, wire and wait. What hops say is believed only as far as the turn was long."""
        turn_ms = 1e3 * self.turn_s
        queue_ms = min(sum(hop.queue_us for hop in self.hops) / 1e3, turn_ms)
        compute_ms = min(sum(hop.compute_us for hop in self.hops) / 1e3, turn_ms - queue_ms)
        wait_ms = max(0.0, 1e3 * self.token_s - turn_ms)
        return {
            "queue_ms": queue_ms,
            "compute_ms": compute_ms,
            "wire_ms": turn_ms - queue_ms - compute_ms,
            "wait_ms": wait_ms,
        }


@dataclass(slots=True)
class Waterfall:
    """The turns of an answer, added up; the first token's, which has the prompt in it, is left out."""

    last: Turn = Turn()
    num_turns: int = 0
    _parts: Millis = field(default_factory=dict)
    _hops: dict[NodeId, tuple[str, int, int, int]] = field(default_factory=dict)  # name, turns, queue_us, compute_us

    def note(self, hops: Sequence[Offer], turn: Turn, *, is_first: bool) -> None:
        """A token came."""
        self.last = turn
        if is_first or not turn.hops:
            return
        self.num_turns += 1
        for name, ms in turn.parts_ms().items():
            self._parts[name] = self._parts.get(name, 0.0) + ms
        for hop, said in zip(hops, turn.hops, strict=False):
            _, turns, queue_us, compute_us = self._hops.get(hop.node, (hop.name, 0, 0, 0))
            self._hops[hop.node] = (hop.name, turns + 1, queue_us + said.queue_us, compute_us + said.compute_us)

    def mean(self) -> Millis | None:
        """Of one turn, in ms; None if there was none yet."""
        if not self.num_turns:
            return None
        return {name: round(total / self.num_turns, 3) for name, total in self._parts.items()}

    def hops(self) -> list[dict[str, str | float]]:
        """The same of every hop there was, by its own turns."""
        return [
            {
                "name": name,
                "node": node,
                "queue_ms": round(queue / turns / 1e3, 3),
                "compute_ms": round(compute / turns / 1e3, 3),
            }
            for node, (name, turns, queue, compute) in self._hops.items()
        ]
