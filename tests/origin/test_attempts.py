"""manyhands.origin.attempts: which nodes a request asks no more, whatever they answer."""

import pytest

from manyhands.core import NodeId
from manyhands.errors import Apart, BadRequest, Busy, ManyhandsError, ModelError, ShardUnavailable, Unanswered
from manyhands.origin.attempts import MAX_BLAMING, MAX_RINGS, Attempts
from tests.route.test_policies import offer

ROUTE = [offer("a", 0, 4), offer("b", 4, 8), offer("c", 8, 12)]


def of(kind: type[ManyhandsError], node: str, told_by: str | None = None) -> ManyhandsError:
    refusal = kind("no")
    refusal.node, refusal.told_by = node, told_by
    return refusal


def test_what_no_node_said_is_raised() -> None:
    error = ShardUnavailable("nowhere")
    with pytest.raises(ShardUnavailable) as raised:
        Attempts().refused(ROUTE, error, is_ring=True)
    assert raised.value is error


def test_a_full_node_is_passed_over_and_not_doubted() -> None:
    attempts = Attempts()
    assert attempts.refused(ROUTE, of(Busy, "a"), is_ring=True) == set()
    assert attempts.refused(ROUTE, of(ShardUnavailable, "b"), is_ring=True) == {"b"}
    assert attempts.excluded == {"a", "b"}
    assert isinstance(attempts.reason(of(ShardUnavailable, "b")), Busy), "that changes"


def test_silent_nodes_are_asked_again_and_given_all_the_time_where_there_are_no_others() -> None:
    attempts, silent = Attempts(), Unanswered("hops 0, 2 did not answer", [0, 2])
    assert attempts.refused(ROUTE, silent, is_ring=True) == {"a", "c"} == attempts.excluded
    assert attempts.is_again() and attempts.is_patient and not attempts.excluded
    attempts.refused(ROUTE, silent, is_ring=True)
    assert not attempts.is_again() and attempts.reason(silent) is silent


def test_after_a_few_rings_a_star() -> None:
    attempts = Attempts()
    for _ in range(MAX_RINGS):
        assert not attempts.is_star
        assert attempts.refused(ROUTE, of(Apart, "b", "a"), is_ring=True) == set()
    assert attempts.is_star and not attempts.excluded
    attempts.refused(ROUTE, of(Apart, "b", "a"), is_ring=False)
    assert attempts.excluded == {"b"}, "in a star no hop dials another"


def test_who_blames_two_is_left_out_and_they_are_asked_again() -> None:
    attempts = Attempts()
    assert attempts.refused(ROUTE, of(ShardUnavailable, "b", "a"), is_ring=True) == set()
    assert attempts.excluded == {"b"}
    attempts.refused(ROUTE, of(ShardUnavailable, "c", "a"), is_ring=True)
    assert attempts.excluded == {"a"}
    assert attempts.is_again() and attempts.excluded == {"b", "c"}, "unless no other node has its layers"
    attempts.refused(ROUTE, of(ShardUnavailable, "d", "a"), is_ring=True)
    assert attempts.excluded == {"b", "c", "d"} and not attempts.is_again()


@pytest.mark.parametrize("kind", [BadRequest, ModelError])
def test_a_request_is_at_fault_where_some_nodes_say_so(kind: type[ManyhandsError]) -> None:
    attempts = Attempts()
    for number in range(MAX_BLAMING - 1):
        assert attempts.refused(ROUTE, of(kind, f"n{number}"), is_ring=True) == set()
    assert attempts.opened() == attempts.excluded == {NodeId(f"n{i}") for i in range(MAX_BLAMING - 1)}
    with pytest.raises(kind):
        attempts.refused(ROUTE, of(kind, "last"), is_ring=True)
