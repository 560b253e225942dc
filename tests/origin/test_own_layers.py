"""Layers that the origin computes itself and nowhere else, and the whole model for when no other node can."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import EndsAt, NodeAddr, PathKind, Span
from manyhands.errors import LinkClosed, ShardUnavailable
from manyhands.net.transport import Link
from manyhands.testing.faults import Faults
from manyhands.testing.swarm import MemorySwarm, memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Lane
from manyhands.worker.execute import Device
from tests.origin.scenes import HOT, PROMPT, ids_of, play

LONG = replace(HOT, max_tokens=40)  # more than a window of steps after what happens
OWN = RequestConfig(own_first=2, own_last=1, patience_s=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("own") / "qwen3", seed=3)


async def keep(swarm: MemorySwarm, folder: Path, device: Device) -> None:
    await swarm.origin.node.listen(NodeAddr("mem", 0))
    for span in swarm.origin.own_spans:
        await swarm.origin.host_own(folder, span, device)


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("ends", ["origin", "edges"])
def test_the_first_and_last_layers_stay_here(folder: Path, path: PathKind, ends: EndsAt) -> None:
    """SH-17, F07: others hold every layer, and see the rows of the middle only; the text is the same."""

    async def main() -> None:
        device = Device.start(1)
        async with memory_swarm(folder, "0-2,3-5", ends=ends) as plain:
            wanted = await ids_of(plain, PROMPT, HOT)
        async with memory_swarm(folder, "0-2,3-5", ends=ends, request=OWN) as swarm:
            await keep(swarm, folder, device)
            origin = swarm.origin
            answer = await origin.complete(origin.request_ids(PROMPT, HOT), path=path)
            assert [(o.name, str(o.info.span)) for o in answer.route] == [
                ("origin", "0-1"),
                ("n0", "2"),
                ("n1", "3-4"),
                ("origin", "5"),
            ]
            assert answer.token_ids == wanted
            assert origin.node.worker.spans == ()  # no other node hears of them
        device.close()

    play(main)


def test_a_repair_does_not_give_them_away(folder: Path) -> None:
    """A hop dies; the spare that holds everything takes the hole and nothing of what is kept here."""

    async def main() -> None:
        device, faults = Device.start(1), Faults()
        async with memory_swarm(folder, "0-2,3-5", request=OWN, spares=["0-5"], wrap=faults.wrap) as swarm:
            await keep(swarm, folder, device)
            origin = swarm.origin
            wanted = await ids_of(swarm, PROMPT, HOT)
            answer = origin.answer(origin.request_ids(PROMPT, HOT))
            async for _ in origin.stream(answer):
                if len(answer.token_ids) == 4:
                    faults.die(swarm.hops[1])
            assert answer.token_ids == wanted
            assert answer.session is not None
            hops = [(hop.offer.name, str(hop.offer.info.span)) for hop in answer.session.route.hops]
            assert hops == [("origin", "0-1"), ("n0", "2"), ("n2", "3-4"), ("origin", "5")]
        device.close()

    play(main)


@pytest.mark.parametrize("path", ["ring", "star"])
def test_this_machine_takes_the_hop_behind_its_own(folder: Path, path: PathKind) -> None:
    """A hop dies; two neighbours are places of this node then, and each gets its credits, for more than a window of steps."""

    async def main() -> None:
        device, faults = Device.start(1), Faults()
        request = replace(OWN, own_last=0, draft="off")
        async with memory_swarm(folder, "0-3,4-5", request=request, wrap=faults.wrap) as swarm:
            origin = swarm.origin
            await origin.node.listen(NodeAddr("mem", 0))
            await origin.host_own(folder, Span(0, 2), device)
            await origin.node.worker.host(folder, Span(2, 4), "bf16", device, model_name="test", is_spare=True)
            answer = origin.answer(origin.request_ids(PROMPT, LONG))
            async for _ in origin.stream(answer, path=path):
                if len(answer.token_ids) == 4:
                    faults.die(swarm.hops[0])
            assert answer.session is not None and len(answer.token_ids) == LONG.max_tokens
            hops = [(hop.offer.name, str(hop.offer.info.span)) for hop in answer.session.route.hops]
            assert hops == [("origin", "0-1"), ("origin", "2-3"), ("n1", "4-5")]
            assert len(answer.repairs) == 1
        device.close()

    play(main)


def test_what_is_kept_here_and_not_held_here_is_named(folder: Path) -> None:
    async def main() -> None:
        async with memory_swarm(folder, "0-2,3-5", request=OWN) as swarm:
            with pytest.raises(
                ShardUnavailable, match="this node does not hold layers 0-1, 5 of 6, and with own_first = 2"
            ):
                await ids_of(swarm, PROMPT, HOT)

    play(main)


def test_own_spans_cover_the_model_at_most(folder: Path) -> None:
    async def main() -> None:
        for first, last, spans in [(0, 0, []), (9, 0, [Span(0, 6)]), (4, 3, [Span(0, 6)]), (0, 2, [Span(4, 6)])]:
            request = RequestConfig(own_first=first, own_last=last)
            async with memory_swarm(folder, "0-5", request=request) as swarm:
                assert swarm.origin.own_spans == spans

    play(main)


# -- when no other node can ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("was_covered", "may_come"), [(True, True), (True, False), (False, True)])
def test_a_request_without_a_route_goes_on_alone(folder: Path, was_covered: bool, may_come: bool) -> None:
    """F44: at once where there never was a route or no node is left that could come, else after the patience; the text is that
    of the swarm."""

    async def main() -> None:
        device, faults = Device.start(1), Faults()
        request = RequestConfig(patience_s=2.0)
        async with memory_swarm(folder, "0-2,3-5", request=request, wrap=faults.wrap) as swarm:
            origin = swarm.origin
            await origin.node.listen(NodeAddr("mem", 0))
            await origin.add_fallback(folder, device)
            wanted = await ids_of(swarm, PROMPT, HOT)
            if not was_covered:
                origin.routes._was_covered = False
            for node in swarm.hops:
                if was_covered:
                    faults.die(node)
                else:
                    origin.routes.evict(node.transport.node)
            if not may_come:
                origin.routes.addrs = []  # as `local` does of processes that have ended
            loop = asyncio.get_running_loop()
            for num_asked in range(2):
                began = loop.time()
                answer = await origin.complete(origin.request_ids(PROMPT, HOT))
                assert answer.token_ids == wanted
                assert answer.routing.is_fallback
                assert answer.events[0].kind == "reshard"
                assert "this machine goes on alone" in answer.events[0].detail
                waits = was_covered and may_come and not num_asked  # patience counts from the first that missed them
                assert (loop.time() - began > 1.9) == waits
            assert origin.node.worker.spans == ()
        device.close()

    play(main)


@pytest.mark.parametrize("own", [(2, 1), (3, 0), (0, 3)])
def test_a_stream_goes_on_alone_where_this_machine_was_a_hop_of_it(folder: Path, own: tuple[int, int]) -> None:
    """Its old place has the number of the new one: steps and credits go to the place of this epoch, and the stream says so."""

    async def main() -> None:
        device, faults = Device.start(1), Faults()
        request = RequestConfig(own_first=own[0], own_last=own[1], patience_s=2.0)
        async with memory_swarm(folder, "0-5", request=request, wrap=faults.wrap) as swarm:
            await keep(swarm, folder, device)
            origin = swarm.origin
            await origin.add_fallback(folder, device)
            wanted = await ids_of(swarm, PROMPT, LONG)
            answer = origin.answer(origin.request_ids(PROMPT, LONG))
            async for _ in origin.stream(answer):
                if len(answer.token_ids) == 4:
                    faults.die(swarm.hops[0])
            assert answer.session is not None
            assert [hop.offer.name for hop in answer.session.route.hops] == ["fallback"]
            assert answer.token_ids == wanted
            assert answer.routing.is_fallback
        device.close()

    play(main)


@pytest.mark.parametrize(("own", "cut"), [((2, 1), "0-5"), ((0, 0), "0-2,3-5")])
def test_what_a_stream_has_left_is_free_while_it_goes_on_alone(folder: Path, own: tuple[int, int], cut: str) -> None:
    """Its places on other layers of this machine, and on nodes that live on, hold no cache for it."""

    async def main() -> None:
        device, faults = Device.start(1), Faults()
        request = RequestConfig(own_first=own[0], own_last=own[1], patience_s=2.0)
        async with memory_swarm(folder, cut, request=request, wrap=faults.wrap) as swarm:
            await keep(swarm, folder, device)
            origin = swarm.origin
            await origin.add_fallback(folder, device)
            answer = origin.answer(origin.request_ids(PROMPT, LONG))
            async for _ in origin.stream(answer):
                if len(answer.token_ids) == 4:
                    faults.die(swarm.hops[-1])
                if len(answer.token_ids) == 30:
                    assert answer.routing.is_fallback
                    used = [(host.info.model_name, host.num_sessions) for host in origin.node.hosts]
                    assert [name for name, sessions in used if sessions] == ["fallback"]
                    assert all(host.is_empty for node in swarm.hops[:-1] for host in node.hosts)
        device.close()

    play(main)


def test_a_request_waits_for_layers_that_come_back(folder: Path) -> None:
    """As a running one does: a node is away for a second."""

    async def main() -> None:
        async with memory_swarm(folder, "0-2,3-5", request=RequestConfig(patience_s=20.0)) as swarm:
            wanted = await ids_of(swarm, PROMPT, HOT)
            routes, node = swarm.origin.routes, swarm.hops[1].transport.node
            routes.evict(node)
            asyncio.get_running_loop().call_later(1.0, routes.readmit, node)
            began = asyncio.get_running_loop().time()
            assert await ids_of(swarm, PROMPT, HOT) == wanted
            assert 1.0 <= asyncio.get_running_loop().time() - began < 5.0
            routes.evict(node)
            began = asyncio.get_running_loop().time()
            with pytest.raises(ShardUnavailable, match="no node that is not evicted holds layers 3-5"):
                await ids_of(swarm, PROMPT, HOT)
            assert 20.0 <= asyncio.get_running_loop().time() - began < 25.0

    play(main)


def test_a_request_waits_for_a_node_that_has_been_restarted(folder: Path) -> None:
    """It is linked again, and its old record still says what it does not hold before it has loaded that anew."""

    async def main() -> None:
        async with memory_swarm(folder, "0-2,3-5", request=RequestConfig(patience_s=20.0)) as swarm:
            device, worker = Device.start(1), swarm.hops[1].worker
            wanted = await ids_of(swarm, PROMPT, HOT)
            worker.drop(worker.hosts[0])
            loop = asyncio.get_running_loop()
            began = loop.time()

            async def load_again() -> None:
                await asyncio.sleep(1.0)
                await worker.host(folder, Span(3, 6), "bf16", device, model_name="test")

            swarm.hops[1].start(load_again())
            assert await ids_of(swarm, PROMPT, HOT) == wanted
            assert 1.0 <= loop.time() - began < 5.0
            worker.drop(worker.hosts[0])
            began = loop.time()
            with pytest.raises(ShardUnavailable, match="n1 does not hold layers 3-5"):
                await ids_of(swarm, PROMPT, HOT)
            assert 20.0 <= loop.time() - began < 25.0
            device.close()

    play(main)


def test_a_request_waits_for_a_node_that_is_called_where_it_was(folder: Path) -> None:
    """Its record has the address of before; nothing listens there until the record follows."""

    async def main() -> None:
        async with memory_swarm(folder, "0-2,3-5", request=RequestConfig(patience_s=20.0)) as swarm:
            wanted, pool, addr = await ids_of(swarm, PROMPT, HOT), swarm.origin.node.pool, swarm.addrs[1]
            dial, loop = swarm.origin.node.transport.dial, asyncio.get_running_loop()
            (link,) = pool._links.pop((swarm.hops[1].transport.node, "data"))
            link.abort("gone")
            ends = loop.time() + 1.0

            async def refused(at: NodeAddr, lane: Lane) -> Link:
                if lane == "data" and at.port == addr.port and loop.time() < ends:
                    raise LinkClosed("Connection refused")
                return await dial(at, lane)

            swarm.origin.node.transport.dial = refused  # type: ignore[assignment, method-assign]
            assert await ids_of(swarm, PROMPT, HOT) == wanted
            assert loop.time() >= ends

    play(main)


def test_what_will_never_fit_is_refused_at_once(folder: Path) -> None:
    async def main() -> None:
        worker = WorkerConfig(cache_tokens=60)
        async with memory_swarm(folder, "0-2,3-5", request=RequestConfig(patience_s=20.0), worker=worker) as swarm:
            await ids_of(swarm, PROMPT, HOT)
            began = asyncio.get_running_loop().time()
            with pytest.raises(ShardUnavailable, match="have cache for 60 positions in all"):
                await ids_of(swarm, PROMPT, replace(HOT, max_tokens=50))
            assert asyncio.get_running_loop().time() - began < 1.0

    play(main)


def test_new_requests_leave_a_spare_what_it_fills(folder: Path) -> None:
    """One of two dies: the spare takes its layers, the other goes on; once it is back, the spare gives them back."""

    async def main() -> None:
        request = replace(RequestConfig(), patience_s=2.0)
        async with memory_swarm(folder, "0-2,3-5", spares=["0-5"], request=request) as swarm:
            routes, node = swarm.origin.routes, swarm.hops[1].transport.node

            async def route() -> list[tuple[str, str]]:
                answer = await swarm.origin.complete(swarm.origin.request_ids(PROMPT, HOT))
                return [(o.name, str(o.info.span)) for o in answer.route]

            assert await route() == [("n0", "0-2"), ("n1", "3-5")]
            routes.evict(node)
            assert await route() == [("n0", "0-2"), ("n2", "3-5")]
            routes.readmit(node)
            assert await route() == [("n0", "0-2"), ("n1", "3-5")]

    play(main)
