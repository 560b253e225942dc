"""manyhands.route.replan and dstar: a repaired plan is what a search from scratch would give."""

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core import NodeId, Span
from manyhands.errors import BadRequest, ShardUnavailable
from manyhands.route.chain import Spans, cheapest
from manyhands.route.dstar import DStarLite
from manyhands.route.offer import Offer, Terms
from manyhands.route.replan import SpanPlan, StagePlan
from manyhands.route.space import Space
from tests.route.test_policies import LAYERS, MS, offer, swarms

N = [NodeId(str(i)) for i in range(6)]


def test_in_r08_d_star_lite() -> None:
    """IN-R08: layers [[0],[1,2,3],[4,5],[0]] give 0-2-4-0; after updates, with [0,2] passed, 2-5-0."""
    stages = [[N[0]], [N[1], N[2], N[3]], [N[4], N[5]], [N[0]]]
    legs = {
        (N[0], N[1]): 4.0, (N[0], N[2]): 2.0, (N[0], N[3]): 5.0,
        (N[1], N[4]): 3.0, (N[2], N[4]): 2.0, (N[3], N[4]): 1.0,
        (N[1], N[5]): 3.0, (N[2], N[5]): 3.0, (N[3], N[5]): 1.0,
        (N[4], N[0]): 1.0, (N[5], N[0]): 1.0,
    }  # fmt: skip
    plan = StagePlan(stages, legs, dict.fromkeys(N[1:], 1.0))
    assert plan.path() == (N[0], N[2], N[4], N[0])
    plan.passed([N[0], N[2]])
    assert plan.path() == (N[2], N[4], N[0])
    plan.update({(N[2], N[5]): 2.5}, {N[4]: 4.0})
    assert plan.path() == (N[2], N[5], N[0])
    plan.update({}, {N[5]: math.inf})
    assert plan.path() == (N[2], N[4], N[0])
    plan.update({}, {N[4]: math.inf})
    with pytest.raises(ShardUnavailable, match="no way"):
        plan.path()


def test_stages_must_begin_and_end_with_the_origin() -> None:
    with pytest.raises(BadRequest, match="origin"):
        StagePlan([[N[0]], [N[1], N[2]]], {}, {})
    plan = StagePlan([[N[0]], [N[1]], [N[0]]], {}, {})
    for nodes in ([], [N[1]], [N[0], N[2]], [N[0], N[1], N[0], N[1]]):
        with pytest.raises(BadRequest, match="not one of each stage"):
            plan.passed(nodes)


def dijkstra(edges: Mapping[int, Mapping[int, float]], start: int, goal: int) -> float:
    """From scratch."""
    heap, settled = [(0.0, start)], set()
    while heap:
        cost, u = heapq.heappop(heap)
        if u == goal:
            return cost
        if u not in settled:
            settled.add(u)
            for v, step in edges.get(u, {}).items():
                if step < math.inf:
                    heapq.heappush(heap, (cost + step, v))
    return math.inf


SIZE = 8
COST = st.one_of(st.integers(0, 9).map(float), st.just(math.inf))
# Only edges that lead on may be free: a loop must cost something.
EDGE = st.tuples(st.integers(0, SIZE - 1), st.integers(0, SIZE - 1), COST).filter(lambda e: e[2] > 0 or e[0] < e[1])


@settings(max_examples=200, deadline=None)
@given(st.lists(EDGE, max_size=40), st.lists(st.tuples(st.lists(EDGE, max_size=8), st.booleans()), max_size=6))
def test_a_repaired_path_costs_what_one_from_scratch_does(
    built: list[tuple[int, int, float]], rounds: list[tuple[list[tuple[int, int, float]], bool]]
) -> None:
    """Any graph, loops and dead ends too; costs rise, fall, vanish and appear; the start moves along the path."""
    edges: dict[int, dict[int, float]] = {}
    for u, v, cost in built:
        edges.setdefault(u, {})[v] = cost
    start, goal = 0, SIZE - 1
    search = DStarLite(edges, start, goal)
    for changes, moves in [([], False), *rounds]:
        search.change(changes)
        for u, v, cost in changes:
            edges.setdefault(u, {})[v] = cost
        path = search.path()
        costs = [edges[a][b] for a, b in itertools.pairwise(path)]
        assert (sum(costs) if path else math.inf) == dijkstra(edges, start, goal)
        assert not path or (path[0], path[-1]) == (start, goal)
        if moves and len(path) > 1:
            start = path[1]
            search.move(start)


@pytest.mark.parametrize("cost", [-1.0, math.nan])
def test_costs_that_cannot_be_are_refused(cost: float) -> None:
    with pytest.raises(BadRequest, match="0 or more"):
        DStarLite({0: {1: cost}}, 0, 1)
    with pytest.raises(BadRequest, match="0 or more"):
        DStarLite({0: {1: 1.0}}, 0, 1).change([(0, 1, cost)])


FIELDS = st.sampled_from(["layer", "fixed", "entry", "closing", "legs", "is_spare"])


def changed(spans: Spans, field: str, at: int, other: int, cost: int) -> Spans:
    """With one figure replaced."""
    values = getattr(spans, field).copy()
    values[(at, other) if field == "legs" else at] = cost % 2 if field == "is_spare" else cost
    return replace(spans, **{field: values})


@settings(max_examples=60, deadline=None)
@given(swarms(), st.lists(st.tuples(FIELDS, st.integers(0, 4), st.integers(0, 4), st.integers(0, 10**8)), max_size=8))
def test_a_span_plan_costs_what_the_cheapest_chain_does(
    swarm: tuple[list[Offer], Terms],
    changes: list[tuple[str, int, int, int]],
) -> None:
    """After every change of a figure."""
    offers, terms = swarm
    run = Span(0, LAYERS)
    spans = Space.of(offers, terms).spans
    plan = SpanPlan(spans, run)
    for field, at, other, cost in [("fixed", 0, 0, 5), *changes]:
        spans = changed(spans, field, at % len(offers), other % len(offers), cost)
        plan.update(spans)
        best = cheapest(spans, run)
        path = plan.path()
        assert bool(path) == bool(best)
        if best:
            assert spans.cost(path) == spans.cost(best)


def test_an_update_looks_at_little() -> None:
    """What D* Lite is for: a change far from the best route repairs a few vertices, not all."""
    offers = [offer(f"{i}.{j}", 4 * i, 4 * i + 4, (1 + j) * MS) for i in range(4) for j in range(5)]
    spans = Space.of(offers, Terms()).spans
    plan = SpanPlan(spans, Span(0, 16))
    plan.path()
    first = plan.expanded
    slowest = int(np.argmax(spans.layer))
    plan.update(changed(spans, "layer", slowest, 0, int(spans.layer[slowest]) + 1))
    plan.path()
    assert plan.expanded - first < first / 10


def test_other_spans_need_another_plan() -> None:
    plan = SpanPlan(Space.of([offer("a", 0, 5)], Terms()).spans, Span(0, 5))
    with pytest.raises(BadRequest, match="other spans"):
        plan.update(Space.of([offer("a", 0, 4)], Terms()).spans)


def test_an_outdated_equal_does_not_mislead() -> None:
    """Two ways of 5; the first rises to 9. Its old 5 equals the start's distance, and must not be followed."""
    search = DStarLite({0: {1: 0, 2: 0}, 1: {3: 5}, 2: {3: 5}}, 0, 3)
    assert search.path() == [0, 1, 3]
    search.change([(1, 3, 9)])
    assert search.path() == [0, 2, 3]


@pytest.mark.parametrize("field", ["layer", "fixed", "entry", "closing", "legs", "is_spare"])
def test_every_figure_that_changes_is_noticed(field: str) -> None:
    """Two replicas of each half: whatever makes one of the best two worse, the plan goes round it."""
    spans = Space.of([offer(n, s, s + 4) for n, s in [("a", 0), ("b", 0), ("c", 4), ("d", 4)]], Terms()).spans
    plan = SpanPlan(spans, Span(0, 8))
    first, last = (part.at for part in plan.path())
    at = last if field == "closing" else first
    plan.update(changed(spans, field, at, last, 10**9 + 1))
    assert (first, last) != tuple(part.at for part in plan.path())
