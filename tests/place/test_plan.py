"""The plan is the best there is under the cost model, and says so in words (field.md §4(a), SH-R05)."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core import Span, check_cover
from manyhands.errors import BadRequest, CutError
from manyhands.place import plan as planning
from manyhands.place.machines import Fleet, Machine
from manyhands.place.plan import PlacementPlan, Task, advice, evaluate, find_plans, place
from manyhands.place.shape import PROCESS_BYTES
from manyhands.plain import size_of
from manyhands.route.chunks import FIRST_BYTES
from tests.place.fleet import MB, machine, shape, task


def test_alone_is_one_machine_and_its_ends() -> None:
    plan = find_plans(task(machine("desk", 24, layer_ms=2, ends_s=0.002))).best
    assert plan.token_s == pytest.approx(0.050) and plan.tokens_per_s == pytest.approx(20)
    assert str(plan) == "desk 0-23" and plan.hops[0].compute_s == pytest.approx(0.048)


def test_alone_wins_over_a_slow_link_and_says_so() -> None:
    plans = find_plans(task(machine("desk", 24, layer_ms=2), machine("fast", 24, layer_ms=1, rtt_ms=60)))
    assert plans.best == plans.alone and plans.best.machines == {"desk"}
    assert advice(plans).startswith("desk alone is fastest: expect 20.8 tokens/s; shared (")


def test_a_fast_machine_near_by_takes_what_fits() -> None:
    """20 layers at 1 ms and 4 at 2 ms, 5 ms for the way there and back."""
    plans = find_plans(task(machine("desk", 24, layer_ms=2), machine("fast", 20, layer_ms=1, rtt_ms=5)))
    assert {hop.machine: len(hop.span) for hop in plans.best.hops} == {"desk": 4, "fast": 20}
    assert plans.best.token_s == pytest.approx(0.028 + 0.005)
    assert "1.45 times desk alone" in advice(plans)


def test_the_way_is_a_tour_and_the_sender_pays_for_its_uplink() -> None:
    desk, nas = machine("desk", 12), machine("nas", 12, rtt_ms=10, uplink_Bps=204_800.0)
    plan = find_plans(task(desk, nas)).best
    assert plan.return_s + sum(hop.leg_s for hop in plan.hops) == pytest.approx(0.010 + 2048 / 204_800)


def test_pairs_that_are_measured_count_as_measured() -> None:
    three = [machine("origin", 1, layer_ms=50), machine("a", 12, rtt_ms=40), machine("b", 12, rtt_ms=40)]
    far = find_plans(Task(shape(), Fleet(tuple(three), "origin"), 128)).best
    near = find_plans(Task(shape(), Fleet(tuple(three), "origin", {frozenset("ab"): 0.002}), 128)).best
    assert far.token_s - near.token_s == pytest.approx(0.039)


def test_who_waits_dozes_off_and_is_slower_for_it() -> None:
    """A request alone on the origin does not wait; two that share wait for each other, and for the way between them."""
    alone = task(machine("desk", 24, doze=1.5))
    assert find_plans(alone).best.token_s == pytest.approx(0.024)
    far = machine("far", 24, rtt_ms=100, doze=1.5)
    pair = task(machine("desk", 12, doze=1.5), far)
    half = [(pair.origin, Span(0, 12)), (far, Span(12, 24))]
    assert evaluate(pair, half).token_s == pytest.approx(0.100 + 1.5 * 0.024)
    assert evaluate(pair, half).hops[0].compute_s == pytest.approx(1.5 * 0.012)


def test_the_first_token_waits_for_the_session_to_open() -> None:
    """What the origin does before, and what a hop does for an Open; the prompt goes there right behind it and back, on cores
    that dozed."""
    far = machine("far", 24, rtt_ms=100, row_s=1e-4, overhead_s=0.001, doze=2.0)
    there = task(machine("desk", 1, ends_s=0.01, begin_s=0.004, doze=2.0), far, prompt=100)
    prompt_s = 0.100 + 2 * (24 * 100 * 1e-4 + 0.001) + 2 * 0.01
    assert evaluate(there, [(far, Span(0, 24))]).ttft_s == pytest.approx(0.004 + 2 * 0.001 + prompt_s)


def test_each_further_hop_is_asked_after_the_others() -> None:
    """The origin's own work for the session grows with the hops, whatever their distance; a machine alone has none of it."""
    three = task(*(machine(name, 24, open_s=0.002) for name in "abc"))
    alone_s, all_s = (evaluate(three, hops).ttft_s for hops in ([(three.origin, Span(0, 24))], _thirds(three)))
    assert all_s - alone_s == pytest.approx(2 * 0.002)


def test_the_first_step_of_a_session_costs_each_hop_more() -> None:
    """A prompt in chunks, too: what follows finds a cache that has been used."""
    for prompt in (1, 300):
        plain, new = (
            task(*(machine(name, 24, new_s=new_s) for name in "abc"), prompt=prompt, tokens=512)
            for new_s in (0.0, 0.002)
        )
        plain_s, new_s = (evaluate(each, _thirds(each)).ttft_s for each in (plain, new))
        assert new_s - plain_s == pytest.approx(3 * 0.002)


def test_the_rest_of_a_prompt_waits_for_the_hop_that_answers_last() -> None:
    """What leaves with the Opens is one chunk. All hops open at once: two that answer sooner change nothing of the opening."""
    far, slow = machine("far", 8, rtt_ms=50), machine("slow", 8, rtt_ms=40, overhead_s=0.030)
    three = task(machine("desk", 8), far, slow, prompt=2, tokens=512)
    legs = [three.fleet.leg(*pair) for pair in itertools.pairwise([*three.fleet.machines, three.origin])]
    one_s = 24 * 0.001 + 0.030 + sum(leg.rtt_s for leg in legs) / 2
    assert evaluate(three, _thirds(three)).ttft_s == pytest.approx(one_s)  # by then the slow one is open
    rows = replace(three, prompt=FIRST_BYTES // three.shape.hidden_bytes + 1)
    assert evaluate(rows, _thirds(rows)).ttft_s == pytest.approx(0.040 + 0.030 + one_s)


def test_first_rows_wait_for_a_hop_that_is_not_open_when_they_come() -> None:
    near = machine("near", 12, overhead_s=0.001)
    pair = task(near, machine("slow", 12, overhead_s=0.5), tokens=512)
    half = [(near, Span(0, 12)), (pair.fleet.machines[1], Span(12, 24))]
    assert evaluate(pair, half).ttft_s == pytest.approx(0.5 + 0.012 + 0.5)


def test_where_a_round_trip_is_short_a_prompt_leaves_when_all_have_answered() -> None:
    """A near hop reads its weights in 24 ms. FIRST_BYTES of rows wait there for its Open alone; more leave in one step,
    a round trip later."""
    near = machine("near", 24, row_s=1e-5, rtt_ms=2, overhead_s=0.001)
    few = task(machine("desk", 8), near, tokens=512)
    rows = FIRST_BYTES // few.shape.hidden_bytes
    for prompt, begins_s in ((rows, 0.001), (rows + 1, 0.003)):
        wanted = replace(few, prompt=prompt)
        through_s = 0.002 + 0.001 + max(0.024, prompt * 24 * 1e-5)
        assert evaluate(wanted, [(near, Span(0, 24))]).ttft_s == pytest.approx(begins_s + through_s)


def _thirds(wanted: Task) -> list[tuple[Machine, Span]]:
    return list(zip(wanted.fleet.machines, (Span(0, 8), Span(8, 16), Span(16, 24)), strict=True))


def test_a_prompt_is_planned_in_the_chunks_that_origins_send() -> None:
    """256 rows over three hops of 25.6 ms each: in steps of 32 they take (3 + 7) / 8 of one hop's time, not 3 of them."""
    three = task(*(machine(name, 8, layer_ms=0.01, row_s=12.5e-6) for name in "abc"), prompt=256, tokens=512)
    assert evaluate(three, _thirds(three)).ttft_s == pytest.approx(10 / 8 * 0.0256, rel=0.01)


@pytest.mark.parametrize(("rest_ms", "times"), [(0, 1.0), (4, 1.0), (11.314, 1.25), (32, 1.5), (1e9, 1.5)])
def test_a_machine_dozes_off_by_and_by(rest_ms: float, times: float) -> None:
    assert machine("desk", 1, doze=1.5).slowed(rest_ms / 1e3) == pytest.approx(times, rel=1e-3)


def test_what_is_missing_is_named_with_the_memory_that_would_do() -> None:
    plans = find_plans(task(machine("a", 8), machine("b", 4)))
    assert plans.ranked == () and plans.missing is not None and plans.missing.span == Span(12, 24)
    assert plans.missing.needs_bytes == PROCESS_BYTES + 1200 * MB
    named = size_of(plans.missing.needs_bytes, is_limit=True)
    assert advice(plans) == (
        f"not enough room: layers 12-23 are held by no node: one more machine with {named} would complete it"
    )
    with pytest.raises(BadRequest, match="12-23 are held by no node"):
        _ = plans.best


def test_the_memory_that_is_named_suffices() -> None:
    few = task(machine("a", 8), machine("b", 4))
    missing = find_plans(few).missing
    assert missing is not None
    more = few.fleet.with_machines([Machine("c", missing.needs_bytes, 0.001)])
    assert find_plans(Task(few.shape, more, few.tokens)).ranked


def test_cache_counts() -> None:
    """2,048 positions of 50 kB take as much as a layer's weights."""
    model = shape(cache_bytes=50_000)
    fleet = Fleet((machine("a", 24),), "a")
    assert find_plans(Task(model, fleet, tokens=1, prompt=1)).ranked == ()  # not even one position's cache
    fleet = Fleet((machine("a", 25),), "a")
    assert find_plans(Task(model, fleet, tokens=1, prompt=1)).ranked
    assert find_plans(Task(model, fleet, tokens=2048)).missing is not None


def test_the_origin_must_hold_the_ends() -> None:
    with pytest.raises(BadRequest, match="too little for the origin"):
        Task(shape(ends_mb=500), Fleet((machine("a", 4),), "a"))
    plan = find_plans(Task(shape(4, ends_mb=300), Fleet((machine("a", 5), machine("b", 4)), "a"))).best
    assert {hop.machine: len(hop.span) for hop in plan.hops} == {"a": 2, "b": 2}


@pytest.mark.parametrize("more, said", [({"tokens": 5000}, "context of 4096"), ({"prompt": 0}, "prompt of 0")])
def test_impossible_tasks_are_refused(more: dict[str, int], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        task(machine("a", 24), **more)


def test_strategies_share_among_all_and_check_the_room() -> None:
    three = task(*(machine(name, 9) for name in "abc"), layers=22)
    assert str(place(three, "uniform")) == "a 0-7, b 8-14, c 15-21"
    check_cover([hop.span for hop in place(three, "capacity").hops], 22)
    assert place(three, "measured") == find_plans(three).best
    with pytest.raises(BadRequest, match="uniform gives a 8 layers, of which 3 fit"):
        place(task(machine("a", 3), machine("b", 9), machine("c", 9), layers=22), "uniform")
    with pytest.raises(CutError):
        place(task(*(machine(name, 9) for name in "abc"), layers=2), "uniform")


def test_equal_input_gives_equal_plans() -> None:
    swarm = task(*(machine(str(i), 7, rtt_ms=10) for i in range(6)))
    assert find_plans(swarm) == find_plans(swarm)


def brute(wanted: Task) -> float:
    """The fastest token over all orders of all subsets and all shares."""
    best = math.inf
    machines = wanted.fleet.machines
    for count in range(1, len(machines) + 1):
        for order in itertools.permutations(machines, count):
            ranges = [range(1, wanted.capacity(m) + 1) for m in order]
            for lengths in itertools.product(*ranges):
                if sum(lengths) == wanted.shape.num_layers:
                    edges = list(itertools.accumulate(lengths, initial=0))
                    spans = [Span(a, b) for a, b in itertools.pairwise(edges)]
                    best = min(best, evaluate(wanted, list(zip(order, spans, strict=True))).token_s)
    return best


@st.composite
def tasks(draw: st.DrawFn, most: int = 4, layers: int = 6) -> Task:
    facts = st.tuples(
        st.integers(0, layers), st.integers(1, 9), st.integers(0, 20), st.sampled_from([1e5, 1e6, math.inf])
    )
    rows = draw(st.lists(facts, min_size=1, max_size=most))
    machines = tuple(
        machine(str(i), room, layer_ms=ms, rtt_ms=rtt, uplink_Bps=uplink, overhead_s=0.001)
        for i, (room, ms, rtt, uplink) in enumerate(rows)
    )
    pairs = [frozenset(pair) for pair in itertools.combinations([m.name for m in machines], 2)]
    known = draw(st.lists(st.sampled_from(pairs), max_size=3)) if pairs else []
    return Task(shape(layers), Fleet(machines, "0", {pair: draw(st.integers(0, 30)) / 1e3 for pair in known}), 128)


@settings(max_examples=60, deadline=None)
@given(tasks())
def test_nothing_is_faster_than_the_plan(wanted: Task) -> None:
    plans = find_plans(wanted)
    best = brute(wanted)
    if not plans.ranked:
        assert best == math.inf and plans.missing is not None
        return
    assert plans.best.token_s == pytest.approx(best)
    check_cover([hop.span for hop in plans.best.hops], wanted.shape.num_layers)
    assert list(plans.ranked) == sorted(plans.ranked, key=lambda plan: plan.token_s)
    for hop in plans.best.hops:
        assert hop.needs_bytes <= wanted.fleet.get_machine(hop.machine).memory_bytes


@settings(max_examples=30, deadline=None)
@given(tasks(most=9, layers=24))
def test_the_beam_is_nearly_as_good(wanted: Task) -> None:
    """What more than twelve machines get, compared with the exact answer on fewer."""
    exact = find_plans(wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "EXACT", 0)
        beam = find_plans(wanted)
    assert bool(exact.ranked) == bool(beam.ranked) and exact.missing == beam.missing
    if exact.ranked:
        assert beam.best.token_s <= 1.05 * exact.best.token_s + 1e-9
        assert beam.alone == exact.alone


def test_a_hundred_machines_are_planned() -> None:
    machines = [machine(str(i), 1 + i % 5, layer_ms=1 + i % 7, rtt_ms=i % 40) for i in range(100)]
    plan = find_plans(task(*machines, layers=80)).best
    check_cover([hop.span for hop in plan.hops], 80)
    assert len(plan.machines) == len(plan.hops)


def test_alone_is_found_among_many() -> None:
    machines: list[Any] = [machine(str(i), 2, rtt_ms=5) for i in range(20)]
    plans = find_plans(task(*machines, machine("big", 24, layer_ms=9, rtt_ms=90)))
    assert isinstance(plans.alone, PlacementPlan) and plans.alone.machines == {"big"}


def test_memory_is_in_whole_bytes() -> None:
    assert machine("a", 1).memory_bytes == PROCESS_BYTES + 100 * MB


def test_many_that_are_fast_and_hold_little_hide_none_that_hold_much() -> None:
    """More than the hops that are tried would be needed of the fast ones alone."""
    fast = [machine(f"fast{i}", 1, layer_ms=0.1) for i in range(40)]
    plans = find_plans(task(*fast, machine("roomy", 40, layer_ms=5), machine("roomier", 45, layer_ms=5), layers=80))
    assert plans.best.machines == {"roomy", "roomier"}


def test_a_model_that_takes_more_machines_than_are_usual_is_planned() -> None:
    plans = find_plans(task(*(machine(str(i), 2) for i in range(45)), layers=80))
    check_cover([hop.span for hop in plans.best.hops], 80)
    assert len(plans.best.hops) == 40
