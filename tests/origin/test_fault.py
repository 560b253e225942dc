"""manyhands.origin.fault: who is at fault, which hop is untrusted, and when the session is over."""

from types import SimpleNamespace
from typing import cast

import pytest

from manyhands.core import ORIGIN_HOP, SessionId
from manyhands.errors import BadRequest, Corruption, LinkClosed, PipelineAborted, ProtocolError, ShardUnavailable
from manyhands.net.transport import Link
from manyhands.origin.fault import Verdict, judge
from manyhands.origin.route import Hop
from manyhands.wire.message import Fault
from tests.route.test_search import offer

HOPS = [
    Hop(offer(name, at, at + 4), cast(Link, SimpleNamespace()), None, 16) for name, at in (("a", 0), ("b", 4), ("c", 8))
]


def verdict(code: str, hop: int, blame: int | None, *, is_running: bool = True) -> Verdict:
    return judge(Fault(SessionId(bytes(16)), 1, hop, code, "so it is", blame), HOPS, is_running=is_running)


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
def test_only_who_is_blamed_for_nonsense_lied(code: str, untrusted: bool) -> None:
    assert verdict(code, 1, 0).untrusted is untrusted and not verdict(code, 1, None).untrusted


@pytest.mark.parametrize(
    ("code", "is_running", "kind"),
    [
        (ShardUnavailable.code, False, ShardUnavailable),
        (LinkClosed.code, False, PipelineAborted),
        (BadRequest.code, True, BadRequest),
    ],
)
def test_a_refusal_to_open_and_a_bad_request_end_the_session(
    code: str, is_running: bool, kind: type[Exception]
) -> None:
    refusal = verdict(code, 1, None, is_running=is_running).refusal
    assert type(refusal) is kind and str(refusal) == "hop 1 (b): so it is"
    assert refusal is not None and refusal.node == HOPS[1].offer.node


def test_a_running_hop_in_trouble_is_replaced() -> None:
    assert verdict(ShardUnavailable.code, 1, None) == Verdict(1, False, None)


def test_the_first_hop_may_blame_the_origin() -> None:
    """No repair helps against that; another hop does not hear from the origin (in a ring)."""
    assert str(verdict(ProtocolError.code, 0, ORIGIN_HOP).refusal) == "the origin: so it is"
    assert verdict(ProtocolError.code, 1, ORIGIN_HOP) == Verdict(1, True, None)
