"""A link hands messages to its taker where it reads them: order, ends, backpressure, and takers that call back."""

import asyncio
from collections.abc import Callable

import pytest

from manyhands.core import MAX_STEP_IDS
from manyhands.errors import LinkClosed, ProtocolError
from manyhands.net.inbox import ID_BYTES, MAX_QUEUED_BYTES, MAX_QUEUED_MESSAGES, Inbox
from manyhands.net.link import FramedLink, Handshake
from manyhands.net.shares import Shares
from manyhands.net.transport import Link
from manyhands.net.turn import Turn
from manyhands.wire.frame import encode
from manyhands.wire.message import DirectoryUpdate, Lane, Message, Ping, Pong, Step
from tests.net.conftest import Run
from tests.net.links import SESSION, A, Pair, linked, memory_pair, over, receive, says, step, until
from tests.net.test_tls import LOOPBACK, node
from tests.waiting import GUARD_S


class Echo(asyncio.Transport):
    """Whatever is written, the far end is faster: `answers` are read before write returns, one batch a write."""

    def __init__(self) -> None:
        super().__init__()
        self.link: FramedLink | None = None
        self.answers: list[list[Message]] = []
        self.is_paused = False

    def write(self, data: object) -> None:
        if self.answers and self.link is not None:
            read(self.link, *self.answers.pop(0))

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def abort(self) -> None:
        pass


def by_hand(lane: Lane = "data") -> tuple[FramedLink, Echo]:
    """A greeted link whose reads the test makes itself."""
    link, transport = (
        FramedLink(Handshake(says("x"), lambda _: A, lambda: 0.0, lane, Shares(Turn(lambda: 0.0)))),
        Echo(),
    )
    link.connection_made(transport)
    read(link, says("y")(lane))
    transport.link = link
    return link, transport


def read(link: FramedLink, *messages: Message) -> None:
    """One read of several messages."""
    data = b"".join(bytes(part) for message in messages for part in encode(message))
    link.get_buffer(-1)[: len(data)] = data
    link.buffer_updated(len(data))


def test_ids_that_wait_are_counted() -> None:
    """A Step of ids alone counted as nothing, and 64 of them waited."""
    inbox, ids = Inbox(), tuple(range(MAX_STEP_IDS))
    waiting = 0
    while not inbox.is_full:
        message = Step(SESSION, 1, 0, 0, len(ids), 0, 0, "hidden", ids, None)
        inbox.put(message, 0)
        waiting += 1
    assert waiting == -(-MAX_QUEUED_BYTES // (ID_BYTES * len(ids))) < MAX_QUEUED_MESSAGES


def numbered(number: int) -> DirectoryUpdate:
    return DirectoryUpdate(bytes([number]))


def position_of(message: Message) -> int:
    assert isinstance(message, Step)
    return message.position


class Taker:
    """Takes from a link in a task: the positions, in order; `act` is called with each, and calls must not nest."""

    def __init__(self, link: Link, act: Callable[[int], object] = lambda position: None) -> None:
        self.taken: list[int] = []
        self._act = act
        self._is_taking = False
        self.task: asyncio.Task[object] = asyncio.create_task(link.deliver(self._take))

    def _take(self, message: Message) -> None:
        assert not self._is_taking, "a take within a take"
        self._is_taking = True
        self.taken.append(position_of(message))
        try:
            self._act(self.taken[-1])
        finally:
            self._is_taking = False

    async def ended(self) -> BaseException | None:
        await asyncio.wait([self.task])
        return self.task.exception()

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


def raise_at(position: int, exc: Exception) -> Callable[[int], None]:
    def act(at: int) -> None:
        if at == position:
            raise exc

    return act


def test_messages_are_taken_before_the_read_returns_after_those_that_waited() -> None:
    async def main() -> None:
        link, _ = by_hand()
        read(link, step(0), step(1))
        taker = Taker(link)
        await asyncio.sleep(0)
        assert taker.taken == [0, 1]
        read(link, step(2), step(3))
        assert taker.taken == [0, 1, 2, 3]
        await taker.cancel()

    asyncio.run(main())


def test_what_waited_and_what_comes_keep_their_order() -> None:
    async def body(pair: Pair) -> None:
        for position in range(200):
            pair.near.send(step(position, num_bytes=30_000))
        await until(lambda: pair.far.health.frames_received > 10)
        taker = Taker(pair.far, lambda position: pair.near.send(step(position + 200)) if position < 200 else None)
        await until(lambda: len(taker.taken) == 400)
        assert taker.taken == list(range(400))
        await taker.cancel()

    over("data", body)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("waits", [True, False], ids=["waited", "read"])
@pytest.mark.parametrize(
    ("exc", "seen"),
    [(ProtocolError("nonsense"), ProtocolError), (LinkClosed("another"), LinkClosed), (StopIteration(), RuntimeError)],
    ids=["ProtocolError", "LinkClosed", "StopIteration"],
)
def test_what_take_raises_ends_deliver_only(at: int, waits: bool, exc: Exception, seen: type[Exception]) -> None:
    """asyncio's callback does not see it, and later messages are for the next caller."""

    async def main() -> None:
        link, _ = by_hand()
        if waits:
            read(link, step(0), step(1), step(2))
        taker = Taker(link, raise_at(at, exc))
        await asyncio.sleep(0)
        if not waits:
            read(link, step(0), step(1), step(2))
        read(link, step(3))
        assert isinstance(await taker.ended(), seen) and taker.taken == list(range(at + 1))
        read(link, step(4))
        after = Taker(link)
        await asyncio.sleep(0)
        assert taker.taken + after.taken == [0, 1, 2, 3, 4] and not link.is_closed
        await after.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("raises", [False, True])
def test_a_take_that_aborts_loses_the_rest_of_the_read(raises: bool) -> None:
    async def main() -> None:
        link, _ = by_hand()

        def act(position: int) -> None:
            if position == 1:
                link.abort("enough")
                if raises:
                    raise ProtocolError("nonsense")

        taker = Taker(link, act)
        await asyncio.sleep(0)
        read(link, step(0), step(1), step(2))
        read(link, step(3))
        reason = await taker.ended()
        assert str(reason) == "nonsense" if raises else str(reason).endswith(": enough")
        assert taker.taken == [0, 1]
        with pytest.raises(LinkClosed, match="enough"):
            await receive(link)

    asyncio.run(main())


def test_garbage_ends_deliver_and_nothing_of_its_read_is_taken() -> None:
    async def main() -> None:
        link, _ = by_hand()
        taker = Taker(link)
        await asyncio.sleep(0)
        read(link, step(0))
        read(link, step(1), DirectoryUpdate(b""))  # not for the data lane
        assert "broke the protocol" in str(await taker.ended()) and taker.taken == [0]

    asyncio.run(main())


def test_a_cancelled_taker_gets_nothing_more_and_nothing_is_lost() -> None:
    """Also what is read after the cancelling and before the task hears of it."""

    async def main() -> None:
        link, _ = by_hand()
        first = Taker(link)
        await asyncio.sleep(0)
        read(link, step(0))
        first.task.cancel()
        read(link, step(1))
        second = Taker(link)
        await asyncio.sleep(0)
        read(link, step(2))
        assert (first.taken, second.taken) == ([0], [1, 2]) and first.task.cancelled()
        await second.cancel()

    asyncio.run(main())


def test_cancelling_at_any_moment_loses_nothing() -> None:
    async def body(pair: Pair) -> None:
        taken: list[int] = []
        for num_turns in range(6):
            taker = Taker(pair.far, taken.append)
            await asyncio.sleep(0)
            pair.near.send(step(num_turns))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await taker.cancel()
        last = Taker(pair.far, taken.append)
        await until(lambda: len(taken) == 6)
        assert taken == list(range(6))
        await last.cancel()

    over("data", body)


def test_a_take_that_cancels_its_own_deliver_is_the_last() -> None:
    async def main() -> None:
        link, _ = by_hand()
        taker = Taker(link, lambda position: taker.task.cancel())
        await asyncio.sleep(0)
        read(link, step(0), step(1))
        assert await asyncio.gather(taker.task, return_exceptions=True) and taker.taken == [0]
        assert position_of(await receive(link)) == 1

    asyncio.run(main())


def test_one_caller_at_a_time() -> None:
    async def main() -> None:
        link, _ = by_hand()
        first = Taker(link)
        await asyncio.sleep(0)
        with pytest.raises(AssertionError, match="one caller"):
            await receive(link)
        read(link, step(0))
        assert first.taken == [0]
        await first.cancel()

    asyncio.run(main())


def test_reading_pauses_until_a_task_delivers() -> None:
    async def main() -> None:
        link, transport = by_hand()
        for start in (0, MAX_QUEUED_MESSAGES):
            for position in range(start, start + MAX_QUEUED_MESSAGES):
                assert not transport.is_paused
                read(link, step(position))
            assert transport.is_paused
            taker = Taker(link)
            await asyncio.sleep(0)
            assert not transport.is_paused and taker.taken == list(range(start, start + MAX_QUEUED_MESSAGES))
            await taker.cancel()

    asyncio.run(main())


def test_a_sender_waits_while_nothing_is_delivered() -> None:
    async def body(pair: Pair) -> None:
        total = 4 * MAX_QUEUED_MESSAGES
        for position in range(total):
            pair.near.send(step(position, num_bytes=40_000))
        waiting = asyncio.ensure_future(pair.near.drain())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert pair.far.health.frames_received <= MAX_QUEUED_MESSAGES + 2
        taker = Taker(pair.far)
        await waiting
        await until(lambda: len(taker.taken) == total)
        assert taker.taken == list(range(total))
        await taker.cancel()

    over("data", body)


def test_a_read_inside_a_write_of_take_comes_after_the_read_at_hand() -> None:
    """And a flood of them pauses reading only as long as the take at hand lasts."""

    async def main() -> None:
        link, transport = by_hand()
        num_nested = 2 * MAX_QUEUED_MESSAGES
        transport.answers = [[step(3 + n)] for n in range(num_nested)]
        were_paused: list[bool] = []

        def act(position: int) -> None:
            if position == 1:
                for _ in range(num_nested):
                    link.send(step(0))
                were_paused.append(transport.is_paused)

        taker = Taker(link, act)
        await asyncio.sleep(0)
        read(link, step(0), step(1), step(2))
        assert taker.taken == list(range(3 + num_nested)) and were_paused == [True] and not transport.is_paused
        await taker.cancel()

    asyncio.run(main())


def test_a_read_inside_the_write_of_a_pong_comes_after_the_read_at_hand() -> None:
    async def main() -> None:
        link, transport = by_hand("control")
        transport.answers = [[Pong(1), numbered(2), numbered(3)]]
        taken: list[Message] = []
        delivering = asyncio.create_task(link.deliver(taken.append))
        await asyncio.sleep(0)
        read(link, Ping(7), numbered(0), Ping(8), numbered(1))
        assert taken == [numbered(number) for number in range(4)] and link.health.frames_sent == 3
        delivering.cancel()

    asyncio.run(main())


def test_takes_that_send_on_both_sides_over_memory() -> None:
    async def main() -> None:
        async with memory_pair("data") as first, memory_pair("data") as second:
            await volley((first.near, first.far), (second.near, second.far))

    asyncio.run(main())


def test_takes_that_send_on_both_sides_over_tls(run: Run) -> None:
    async def body() -> None:
        async with node() as a, node() as b:
            addr = await b.listen(LOOPBACK)
            async with linked(a, b, addr, "data") as first, linked(a, b, addr, "data") as second:
                await volley(first, second)

    run(body())


async def volley(first: tuple[Link, Link], second: tuple[Link, Link]) -> None:
    """`near` asks on the first link; `far` answers twice on it and once on the second; an answer makes the next question."""
    num_asked, total = 20, 400
    (near, far), (side_near, side_far) = first, second

    def answer(position: int) -> None:
        far.send(step(2 * position, num_bytes=9000))
        far.send(step(2 * position + 1))
        side_far.send(step(position, num_bytes=9000))

    def ask(position: int) -> None:
        nonlocal num_asked
        if position % 2 and num_asked < total:
            near.send(step(num_asked, num_bytes=9000))
            num_asked += 1

    takers = [Taker(far, answer), Taker(near, ask), Taker(side_near)]
    for position in range(num_asked):
        near.send(step(position, num_bytes=9000))
    sizes = [total, 2 * total, total]
    async with asyncio.timeout(GUARD_S):
        while [len(taker.taken) for taker in takers] != sizes:
            assert not any(taker.task.done() for taker in takers)
            await asyncio.sleep(0.001)
    assert [taker.taken for taker in takers] == [list(range(size)) for size in sizes]
    for taker in takers:
        await taker.cancel()


@pytest.mark.parametrize("how", ["abort", "close", "raise"])
def test_a_take_that_ends_its_link_over_tls(run: Run, how: str) -> None:
    """In the middle of a burst: nothing more is taken, and the link beside it works on."""

    async def body() -> None:
        async with node() as a, node() as b:
            addr = await b.listen(LOOPBACK)
            async with linked(a, b, addr, "data") as (near, far), linked(a, b, addr, "data") as (other, beside):
                closing: list[asyncio.Task[None]] = []

                def act(position: int) -> None:
                    if position == 5 and how == "abort":
                        far.abort("enough")
                    elif position == 5 and how == "close":
                        closing.append(asyncio.create_task(far.aclose()))
                    elif position == 5:
                        far.send(step(99))
                        raise ProtocolError("nonsense")

                taker = Taker(far, act)
                for position in range(50):
                    near.send(step(position, num_bytes=3000))
                assert isinstance(await taker.ended(), ProtocolError if how == "raise" else LinkClosed)
                assert taker.taken == list(range(len(taker.taken)))
                assert len(taker.taken) == 6 or (how == "close" and len(taker.taken) > 6)  # it begins a turn later
                await asyncio.gather(*closing)
                assert far.is_closed == (how != "raise")
                if how == "raise":
                    assert position_of(await receive(near)) == 99
                beside.send(step(1))
                assert position_of(await receive(other)) == 1

    run(body())


def test_a_taker_that_hands_over_to_another_in_its_call() -> None:
    async def body() -> None:
        inbox, taken = Inbox(), list[tuple[str, int]]()

        def first(message: Message) -> None:
            taken.append(("first", position_of(message)))
            ended.cancel()
            inbox.hand_to(lambda message: taken.append(("second", position_of(message))))
            inbox.hand_on()

        ended = inbox.hand_to(first)
        for position in range(3):
            inbox.put(step(position), 8)
        inbox.hand_on()
        assert taken == [("first", 0), ("second", 1), ("second", 2)]

    asyncio.run(body())
