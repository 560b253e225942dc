"""A faulty link delivers as any other, but for what it was told to do wrong."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from manyhands.errors import LinkClosed
from manyhands.net.memory import MemoryNetwork
from manyhands.net.transport import Link, Transport
from manyhands.origin.node import FullNode
from manyhands.testing.clock import run_virtual
from manyhands.testing.faults import Faults
from manyhands.wire.message import Message, Step
from tests.net.links import ANYWHERE, A, B, receive, says, step


class Scene(NamedTuple):
    """`near`, of node `a`, dialled `far`, of node `b`; both are faulty."""

    faults: Faults
    a: FullNode
    b: FullNode
    near: Link
    far: Link


def as_node(transport: Transport) -> FullNode:
    """All that Faults wants of a node here."""
    return cast(FullNode, SimpleNamespace(transport=transport))


def over(body: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        faults, network = Faults(), MemoryNetwork()
        a, b = (faults.wrap(network.transport(name, says("x"))) for name in (A, B))
        near, far = await a.dial(await b.listen(ANYWHERE), "data"), await b.accept()
        await body(Scene(faults, as_node(a), as_node(b), near, far))
        for link in (near, far):
            await link.aclose()

    run_virtual(run())


def positions(messages: list[Message]) -> list[int]:
    return [message.position for message in messages if isinstance(message, Step)]


def test_a_frozen_node_takes_nothing_and_after_the_thaw_everything_in_order() -> None:
    """Also what was on its way when it froze."""

    async def body(s: Scene) -> None:
        taken: list[Message] = []

        def take(message: Message) -> None:
            taken.append(message)
            if len(taken) == 2:
                s.faults.freeze(s.b)

        delivering = asyncio.create_task(s.far.deliver(take))
        for position in range(5):
            s.near.send(step(position))
        await asyncio.sleep(1)
        assert positions(taken) == [0, 1]
        s.near.send(step(5))
        s.faults.thaw(s.b)
        await asyncio.sleep(1)
        assert positions(taken) == [0, 1, 2, 3, 4, 5]
        delivering.cancel()

    over(body)


def test_cancelled_while_frozen_nothing_is_lost() -> None:
    async def body(s: Scene) -> None:
        delivering = asyncio.create_task(s.far.deliver(lambda message: None))
        for position in range(3):
            s.near.send(step(position))
        s.faults.trouble.frozen.add(B)  # as freeze, but what was sent arrives
        await asyncio.sleep(1)
        delivering.cancel()
        await asyncio.sleep(1)
        s.faults.thaw(s.b)
        assert positions([await receive(s.far) for _ in range(3)]) == [0, 1, 2]

    over(body)


def test_a_take_that_kills_its_node_is_the_last() -> None:
    async def body(s: Scene) -> None:
        taken: list[Message] = []

        def take(message: Message) -> None:
            taken.append(message)
            s.faults.die(s.b)

        for position in range(3):
            s.near.send(step(position))
        with pytest.raises(LinkClosed, match="killed by the test"):
            await s.far.deliver(take)
        assert positions(taken) == [0]
        with pytest.raises(LinkClosed):
            await receive(s.near)

    over(body)


def test_a_delay_that_ends_lets_nothing_overtake_what_is_on_its_way() -> None:
    async def body(s: Scene) -> None:
        taken: list[Message] = []
        reading = asyncio.create_task(s.far.deliver(taken.append))
        s.faults.delay(s.a, s.b, "data", 2.0)
        s.near.send(step(1))
        s.faults.delay(s.a, s.b, "data", 0.0)
        s.near.send(step(2))
        await asyncio.sleep(3)
        assert positions(taken) == [1, 2]
        reading.cancel()
        await asyncio.wait([reading])

    over(body)
