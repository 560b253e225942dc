"""manyhands.origin.room: how long a session waits for room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.origin.room import ANSWER_S, FULL_S, RoomWait

PATIENCE_S = 30.0


def replaces(wait: RoomWait, waited_s: float, **other: float) -> bool:
    known = {"asked_s": waited_s, "replay_s": 0.0, "late_s": 0.0, "patience_s": PATIENCE_S} | other
    return wait.replaces(waited_s, **known)


def test_a_full_hop_is_waited_for_as_long_as_its_replay_takes() -> None:
    """Some seconds at least, half of the patience at most; that, if it is short."""
    wait = RoomWait(100)
    wait.begin(100, 1.0)
    assert [replaces(wait, s) for s in (FULL_S - 0.1, FULL_S)] == [False, True]
    assert [replaces(wait, s, replay_s=7.0) for s in (6.9, 7.0)] == [False, True]
    assert [replaces(wait, s, replay_s=1e9) for s in (14.9, 15.0)] == [False, True]
    assert [replaces(wait, s, patience_s=2.0) for s in (0.9, 1.0)] == [False, True]


def test_hops_have_time_to_answer() -> None:
    """What they were asked only now, or may have answered if loops were not late, says nothing of their room."""
    wait = RoomWait(100)
    wait.begin(100, 1.0)
    assert not replaces(wait, 10.0, asked_s=ANSWER_S - 0.1) and replaces(wait, 10.0, asked_s=ANSWER_S)
    assert not replaces(wait, 10.0, asked_s=2.0, late_s=1.5)


def test_a_position_buys_what_a_step_may_take() -> None:
    """No less than hops have to answer."""
    wait = RoomWait(100)
    wait.begin(100, 1.0)
    wait.end(29.0)
    wait.begin(101, 0.1)
    assert not wait.is_over(2.0, PATIENCE_S) and wait.is_over(2.1, PATIENCE_S)
    wait.begin(105, 4.0)
    assert not wait.is_over(18.0, PATIENCE_S) and wait.is_over(18.1, PATIENCE_S)
    wait.begin(10_000, 1.0)
    assert not wait.is_over(PATIENCE_S, PATIENCE_S) and wait.is_over(PATIENCE_S + 0.1, PATIENCE_S)


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 40)), max_size=60), st.floats(0.1, 10))
def test_the_waiting_of_a_session_is_bounded(turns: list[tuple[int, float]], row_s: float) -> None:
    """By its patience and what its positions buy, whatever they come with, and it has its patience at least."""
    wait, leased, total_s = RoomWait(0), 0, 0.0
    for gained, waited_s in turns:
        leased += gained
        wait.begin(leased, row_s)
        if wait.is_over(waited_s, PATIENCE_S):
            assert total_s + waited_s >= PATIENCE_S
            break
        wait.end(waited_s)
        total_s += waited_s
        assert total_s <= PATIENCE_S + leased * max(ANSWER_S, row_s) + 1e-6


@pytest.mark.parametrize("num_waits", [1, 5])
def test_what_a_session_has_waited_before_counts(num_waits: int) -> None:
    wait = RoomWait(0)
    for _ in range(num_waits):
        wait.begin(0, 1.0)
        wait.end(FULL_S / num_waits)
    wait.begin(0, 1.0)
    assert replaces(wait, 0.1, asked_s=ANSWER_S)
