"""What the tests of links share: a Hello, a Step, open pairs, and what every pair does."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import pytest

from manyhands.core import NodeAddr, NodeId, SessionId
from manyhands.errors import LinkClosed
from manyhands.net.link import FramedLink
from manyhands.net.memory import MemoryNetwork, MemoryTransport
from manyhands.net.transport import Link, Transport
from manyhands.wire.message import PROTOCOL_VERSION, Hello, Lane, Message, Payload, Step, Token

A = NodeId("aa" * 32)
B = NodeId("bb" * 32)
TOKEN = Token("cc" * 16)
ANYWHERE = NodeAddr("host", 0)
SESSION = SessionId(bytes(16))


def says(name: str) -> Callable[[Lane], Hello]:
    return lambda lane: Hello(PROTOCOL_VERSION, lane, name, None, (), TOKEN)


def step(position: int, num_bytes: int = 8) -> Step:
    payload = Payload("int32", num_bytes // 4, bytes(num_bytes))
    return Step(SESSION, 0, 0, position, 1, 0, 0, "hidden", None, payload)


class Pair(NamedTuple):
    """`near` dialled `far`."""

    near: FramedLink
    far: FramedLink


@asynccontextmanager
async def memory_pair(lane: Lane) -> AsyncIterator[Pair]:
    """An open pair of links from A to B, closed at the end."""
    network = MemoryNetwork()
    a, b = MemoryTransport(network, A, says("a")), MemoryTransport(network, B, says("b"))
    addr = await b.listen(ANYWHERE)
    pair = Pair(await a.dial(addr, lane), await b.accept())
    yield pair
    for link in pair:
        await link.aclose()
    await a.aclose()
    await b.aclose()


def over(lane: Any, body: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with memory_pair(lane) as pair:
            await body(pair)

    asyncio.run(run())


async def until(is_true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_true():
            return
        await asyncio.sleep(0)
    raise AssertionError("never came true")


@asynccontextmanager
async def linked(a: Transport, b: Transport, addr: NodeAddr, lane: Lane) -> AsyncIterator[tuple[Link, Link]]:
    """The link by which `a` dialled `b`, which listens at `addr`, and its far end; closed at the end."""
    near, far = await a.dial(addr, lane), await b.accept()
    yield near, far
    await asyncio.gather(near.aclose(), far.aclose())


class _Enough(Exception):
    """Ends deliver after one message."""


async def receive(link: Link) -> Message:
    """The next message; what comes after it waits in the link. Raises what deliver does."""
    taken: list[Message] = []

    def take(message: Message) -> None:
        taken.append(message)
        raise _Enough

    with suppress(_Enough):
        await link.deliver(take)
    return taken[0]


async def pass_sizes(near: Link, far: Link) -> None:
    """Steps of any size pass both ways."""
    for size in (4, 8192, 70_000, 4 << 20, 12):
        for sender, receiver in ((near, far), (far, near)):
            sender.send(step(size, num_bytes=size))
            await sender.drain()
            message = await receive(receiver)
            assert isinstance(message, Step) and message.payload is not None
            assert message.position == len(message.payload.data) == size


async def pass_all_before_closing(near: Link, far: Link) -> None:
    """What `near` sent before it closed arrives, and then the end."""
    for position in range(30):
        near.send(step(position, num_bytes=20_000))
    closing = asyncio.create_task(near.aclose())
    for position in range(30):
        message = await receive(far)
        assert isinstance(message, Step) and message.position == position
    with pytest.raises(LinkClosed, match="closed by the peer"):
        await receive(far)
    await closing
