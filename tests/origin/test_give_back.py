"""What a spare took goes back to a node that serves it again, in the middle of a stream."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from manyhands.config import RequestConfig
from manyhands.core import PathKind
from manyhands.errors import ShardUnavailable
from manyhands.origin import Answer
from manyhands.testing.swarm import MemorySwarm, memory_swarm
from manyhands.testing.tiny import make_tiny
from tests.origin.scenes import HOT, PROMPT, play

LONG = replace(HOT, max_tokens=230)
PLAIN = RequestConfig(draft="off", patience_s=3.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("back") / "qwen3", seed=3)


async def stream(swarm: MemorySwarm, at: dict[int, Callable[[], object]], path: PathKind = "ring") -> Answer:
    """An answer, with something done when so many tokens have come.

    The clock moves on at each token, for which it waits until all devices are idle: a standby does not fall behind.
    """
    origin = swarm.origin
    answer = origin.answer(origin.request_ids(PROMPT, LONG))
    async for _ in origin.stream(answer, path=path):
        if (act := at.get(len(answer.token_ids))) is not None:
            act()
        await asyncio.sleep(0.001)
    return answer


def moves(answer: Answer) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    return [(repair.lost, repair.replacement) for repair in answer.repairs]


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_running_stream_leaves_the_spare_when_its_node_is_back(folder: Path, victim: int, path: PathKind) -> None:
    """The spare takes the hole alone; 64 positions on, a standby on the node that is back takes over without a replay."""

    async def main() -> None:
        async with memory_swarm(folder, "0-2,3-5", spares=["0-5"], request=PLAIN) as swarm:
            routes, node = swarm.origin.routes, swarm.hops[victim].transport.node
            wanted = await stream(swarm, {})
            told = await stream(swarm, {10: lambda: routes.evict(node), 20: lambda: routes.readmit(node)}, path)
            assert told.token_ids == wanted.token_ids
            assert moves(told) == [((f"n{victim}",), ("n2",)), (("n2",), (f"n{victim}",))]
            assert f"n{victim} serves layers {told.route[victim].info.span} again" in told.repairs[1].reason
            assert swarm.hops[2].hosts[0].num_sessions == 0

    play(main)


def test_a_node_that_was_lost_twice_does_not_get_them_back_and_the_spare_serves_on(folder: Path) -> None:
    async def main() -> None:
        async with memory_swarm(folder, "0-2,3-5", spares=["0-5"], request=PLAIN) as swarm:
            routes, node = swarm.origin.routes, swarm.hops[1].transport.node
            out, back = (lambda: routes.evict(node)), (lambda: routes.readmit(node))
            told = await stream(swarm, {5: out, 8: back, 120: out, 125: back})
            assert moves(told) == [(("n1",), ("n2",)), (("n2",), ("n1",)), (("n1",), ("n2",))]
            assert told.token_ids == (await stream(swarm, {})).token_ids

    play(main)


def test_one_spare_does_not_hand_over_to_another(folder: Path) -> None:
    async def main() -> None:
        async with memory_swarm(folder, "0-2,3-5", spares=["0-5", "0-5"], request=PLAIN) as swarm:
            told = await stream(swarm, {5: lambda: swarm.origin.routes.evict(swarm.hops[1].transport.node)})
            assert len(told.repairs) == 1

    play(main)


def test_a_standby_on_another_spare_makes_way(folder: Path) -> None:
    """With `standby` the spare's hop is followed by the second spare; the layers go back all the same."""

    async def main() -> None:
        request = replace(PLAIN, standby=True)
        async with memory_swarm(folder, "0-2,3-5", spares=["0-5", "0-5"], request=request) as swarm:
            routes, node = swarm.origin.routes, swarm.hops[1].transport.node
            told = await stream(swarm, {5: lambda: routes.evict(node), 20: lambda: routes.readmit(node)})
            assert moves(told)[-1][1] == ("n1",) and len(told.repairs) == 2
            assert told.token_ids == (await stream(swarm, {})).token_ids

    play(main)


def test_layers_of_an_evicted_node_are_not_said_to_be_held_by_none(folder: Path) -> None:
    """An audit evicts too: who reads that no node holds them looks for another machine, and the node stands there."""

    async def main() -> None:
        async with memory_swarm(folder, "0-2,3-5", request=PLAIN) as swarm:
            routes, node = swarm.origin.routes, swarm.hops[1].transport.node
            await routes.find()
            routes.evict(node)
            with pytest.raises(
                ShardUnavailable, match=r"no node that is not evicted holds layers 3-5 of 6: .* readmit"
            ):
                await routes.find()
            routes.readmit(node)
            await routes.find()

    play(main)
