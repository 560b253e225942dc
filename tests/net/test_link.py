"""What every Link promises, over memory."""

import asyncio
import contextlib
from typing import Any

import pytest

from manyhands.core import NodeId, SessionId
from manyhands.errors import LinkClosed, ProtocolError
from manyhands.net.link import CLOSE_S, FramedLink, Handshake
from manyhands.net.unread import MAX_UNSENT, MIN_READ_BPS, MUCH_UNSENT, READ_S
from manyhands.testing.clock import run_virtual
from manyhands.wire.message import PROTOCOL_VERSION, Close, DirectoryUpdate, Hello, Message, Payload, Ping, Pong, Step
from manyhands.wire.weights_message import WeightsChunk
from tests.net.links import SESSION, TOKEN, A, B, Pair, over, receive, says, step, until


def test_each_side_knows_the_other() -> None:
    async def body(pair: Pair) -> None:
        assert (pair.near.peer, pair.near.hello.name, pair.near.lane) == (B, "b", "control")
        assert (pair.far.peer, pair.far.hello.name, pair.far.lane) == (A, "a", "control")
        assert repr(pair.near) == "<FramedLink bbbbbbbb control open>"

    over("control", body)


def test_messages_arrive_in_order_both_ways_and_are_counted() -> None:
    async def body(pair: Pair) -> None:
        for position in range(20):
            pair.near.send(step(position))
            pair.far.send(step(position))
        for link in pair:
            received = [await receive(link) for _ in range(20)]
            assert [m.position for m in received if isinstance(m, Step)] == list(range(20))
            assert link.health.frames_received == link.health.frames_sent == 21
        assert pair.near.health.bytes_sent == pair.far.health.bytes_received > 20 * 8

    over("data", body)


def test_large_steps_pass_whole() -> None:
    async def body(pair: Pair) -> None:
        pair.near.send(step(1, num_bytes=1 << 20))
        await pair.near.drain()
        message = await receive(pair.far)
        assert isinstance(message, Step) and message.payload is not None and len(message.payload.data) == 1 << 20

    over("data", body)


@pytest.mark.parametrize(
    ("lane", "message"),
    [
        ("data", Close(SESSION)),
        ("control", step(0)),
        ("control", Hello(PROTOCOL_VERSION, "control", "", None, (), TOKEN)),
    ],
)
def test_what_a_lane_cannot_carry_is_refused_here_and_costs_nothing(lane: str, message: Message) -> None:
    async def body(pair: Pair) -> None:
        with pytest.raises(ProtocolError, match="cannot be sent on"):
            pair.near.send(message)
        assert not pair.near.is_closed

    over(lane, body)


def test_ping_is_answered_below_deliver_and_measured() -> None:
    async def body(pair: Pair) -> None:
        for _ in range(40):
            assert await pair.near.ping() >= 0
        assert len(pair.near.health.rtt_samples) == 32
        assert pair.near.health.rtt_s is not None
        pair.near.send(Close(SESSION))
        assert await receive(pair.far) == Close(SESSION)

    over("control", body)


def test_unasked_pongs_are_ignored() -> None:
    async def body(pair: Pair) -> None:
        pair.far.send(Pong(99))
        await pair.near.ping()

    over("control", body)


def test_ping_ends_with_the_link() -> None:
    async def body(pair: Pair) -> None:
        asking = asyncio.ensure_future(pair.near.ping())
        await asyncio.sleep(0)
        pair.near.abort("enough")
        with pytest.raises(LinkClosed, match="enough"):
            await asking

    over("control", body)


def test_a_peer_that_does_not_read_gets_no_pongs() -> None:
    async def body(pair: Pair) -> None:
        pair.far.pause_writing()
        for nonce in range(5):
            pair.near.send(Ping(nonce))
        await until(lambda: pair.far.health.frames_received == 6)
        assert pair.far.health.frames_sent == 1
        pair.far.resume_writing()
        await pair.near.ping()

    over("control", body)


def test_what_arrived_before_a_peers_close_is_delivered_then_the_reason() -> None:
    async def body(pair: Pair) -> None:
        pair.near.send(step(1))
        pair.near.send(step(2))
        await pair.near.aclose()
        assert [m.position for m in (await receive(pair.far), await receive(pair.far)) if isinstance(m, Step)] == [1, 2]
        for _ in range(2):
            with pytest.raises(LinkClosed, match="link to aaaaaaaaaaaaaaaa: closed by the peer"):
                await receive(pair.far)
        with pytest.raises(LinkClosed):
            pair.far.send(step(3))
        with pytest.raises(LinkClosed):
            await pair.far.drain()

    over("data", body)


def test_close_wakes_all_that_wait() -> None:
    async def body(pair: Pair) -> None:
        pair.near.pause_writing()
        waiting = [asyncio.ensure_future(receive(pair.near)), asyncio.ensure_future(pair.near.drain())]
        await asyncio.sleep(0)
        await pair.near.aclose()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [LinkClosed, LinkClosed]
        await pair.near.aclose()

    over("data", body)


class Deaf(asyncio.Transport):
    """Never finishes closing by itself."""

    def close(self) -> None:
        pass

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        asyncio.get_running_loop().call_soon(self.get_protocol().connection_lost, None)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol


def test_closing_towards_a_deaf_peer_is_bounded() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        link, transport = FramedLink(Handshake(says("x"), lambda _: A, loop.time, "data")), Deaf()
        transport.set_protocol(link)
        link.connection_made(transport)
        await link.aclose()
        assert loop.time() == pytest.approx(CLOSE_S) and link.is_closed

    run_virtual(main())


def test_a_peer_that_is_not_wanted_is_dropped_unheard() -> None:
    def unwanted(_: asyncio.BaseTransport) -> NodeId:
        raise LinkClosed("not wanted")

    async def main() -> None:
        link, transport = FramedLink(Handshake(says("x"), unwanted, lambda: 0.0, "data")), Deaf()
        transport.set_protocol(link)
        link.connection_made(transport)
        with pytest.raises(LinkClosed, match="link: not wanted"):
            await link.opened()
        assert link.health.frames_sent == 0

    run_virtual(main())


def test_garbage_costs_the_link_that_carried_it() -> None:
    async def body(pair: Pair) -> None:
        assert pair.near._transport is not None
        pair.near._transport.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        with pytest.raises(LinkClosed, match="broke the protocol: unknown frame"):
            await receive(pair.far)
        assert pair.far.health.last_error is not None
        with pytest.raises(LinkClosed):
            await receive(pair.near)

    over("control", body)


@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_a_peer_that_does_not_read_costs_a_bounded_number_of_bytes(lane: Any) -> None:
    """What waits for it is counted; beyond the lane's limit the link is closed, with the reason. (It grew for ever.)"""

    async def body(pair: Pair) -> None:
        near, far = pair
        assert far._transport is not None and near._transport is not None
        far._transport.pause_reading()
        message = DirectoryUpdate(bytes(48 << 10)) if lane == "control" else WeightsChunk(1, 0, bytes(1 << 20))
        most = 0
        with pytest.raises(LinkClosed, match="does not read"):
            for _ in range(1000):
                near.send(message)
                most = max(most, near._transport.get_write_buffer_size())
        assert MAX_UNSENT[lane] // 2 < most <= MAX_UNSENT[lane] + (1 << 20)

    over(lane, body)


class Slow(Deaf):
    """Reads at a rate, by a clock that the test moves."""

    def __init__(self, read_Bps: float) -> None:
        super().__init__()
        self.read_Bps, self.now, self.waiting = read_Bps, 0.0, 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.waiting = max(0.0, self.waiting - seconds * self.read_Bps)

    def writelines(self, parts: Any) -> None:
        self.waiting += sum(map(len, parts))

    def get_write_buffer_size(self) -> int:
        return int(self.waiting)


@pytest.mark.parametrize(("read_Bps", "is_kept"), [(0, False), (0.9 * MIN_READ_BPS, False), (1.5 * MIN_READ_BPS, True)])
def test_a_slow_reader_of_data_costs_less_than_a_busy_one(read_Bps: float, is_kept: bool) -> None:
    """Steps of 1 MiB come, two a second; who reads less than one a second is cut off, long before the lane's limit."""

    async def main() -> None:
        transport = Slow(read_Bps)
        link = FramedLink(Handshake(says("x"), lambda _: A, lambda: transport.now, "data"))
        transport.set_protocol(link)
        link.connection_made(transport)
        link.pause_writing()
        most, every_s = 0.0, (1 << 20) / (2 * MIN_READ_BPS)
        payload = Payload("bf16", 1 << 19, bytes(1 << 20))
        with contextlib.suppress(LinkClosed):
            for number in range(300):
                link.send(Step(SessionId(bytes(16)), 1, 0, number, 1, 0, 0, "hidden", None, payload))
                transport.wait(every_s)
                most = max(most, transport.waiting)
        assert link.is_closed != is_kept
        assert most <= MUCH_UNSENT + 2 * MIN_READ_BPS * READ_S + (2 << 20) < MAX_UNSENT["data"]

    asyncio.run(main())
