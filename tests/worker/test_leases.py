"""A node's bound on cache bytes (cache_bytes, --memory) holds for all its spans together, whoever opens sessions on them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from manyhands.config import WorkerConfig
from manyhands.core import NodeAddr, SessionId, Span
from manyhands.net.transport import Link
from manyhands.place.shape import look_up
from manyhands.testing.clock import run_virtual
from manyhands.testing.swarm import memory_node, memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Close, Fault, Opened, Payload, Step
from manyhands.worker.worker import Worker
from tests.hostile.test_floods import Flooder
from tests.kill import Scene

FIRST, MORE = Span(3, 6), Span(0, 3)  # held from the start; loaded on demand
LEASE, FIT = 512, 4  # positions of a session, and how many of them the node has memory for
HIDDEN = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("leases") / "qwen3", seed=3)


def lease_bytes(folder: Path, layers: int = 3) -> int:
    return layers * LEASE * look_up(str(folder), "bf16", folder).shape.cache_bytes


class Crowd(Flooder):
    """A member that opens sessions on a node with two spans and fills them."""

    control: Link
    data: Link

    @property
    def worker(self) -> Worker:
        return self.victim.worker

    @property
    def held_bytes(self) -> int:
        """Of all caches that the node holds, live and parked."""
        caches = [s.cache for host in self.worker.hosts for s in host._places.values()]
        caches += [p.cache for host in self.worker.hosts for p, _ in host.parking._parked.values() if p.cache]
        return sum(cast(Any, cache).num_bytes for cache in caches)

    async def ask(self, number: int, span: Span, capacity: int = LEASE) -> Fault | None:
        """Open a session and fill its lease; the Fault if that is refused."""
        session = SessionId(number.to_bytes(16, "big"))
        self.control.send(self.open(self.control, number, span=span, capacity=capacity))

        def heard(kind: type[Any]) -> list[Any]:
            return [one for one in self.of(kind) if one.session == session]

        while not (heard(Opened) or heard(Fault)):  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.001)
        if heard(Fault):
            return cast(Fault, heard(Fault)[0])
        rows = Payload("bf16", HIDDEN, b"\x80\x3f" * (HIDDEN * capacity))
        self.data.send(Step(session, 1, 1, 0, capacity, capacity, 0, "hidden", None, rows))
        (place,) = [s for host in self.worker.hosts for s in host._places.values() if s.opened.session == session]
        while place.cache.length < capacity:
            assert not heard(Fault), heard(Fault)
            await asyncio.sleep(0.001)
        return None

    async def close(self, number: int, parked_as: int | None = None) -> None:
        """Close a session, or park what its lease holds."""
        name = None if parked_as is None else SessionId(parked_as.to_bytes(16, "big"))
        self.control.send(Close(SessionId(number.to_bytes(16, "big")), name, 0 if name is None else LEASE))
        await asyncio.sleep(0.1)


@asynccontextmanager
async def crowd(folder: Path, cache_bytes: int) -> AsyncIterator[Crowd]:
    config = WorkerConfig(cache_bytes=cache_bytes)
    async with memory_swarm(folder, "0-2,3-5", worker=config) as swarm:
        victim = swarm.hops[1]
        (host,) = victim.hosts
        assert host.info.span == FIRST
        await victim.worker.offer_to_load(
            folder, Span(0, 6), "bf16", host.engine.device, model_name="test", max_layers=6
        )
        async with memory_node(swarm.network, "crowd") as node:
            await node.listen(NodeAddr("mem", 0))
            here = Crowd(node, cast(Scene, swarm))
            here.control, here.data = await here.link(), await here.link("data")
            yield here


def test_sessions_on_two_spans_hold_no_more_than_one_bound(folder: Path) -> None:
    """One span from the start, one that they make the node load: refused is what exceeds both together."""

    async def main() -> None:
        one = lease_bytes(folder)
        async with crowd(folder, FIT * one) as here:
            held = []
            for number in range(1, 2 * FIT + 3):
                refused = await here.ask(number, (FIRST, MORE)[number % 2])
                assert here.held_bytes <= FIT * one, number
                if refused is None:
                    held.append(number)
                else:
                    assert refused.code == "busy" and "cache for 0 more positions, 512 are asked" in refused.detail
            assert held == list(range(1, FIT + 1)) and here.held_bytes == FIT * one
            assert [host.info.free_tokens for host in here.worker.hosts] == [0, 0]
            for number, later in ((2, 101), (4, 103), (1, 105)):  # what either gives back the other may have
                await here.close(number)
                assert await here.ask(later, MORE if number % 2 == 0 else FIRST) is None
                assert here.held_bytes == FIT * one

    run_virtual(main())
