"""manyhands.route.learn: what experience says, how it fades, and that it is forgotten."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import NodeId, Span
from manyhands.route.learn import BELIEVED, FORGET_S, HALF_LIFE_S, WEIGHT, Learned
from manyhands.route.offer import Terms, pair
from manyhands.route.search import find_route
from tests.route.test_policies import MS, offer, shown

A, B = NodeId("a"), NodeId("b")
SPAN = Span(0, 8)


def test_the_first_figure_counts_whole_the_next_ones_by_weight() -> None:
    learned = Learned()
    learned.observe(A, SPAN, 1.0, now=0)
    assert learned.cost(A, SPAN, None, now=0) == 1.0
    learned.observe(A, SPAN, 2.0, now=0)
    assert learned.cost(A, SPAN, None, now=0) == pytest.approx(1 + WEIGHT)


def test_a_figure_fades_to_the_advertised_one_and_is_aged_out() -> None:
    learned = Learned()
    learned.observe(A, SPAN, 9.0, now=100)
    assert learned.cost(A, SPAN, 1.0, now=100) == 9.0
    assert learned.cost(A, SPAN, 1.0, now=100 + HALF_LIFE_S) == pytest.approx(5.0)
    assert learned.cost(A, SPAN, 1.0, now=100 + FORGET_S) == pytest.approx(1.0, abs=0.01)
    assert learned.cost(A, SPAN, None, now=100 + FORGET_S) == 9.0  # better than nothing, until it is forgotten
    assert learned.cost(A, SPAN, None, now=101 + FORGET_S) is None


def test_after_a_pause_a_new_figure_counts_for_more() -> None:
    learned = Learned()
    learned.observe(A, SPAN, 0.1, now=0)
    learned.observe(A, SPAN, 1.1, now=HALF_LIFE_S)
    assert learned.cost(A, SPAN, None, now=HALF_LIFE_S) == pytest.approx(0.1 + 1 - (1 - WEIGHT) / 2)


def test_a_part_tells_of_the_whole_span_but_not_of_another() -> None:
    """A hop may serve any part of what its node holds; the latest part counts."""
    learned = Learned()
    learned.observe(A, Span(0, 4), 1.0, now=0)
    learned.observe(A, Span(2, 8), 2.0, now=1)
    assert learned.cost(A, SPAN, None, now=1) == 2.0
    assert learned.cost(A, Span(8, 12), 7.0, now=1) == 7.0
    assert learned.cost(B, SPAN, None, now=1) is None


def test_round_trips_are_the_same_from_both_ends_and_fade_alike() -> None:
    learned = Learned()
    learned.observe_rtt(B, A, 0.04, now=0)
    assert learned.rtts(0) == {pair(A, B): 0.04}
    told = {pair(A, B): 0.02, pair(A, NodeId("c")): 0.5}
    assert learned.rtts(HALF_LIFE_S, told) == pytest.approx({pair(A, B): 0.03, pair(A, NodeId("c")): 0.5})
    assert learned.rtts(FORGET_S + 1, told) == told


def test_forgetting_frees_what_is_old_and_keeps_the_rest() -> None:
    learned = Learned()
    learned.observe(A, SPAN, 1.0, now=0)
    learned.observe_rtt(A, B, 1.0, now=0)
    learned.observe(B, SPAN, 1.0, now=FORGET_S)
    learned.forget(now=FORGET_S)
    assert len(learned) == 3
    learned.forget(now=FORGET_S + 1)
    assert len(learned) == 1
    assert learned.cost(B, SPAN, None, now=FORGET_S + 1) == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_figures_that_cannot_be_are_not_taken(value: float) -> None:
    learned = Learned()
    learned.observe(A, SPAN, value, now=0)
    learned.observe_rtt(A, B, value, now=0)
    assert len(learned) == 0


@given(st.lists(st.tuples(st.floats(1e-6, 10), st.floats(0, 1000)), min_size=1), st.floats(1e-6, 10), st.floats(0, 1e4))
def test_a_cost_lies_between_what_was_seen_and_what_is_said(
    seen: list[tuple[float, float]], advertised: float, later: float
) -> None:
    """Whatever the times, also with a clock that went back."""
    learned = Learned()
    for value, now in seen:
        learned.observe(A, SPAN, value, now)
    cost = learned.cost(A, SPAN, advertised, later)
    values = [advertised, *(value for value, _ in seen)]
    assert cost is not None
    assert min(values) * (1 - 1e-9) <= cost <= max(values) * (1 + 1e-9)


def test_a_node_that_promises_too_much_loses_its_sessions_until_it_is_tried_again() -> None:
    """Advertised 1 ms, seen 5: the route goes elsewhere, and comes back when the experience has faded."""
    learned = Learned()
    offers = [offer("a", 0, 12, 1 * MS), offer("b", 0, 12, 2 * MS)]

    def route(now: float) -> str:
        return shown(find_route([learned.informed(o, now) for o in offers], 12, terms=Terms(rtts=learned.rtts(now))))

    assert route(0) == "a:0-11"
    learned.observe(A, Span(0, 12), 5 * MS, now=0)
    assert route(1) == "b:0-11"
    assert route(3 * HALF_LIFE_S) == "a:0-11"


@pytest.mark.parametrize("number", [1, 64])
def test_impossible_speed_is_believed_only_as_far_as_a_fast_newcomers(number: int) -> None:
    """64 records that claim a thousandth of what sessions measured, beside two honest nodes at 5 ms."""
    learned = Learned()
    honest = [offer(name, 0, 12, 5 * MS) for name in ("a", "b")]
    false = [offer(f"x{i}", 0, 12, 5e-6) for i in range(number)]

    def costs(now: float) -> list[float | None]:
        least_s = learned.least_s(now)
        return [learned.informed(o, now, least_s).layer_s for o in (*honest, *false)]

    assert min(cost or 0 for cost in costs(0)) == 5e-6, "nothing is known yet"
    for node in (A, B):
        learned.observe(node, SPAN, 5 * MS, now=0)
    assert costs(0)[2:] == [5 * MS / BELIEVED] * number
    for each in false:
        learned.observe(each.node, SPAN, 20 * MS, now=1)
    assert all(cost == pytest.approx(20 * MS) for cost in costs(1)[2:])
    assert min(cost or 0 for cost in costs(1 + FORGET_S)[2:]) >= 5 * MS / BELIEVED, "and never again"
