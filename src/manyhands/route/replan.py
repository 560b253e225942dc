"""Routes repaired when costs change: D* Lite (dstar.py) over stages of nodes, and over spans that overlap. Pure."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from manyhands.core import NodeId, Span
from manyhands.errors import BadRequest, ShardUnavailable
from manyhands.route.chain import SPARE, Ints, RoutePart, Spans
from manyhands.route.dstar import DStarLite

Stages = Sequence[Sequence[NodeId]]
Legs = Mapping[tuple[NodeId, NodeId], float]
Place = tuple[int, NodeId]  # a node in a stage: the origin stands in the first and in the last


class StagePlan:
    """The cheapest way through stages of nodes, one of each, the first and the last being the origin (IN-R08).

    Going from u to v costs legs[u, v] plus nodes[v] (0 if not given), any unit; a leg that is not given cannot be gone.
    """

    def __init__(self, stages: Stages, legs: Legs, nodes: Mapping[NodeId, float]) -> None:
        if len(stages) < 2 or len(stages[0]) != 1 or len(stages[-1]) != 1:
            raise BadRequest("stages begin and end with one node, the origin")
        self._stages, self._legs, self._nodes = stages, dict(legs), dict(nodes)
        edges: dict[Place, dict[Place, float]] = {}
        for before, after in self._pairs():
            edges.setdefault(before, {})[after] = self._cost(before, after)
        self._search = DStarLite(edges, (0, stages[0][0]), (len(stages) - 1, stages[-1][0]))

    def path(self) -> tuple[NodeId, ...]:
        """The nodes from where the plan stands to the origin. Raises ShardUnavailable if there is no way."""
        path = self._search.path()
        if not path:
            raise ShardUnavailable("no way through the stages is left: serve one of their layers on another node")
        return tuple(node for _, node in path)

    def update(self, legs: Legs, nodes: Mapping[NodeId, float]) -> None:
        """New costs of some legs and nodes (inf: gone)."""
        self._legs |= legs
        self._nodes |= nodes
        self._search.change(
            (before, after, self._cost(before, after))
            for before, after in self._pairs()
            if (before[1], after[1]) in legs or after[1] in nodes
        )

    def passed(self, nodes: Sequence[NodeId]) -> None:
        """The stages that have been gone through, one node each: plan from the last of them on."""
        fit = zip(nodes, self._stages, strict=False)
        if not 1 <= len(nodes) <= len(self._stages) or any(node not in stage for node, stage in fit):
            raise BadRequest(f"nodes {list(nodes)} are not one of each stage from the first on")
        self._search.move((len(nodes) - 1, nodes[-1]))

    def _cost(self, before: Place, after: Place) -> float:
        return self._legs.get((before[1], after[1]), math.inf) + self._nodes.get(after[1], 0)

    def _pairs(self) -> Iterator[tuple[Place, Place]]:
        for stage in range(len(self._stages) - 1):
            for u in self._stages[stage]:
                for v in self._stages[stage + 1]:
                    yield (stage, u), (stage + 1, v)


START, GOAL = -1, -2


class SpanPlan:
    """The cheapest chain of spans for a run of layers, as chain.py finds it, kept up to date as figures change.

    Vertices, as numbers: span i is about to compute layer l (`_ready`), or has computed it (`_done`). Between the two lies
    the cost of the layer, from done to ready that of going on (0) or of a leg and a new hop.
    """

    def __init__(self, spans: Spans, run: Span) -> None:
        self._spans, self._run, self._num = spans, run, len(spans.start)
        self._held = [
            range(max(a, run.start), min(b, run.end))
            for a, b in zip(spans.start.tolist(), spans.end.tolist(), strict=True)
        ]
        edges: dict[int, dict[int, float]] = {}
        for u, v, cost in self._edges(spans, range(self._num), itertools.product(range(self._num), repeat=2)):
            edges.setdefault(u, {})[v] = cost
        self._search = DStarLite(edges, START, GOAL)

    @property
    def expanded(self) -> int:
        """Vertices looked at so far: the work done."""
        return self._search.expanded

    def path(self) -> list[RoutePart]:
        """As `chain.cheapest`; [] if some layer is held by none."""
        parts: list[RoutePart] = []
        for vertex in self._search.path()[1:-1]:
            step, is_done = divmod(vertex, 2)
            layer, at = divmod(step, self._num)
            if is_done:
                continue
            if parts and parts[-1].at == at:
                parts[-1] = RoutePart(at, Span(parts[-1].span.start, layer + 1))
            else:
                parts.append(RoutePart(at, Span(layer, layer + 1)))
        return parts

    def update(self, spans: Spans) -> None:
        """The same spans with other costs: only what differs is looked at again. Raises BadRequest for other spans."""
        old = self._spans
        if not (np.array_equal(old.start, spans.start) and np.array_equal(old.end, spans.end)):
            raise BadRequest("these are other spans: a new plan is needed")
        self._spans = spans
        begins = _hop_costs(old) != _hop_costs(spans)
        alone = (old.layer != spans.layer) | begins | (old.entry != spans.entry) | (old.closing != spans.closing)
        pairs = np.argwhere((old.legs != spans.legs) | begins)
        self._search.change(self._edges(spans, np.flatnonzero(alone).tolist(), pairs.tolist()))

    def _ready(self, layer: int, at: int) -> int:
        return 2 * (layer * self._num + at)

    def _done(self, layer: int, at: int) -> int:
        return self._ready(layer, at) + 1

    def _edges(
        self, spans: Spans, alone: Iterable[int], pairs: Iterable[Sequence[int]]
    ) -> Iterator[tuple[int, int, float]]:
        """The edges of each span `alone`, and those of a hop of one (a) to another (b) for each of `pairs`."""
        hop = _hop_costs(spans)
        for at in alone:
            held, layer_ns = self._held[at], int(spans.layer[at])
            if held and held[0] == self._run.start:
                yield START, self._ready(held[0], at), int(spans.entry[at] + hop[at])
            if held and held[-1] == self._run.end - 1:
                yield self._done(held[-1], at), GOAL, int(spans.closing[at])
            for layer in held:
                yield self._ready(layer, at), self._done(layer, at), layer_ns
        for a, b in pairs:
            cost = 0 if a == b else int(spans.legs[a, b] + hop[b])
            for layer in _meeting(self._held[a], self._held[b]):
                yield self._done(layer - 1, a), self._ready(layer, b), cost


def _meeting(a: range, b: range) -> range:
    """Layers that can be the first of b after a's last."""
    return range(max(a.start + 1, b.start), min(a.stop + 1, b.stop)) if a and b else range(0)


def _hop_costs(spans: Spans) -> Ints:
    return spans.fixed + SPARE * spans.is_spare
