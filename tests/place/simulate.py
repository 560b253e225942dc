"""A swarm of spans in virtual time: every node decides for itself each period from the records it sees.

A mover announces its new span at once, serves it after `load_periods`, and leaves the old one then (make before break).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from manyhands.config import BalanceConfig
from manyhands.core import NodeId, Span, SpanLoad
from manyhands.place.balance import Decision, LoadHistory, Move, decide, may_leave
from manyhands.place.strategy import Holding, coverage, throughputs

PERIOD_S = 60.0


def node_id(name: object) -> NodeId:
    return NodeId(sha256(str(name).encode()).hexdigest())


def hosts(span: str, count: int, first: int = 0, layer_s: float = 0.01, sessions: int = 0) -> list[Holding]:
    """`count` nodes that hold `span`."""
    load = SpanLoad(layer_s=layer_s, sessions=sessions)
    return [Holding(node_id(first + i), Span.parse(span), load) for i in range(count)]


@dataclass
class Simulation:
    """`moves`: those of each period. `weakest`: throughput of the weakest layer then, `cover`: its least ready holders."""

    holdings: list[Holding]
    num_layers: int
    rules: BalanceConfig = field(default_factory=BalanceConfig)
    load_periods: int = 2
    lag: int = 0  # periods by which views are old
    sessions: int = 0  # pile up where the swarm is slowest, as they do in a pipeline; 0: loads stay as given
    period: int = 0
    moves: list[list[Move]] = field(default_factory=list)
    weakest: list[float] = field(default_factory=list)
    cover: list[int] = field(default_factory=list)
    histories: dict[NodeId, LoadHistory] = field(default_factory=dict)
    arrivals: list[tuple[int, NodeId, Span]] = field(default_factory=list)
    views: list[list[Holding]] = field(default_factory=list)
    decide: Callable[..., Decision] = decide

    def __post_init__(self) -> None:
        self.holdings = list(self.holdings)

    def run(self, periods: int) -> "Simulation":
        for _ in range(periods):
            self._one()
        return self

    def lose(self, victims: Sequence[Holding]) -> None:
        gone = {holding.node for holding in victims}
        self.holdings = [holding for holding in self.holdings if holding.node not in gone]
        self.arrivals = [arrival for arrival in self.arrivals if arrival[1] not in gone]

    def _one(self) -> None:
        self._arrive()
        if self.sessions:
            self.holdings = self._loaded()
        self.views.append(list(self.holdings))
        view = self.views[max(0, len(self.views) - 1 - self.lag)]
        made: list[Move] = []
        moving = {node for _, node, _ in self.arrivals}  # a node knows its own moves, however old its view is
        for mine in [holding for holding in self.holdings if holding.node not in moving]:
            history = self.histories.get(mine.node, LoadHistory())
            now_s = self.period * PERIOD_S
            decision = self.decide(mine, view, self.num_layers, history, self.period, now_s, self.rules)
            self.histories[mine.node] = decision.history
            if decision.move is not None:
                made.append(decision.move)
                self.holdings.append(replace(mine, span=decision.move.target, is_ready=False))
                self.arrivals.append((self.period + self.load_periods, mine.node, decision.move.target))
        self.moves.append(made)
        ready = [holding for holding in self.holdings if holding.is_ready]
        self.weakest.append(min(throughputs(ready, self.num_layers)))
        self.cover.append(min(coverage(ready, self.num_layers)))
        self.period += 1

    def _arrive(self) -> None:
        for due, node, target in list(self.arrivals):
            mine, coming = [holding for holding in self.holdings if holding.node == node]
            if due == self.period:
                self.holdings[self.holdings.index(coming)] = replace(coming, is_ready=True)
            if due <= self.period and may_leave(mine, target, self.holdings):
                self.arrivals.remove((due, node, target))
                self.holdings.remove(mine)

    def _loaded(self) -> list[Holding]:
        """Each node's load, with all sessions waiting for the holders of the weakest layer."""
        strength = throughputs([h for h in self.holdings if h.is_ready], self.num_layers)
        layer = strength.index(min(strength))
        holders = sum(h.span.start <= layer < h.span.end for h in self.holdings) or 1

        def load(holding: Holding) -> SpanLoad:
            is_slow = holding.span.start <= layer < holding.span.end
            return replace(holding.load, sessions=self.sessions // holders if is_slow else 0)

        return [replace(holding, load=load(holding)) for holding in self.holdings]

    @property
    def num_moves(self) -> int:
        return sum(map(len, self.moves))

    @property
    def settled(self) -> int:
        """The period after which no node moved any more."""
        return max((period + 1 for period, made in enumerate(self.moves) if made), default=0)
