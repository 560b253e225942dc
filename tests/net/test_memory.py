"""The memory transport refuses what a network would."""

import asyncio

import pytest

from manyhands.core import NodeAddr
from manyhands.errors import BadRequest, LinkClosed
from manyhands.net.memory import MemoryNetwork
from manyhands.net.transport import Transport
from tests.net.links import ANYWHERE, A, B, receive, says


def test_port_taken() -> None:
    async def run() -> None:
        network = MemoryNetwork()
        addr = await network.transport(A, says("a")).listen(ANYWHERE)
        with pytest.raises(BadRequest, match=f"{addr} is in use"):
            await network.transport(B, says("b")).listen(addr)

    asyncio.run(run())


def test_dial_an_address_without_a_node_or_the_wrong_node() -> None:
    async def run() -> None:
        network = MemoryNetwork()
        a: Transport = network.transport(A, says("a"))
        addr = await network.transport(B, says("b")).listen(ANYWHERE)
        with pytest.raises(LinkClosed, match="nothing listens"):
            await a.dial(NodeAddr("elsewhere", 1), "data")
        with pytest.raises(LinkClosed, match="it is node bbbb"):
            await a.dial(NodeAddr(addr.host, addr.port, A), "data")

    asyncio.run(run())


def test_closing_ends_accept_and_drops_links_not_accepted() -> None:
    async def run() -> None:
        network = MemoryNetwork()
        a, b = network.transport(A, says("a")), network.transport(B, says("b"))
        addr = await b.listen(ANYWHERE)
        link = await a.dial(addr, "control")
        await b.aclose()
        with pytest.raises(LinkClosed):
            await receive(link)
        for _ in range(2):
            with pytest.raises(LinkClosed, match="stopped listening"):
                await b.accept()
        with pytest.raises(LinkClosed, match="nothing listens"):
            await a.dial(addr, "control")

    asyncio.run(run())
