"""What may come before its Open, and no more."""

from typing import cast

from manyhands.core import NodeId, SessionId
from manyhands.net.transport import Link
from manyhands.wire.message import Payload, Step
from manyhands.wire.timings import MAX_TIMINGS, TIMING
from manyhands.worker.early import (
    EARLY_BYTES,
    LINK_BYTES,
    LINK_SESSIONS,
    MAX_DROPPED,
    MAX_ENDED,
    NODE_BYTES,
    EarlySteps,
    Unopened,
)
from tests.worker.hop import BEFORE, Notes, opening, session_id, step


def rows(number: int, num_bytes: int = 128, **changes: object) -> Step:
    return step(number, 0, None, count=1, payload=Payload("bf16", 64, bytes(num_bytes)), **changes)


def link(peer: NodeId = BEFORE) -> Link:
    return cast(Link, Notes(peer))


def test_a_session_has_its_steps_in_order_and_on_their_links() -> None:
    early, one, two = Unopened(), link(), link(NodeId("another"))
    first, second = rows(1), rows(1)._replace(position=1)
    for each, way in ((rows(1), two), (first, one), (rows(2), one), (second, one)):
        assert early.hold(each, way)
    assert early.take(opening(1)).steps == [(first, one), (second, one)]
    assert early.take(opening(1)).steps == []  # also those of another peer are gone
    assert len(early.take(opening(2)).steps) == 1


def test_what_comes_on_a_lost_link_or_for_another_hop_or_epoch_is_not_kept() -> None:
    early, way = Unopened(), link()
    assert not early.hold(rows(1, epoch=2), way)
    early.hold(rows(1, hop=2), way)
    assert early.take(opening(1)).steps == []
    early.hold(rows(1), way)
    early.drop(way)
    assert early.take(opening(1)).steps == []


def test_what_comes_late_is_not_kept_for_long_or_at_all() -> None:
    """Windows in flight reach a hop after the Close: kept, they would fill the place of what comes early."""
    early, way = Unopened(), link()
    early.hold(rows(1), way)
    early.hold(rows(2), way)
    early.end(session_id(1))
    assert early.take(opening(1)).steps == [] and not early.hold(rows(1), way)
    assert early.take(opening(2)).steps
    for number in range(3, 3 + MAX_ENDED):
        early.end(session_id(number))
    assert early.hold(rows(1), way) and not early.hold(rows(3), way)  # so many are known, no more


def test_one_link_holds_a_bounded_number_of_sessions_the_oldest_go() -> None:
    early, hostile, honest = Unopened(), link(), link(NodeId("honest"))
    early.hold(rows(9), honest)
    for number in range(100_000):
        early.hold(rows(1000 + number), hostile)
    held = [number for number in range(100_000) if early.take(opening(1000 + number)).steps]
    assert held == list(range(100_000 - LINK_SESSIONS, 100_000))
    assert early.take(opening(9, predecessor=NodeId("honest"))).steps


def test_one_link_holds_a_bounded_number_of_bytes_the_oldest_go() -> None:
    early, hostile = Unopened(), link()
    for number in range(100):
        early.hold(rows(number, EARLY_BYTES * 3 // 4), hostile)
    held = [number for number in range(100) if early.take(opening(number)).steps]
    assert held == list(range(100 - len(held), 100))
    assert LINK_BYTES - EARLY_BYTES < len(held) * EARLY_BYTES * 3 // 4 <= LINK_BYTES


def test_all_links_hold_a_bounded_number_of_bytes_those_with_the_most_lose_theirs() -> None:
    """Each of 256 links could hold 8 MiB."""
    early, honest = Unopened(), link(NodeId("honest"))
    early.hold(rows(9), honest)
    size = EARLY_BYTES * 3 // 4
    each = LINK_BYTES // EARLY_BYTES
    floods = [link(NodeId(f"peer {number}")) for number in range(20)]
    for number, flood in enumerate(floods):
        for session in range(each):
            early.hold(rows(100 + each * number + session, size), flood)
    openings = [opening(100 + each * n + s, predecessor=f.peer) for n, f in enumerate(floods) for s in range(each)]
    held = sum(len(early.take(message).steps) for message in openings)
    assert NODE_BYTES - EARLY_BYTES < held * size <= NODE_BYTES
    assert early.take(opening(9, predecessor=NodeId("honest"))).steps
    assert early._num_bytes == 0


def test_what_was_dropped_is_known_as_such_and_not_begun_again_in_the_middle() -> None:
    """Its origin waited for 15 s, or for 60 s and in vain: it had sent those rows, and sends them once."""
    early, way = Unopened(), link()
    for number in range(LINK_SESSIONS + 1):
        early.hold(rows(number), way)
    assert early.hold(rows(0)._replace(position=1), way)
    gone = early.take(opening(0))
    assert gone.is_short and not gone.steps
    assert not early.take(opening(1)).is_short, "it is the oldest now, and still here"
    assert not early.take(opening(0, epoch=2)).is_short, "a repair sends again what it needs"
    for number in range(LINK_SESSIONS + 1, LINK_SESSIONS + MAX_DROPPED + 2):
        early.hold(rows(number), way)
    assert not early.take(opening(0)).is_short and early.take(opening(LINK_SESSIONS + 1)).is_short  # no more are known


def test_what_others_send_for_a_session_drops_nothing_of_its_predecessor() -> None:
    """A hop that knows the id: more than is held of one session, on a link of its own, or of so many that its oldest go."""
    early, way, hostile = Unopened(), link(), link(NodeId("another hop"))
    early.hold(rows(1), way)
    early.hold(rows(2), hostile)
    for _ in range(3):
        early.hold(rows(1, EARLY_BYTES * 3 // 4), hostile)
    for number in range(100, 100 + LINK_SESSIONS + 8):
        early.hold(rows(number), hostile)
    early.hold(rows(1)._replace(position=1), way)
    early.hold(rows(2), way)
    for number, count in ((1, 2), (2, 1)):
        taken = early.take(opening(number))
        assert len(taken.steps) == count and not taken.is_short
    for number in range(100, 100 + LINK_SESSIONS):
        early.hold(rows(number), way)
    early.hold(rows(10_000), way)
    for number in range(20_000, 20_000 + LINK_SESSIONS + MAX_DROPPED + 10):
        early.hold(rows(number), hostile)
    assert early.take(opening(100)).is_short, "what this link has lost stays known, whatever others lose"


class Compared(bytes):
    """A session id that counts with how many others it is compared."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return super().__eq__(other)

    __hash__ = bytes.__hash__


def test_a_close_does_not_look_at_what_others_have_sent() -> None:
    """With 256 links full of early steps, which a member with as many keys can have, each Close took 3 ms of the event loop."""
    early, ways = Unopened(), [link() for _ in range(4)]
    for number in range(4 * LINK_SESSIONS):
        early.hold(rows(number), ways[number % 4])
    for number in (1, 10**9):
        early.end(SessionId(Compared(session_id(number))))
    assert Compared.times < 16
    assert not early.take(opening(1)).steps and early.take(opening(2)).steps


def test_the_bytes_of_a_link_are_free_again_when_its_sessions_are_taken_or_end() -> None:
    early, way = Unopened(), link()
    for turn in range(4):
        first = 1000 * turn
        for number in range(first, first + LINK_BYTES // EARLY_BYTES):
            assert early.hold(rows(number, EARLY_BYTES * 3 // 4), way)
        for number in range(first, first + LINK_BYTES // EARLY_BYTES, 2):
            assert early.take(opening(number)).steps
            early.end(session_id(number + 1))


def test_one_session_holds_a_bounded_number_of_bytes() -> None:
    most = bytes(MAX_TIMINGS * TIMING.size)
    for size, ids, timings in (
        (EARLY_BYTES // 4, None, b""),
        (0, None, b""),
        (0, (1,) * 1000, b""),
        (0, None, most),
    ):
        early = EarlySteps()
        for _ in range(10_000):
            early.add(rows(1, size)._replace(ids=ids, timings=timings), link())
        held = sum(
            len(each.payload.data) + 28 * len(each.ids or ()) + 2 * len(each.timings) + 700
            for each, _ in early.steps
            if each.payload
        )
        assert early.is_short and early.steps and held <= EARLY_BYTES and len(early.steps) <= EARLY_BYTES // 1024


def test_a_step_larger_than_that_is_dropped_whole() -> None:
    early = EarlySteps()
    early.add(rows(1, EARLY_BYTES), link())
    assert early.steps == []


def test_a_name_is_a_session_and_a_hop() -> None:
    early = Unopened()
    early.hold(rows(1, session=SessionId(bytes(16))), link())
    assert early.take(opening(1)).steps == [] and session_id(1) != bytes(16)
