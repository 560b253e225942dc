"""What waits to be accepted: open links in order, then the end, for every taker."""

import asyncio

import pytest

from manyhands.errors import LinkClosed
from manyhands.net.arrivals import Arrivals
from manyhands.net.link import FramedLink
from tests.net.links import memory_pair


def test_open_links_are_taken_in_order_and_closed_ones_passed_over() -> None:
    async def body() -> None:
        arrivals = Arrivals[FramedLink]()
        async with memory_pair("data") as one, memory_pair("data") as two, memory_pair("data") as three:
            for pair in (one, two, three):
                arrivals.put(pair.far)
            one.far.abort("gone before anyone took it")
            assert [await arrivals.take(), await arrivals.take()] == [two.far, three.far]

    asyncio.run(body())


def test_the_end_reaches_every_taker_and_turns_away_who_comes_later() -> None:
    async def body() -> None:
        arrivals = Arrivals[FramedLink]()
        takers = [asyncio.ensure_future(arrivals.take()) for _ in range(3)]
        await asyncio.sleep(0)
        async with memory_pair("data") as early, memory_pair("data") as late:
            arrivals.put(early.far)
            assert await takers[0] is early.far
            await arrivals.aclose()
            arrivals.put(late.far)
            for taker in (*takers[1:], asyncio.ensure_future(arrivals.take())):
                with pytest.raises(LinkClosed, match="stopped listening"):
                    await taker
            assert late.far.is_closed and not early.far.is_closed

    asyncio.run(body())


def test_links_that_were_not_accepted_are_closed() -> None:
    async def body() -> None:
        arrivals = Arrivals[FramedLink]()
        async with memory_pair("data") as pair:
            arrivals.put(pair.far)
            await arrivals.aclose()
            assert pair.far.is_closed

    asyncio.run(body())


def test_a_listener_that_fails_ends_it_and_a_cancelled_one_does_not(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("a bug")

    async def body() -> None:
        arrivals = Arrivals[FramedLink]()
        cancelled = asyncio.create_task(asyncio.sleep(10))
        cancelled.cancel()
        failed = asyncio.create_task(fail(), name="listen here")
        await asyncio.wait([cancelled, failed])
        arrivals.end_with(cancelled)
        assert not arrivals.has_ended and not caplog.records
        arrivals.end_with(failed)
        assert arrivals.has_ended and "listen here ended" in caplog.text

    asyncio.run(body())
