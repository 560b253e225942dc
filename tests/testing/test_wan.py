"""The emulated WAN keeps its times exactly, under the virtual clock."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from manyhands.errors import LinkClosed, ProtocolError
from manyhands.net.inbox import MAX_QUEUED_MESSAGES
from manyhands.net.memory import MemoryNetwork
from manyhands.net.transport import Link, Transport
from manyhands.testing.clock import run_virtual
from manyhands.testing.wan import HIGH_WATER_BYTES, WanLine, WanLink, WanProfile, WanTransport
from manyhands.wire.frame import wire_size
from manyhands.wire.message import Close, Lane, Message, Step
from tests.net.links import ANYWHERE, SESSION, A, B, receive, says, step

MS_30 = WanProfile(delay_s=0.030)


class Ends(NamedTuple):
    near: WanLink
    far: Link


@asynccontextmanager
async def wan_pair(lane: Lane, up: WanProfile, down: WanProfile | None = None) -> AsyncIterator[Ends]:
    """A's end is behind the WAN, B's is plain."""
    network = MemoryNetwork()
    a = WanTransport(network.transport(A, says("a")), up, down)
    b = network.transport(B, says("b"))
    ends = Ends(await a.dial(await b.listen(ANYWHERE), lane), await b.accept())
    yield ends
    await ends.near.aclose()
    await ends.far.aclose()


def over(
    lane: Lane, up: WanProfile, down: WanProfile | None, body: Callable[[Ends], Coroutine[Any, Any, None]]
) -> None:
    async def run() -> None:
        async with wan_pair(lane, up, down) as ends:
            await body(ends)

    run_virtual(run())


def now() -> float:
    return asyncio.get_running_loop().time()


def position_of(message: object) -> int:
    assert isinstance(message, Step)
    return message.position


def test_thirty_milliseconds_are_thirty_milliseconds_each_way() -> None:
    async def body(ends: Ends) -> None:
        for receiver, sender in ((ends.far, ends.near), (ends.near, ends.far)):
            begin = now()
            for position in range(5):
                sender.send(step(position))
            for position in range(5):
                assert position_of(await receive(receiver)) == position
                assert now() - begin == pytest.approx(0.030, abs=1e-5)

    over("data", MS_30, MS_30, body)


def test_directions_differ() -> None:
    async def body(ends: Ends) -> None:
        ends.far.send(step(0))
        begin = now()
        await receive(ends.near)
        assert now() == begin

    over("data", MS_30, None, body)


def test_delay_counts_from_arrival_not_from_deliver() -> None:
    async def body(ends: Ends) -> None:
        ends.far.send(step(0))
        begin = now()
        await asyncio.sleep(0.1)
        await receive(ends.near)
        assert now() - begin == pytest.approx(0.1)

    over("data", WanProfile(), MS_30, body)


def test_rate_queues_bytes_behind_each_other() -> None:
    async def body(ends: Ends) -> None:
        message = step(0, num_bytes=10_000)
        begin, takes_s = now(), wire_size(message) / 1e6
        for _ in range(3):
            ends.near.send(message)
        for number in (1, 2, 3):
            await receive(ends.far)
            assert now() - begin == pytest.approx(number * takes_s + 0.030, abs=1e-5)

    over("data", WanProfile(delay_s=0.030, rate_bytes_per_s=1e6), None, body)


def test_jitter_is_seeded_bounded_and_keeps_order() -> None:
    profile = WanProfile(delay_s=0.030, jitter_s=0.010, seed=4)
    first, second = ([line.arrival(n / 1000, 10) for n in range(200)] for line in (WanLine(profile), WanLine(profile)))
    assert first == second == sorted(first)
    assert all(0.030 <= arrival - n / 1000 <= 0.040 for n, arrival in enumerate(first))
    assert len(set(first)) > 20
    assert WanLine(WanProfile(0.030, 0.010, seed=5)).arrival(0, 10) != first[0]


def test_a_stall_holds_what_is_on_its_way_and_delivers_it_in_order() -> None:
    async def body(ends: Ends) -> None:
        begin = now()
        ends.near.send(step(0))
        await asyncio.sleep(0.020)
        ends.near.stall(1.0)
        ends.near.send(step(1))
        assert [position_of(await receive(ends.far)) for _ in range(2)] == [0, 1]
        assert now() - begin == pytest.approx(1.020, abs=1e-5)

    over("data", MS_30, MS_30, body)


def test_a_cut_ends_both_sides_and_loses_what_was_on_its_way() -> None:
    async def body(ends: Ends) -> None:
        ends.near.send(step(0))
        ends.near.cut()
        for link in ends:
            with pytest.raises(LinkClosed):
                await receive(link)
        with pytest.raises(LinkClosed, match="cut by the test"):
            ends.near.send(step(1))
        with pytest.raises(LinkClosed):
            await ends.near.drain()

    over("data", MS_30, MS_30, body)


def test_closing_sends_what_is_on_its_way_first() -> None:
    async def body(ends: Ends) -> None:
        ends.near.send(step(0))
        await ends.near.aclose()
        assert position_of(await receive(ends.far)) == 0

    over("data", MS_30, MS_30, body)


def test_closing_a_stalled_line_is_bounded() -> None:
    async def body(ends: Ends) -> None:
        ends.near.send(step(0))
        ends.near.stall(3600)
        begin = now()
        await ends.near.aclose()
        assert now() - begin == pytest.approx(1.0)

    over("data", MS_30, MS_30, body)


def test_a_peers_close_takes_its_time_too() -> None:
    async def body(ends: Ends) -> None:
        ends.far.send(step(0))
        await ends.far.aclose()
        begin = now()
        assert position_of(await receive(ends.near)) == 0
        with pytest.raises(LinkClosed, match="closed by the peer"):
            await receive(ends.near)
        assert now() - begin == pytest.approx(0.030, abs=1e-5)

    over("data", MS_30, MS_30, body)


def test_drain_waits_while_the_line_is_full() -> None:
    async def body(ends: Ends) -> None:
        receiving = [asyncio.ensure_future(receive(ends.far))]
        begin = now()
        for position in range(2):
            ends.near.send(step(position, num_bytes=HIGH_WATER_BYTES - 1000))
        await ends.near.drain()
        assert now() - begin == pytest.approx((HIGH_WATER_BYTES - 1000) / 1e8, rel=0.01)
        await asyncio.gather(*receiving)
        await receive(ends.far)

    over("data", WanProfile(rate_bytes_per_s=1e8), None, body)


def test_the_far_end_waits_while_nothing_is_delivered() -> None:
    """One inbox here, one below, and a read or two; then everything comes, in order."""

    async def body(ends: Ends) -> None:
        total = 6 * MAX_QUEUED_MESSAGES
        for position in range(total):
            ends.far.send(step(position, num_bytes=40_000))
        await asyncio.sleep(1)
        assert MAX_QUEUED_MESSAGES < ends.near.health.frames_received < 3 * MAX_QUEUED_MESSAGES
        taken: list[Message] = []
        delivering = asyncio.create_task(ends.near.deliver(taken.append))
        await asyncio.sleep(1)
        assert [position_of(message) for message in taken] == list(range(total))
        delivering.cancel()

    over("data", WanProfile(), MS_30, body)


def test_what_take_raises_ends_deliver_and_the_rest_waits() -> None:
    async def body(ends: Ends) -> None:
        for position in range(3):
            ends.far.send(step(position))
        begin = now()
        assert position_of(await receive(ends.near)) == 0  # receive raises in take
        assert [position_of(await receive(ends.near)) for _ in range(2)] == [1, 2]
        assert now() - begin == pytest.approx(0.030, abs=1e-5)

    over("data", WanProfile(), MS_30, body)


def test_a_take_that_cuts_the_line_is_the_last() -> None:
    async def body(ends: Ends) -> None:
        taken: list[Message] = []

        def take(message: Message) -> None:
            taken.append(message)
            ends.near.cut()

        for position in range(3):
            ends.far.send(step(position))
        with pytest.raises(LinkClosed, match="cut by the test"):
            await ends.near.deliver(take)
        assert [position_of(message) for message in taken] == [0]

    over("data", WanProfile(), MS_30, body)


def test_what_a_lane_cannot_carry_is_refused_at_once() -> None:
    async def body(ends: Ends) -> None:
        with pytest.raises(ProtocolError):
            ends.near.send(Close(SESSION))

    over("data", MS_30, MS_30, body)


@pytest.mark.parametrize("asks", ["near", "far"])
def test_pings_from_either_side_see_both_directions(asks: str) -> None:
    async def body(ends: Ends) -> None:
        rtt_s = await (ends.near if asks == "near" else ends.far).ping()
        assert rtt_s == pytest.approx(0.050, abs=1e-5)
        health = (ends.near if asks == "near" else ends.far).health
        assert health.rtt_s == pytest.approx(0.050, abs=1e-5) and health.frames_sent == 2

    over("control", MS_30, WanProfile(delay_s=0.020), body)


def test_pings_do_not_delay_what_is_sent_meanwhile() -> None:
    async def body(ends: Ends) -> None:
        asking = asyncio.ensure_future(ends.far.ping())
        await asyncio.sleep(0.001)
        begin = now()
        ends.near.send(Close(SESSION))
        await receive(ends.far)
        assert now() - begin == pytest.approx(0.030, abs=1e-5)
        await asking

    over("control", MS_30, MS_30, body)


def test_two_nodes_behind_wans_add_up() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a: Transport = WanTransport(network.transport(A, says("a")), MS_30, MS_30)
        b = WanTransport(network.transport(B, says("b")), WanProfile(delay_s=0.005), WanProfile(delay_s=0.010))
        begin = now()
        near = await a.dial(await b.listen(ANYWHERE), "control")
        assert now() - begin == pytest.approx(0.060) and a.node == A
        far = await b.accept()
        for link in (near, far):
            assert await link.ping() == pytest.approx(0.075, abs=1e-5)
        begin = now()
        near.send(Close(SESSION))
        await receive(far)
        assert now() - begin == pytest.approx(0.040, abs=1e-5)
        await near.aclose()
        await far.aclose()
        await a.aclose()
        await b.aclose()

    run_virtual(main())
