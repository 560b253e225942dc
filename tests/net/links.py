"""What the tests of links share: a Hello, a Step, and an open pair over memory."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from manyhands.core import NodeAddr, NodeId, SessionId
from manyhands.net.link import FramedLink
from manyhands.net.memory import MemoryNetwork, MemoryTransport
from manyhands.wire.message import Hello, Lane, Payload, Step

A = NodeId("aa" * 32)
B = NodeId("bb" * 32)
ANYWHERE = NodeAddr("host", 0)
SESSION = SessionId(bytes(16))


def says(name: str) -> Callable[[Lane], Hello]:
    return lambda lane: Hello(1, lane, name, None, ())


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
