"""manyhands.worker.order: which steps follow."""

import pytest

from manyhands.errors import AnsweredEarly, ProtocolError
from manyhands.worker.order import StepOrder


def test_under_one_guess_each_step_begins_where_the_last_one_ended() -> None:
    order = StepOrder(may_begin_anew=False)
    assert order.admit(40, 8) and order.admit(48, 1)
    for position, count in ((48, 1), (40, 8), (0, 40), (47, 3)):
        assert not order.admit(position, count), "they came before"
    with pytest.raises(ProtocolError, match="50 came where 49 was due"):
        order.admit(50, 1)
    assert order.admit(49, 4)


def test_another_guess_begins_where_it_is_said_to() -> None:
    order = StepOrder(may_begin_anew=False)
    assert order.admit(0, 30)
    order.begin_guess(1, 20, 30)
    assert order.admit(20, 2) and not order.admit(20, 2) and order.admit(22, 1)


def test_the_first_step_of_a_guess_is_where_the_origin_says_whichever_comes_first() -> None:
    for position in (17, 23):
        order = StepOrder(may_begin_anew=True)
        assert order.admit(0, 30)
        order.begin_guess(1, 20, 30)
        order.confirm(1, 20)
        with pytest.raises(ProtocolError, match=f"{position} came where 20 was due"):
            order.admit(position, 2)
        order.begin_guess(2, position, 30)
        assert order.admit(position, 2)
        order.confirm(1, 20)  # an older one
        with pytest.raises(ProtocolError, match=f"guess 2 began with a step at position {position}, not 20"):
            order.confirm(2, 20)


def test_a_guess_that_begins_behind_what_is_computed_was_answered_early() -> None:
    order = StepOrder(may_begin_anew=False)
    assert order.admit(0, 30)
    order.begin_guess(1, 20, 20)
    order.confirm(1, 20)
    order.begin_guess(2, 20, 19)
    with pytest.raises(AnsweredEarly, match="up to 20, of which this hop had computed 19"):
        order.confirm(2, 20)
    for guess in range(3, 9):
        order.begin_guess(guess, 10**9, 0)
        order.confirm(guess, 10**9)  # is said once


def test_a_session_that_goes_on_with_less_than_was_known_begins_anew() -> None:
    """At an earlier position than it began, each time; not at the same."""
    order = StepOrder(may_begin_anew=True)
    assert order.admit(40, 8) and order.admit(33, 8)
    assert not order.admit(33, 8) and not order.admit(40, 1)
    assert order.admit(41, 8)


def test_rows_that_come_again_in_place_of_those_that_are_due_are_told_of() -> None:
    order = StepOrder(may_begin_anew=False)
    assert order.admit(0, 8) and order.repeated() is None
    assert not order.admit(0, 8)
    assert "none where 8 is due" in str(order.repeated())
    assert order.admit(8, 1) and order.repeated() is None, "the one that was due has come"
    assert not order.admit(0, 8)
    order.begin_guess(1, 4, 9)
    assert order.repeated() is None, "of an older guess"
