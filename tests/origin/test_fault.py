"""manyhands.origin.fault: who is at fault, which hop is untrusted, and when the session is over."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from manyhands.core import ORIGIN_HOP, SessionId
from manyhands.errors import BadRequest, Corruption, LinkClosed, PipelineAborted, ProtocolError, ShardUnavailable
from manyhands.net.transport import Link
from manyhands.origin.fault import Told, Verdict, judge
from manyhands.origin.route import Hop
from manyhands.wire.message import Fault
from tests.route.test_search import offer

HOPS = [
    Hop(offer(name, at, at + 4), cast(Link, SimpleNamespace()), None, 16) for name, at in (("a", 0), ("b", 4), ("c", 8))
]


def verdict(code: str, hop: int, blame: int | None, *, is_running: bool = True, told: Told | None = None) -> Verdict:
    fault = Fault(SessionId(bytes(16)), 1, hop, code, "so it is", blame)
    return judge(fault, HOPS, told or Told(), is_running=is_running)


@pytest.mark.parametrize(
    ("hop", "blame", "at_fault"), [(0, 1, 1), (1, 0, 0), (1, 2, 2), (2, 0, 2), (0, 2, 0), (2, 9, 2)]
)
def test_a_hop_may_blame_its_neighbours_and_no_others(hop: int, blame: int, at_fault: int) -> None:
    """Whom it cannot know of it cannot blame: that falls on itself, be it open or not."""
    for is_running in (True, False):
        assert verdict(LinkClosed.code, hop, blame, is_running=is_running) == Verdict(at_fault, False, None)


@pytest.mark.parametrize(
    ("code", "untrusted"), [(Corruption.code, True), (ProtocolError.code, True), (LinkClosed.code, False)]
)
def test_only_a_hop_blamed_for_wrong_rows_is_untrusted(code: str, untrusted: bool) -> None:
    assert verdict(code, 1, 0).untrusted is untrusted and not verdict(code, 1, None).untrusted


@pytest.mark.parametrize(
    ("code", "kind"),
    [(ShardUnavailable.code, ShardUnavailable), (LinkClosed.code, PipelineAborted), (BadRequest.code, BadRequest)],
)
def test_a_refusal_to_open_ends_the_session(code: str, kind: type[Exception]) -> None:
    refusal = verdict(code, 1, None, is_running=False).refusal
    assert type(refusal) is kind and str(refusal) == "hop 1 (b): so it is"
    assert refusal is not None and refusal.node == HOPS[1].offer.node


def test_a_running_request_that_one_node_calls_faulty_goes_on_without_it() -> None:
    """The second node that says so is believed."""
    told = Told()
    assert verdict(BadRequest.code, 1, None, told=told) == Verdict(1, False, None)
    assert verdict(BadRequest.code, 1, None, told=told).refusal is None, "the same node"
    refusal = verdict(BadRequest.code, 2, None, told=told).refusal
    assert type(refusal) is BadRequest and str(refusal) == "hop 2 (c): so it is"


def test_a_running_hop_in_trouble_is_replaced() -> None:
    assert verdict(ShardUnavailable.code, 1, None) == Verdict(1, False, None)


def test_the_first_hop_may_blame_the_origin() -> None:
    """It is replaced; what a second one says is true. Another hop does not hear from the origin (in a ring)."""
    told = Told()
    assert verdict(ProtocolError.code, 0, ORIGIN_HOP, told=told) == Verdict(0, False, None)
    assert [str(word) for word in told.faulty.values()] == ["the origin: so it is"]
    others = [replace(HOPS[0], offer=offer("d", 0, 4)), *HOPS[1:]]
    fault = Fault(SessionId(bytes(16)), 1, 0, ProtocolError.code, "so it is", ORIGIN_HOP)
    assert str(judge(fault, others, told, is_running=True).refusal) == "the origin: so it is"
    assert verdict(ProtocolError.code, 0, ORIGIN_HOP, is_running=False).refusal is not None
    assert verdict(ProtocolError.code, 1, ORIGIN_HOP) == Verdict(1, True, None)


def test_who_blamed_a_node_is_known() -> None:
    told = Told()
    verdict(LinkClosed.code, 0, 1, told=told)
    verdict(LinkClosed.code, 2, None, told=told)
    assert told.by == {HOPS[1].offer.node: HOPS[0].offer.node}
