"""What all links of a transport hold is bounded, and an honest one keeps its link while others take all they can."""

import asyncio
import dataclasses
import tracemalloc
from typing import Any

import pytest

from manyhands.core import MAX_BIASES, NodeId
from manyhands.errors import LinkClosed
from manyhands.net.inbox import JSON_BYTES
from manyhands.net.link import FramedLink, Handshake
from manyhands.net.memory import MemoryNetwork, MemoryTransport
from manyhands.net.shares import RECEIVED_BYTES, Budget, Shares
from manyhands.net.unread import MUCH_UNSENT
from manyhands.wire import control
from manyhands.wire.frame import encode
from manyhands.wire.header import HEADER_BYTES, MAX_STEP_BODY
from manyhands.wire.message import Lane, Message, Open, Step
from tests.net.links import ANYWHERE, A, B, receive, says, step, until
from tests.net.test_link import Slow
from tests.wire.messages import CONTROL, hello

SMALL = 64 << 20  # for all links of a test


class Holder:
    """Holds what a test says."""

    def __init__(self, peer: str, num_bytes: int = 0) -> None:
        self.peer, self.num_bytes = NodeId(peer), num_bytes

    def num_received(self) -> int:
        return self.num_bytes

    def num_unsent(self) -> int:
        return self.num_bytes

    def abort(self, reason: str) -> None:
        raise AssertionError("note does not close")


def test_json_takes_no_more_memory_than_is_counted() -> None:
    """Of all frames an Open with as many biases as it may have takes the most for its bytes."""
    usual = next(message for message in CONTROL if isinstance(message, Open) and message.sampling is not None)
    assert usual.sampling is not None
    biases = tuple((1000 + number, 1.0) for number in range(MAX_BIASES))
    body = control.encode(
        dataclasses.replace(usual, sampling=dataclasses.replace(usual.sampling, logit_bias=biases))
    ).replace(b"1.0]", b"9]")
    control.decode(Open, body)
    tracemalloc.start()
    kept = control.decode(Open, body)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept.sampling is not None and len(kept.sampling.logit_bias) == MAX_BIASES
    assert JSON_BYTES / 2 < taken / (len(body) + HEADER_BYTES) <= JSON_BYTES


def budget(limit: int) -> Budget:
    return Budget(limit, lambda link: link.num_received())


def test_the_peer_with_the_most_loses_its_largest_link() -> None:
    shared = budget(100)
    one, two, large, honest = Holder("x", 40), Holder("x", 20), Holder("y", 40), Holder("z", 1)
    assert [shared.note(each, each.num_bytes) for each in (one, two, large)] == [None, None, None]
    assert shared.total == 100
    assert shared.note(honest, 1) is one and shared.total == 61, "x holds 60 with two links, y 40 with one"
    assert shared.note(honest, 41) is None or shared.total <= 100


def test_what_has_become_less_is_found_before_a_link_is_closed() -> None:
    shared = budget(100)
    drained, other = Holder("x", 90), Holder("y", 30)
    shared.note(drained, 90)
    drained.num_bytes = 10
    assert shared.note(other, 30) is None and shared.total == 40


def test_a_link_that_holds_nothing_is_not_kept() -> None:
    shared = budget(100)
    holder = Holder("x", 5)
    shared.note(holder, 5)
    assert "1 links" in repr(shared)
    shared.note(holder, 0)
    assert repr(shared) == "<Budget 0 of 100 bytes, 0 links>"


class Idle(Slow):
    """Sends nothing, and may be told not to read."""

    def pause_reading(self) -> None:
        pass


def by_hand(peer: str, shares: Shares, lane: Lane = "data") -> FramedLink:
    """A greeted link whose reads the test makes itself."""
    transport = Idle(0.0)
    link = FramedLink(Handshake(says("x"), lambda _: NodeId(peer), lambda: 0.0, lane, shares))
    transport.set_protocol(link)
    link.connection_made(transport)
    feed(link, encoded(hello(lane)))
    return link


def encoded(message: Message) -> bytes:
    return b"".join(bytes(part) for part in encode(message))


def feed(link: FramedLink, data: bytes) -> None:
    """As many reads as `data` takes."""
    view = memoryview(data)
    while len(view) and not link.is_closed:
        buffer = link.get_buffer(-1)
        num_bytes = min(len(buffer), len(view))
        buffer[:num_bytes] = view[:num_bytes]
        link.buffer_updated(num_bytes)
        view = view[num_bytes:]


def test_bodies_that_are_declared_and_not_sent_are_bounded_for_all_links() -> None:
    """A header of 72 bytes took 8 MiB of each link: 2 GiB of a node's 256."""

    async def main() -> None:
        shares = Shares(received=budget(SMALL))
        taken: list[Any] = []
        honest = by_hand("honest", shares)
        delivering = asyncio.create_task(honest.deliver(taken.append))
        await asyncio.sleep(0)
        frame = encoded(step(1, num_bytes=1 << 20))
        feed(honest, frame[: len(frame) // 2])
        largest = encoded(step(0, num_bytes=MAX_STEP_BODY))
        hostile = [by_hand(f"peer {number % 10}", shares) for number in range(40)]
        for link in hostile:
            feed(link, largest[:HEADER_BYTES])
            assert 0 < shares.received.total <= SMALL
        alive = [link for link in hostile if not link.is_closed]
        assert len(alive) == SMALL // MAX_STEP_BODY - 1, "and the honest one's"
        assert not any(link._reader.num_open for link in hostile if link.is_closed), "freed"
        feed(honest, frame[len(frame) // 2 :])
        assert len(taken) == 1 and not honest.is_closed
        for link in alive:
            link.abort("the test is over")
        assert shares.received.total == 0
        delivering.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["rows", "JSON"])
def test_messages_that_nothing_takes_are_bounded_for_all_links(kind: str) -> None:
    """Each link pauses at its own limit; many links together had none."""

    async def main() -> None:
        shares = Shares(received=budget(SMALL))
        lane: Lane = "data" if kind == "rows" else "control"
        largest = max(CONTROL, key=lambda message: len(encoded(message)))
        message = encoded(step(0, num_bytes=1 << 20) if kind == "rows" else largest)
        size = 1 << 20 if kind == "rows" else JSON_BYTES * len(message)
        links = [by_hand(f"peer {number}", shares, lane) for number in range(200)]
        for link in links:
            for _ in range(50):
                if link._is_reading:
                    feed(link, message)
            assert shares.received.total <= SMALL
        held = sum(link.num_received() for link in links if not link.is_closed)
        assert SMALL - 50 * size < held == shares.received.total <= SMALL

    asyncio.run(main())


def test_what_waits_to_be_sent_is_bounded_for_all_links() -> None:
    """The link with the most goes, also while another is written to."""

    async def main() -> None:
        shares = Shares(unsent=Budget(2 * MUCH_UNSENT, lambda link: link.num_unsent()))
        links = [by_hand(f"peer {number}", shares) for number in range(10)]
        for link in links:
            link.pause_writing()
        for number in range(60):
            for link in links:
                if not link.is_closed:
                    link.send(step(number, num_bytes=1 << 20))
                waiting = sum(each.num_unsent() for each in links if not each.is_closed)
                assert waiting <= 2 * MUCH_UNSENT + (1 << 20)
        assert [link.is_closed for link in links].count(False) == 2 * MUCH_UNSENT // (60 << 20)
        with pytest.raises(LinkClosed, match="the links of this node hold more than 134217728 bytes"):
            next(link for link in links if link.is_closed).send(step(0))

    asyncio.run(main())


def test_a_node_holds_no_more_than_its_share_over_real_links() -> None:
    """Ten keys with four data links each declare 8 MiB on each; the honest link goes on."""

    async def main() -> None:
        network = MemoryNetwork()
        node = MemoryTransport(network, B, says("b"))
        addr = await node.listen(ANYWHERE)
        largest = encoded(step(0, num_bytes=MAX_STEP_BODY))
        callers = [MemoryTransport(network, NodeId(f"{number:064x}"), says("x")) for number in range(10)]
        near = await MemoryTransport(network, A, says("a")).dial(addr, "data")
        far = await node.accept()
        flood = [await caller.dial(addr, "data") for caller in callers for _ in range(4)]
        theirs = [await node.accept() for _ in flood]
        for link in flood:
            assert link._transport is not None
            link._transport.write(largest[: HEADER_BYTES + 1000])
        await until(lambda: sum(link.is_closed for link in theirs) == len(flood) - RECEIVED_BYTES // MAX_STEP_BODY)
        near.send(step(7, num_bytes=1 << 20))
        message = await receive(far)
        assert isinstance(message, Step) and message.position == 7
        for each in (near, far, *flood, *theirs):
            await each.aclose()

    asyncio.run(main())
