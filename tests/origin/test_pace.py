"""manyhands.origin.pace: how long is too long, and when a slow hop is worth a replay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.config import RequestConfig
from manyhands.origin.pace import LATE_S, MAX_WAIT_S, PAYS, SLACK, HeldStep, Pace, Thrift, held_step, replay_s
from manyhands.wire.message import Progress
from tests.worker.hop import session_id


def test_a_step_is_overdue_after_ten_usual_ones() -> None:
    """Never before the floor, never after the deadline of a prefill; before anything is known, that deadline."""
    pace = Pace(RequestConfig(step_floor_s=1.0, overdue_factor=10.0, prefill_overdue_s=15.0))
    assert pace.deadline_s(is_prefill=False) == pace.deadline_s(is_prefill=True) == 15.0
    pace.note(0.02)
    assert pace.deadline_s(is_prefill=False) == 1.0
    for _ in range(40):
        pace.note(0.5)
    assert (pace.deadline_s(is_prefill=False), pace.deadline_s(is_prefill=True)) == (5.0, 15.0)
    for _ in range(40):
        pace.note(9.0)
    assert pace.deadline_s(is_prefill=False) == 15.0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=80))
def test_one_slow_step_does_not_make_the_next_deadline(seconds: list[float]) -> None:
    """The median decides: between the floor and the prefill's deadline, whatever a few steps took."""
    config = RequestConfig()
    pace = Pace(config)
    for s in [*seconds, *[0.01] * 17]:
        pace.note(s)
    assert pace.deadline_s(is_prefill=False) == config.step_floor_s


def test_hn_48_steps_that_are_slow_from_the_first_are_compared_with_what_the_hops_state() -> None:
    """What is stated bounds what may become usual; where a step is usually faster than stated, that decides."""
    stated = [0.1]
    pace = Pace(RequestConfig(step_floor_s=1.0, overdue_factor=10.0, prefill_overdue_s=15.0), lambda: stated[0])
    assert pace.deadline_s(is_prefill=False) == pytest.approx(10 * SLACK * 0.1), "known before the first step"
    assert pace.deadline_s(is_prefill=True) == 15.0
    for _ in range(40):
        pace.note(5.0)
    assert pace.usual_s == pytest.approx(SLACK * 0.1) and pace.deadline_s(is_prefill=False) == pytest.approx(3.0)
    stated[0] = 0.001
    assert pace.deadline_s(is_prefill=False) == 1.0, "never before the floor"
    stated[0] = 60.0
    assert pace.usual_s == 5.0 and pace.deadline_s(is_prefill=False) == 15.0
    for _ in range(40):
        pace.note(0.2)
    assert pace.deadline_s(is_prefill=False) == pytest.approx(2.0)


# -- thrift -----------------------------------------------------------------------------------------------------------

SLOW, SILENT = HeldStep(1, is_silent=False, computed={1: 7}), HeldStep(1, is_silent=True)


def worth(thrift: Thrift, holdup: HeldStep, waited_s: float, **known: float) -> bool:
    """After a wait at position 50 and time 0, unless `committed`, `now`, `replay_s` or `late_s` say otherwise."""
    known = {"committed": 50, "now": 0.0, "replay_s": 0.0, "late_s": 0.0, **known}
    return thrift.is_worth(holdup, int(known.pop("committed")), known.pop("now"), waited_s=waited_s, **known)


def test_a_silent_hop_among_machines_that_have_time_is_replaced_whatever_a_replay_costs() -> None:
    thrift = Thrift(60.0)
    for _ in range(8):
        thrift.replaced(0, 0.0, 100.0)
    assert worth(thrift, SILENT, waited_s=1.5, replay_s=60.0)


def test_a_silent_hop_among_busy_machines_has_the_patience_of_the_watch() -> None:
    assert not worth(Thrift(60.0), SILENT, waited_s=9.9, late_s=1.0)
    assert worth(Thrift(60.0), SILENT, waited_s=10.0, late_s=1.0)
    assert worth(Thrift(60.0), SILENT, waited_s=1.0, late_s=LATE_S / 2)


def test_a_slow_hop_is_replaced_once_the_wait_has_cost_as_much_as_the_replay() -> None:
    assert not worth(Thrift(60.0), SLOW, waited_s=1.5, replay_s=4.0)
    assert worth(Thrift(60.0), SLOW, waited_s=4.0, replay_s=4.0)
    assert worth(Thrift(60.0), SLOW, waited_s=1.0), "where a replay costs nothing, at once"


def test_a_hop_that_gets_on_is_not_replaced() -> None:
    thrift = Thrift(60.0)
    for computed in range(7, 20):
        assert worth(thrift, HeldStep(1, is_silent=False, computed={1: computed}), waited_s=20.0) == (computed == 7)
    assert worth(thrift, HeldStep(1, is_silent=False, computed={1: 19}), waited_s=20.0)
    assert worth(thrift, HeldStep(1, is_silent=False, computed={1: 20}), waited_s=60.0), "by its own word alone"


def test_a_hop_is_not_replaced_while_another_gets_on() -> None:
    """One that waits for the hops before it to replay, say. One whose answer did not come has not got on by that."""
    thrift = Thrift(60.0)
    for computed in range(7, 20):
        held = HeldStep(2, is_silent=False, computed={0: 3, 1: computed, 2: 0})
        assert worth(thrift, held, waited_s=20.0) == (computed == 7)
    assert worth(thrift, HeldStep(2, is_silent=False, computed={0: 3, 2: 0}), waited_s=20.0)
    assert worth(thrift, HeldStep(2, is_silent=False, computed={0: 3, 1: 90, 2: 0}), waited_s=20.0)


def test_what_has_not_left_for_hop_0_is_not_computed_whatever_it_says() -> None:
    said = {0: Progress(session_id(1), 1, 0, 9, 9, 0), 1: Progress(session_id(1), 1, 1, 0, 0, 0)}
    held = held_step(said, 2, 9, 4)
    assert (held.hop, held.computed) == (0, {0: 4, 1: 0})


@pytest.mark.parametrize(
    ("said", "hop"),
    [
        ([(9, 9), (9, 8), (8, 8)], 1),
        ([(9, 4), (4, 2), (0, 0)], 1),  # hop 0 waits for credits of hop 1
        ([(9, 4), None, (0, 0)], 1),
        ([(9, 0), (9, 0), (9, 4)], 2),
        ([(9, 0), (9, 0), None], 2),
        ([(8, 8), (8, 8), (8, 8)], 0),  # the last step has not come to hop 0
        ([(9, 9), (8, 8), (8, 8)], 1),
        ([(9, 9), None, (8, 8)], 1),
        ([None, (9, 8), (8, 8)], 1),
        ([(9, 8), (8, 8), None], 0),
        ([(9, 9), (9, 9), None], 2),
        ([(9, 9), (9, 9), (9, 9)], 2),
        ([None, None, None], 0),
    ],
)
def test_the_last_hop_with_rows_to_compute_holds_a_step_up(said: list[tuple[int, int] | None], hop: int) -> None:
    """Of three, of which some say what they have received and computed. Up to position 9 was sent."""
    progress = {i: Progress(session_id(1), 1, i, *counts, 0) for i, counts in enumerate(said) if counts is not None}
    held = held_step(progress, 3, 9, 9)
    assert (held.hop, held.is_silent, held.is_done) == (hop, said[hop] is None, said == [(9, 9)] * 3)
    assert held.computed == {i: counts[1] for i, counts in enumerate(said) if counts is not None}


def test_lateness_makes_a_slow_hop_no_culprit() -> None:
    assert not worth(Thrift(60.0), SLOW, waited_s=5.0, late_s=1.0)
    assert worth(Thrift(60.0), SLOW, waited_s=10.0, late_s=1.0)


def test_a_storm_ends_by_itself() -> None:
    """Every step of every node is overdue: in ten minutes of it a session is repaired a dozen or two times, not 300."""
    thrift, now, waited_s, repairs = Thrift(60.0), 0.0, 0.0, list[float]()
    while now < 600.0:
        now, waited_s = now + 1.0, waited_s + 1.0
        if worth(thrift, SLOW, waited_s, replay_s=1.0, now=now):
            thrift.replaced(0, now, waited_s + 1.0)
            repairs.append(now)
            now, waited_s = now + 1.0, 0.0
    assert 4 <= len(repairs) <= 30
    assert max(sum(begin <= at < begin + 60 for at in repairs) for begin in repairs) <= 6
    assert worth(thrift, SLOW, MAX_WAIT_S, replay_s=500.0), "in the end it is replaced all the same"


def test_a_second_slow_hop_at_one_position_is_given_the_time_of_its_replay() -> None:
    thrift = Thrift(60.0)
    thrift.replaced(50, 0.0, 1.0)
    assert not worth(thrift, SLOW, waited_s=MAX_WAIT_S - 1) and worth(thrift, SLOW, waited_s=MAX_WAIT_S)
    assert worth(thrift, SILENT, waited_s=1.0) and worth(thrift, SLOW, waited_s=2.0, committed=51)


def test_a_replacement_that_paid_is_not_held_against_the_next() -> None:
    thrift = Thrift(60.0)
    for _ in range(6):
        thrift.replaced(0, 0.0, 2.0)
    assert not worth(thrift, SLOW, waited_s=2.0, now=PAYS * 2.0 - 1)
    assert worth(thrift, SLOW, waited_s=2.0, now=PAYS * 2.0)


def test_what_a_replay_costs_grows_with_the_text() -> None:
    assert replay_s(0, 0.1) == 0.0 and replay_s(1200, 0.1) == pytest.approx(10.0)


def test_a_probe_waits_longer_where_loops_are_late_and_not_for_ever() -> None:
    assert Thrift.probe_s(0.5, 0.0) == 0.5 and 0.5 < Thrift.probe_s(0.5, 9.0) <= 2.0


def test_the_usual_step_is_the_median() -> None:
    pace = Pace(RequestConfig())
    assert pace.usual_s == 0.0
    for seconds in (0.1, 0.2, 9.0):
        pace.note(seconds)
    assert pace.usual_s == 0.2
