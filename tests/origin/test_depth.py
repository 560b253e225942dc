"""manyhands.origin.depth: over acceptance, round trip, row cost and load, never under 0.98 of plain."""

import random
from collections.abc import Sequence
from itertools import product

import pytest

from manyhands.origin.depth import MAX_AHEAD, Acceptance, Depth, Timing, copied, modelled
from manyhands.origin.draft import AutoDrafter, Drafter, NoDrafter
from tests.origin.routes_in_time import Fixed, Line, ReadyModel, Simulation, Stream, rate

GRID = list(product((0.0, 0.3, 0.6, 0.98), (0.0, 0.02, 0.3), (0.001, 0.01), (1, 4)))


@pytest.mark.parametrize(("chance", "trip_s", "row_s", "streams"), GRID)
def test_never_slower_than_plain_and_near_the_best_fixed_depth(
    chance: float, trip_s: float, row_s: float, streams: int
) -> None:
    """Of all streams together. A row of 10 ms is half as much as a step: rows are not free there."""
    line, tokens, acceptance = Line(trip_s, 0.02, row_s), 300, Acceptance()

    def ours(truth: Sequence[int]) -> Drafter:
        model = ReadyModel(truth, chance)
        return AutoDrafter(acceptance, model=model, copies=False, streams=lambda: streams)

    def fixed(depth: int) -> float:
        return rate(line, lambda truth: Fixed(ReadyModel(truth, chance), depth), tokens=tokens, streams=streams)

    got = rate(line, ours, tokens=tokens, streams=streams)
    plain = rate(line, lambda truth: NoDrafter(), tokens=tokens, streams=streams)
    assert got >= 0.98 * plain
    if trip_s == 0.3 and streams == 1:
        assert got >= max(plain, *map(fixed, (1, 4, 15))) / 1.15


def test_repeated_text_over_a_long_route_fills_it() -> None:
    """Text that repeats is guessed further ahead than one window holds; far more than that is not on its way in vain."""
    line, truth = Line(0.3, 0.02, 0.001), [i % 40 for i in range(1200)]

    def run(drafter: Drafter) -> tuple[float, Simulation]:
        simulation = Simulation(line, [Stream(truth, drafter)])
        return simulation.play(), simulation

    plain, _ = run(NoDrafter())
    took, simulation = run(AutoDrafter(Acceptance()))
    assert plain / took > 8
    assert simulation.stale <= 0.03 * simulation.steps


def depth_with(token_s: float, row_s: float, step_s: float = 0.0) -> Depth:
    depth = Depth()
    depth.learn(Timing(1, token_s, step_s))
    depth.learn(Timing(5, token_s + 4 * row_s, step_s + 4 * row_s))
    assert depth.begin()
    return depth


def test_nothing_is_drafted_before_a_plain_window_was_timed() -> None:
    depth = Depth()
    assert not depth.begin() and depth.choose((), [0.9] * 8, is_apart=False) == 0
    depth.note(1, None)  # disturbed: no time
    assert not depth.begin()
    depth.learn(Timing(1, 0.1, 0.0))
    assert depth.begin() and depth.choose((), [0.9] * 8, is_apart=False) > 0


def test_a_plain_round_now_and_then_keeps_the_estimate_true() -> None:
    depth = depth_with(0.1, 0.001)
    begun = []
    for _ in range(100):
        begun.append(depth.begin())
        depth.choose((), [0.9] * 4, is_apart=False)
        depth.note(3, 0.104)
    assert begun.count(False) == 3


def test_more_ahead_is_worth_less() -> None:
    """The first guess may be wrong, then all behind it are."""
    depth = depth_with(0.3, 0.005)
    counts = [depth.choose([0.8] * ahead, [0.8] * MAX_AHEAD, is_apart=False) for ahead in (0, 4, 8, 16)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]
    assert depth.choose([1.0] * MAX_AHEAD, [1.0] * 9, is_apart=False) == 0


def test_a_step_of_their_own_must_pay_too() -> None:
    """On one machine a round is what hops compute: a second step for drafts costs as much as it can win."""
    depth = depth_with(0.02, 0.0005, 0.0199)
    assert depth.choose((), [0.6] * 8, is_apart=False) > 0
    assert depth.choose((), [0.5] * 8, is_apart=True) == 0


def test_rows_cost_all_streams_that_share_the_route() -> None:
    depth = depth_with(0.1, 0.02)
    assert depth.choose((), [0.5] * 8, is_apart=False) > 0
    assert depth.choose((), [0.5] * 8, is_apart=False, streams=8) == 0


def test_drafts_that_win_nothing_are_stopped_and_tried_again_later() -> None:
    """Whatever the estimates say, what rounds took decides; each time that drafts lose they rest for longer."""
    depth, rests, drafting = depth_with(0.1, 0.0), list[int](), 0
    for _ in range(600):
        if depth.begin():
            if depth.choose((), [0.9] * 4, is_apart=False):
                drafting += 1
                depth.note(1, 0.15)
            continue
        depth.note(1, 0.1)
        rests.append(depth.trial.pause)
    assert drafting < 60 and max(rests) > 64


def test_drafts_that_win_are_not_stopped() -> None:
    depth = depth_with(0.1, 0.001)
    for _ in range(300):
        if depth.begin() and depth.choose((), [0.9] * 4, is_apart=False):
            depth.note(3, 0.11)
    assert depth.trial.pause == 0


def test_acceptance_is_learnt_by_drafter_and_place() -> None:
    acceptance, rng = Acceptance(), random.Random(3)
    for _ in range(300):
        acceptance.note(copied(20), True)
        acceptance.note(modelled(0), rng.random() < 0.6)
        acceptance.note(modelled(5), False)
    assert acceptance.chance(copied(16)) > 0.95 and acceptance.chance(copied(3)) == 0.3
    assert 0.4 < acceptance.chance(modelled(0)) < 0.8 and acceptance.chance(modelled(9)) < 0.05


def test_verdict_names_the_figures() -> None:
    assert "no window" in Depth().verdict(0.5)
    assert (
        depth_with(0.0006, 0.0041).verdict(0.3)
        == "one more row costs 4.1 ms, a round 0.6 ms, a draft is right in 30%: drafting does not pay"
    )
