"""Hostile peers and Murphy against a live session: lies, floods, races, leaks. Under the virtual clock."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from manyhands.core import ORIGIN_HOP, NodeAddr, PathKind
from manyhands.errors import PipelineStalled, ShardUnavailable
from manyhands.net.transport import Link
from manyhands.origin.node import FullNode
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Close, Fault, Progress, Step
from manyhands.worker.execute import Device
from tests.kill import PARAMS, REQUEST, Bench, Scene, kept_models


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("attack") / "qwen3", seed=21), models)


def link_between(node: FullNode, peer: FullNode, lane: Any) -> Link:
    link = node.pool.find(peer.transport.node, lane)
    assert link is not None
    return link


def die_at(scene: Scene, victim: int, skip: int = 7) -> None:
    node = scene.hops[victim]
    scene.faults.at("decode", node, lambda: scene.faults.die(node), skip)


# -- floods and lies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spares", [["0-5"], []])
def test_news_that_are_none_do_not_keep_a_stalled_session_alive(bench: Bench, spares: list[str]) -> None:
    """A last hop says "computed so far" for ever, and nothing else. That counts for nothing: the hop that lacks a step is
    replaced, or the pipeline has stalled. (It never ended.)"""

    async def main() -> None:
        async with bench.scene(spares=spares, request=replace(REQUEST, stall_timeout_s=20.0)) as scene:
            origin = scene.swarm.origin.node
            scene.faults.drop(scene.hops[0], scene.hops[1], "decode", 5)

            async def flood() -> None:
                await asyncio.sleep(0.01)
                link = link_between(scene.hops[2], origin, "data")
                while True:
                    for s in origin.sessions.values():
                        link.send(Step(s.id, s.route.epoch, 255, 1, 0, 0, 0, "hidden", None, None))
                    await asyncio.sleep(0.2)

            task = asyncio.ensure_future(flood())
            async with asyncio.timeout(25.0):
                if spares:
                    assert await scene.ask() == bench.wanted["greedy", 0]
                    assert [r.lost for r in scene.answers[0].repairs] == [("n1",)]
                else:
                    with pytest.raises(PipelineStalled):
                        await scene.ask()
            task.cancel()

    bench.play(main)


def test_a_hop_blames_only_its_neighbours(bench: Bench) -> None:
    """The last hop accuses the first: it knows nothing of it, so the accuser goes."""

    async def main() -> None:
        async with bench.scene() as scene:
            origin = scene.swarm.origin.node

            def accuse() -> None:
                (s,) = origin.sessions.values()
                link = link_between(scene.hops[2], origin, "control")
                link.send(Fault(s.id, s.route.epoch, 2, "pipeline_aborted", "hop 0 is evil", blame=0))

            scene.faults.at("decode", scene.hops[1], accuse, 5)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            assert [r.lost for r in scene.answers[0].repairs] == [("n2",)]

    bench.play(main)


@pytest.mark.parametrize(("hop", "code", "blame"), [(2, "bad_request", None), (0, "protocol_error", ORIGIN_HOP)])
def test_a_hop_that_calls_a_running_request_faulty_is_replaced(
    bench: Bench, hop: int, code: str, blame: int | None
) -> None:
    """Its word ended any stream. The second node that says so is believed (tests/origin/test_fault.py)."""

    async def main() -> None:
        async with bench.scene() as scene:
            origin = scene.swarm.origin.node

            def accuse() -> None:
                (s,) = origin.sessions.values()
                link = link_between(scene.hops[hop], origin, "control")
                link.send(Fault(s.id, s.route.epoch, hop, code, "the request is evil", blame))

            scene.faults.at("decode", scene.hops[1], accuse, 5)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            assert [r.lost for r in scene.answers[0].repairs] == [(f"n{hop}",)]

    bench.play(main)


def test_no_node_speaks_in_the_name_of_another(bench: Bench) -> None:
    """Faults, progress and steps that hop 2 sends as hop 0 or 1 are not heard."""

    async def main() -> None:
        async with bench.scene(spares=[]) as scene:
            origin = scene.swarm.origin.node

            def lie() -> None:
                (s,) = origin.sessions.values()
                link = link_between(scene.hops[2], origin, "control")
                link.send(Fault(s.id, s.route.epoch, 0, "pipeline_aborted", "I am dead, says hop 0", blame=None))
                link.send(Progress(s.id, s.route.epoch, 1, 0, 0, 0))

            scene.faults.at("decode", scene.hops[1], lie, 5)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            assert not scene.answers[0].events

    bench.play(main)


def test_a_stale_fault_is_not_heard(bench: Bench) -> None:
    """What a survivor said of the old route does not hurt the new one."""

    async def main() -> None:
        async with bench.scene() as scene:
            origin = scene.swarm.origin.node
            die_at(scene, 1)

            def late() -> None:
                (s,) = origin.sessions.values()
                link = link_between(scene.hops[0], origin, "control")
                link.send(Fault(s.id, 1, 0, "link_closed", "lost its link to the next", blame=1))

            scene.faults.at("replay", scene.hops[3], late, 4)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            assert len(scene.answers[0].repairs) == 1

    bench.play(main)


@pytest.mark.parametrize("forgetful", [0, 1])
def test_a_survivor_that_has_lost_its_cache_is_found_out(bench: Bench, forgetful: int) -> None:
    """It says Opened as if nothing were; the text is right all the same."""

    async def main() -> None:
        async with bench.scene(spares=["0-5", "0-5"]) as scene:

            def forget() -> None:
                for host in scene.hops[forgetful].hosts:
                    for session_id, _ in list(host._places):
                        host.close(Close(session_id), scene.swarm.origin.node.transport.node)
                scene.faults.die(scene.hops[2])

            scene.faults.at("decode", scene.hops[2], forget, 6)
            async with asyncio.timeout(1.0):
                assert await scene.ask("hot") == bench.wanted["hot", 0]

    bench.play(main)


def test_a_full_spare_ends_the_patience_not_the_world(bench: Bench) -> None:
    """The only spare has no room: the request asks until its patience ends; a close in time saves it."""

    async def main() -> None:
        for frees in (False, True):
            async with bench.scene(request=replace(REQUEST, patience_s=5.0)) as scene:
                spare = scene.hops[3]
                (host,) = spare.hosts
                room, host.engine.cache_tokens = host.engine.cache_tokens, 1
                if frees:
                    asyncio.get_running_loop().call_later(3.0, setattr, host.engine, "cache_tokens", room)
                die_at(scene, 1)
                async with asyncio.timeout(6.0):
                    if frees:
                        assert await scene.ask("hot") == bench.wanted["hot", 0]
                    else:
                        with pytest.raises(ShardUnavailable):
                            await scene.ask("hot")
                host.engine.cache_tokens = room

    bench.play(main)


# -- fallback ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["ring", "star"])
def test_the_local_model_goes_on_where_no_node_can(bench: Bench, path: PathKind) -> None:
    """HN-29, HN-30: all nodes die; after the request's patience the text continues from the ledger, here."""

    async def main() -> None:
        async with bench.scene(spares=[], request=replace(REQUEST, patience_s=2.0)) as scene:
            origin = scene.swarm.origin
            device = Device.start(1)
            await origin.node.listen(NodeAddr("mem", 0))
            await origin.add_fallback(bench.folder, device)

            def die() -> None:
                for node in scene.hops:
                    scene.faults.die(node)

            scene.faults.at("decode", scene.hops[1], die, 7)
            async with asyncio.timeout(30.0):
                assert await scene.ask("hot", path=path) == bench.wanted["hot", 0]
            assert scene.answers[0].repairs[-1].replacement == ("fallback",)
            assert asyncio.get_running_loop().time() < 4.0
            device.close()

    bench.play(main)


def test_hops_that_the_local_model_replaces_are_freed(bench: Bench) -> None:
    """Two survivors are not needed any more; their leases are free before the answer ends."""

    async def main() -> None:
        async with bench.scene(spares=[], request=replace(REQUEST, patience_s=1.0)) as scene:
            origin = scene.swarm.origin
            device = Device.start(1)
            await origin.node.listen(NodeAddr("mem", 0))
            await origin.add_fallback(bench.folder, device)
            die_at(scene, 1)
            answer = origin.answer(origin.request_ids((1, 2, 3), PARAMS["greedy"]))
            async for _ in origin.stream(answer):
                if answer.repairs:
                    await asyncio.sleep(0.1)
                    assert not any(h.num_sessions for n in scene.hops for h in n.hosts)
            assert answer.repairs
            device.close()

    bench.play(main)


# -- leaks ------------------------------------------------------------------------------------------------------------


def test_repairs_leave_no_tasks_links_or_readers_behind(bench: Bench) -> None:
    """Five spares die one after the other; what is left are the links that are open."""

    async def main() -> None:
        async with bench.scene(spares=["0-5"] * 6) as scene:
            die_at(scene, 1, 3)
            spares = scene.hops[3:]

            def die(node: FullNode) -> None:  # whichever the route took; not the last
                if sum(spare.transport.node in scene.faults.trouble.dead for spare in spares) < 5:
                    scene.faults.die(node)

            for spare in spares:
                scene.faults.at("replay", spare, lambda n=spare: die(n), 4)  # type: ignore[misc]
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            assert len(scene.answers[0].repairs) == 6
            await asyncio.sleep(5.0)
            living = [spare for spare in spares if spare.transport.node not in scene.faults.trouble.dead]
            assert len(living) == 1
            for node in [scene.swarm.origin.node, scene.hops[0], scene.hops[2], *living]:
                open_links = [link for links in node.pool._open().values() for link in links]
                reading = [task for task in node.tasks if task.get_coro().__name__ == FullNode._read.__name__]  # type: ignore[union-attr]
                assert len(reading) == len(open_links)
                # a reader each, the watch, and accept, device loop or ends
                assert len(node.tasks) <= len(open_links) + 3

    bench.play(main)
