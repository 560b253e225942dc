"""The pool dials once, shares, forgets the closed, and closes all."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from manyhands.core import NodeAddr
from manyhands.errors import LinkClosed
from manyhands.net.link import FramedLink
from manyhands.net.memory import MemoryNetwork, MemoryTransport
from manyhands.net.pool import LinkPool
from manyhands.wire.message import Lane
from tests.net.links import ANYWHERE, A, B, says


class CountingTransport(MemoryTransport):
    """Counts dials and lets each begin only when told."""

    def __init__(self, network: MemoryNetwork) -> None:
        super().__init__(network, A, says("a"))
        self.num_dials = 0
        self.may_dial = asyncio.Event()

    async def dial(self, addr: NodeAddr, lane: Lane) -> FramedLink:
        self.num_dials += 1
        await self.may_dial.wait()
        return await super().dial(addr, lane)


Body = Callable[[CountingTransport, LinkPool, NodeAddr], Awaitable[None]]


def with_pool(body: Body) -> None:
    """Run `body` with A's transport, a pool over it, and the address of B."""

    async def run() -> None:
        network = MemoryNetwork()
        transport, target = CountingTransport(network), network.transport(B, says("b"))
        addr = await target.listen(ANYWHERE)
        pool = LinkPool(transport)
        await body(transport, pool, addr)
        await pool.aclose()
        await target.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("is_named", [True, False])
def test_concurrent_callers_share_one_dial(is_named: bool) -> None:
    async def body(transport: CountingTransport, pool: LinkPool, addr: NodeAddr) -> None:
        target = addr if is_named else NodeAddr(addr.host, addr.port)
        callers = [asyncio.ensure_future(pool.get(target, "data")) for _ in range(5)]
        await asyncio.sleep(0)
        transport.may_dial.set()
        links = {id(link) for link in await asyncio.gather(*callers)}
        assert len(links) == 1 and transport.num_dials == 1
        assert id(await pool.get(target, "data")) in links
        assert await pool.get(target, "control") is not pool.find(B, "data")
        assert transport.num_dials == 2
        assert repr(pool) == "<LinkPool open=2 dialling=0>"

    with_pool(body)


def test_a_cancelled_dial_is_taken_over() -> None:
    async def body(transport: CountingTransport, pool: LinkPool, addr: NodeAddr) -> None:
        first, second = (asyncio.ensure_future(pool.get(addr, "data")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        transport.may_dial.set()
        assert (await second).peer == B
        assert transport.num_dials == 2

    with_pool(body)


def test_a_failed_dial_fails_all_who_wait_and_is_not_remembered() -> None:
    async def body(transport: CountingTransport, pool: LinkPool, addr: NodeAddr) -> None:
        transport.may_dial.set()
        wrong = NodeAddr(addr.host, addr.port, A)
        results = await asyncio.gather(*(pool.get(wrong, "data") for _ in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [LinkClosed] * 3
        assert (await pool.get(addr, "data")).peer == B

    with_pool(body)


def test_an_accepted_link_is_reused_and_a_closed_one_forgotten() -> None:
    async def body(transport: CountingTransport, pool: LinkPool, addr: NodeAddr) -> None:
        transport.may_dial.set()
        incoming = await transport.dial(addr, "control")
        pool.add(incoming)
        assert await pool.get(addr, "control") is incoming
        assert pool.find(B, "control") is incoming
        assert pool.health()[B, "control"].frames_sent == 1
        await incoming.aclose()
        assert pool.find(B, "control") is None and pool.health() == {}
        assert await pool.get(addr, "control") is not incoming

    with_pool(body)


def test_closing_closes_links_and_dials_under_way() -> None:
    async def body(transport: CountingTransport, pool: LinkPool, addr: NodeAddr) -> None:
        transport.may_dial.set()
        link = await pool.get(addr, "data")
        transport.may_dial.clear()
        late = asyncio.ensure_future(pool.get(addr, "control"))
        await asyncio.sleep(0)
        await pool.aclose()
        assert link.is_closed
        transport.may_dial.set()
        with pytest.raises(LinkClosed, match="stopping"):
            await late
        with pytest.raises(LinkClosed, match="stopping"):
            await pool.get(addr, "data")

    with_pool(body)


def test_each_new_link_is_told_once_whichever_end_dialled_it() -> None:
    """Callers that share a link do not make it new; one who waits for the peer's call gets the link that comes."""

    async def run() -> None:
        network = MemoryNetwork()
        near, far = network.transport(A, says("a")), network.transport(B, says("b"))
        here, there = await near.listen(ANYWHERE), await far.listen(ANYWHERE)
        told: list[tuple[str, Lane]] = []
        pool = LinkPool(near, lambda link: told.append((link.peer, link.lane)))
        accepting = asyncio.ensure_future(pool.accept())
        first = await pool.get(there, "control")
        assert await pool.get(there, "control") is first and told == [(B, "control")]
        waiting = [asyncio.ensure_future(pool.await_link(B, "data")) for _ in range(2)]
        await asyncio.sleep(0)
        await far.dial(here, "control")
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting), "another lane came"
        await far.dial(here, "data")
        one, other = await asyncio.gather(*waiting)
        assert one is other and told == [(B, "control"), (B, "control"), (B, "data")]
        await pool.aclose()
        await near.aclose()
        await accepting
        await far.aclose()

    asyncio.run(run())
