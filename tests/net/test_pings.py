"""A flood of Pings: they are taken before all else and fill no queue, so they have a bound of their own."""

import asyncio

import pytest

from manyhands.net.pings import ANSWERED, BURST, PER_S, PingBudget
from manyhands.wire.frame import SCRATCH_BYTES, encode
from manyhands.wire.message import Message, Ping, Pong
from tests.net.test_deliver import by_hand, read

ONE_READ = SCRATCH_BYTES // max(len(encode(message)[0]) for message in (Ping(100), Pong(100)))


def test_a_peer_may_ping_as_often_as_peers_do_and_no_more() -> None:
    budget, now = PingBudget(0.0), 0.0
    for _ in range(10 * BURST):
        now += 1 / PER_S
        assert budget.take(1, now)
    assert budget.take(BURST - 1, now) and not budget.take(1, now)
    budget, late = PingBudget(0.0), 120.0
    assert budget.take(4 * int(late), late), "two minutes of Pings and Pongs, of a node that did not read"


@pytest.mark.parametrize("message", [Ping(100), Pong(100)], ids=["pings", "pongs"])
def test_a_flood_of_pings_loses_the_link(message: Message) -> None:
    """1,000 in one read held the event loop for 40 ms, on each link again and again: reading never paused."""

    async def main() -> None:
        link, _ = by_hand("control")
        reads = 0
        while not link.is_closed and reads < 100:
            read(link, *[message] * ONE_READ)
            reads += 1
        assert reads == BURST // ONE_READ + 1
        assert link.health.frames_sent <= 1 + ANSWERED * reads

    asyncio.run(main())


def test_the_first_pings_of_a_read_are_answered() -> None:
    """The peer waits for the first; the others only show that it runs (net/watch.py: NO_ANSWER)."""

    async def main() -> None:
        link, _ = by_hand("control")
        before = link.health.frames_sent
        read(link, Ping(7), *[Ping(0)] * 40)
        assert not link.is_closed and link.health.frames_sent == before + ANSWERED

    asyncio.run(main())
