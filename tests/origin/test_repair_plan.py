"""manyhands.origin.repair_plan: who replaces whom, who recomputes, who feeds it. Pure."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import NodeId, check_cover
from manyhands.errors import ShardUnavailable
from manyhands.origin.repair_plan import RepairPlan, Warm, plan_repair, rounds
from manyhands.route.search import Offer
from tests.route.test_search import OTHER, offer

LAYERS, COMMITTED = 12, 40


@dataclass(frozen=True)
class Case:
    """What plan_repair is asked."""

    route: list[Offer]
    lost: set[int]
    empty: set[int]
    logless: set[int]
    offers: list[Offer]
    excluded: set[NodeId]
    warm: tuple[Warm, ...] = ()

    def plan(self, committed: int = COMMITTED) -> RepairPlan:
        return plan_repair(
            self.route,
            self.lost,
            dict.fromkeys(self.empty, 0),
            self.logless,
            self.offers,
            self.excluded | self.nodes(self.lost),
            committed,
            self.warm,
        )

    def nodes(self, indices: set[int]) -> set[NodeId]:
        return {self.route[i].node for i in indices}

    def usable(self) -> list[Offer]:
        banned = self.excluded | self.nodes(self.lost)
        kind = self.route[0].info.model
        return [o for o in self.offers if o.node not in banned and o.info.model == kind]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    edges = sorted(draw(st.sets(st.integers(1, LAYERS - 1), max_size=4)))
    spans = list(zip([0, *edges], [*edges, LAYERS], strict=True))
    route = [offer(f"h{i}", a, b) for i, (a, b) in enumerate(spans)]
    index = st.integers(0, len(route) - 1)
    lost = draw(st.sets(index))
    survivors = set(range(len(route))) - lost
    some = st.sets(st.sampled_from(sorted(survivors))) if survivors else st.just(set[int]())
    spares = draw(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)).filter(lambda s: s[0] < s[1]), max_size=5))
    offers = [offer(f"s{i}", a, b, free=draw(st.integers(0, 9))) for i, (a, b) in enumerate(spares)]
    if draw(st.booleans()):
        offers += route
        offers += [offer(f"h{draw(index)}", 0, LAYERS)] if draw(st.booleans()) else []
    if draw(st.booleans()):
        offers.append(offer("x", 0, LAYERS, model=OTHER))
    excluded = {o.node for o in draw(st.lists(st.sampled_from(offers), max_size=2))} if offers else set[NodeId]()
    return Case(route, lost, draw(some), draw(some), offers, excluded)


def is_covered(case: Case) -> bool:
    held = {layer for o in case.usable() for layer in range(o.info.span.start, o.info.span.end)}
    return all(set(range(s.start, s.end)) <= held for s in (case.route[i].info.span for i in case.lost))


@given(cases())
def test_a_plan_is_found_exactly_where_the_layers_are_held(case: Case) -> None:
    """It covers every layer once, keeps every survivor in its place, and uses no node that is excluded."""
    if not is_covered(case):
        with pytest.raises(ShardUnavailable, match="no other node holds layers"):
            case.plan()
        return
    slots = case.plan().slots
    check_cover([slot.offer.info.span for slot in slots], LAYERS)
    kept = [slot.kept for slot in slots if slot.kept is not None]
    assert kept == [i for i in range(len(case.route)) if i not in case.lost]
    for slot in slots:
        if slot.kept is not None:
            assert slot.offer == case.route[slot.kept]
        else:
            assert any(o.node == slot.offer.node and o.info.span.covers(slot.offer.info.span) for o in case.usable())


@given(cases())
def test_every_hop_gets_exactly_what_it_lacks(case: Case) -> None:
    """A recomputing hop gets the committed positions from the hop before it or the origin; no other hop gets them."""
    if not is_covered(case):
        return
    plan = case.plan()
    comes_in = plan.replay_from < COMMITTED
    for slot in plan.slots:
        assert comes_in == slot.recomputes
        if slot.recomputes:
            assert slot.replay_until == 0 and slot.emit_from in (0, COMMITTED)
            comes_in = slot.emit_from == 0
        else:
            assert slot.kept is not None and slot.emit_from == 0 and slot.replay_until in (0, COMMITTED)
            comes_in = slot.replay_until == COMMITTED
            assert not (comes_in and slot.kept in case.logless)
    assert not comes_in, "the origin has the tokens"


@given(cases(), st.lists(st.integers(0, COMMITTED), min_size=12, max_size=12))
def test_hops_go_on_from_what_they_hold(case: Case, holds: list[int]) -> None:
    """Each gets the committed positions that it lacks, each once and in order: replayed, or as the hop before computes them."""
    if not is_covered(case):
        return
    excluded, short = case.excluded | case.nodes(case.lost), {index: holds[index] for index in case.empty}
    plan = plan_repair(case.route, case.lost, short, case.logless, case.offers, excluded, COMMITTED)
    comes = list(range(plan.replay_from, COMMITTED))
    for slot in plan.slots:
        held = 0 if slot.kept is None else short.get(slot.kept, COMMITTED)
        assert slot.resume_until <= held and (slot.resume_until == held or slot.kept in case.logless)
        assert comes == list(range(slot.resume_until, COMMITTED)) and slot.recomputes >= bool(comes)
        replayed = list(range(slot.replay_from, slot.replay_until))
        assert not (replayed and slot.kept in case.logless) and slot.replay_until in (0, slot.resume_until)
        comes = replayed + [position for position in comes if position >= slot.emit_from]
    assert not comes, "the origin has the tokens"


@given(cases())
def test_no_hop_recomputes_without_need(case: Case) -> None:
    """New and empty hops do; a survivor with its cache only where it has no log and the hop after it recomputes."""
    if not is_covered(case):
        return
    slots = case.plan().slots
    for index, slot in enumerate(slots):
        must = slot.kept is None or slot.kept in case.empty
        feeds = index + 1 < len(slots) and slots[index + 1].recomputes
        assert slot.recomputes == (must or (slot.kept in case.logless and feeds))


@given(cases())
def test_nothing_committed_means_nothing_replayed(case: Case) -> None:
    """Before the first position has come through, the origin sends everything anyway."""
    if is_covered(case):
        plan = case.plan(committed=0)
        assert plan.replay_from == 0 and all(s.replay_until == s.emit_from == 0 for s in plan.slots)


@given(cases())
def test_nodes_of_the_route_are_the_last_choice(case: Case) -> None:
    """A survivor takes a second place only if others cannot cover the lost run."""
    if not is_covered(case):
        return
    staying = case.nodes(set(range(len(case.route))) - case.lost)
    others = replace(case, offers=[o for o in case.offers if o.node not in staying])
    slots = case.plan().slots
    if is_covered(others):
        assert not {slot.offer.node for slot in slots if slot.kept is None} & staying


@given(cases(), st.data())
def test_standbys_take_over_and_get_what_they_lack(case: Case, data: st.DataObject) -> None:
    """Following the rows through the route: every hop gets each position that its cache lacks, from one that has it."""
    spans = {i: case.route[i].info.span for i in data.draw(st.sets(st.sampled_from(range(len(case.route)))))}
    warm = tuple(
        Warm(offer(f"w{i}", span.start, span.end), data.draw(st.integers(0, COMMITTED + 5)))
        for i, span in sorted(spans.items())
    )
    case = replace(case, warm=warm, offers=[*case.offers, *(w.offer for w in warm)])
    if not is_covered(case):
        return
    plan = case.plan()
    held = {w.offer: w.computed for w in warm}
    comes_from = plan.replay_from  # the first position that arrives at a hop; all later ones do
    for slot in plan.slots:
        has = (
            min(held.get(slot.offer, 0), COMMITTED) if slot.kept is None else COMMITTED * (slot.kept not in case.empty)
        )
        assert comes_from <= has, "no hole"
        assert slot.recomputes == (comes_from < COMMITTED or slot.kept is None or slot.kept in case.empty)
        logged = 0 if slot.kept in case.logless else comes_from
        assert slot.replay_until <= logged, "only what it had computed before can be replayed"
        if slot.replay_until:
            assert slot.replay_until == comes_from > slot.replay_from
            comes_from = slot.replay_from
        elif slot.recomputes:
            comes_from = max(comes_from, slot.emit_from)
        else:
            comes_from = COMMITTED
    assert comes_from == COMMITTED, "the origin has the tokens"


@given(cases(), st.data())
def test_no_rows_reach_a_hop_that_has_not_been_told_of_its_place(case: Case, data: st.DataObject) -> None:
    """What a hop sends again goes through all those behind it that recompute. Without standbys there are two rounds at most."""
    indices = data.draw(st.sets(st.sampled_from(range(len(case.route)))))
    spans = [(index, case.route[index].info.span) for index in sorted(indices)]
    warm = [Warm(offer(f"w{i}", span.start, span.end), data.draw(st.integers(0, COMMITTED))) for i, span in spans]
    case = replace(case, warm=tuple(warm), offers=[*case.offers, *(w.offer for w in warm)])
    if not is_covered(case):
        return
    slots = case.plan().slots
    order = rounds(slots)
    assert sorted(index for indices in order for index in indices) == list(range(len(slots)))
    turn = {index: number for number, indices in enumerate(order) for index in indices}
    for index, slot in enumerate(slots):
        assert turn[index] < len(order) - 1 or not slot.recomputes, "survivors come last"
        for later in range(index + 1, len(slots)) if slot.replay_until else ():
            if not slots[later].recomputes:
                break
            assert turn[later] < turn[index]
    assert warm or len(order) <= 2


def test_a_standby_costs_its_predecessor_the_rows_since() -> None:
    """The hop before replays what the standby lacks; with two in a row, so does the first of them for the second."""
    route = [offer("a", 0, 4), offer("b", 4, 8), offer("c", 8, 12)]
    warm = [Warm(offer("s", 4, 8), 30), Warm(offer("t", 8, 12), 20)]
    spare = [offer("u", 0, 12)]
    (a, s, c) = plan_repair(route, {1}, {}, (), spare, {NodeId("b")}, 40, warm).slots
    assert (a.replay_from, a.replay_until, s.offer.name, s.emit_from, c.replay_until) == (30, 40, "s", 40, 0)
    (a, s, t) = plan_repair(route, {1, 2}, {}, (), spare, {NodeId("b"), NodeId("c")}, 40, warm).slots
    assert (a.replay_from, a.replay_until) == (30, 40)
    assert (s.replay_from, s.replay_until, s.emit_from, t.emit_from) == (20, 30, 20, 40)
    plan = plan_repair(route, {1}, {}, {0}, spare, {NodeId("b")}, 40, warm)
    assert plan.replay_from == 30 and plan.slots[0].recomputes, "without a log it computes those rows again"
    gone = plan_repair(route, {1}, {}, (), spare, {NodeId("b"), NodeId("s")}, 40, warm).slots
    assert gone[1].offer.name == "u" and gone[0].replay_from == 0


def test_one_spare_several_spares_or_a_survivor() -> None:
    """The three kinds of replacement, by example."""
    route = [offer("a", 0, 4), offer("b", 4, 8), offer("c", 8, 12)]

    def new_hops(*offers: Offer) -> list[tuple[str, str]]:
        slots = plan_repair(route, {1}, {}, (), offers, {NodeId("b")}, 5).slots
        return [(s.offer.name, str(s.offer.info.span)) for s in slots if s.kept is None]

    assert new_hops(offer("s", 2, 10)) == [("s", "4-7")]
    assert new_hops(offer("s", 0, 6), offer("t", 6, 12)) == [("s", "4-5"), ("t", "6-7")]
    assert new_hops(offer("c", 4, 12)) == [("c", "4-7")]


def test_adjacent_losses_are_covered_as_one() -> None:
    """One spare for both is one hop fewer; losses apart are covered apart."""
    route = [offer("a", 0, 4), offer("b", 4, 8), offer("c", 8, 12)]

    def spans(lost: set[int]) -> list[str]:
        slots = plan_repair(route, lost, {}, (), [offer("s", 0, 12)], (), 5).slots
        return [str(slot.offer.info.span) for slot in slots]

    assert spans({0, 1}) == ["0-7", "8-11"]
    assert spans({0, 2}) == ["0-3", "4-7", "8-11"]
    assert spans({0, 1, 2}) == ["0-11"]
