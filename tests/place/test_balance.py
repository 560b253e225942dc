"""The balancer heals a lopsided swarm and otherwise leaves it alone (IN-14..18, C-19, IN-R06)."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.config import BalanceConfig
from manyhands.core import Span
from manyhands.errors import BadRequest
from manyhands.place.balance import LoadHistory, Move, decide, holds_claim, propose
from manyhands.place.strategy import Holding, coverage
from tests.place.simulate import Simulation, hosts

TEN_TO_ONE = [*hosts("0-3", 10), *hosts("4-7", 1, first=10)]
EAGER = BalanceConfig(patience=1, cool_down_s=0)


def test_ten_hosts_against_one_heal_and_then_rest() -> None:
    """IN-14: the weakest layer gets five times as fast, one move at a time, and no node moves twice."""
    swarm = Simulation(TEN_TO_ONE, 8).run(60)
    counts = coverage(swarm.holdings, 8)
    assert sorted({counts[0], counts[7]}) == [5, 6] and len(swarm.holdings) == 11
    assert max(map(len, swarm.moves)) == 1 and swarm.num_moves == 4
    assert swarm.weakest[-1] == pytest.approx(5 * swarm.weakest[0])
    assert swarm.settled < 30 and min(swarm.cover) == 1


def test_throughput_never_falls_on_the_way() -> None:
    """A node leaves its old span only when the new one serves; what it leaves is not the bottleneck."""
    weakest = Simulation(TEN_TO_ONE, 8).run(60).weakest
    assert weakest == sorted(weakest)


def test_simultaneous_candidates_make_exactly_one_move() -> None:
    movers = [h for h in TEN_TO_ONE if decide(h, TEN_TO_ONE, 8, LoadHistory(wanted=9), 7, 0.0, BalanceConfig()).move]
    assert len([h for h in TEN_TO_ONE if propose(h, TEN_TO_ONE, 8, BalanceConfig())]) == 10
    assert len(movers) == 1


def test_the_claim_goes_round() -> None:
    """No node is first in every period, so a candidate that cannot move does not stop the others for ever."""
    winners = {h.node for p in range(40) for h in TEN_TO_ONE if holds_claim(h, TEN_TO_ONE, 8, p, BalanceConfig())}
    assert len(winners) > 5


def test_the_last_holder_stays() -> None:
    swarm = [*hosts("0-3", 1), *hosts("4-7", 1, first=1, layer_s=1.0)]
    assert all(propose(h, swarm, 8, BalanceConfig()) is None for h in swarm)
    partly = [*hosts("0-5", 1), *hosts("0-3", 5, first=1), *hosts("6-7", 1, first=9, layer_s=9.0)]
    assert propose(partly[0], partly, 8, BalanceConfig()) is None  # no other node holds 4 and 5


def test_a_holder_that_is_not_ready_covers_nothing() -> None:
    """Make before break: a node that still loads is no reason to leave."""
    loading = replace(hosts("0-3", 1, first=5)[0], is_ready=False)
    swarm = [*hosts("0-3", 1), loading, *hosts("4-7", 1, first=1, layer_s=1.0)]
    assert propose(swarm[0], swarm, 8, EAGER) is None


def test_an_empty_stage_is_filled_at_once() -> None:
    """Coverage loss waits for no second period and no cool-down; one node goes, not all four."""
    swarm = Simulation(
        [*hosts("0-3", 4), *hosts("4-7", 1, first=10)], 12, BalanceConfig(patience=9), load_periods=2
    ).run(5)
    assert swarm.moves == [[Move(Span(0, 4), Span(8, 12))], [], [], [], []]
    assert swarm.cover == [0, 0, 1, 1, 1]


def test_layers_that_are_weak_alike_are_helped_one_by_one() -> None:
    """What one move cannot lift for the whole swarm is lifted where it goes: else two weak ends would block each other."""
    swarm = Simulation([*hosts("0-1", 1), *hosts("2-3", 8, first=1), *hosts("4-5", 1, first=9)], 6).run(60)
    assert min(coverage(swarm.holdings, 6)) == 3 and swarm.num_moves <= 6


def test_it_waits_two_periods_and_cools_down() -> None:
    mover = next(h for h in TEN_TO_ONE if holds_claim(h, TEN_TO_ONE, 8, 3, BalanceConfig()))
    first = decide(mover, TEN_TO_ONE, 8, LoadHistory(), 3, 0.0, BalanceConfig())
    assert first.move is None and first.history.wanted == 1 and "wait" in first.why
    second = decide(mover, TEN_TO_ONE, 8, first.history, 3, 60.0, BalanceConfig())
    assert second.move is not None and "0-3" in second.why
    tired = decide(mover, TEN_TO_ONE, 8, LoadHistory(5, moved_at_s=60.0), 3, 120.0, BalanceConfig())
    assert tired.move is None and "600 s" in tired.why


def test_a_passing_imbalance_moves_no_span() -> None:
    mover = next(h for h in TEN_TO_ONE if holds_claim(h, TEN_TO_ONE, 8, 3, BalanceConfig()))
    even = [mover, *hosts("4-7", 1, first=20)]
    history = decide(mover, TEN_TO_ONE, 8, LoadHistory(), 3, 0.0, BalanceConfig()).history
    assert decide(mover, even, 8, history, 4, 60.0, BalanceConfig()).history.wanted == 0


def test_who_is_unknown_or_on_the_move_stays() -> None:
    """IN-R06: skip if the directory does not know me."""
    assert propose(TEN_TO_ONE[0], TEN_TO_ONE[1:], 8, EAGER) is None
    moving = [*TEN_TO_ONE, replace(TEN_TO_ONE[0], span=Span(4, 8), is_ready=False)]
    assert propose(TEN_TO_ONE[0], moving, 8, EAGER) is None


def test_the_load_policy_is_inferds() -> None:
    """IN-R06: from a stage with least to do to the one with most; an empty stage beats all; equal loads rest."""
    rules = BalanceConfig(policy="load")
    idle, busy = hosts("0-3", 2), hosts("4-7", 2, first=5, sessions=9)
    move = propose(idle[0], [*idle, *busy], 8, rules)
    assert move is not None and move.target == Span(4, 8)
    assert propose(busy[0], [*idle, *busy], 8, rules) is None
    empty = propose(idle[0], [*idle, *busy], 12, rules)
    assert empty is not None and empty.target == Span(8, 12)
    alike = [*hosts("0-3", 2), *hosts("4-7", 2, first=5)]
    assert all(propose(h, alike, 8, rules) is None for h in alike)
    assert propose(hosts("0-3", 1)[0], [*hosts("0-3", 1), *busy], 8, rules) is None


@pytest.mark.parametrize("wrong", [{"gain": 1.0}, {"gain": float("nan")}, {"patience": 0}, {"cool_down_s": -1.0}])
def test_rules_that_would_thrash_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadRequest, match=next(iter(wrong))):
        BalanceConfig(**wrong)  # type: ignore[arg-type]


def test_old_views_delay_but_do_not_tear() -> None:
    """Views two periods old may cost moves, never cover."""
    swarm = Simulation(TEN_TO_ONE, 8, lag=2).run(120)
    assert min(swarm.cover) == 1 and swarm.settled < 100
    assert swarm.weakest[-1] >= 4 * swarm.weakest[0]


@st.composite
def swarms(draw: st.DrawFn) -> list[Holding]:
    """2 to 14 nodes with spans of 12 layers, of different speeds."""
    spans = draw(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6), st.integers(1, 4)), min_size=2, max_size=14))
    return [
        hosts(f"{start}-{min(11, start + length - 1)}", 1, first=i, layer_s=0.01 * speed)[0]
        for i, (start, length, speed) in enumerate(spans)
    ]


@settings(max_examples=60, deadline=None)
@given(swarms())
def test_any_swarm_comes_to_rest_with_no_less_cover(holdings: list[Holding]) -> None:
    before = [count > 0 for count in coverage(holdings, 12)]
    swarm = Simulation(holdings, 12, EAGER).run(80)
    after = [count > 0 for count in coverage([h for h in swarm.holdings if h.is_ready], 12)]
    assert swarm.settled < 70
    assert all(now or not then for now, then in zip(after, before, strict=True))
    assert swarm.weakest[-1] >= swarm.weakest[0]
