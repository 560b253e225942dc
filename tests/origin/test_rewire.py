"""A running session leaves the relay when there is a direct link: same tokens, caches kept, nothing more over the relay."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from manyhands.core import NodeAddr, NodeId, PathKind
from manyhands.errors import Detour
from manyhands.net.transport import Link
from manyhands.origin import repair
from manyhands.origin.node import FullNode
from manyhands.origin.session import Session
from manyhands.testing.clock import run_virtual
from manyhands.testing.swarm import MemorySwarm, memory_swarm
from manyhands.wire.message import Lane
from tests.origin.scenes import GREEDY, HOT, PROMPT, Oracle, expected

Disturb = Callable[["Scene"], Coroutine[Any, Any, None]]


@dataclass
class Scene:
    """A request of which every link to another node counts as relayed."""

    swarm: MemorySwarm
    session: Session
    epochs: list[int] = field(default_factory=list)

    @property
    def nodes(self) -> list[FullNode]:
        return [self.swarm.origin.node, *self.swarm.hops]

    def links(self, node: FullNode, peer: NodeId, lane: Lane) -> list[Link]:
        return [link for (who, on), links in node.pool._links.items() if (who, on) == (peer, lane) for link in links]

    def relay_all(self) -> None:
        for node in self.nodes:
            for links in node.pool._links.values():
                for link in links:
                    link.health.path_kind = "relay"

    async def connect(self, node: FullNode, addr: NodeAddr, *lanes: Lane) -> None:
        """A direct link beside those there are, as net/reach.py finds one."""
        for lane in lanes:
            link = await node.transport.dial(addr, lane)
            node.pool.add(link)
        await asyncio.sleep(0)

    def relayed_bytes(self, node: FullNode, peer: NodeId, lane: Lane) -> int:
        return sum(ln.health.bytes_sent for ln in self.links(node, peer, lane) if ln.health.path_kind == "relay")


def play(folder: Path, disturb: Disturb, path: PathKind = "ring", params: Any = GREEDY, drafts: int = 0) -> Scene:
    """Disturb a request at its first token; its tokens must be those of an undisturbed one."""

    async def main() -> Scene:
        async with memory_swarm(folder, "0-1,2-3,4-5") as swarm:
            ids = expected(folder, PROMPT, params)
            answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, params))
            drafter = Oracle((*PROMPT, *ids), drafts, lambda position: position % 3 == 0) if drafts else None
            scene: Scene | None = None
            async for _ in swarm.origin.stream(answer, path=path, drafter=drafter):
                assert answer.session is not None
                if scene is None:
                    scene = Scene(swarm, answer.session)
                    scene.relay_all()
                    await disturb(scene)
                scene.epochs.append(answer.session.route.epoch)
            assert scene is not None and not answer.repairs and answer.token_ids == ids
            return scene

    return run_virtual(main())


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("path", ["ring", "star"])
def test_a_session_moves_to_direct_links_of_its_origin(folder: Path, path: PathKind, drafts: int) -> None:
    before: list[int] = []

    async def disturb(scene: Scene) -> None:
        await scene.connect(scene.swarm.origin.node, scene.swarm.addrs[0], "control", "data")
        before.append(scene.session.route.epoch)

    scene = play(folder, disturb, path, HOT, drafts)
    assert scene.epochs[-1] == before[0] + 1
    hop, rest = scene.session.route.hops[0], scene.session.route.hops[1:]
    assert hop.data is not None and (hop.control.health.path_kind, hop.data.health.path_kind) == ("direct", "direct")
    assert {one.control.health.path_kind for one in rest} == {"relay"}


def test_hops_tell_that_they_can_reach_each_other(folder: Path) -> None:
    """The origin cannot see a link between two hops; the hop that sends over it says so, and nothing more goes by the relay."""

    async def main() -> None:
        async with memory_swarm(folder, "0-1,2-3,4-5") as swarm:
            answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, GREEDY))
            first, second = swarm.hops[0], swarm.addrs[1].node
            assert second is not None
            after: list[int] = []
            async for _ in swarm.origin.stream(answer):
                assert answer.session is not None
                scene = Scene(swarm, answer.session)
                if not after:
                    scene.relay_all()
                    await scene.connect(first, swarm.addrs[1], "data")
                    await asyncio.sleep(0.01)  # the news reach the origin while the consumer is here
                after.append(scene.relayed_bytes(first, second, "data"))
            assert answer.token_ids == expected(folder, PROMPT, GREEDY) and not answer.repairs
            assert answer.session is not None and answer.session.route.epoch == 2
            assert len(set(after[2:])) == 1, "steps still went by the relay"

    run_virtual(main())


def test_a_hop_that_calls_for_it_all_the_time_is_heard_once_a_second(folder: Path) -> None:
    async def main() -> None:
        async with memory_swarm(folder, "0-1,2-3,4-5") as swarm:
            answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, GREEDY))
            async for _ in swarm.origin.stream(answer):
                for host in swarm.hops[0].hosts:
                    for place in host._places.values():
                        place.fault(Detour.code, "again", 0)
                await asyncio.sleep(0.01)
            assert answer.token_ids == expected(folder, PROMPT, GREEDY)
            assert answer.session is not None and answer.session.route.epoch == 2

    assert repair.REWIRE_PAUSE_S > GREEDY.max_tokens * 0.01
    run_virtual(main())


def test_a_second_relayed_link_changes_nothing(folder: Path) -> None:
    async def disturb(scene: Scene) -> None:
        dial = scene.nodes[0].transport.dial
        link = await dial(scene.swarm.addrs[0], "data")
        link.health.path_kind = "relay"
        scene.nodes[0].pool.add(link)

    assert len(set(play(folder, disturb).epochs)) == 1


def test_a_hop_that_dies_while_links_change_is_repaired(folder: Path) -> None:
    """The new place is never taken: the hop counts as lost, and the session goes on over a spare."""

    async def main() -> None:
        async with memory_swarm(folder, "0-1,2-3,4-5", spares=["2-3"]) as swarm:
            answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, GREEDY))
            async for _ in swarm.origin.stream(answer):
                assert answer.session is not None
                if len(answer.token_ids) == 4:
                    scene = Scene(swarm, answer.session)
                    scene.relay_all()
                    await scene.connect(swarm.origin.node, swarm.addrs[0], "control", "data")
                    for link in [link for links in swarm.hops[1].pool._links.values() for link in links]:
                        link.abort("it dies")
            assert answer.token_ids == expected(folder, PROMPT, GREEDY) and len(answer.repairs) == 1

    run_virtual(main())
