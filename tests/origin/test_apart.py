"""Hops that cannot reach each other (C-10): another ring if there is one, else a star over the same nodes; the same text."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from manyhands.config import RequestConfig
from manyhands.core import EndsAt, NodeId
from manyhands.origin import Answer
from manyhands.origin.apart import APART_S, MAX_PAIRS, ApartPairs
from manyhands.route.offer import pair
from manyhands.testing.faults import Faults
from manyhands.testing.swarm import MemorySwarm, memory_swarm
from manyhands.testing.tiny import make_tiny
from tests.origin.scenes import HOT, PROMPT, play
from tests.route.test_policies import offer

PLAIN = RequestConfig(draft="off", patience_s=20.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("apart") / "qwen3", seed=3)


@asynccontextmanager
async def apart(folder: Path, cut: str, *pairs: tuple[int, int], **options: object) -> AsyncIterator[MemorySwarm]:
    """Nodes of these pairs cannot dial each other, as behind two NATs without a relay: dials end in silence."""
    faults = Faults()
    async with memory_swarm(folder, cut, wrap=faults.wrap, request=PLAIN, **options) as swarm:  # type: ignore[arg-type]
        for a, b in pairs:
            faults.cut(swarm.hops[a], swarm.hops[b])
            faults.cut(swarm.hops[b], swarm.hops[a])
        yield swarm


async def ask(swarm: MemorySwarm, evict: int | None = None) -> Answer:
    """An answer; node `evict` is evicted at its fifth token."""
    answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, HOT))
    async for _ in swarm.origin.stream(answer):
        if evict is not None and len(answer.token_ids) == 5:
            swarm.origin.routes.evict(swarm.hops[evict].transport.node)
    return answer


def path_of(answer: Answer) -> tuple[str, bool]:
    assert answer.session is not None
    return answer.session.route.lease.path, answer.routing.is_star


@pytest.mark.parametrize("ends", ["origin", "edges"])
def test_a_ring_whose_hops_cannot_meet_becomes_a_star(folder: Path, ends: EndsAt) -> None:
    """Without an error; only the first request waits for the dial that fails."""

    async def main() -> None:
        async with memory_swarm(folder, "0-1,2-3,4-5", request=PLAIN, ends=ends) as swarm:
            wanted = (await ask(swarm)).token_ids
        async with apart(folder, "0-1,2-3,4-5", (0, 1), (1, 2), ends=ends) as swarm:
            first = await ask(swarm)
            assert first.token_ids == wanted and path_of(first) == ("star", True) and first.repairs == []
            began = asyncio.get_running_loop().time()
            again = await ask(swarm)
            assert again.token_ids == wanted and path_of(again) == ("star", True)
            assert asyncio.get_running_loop().time() - began < 1.0

    play(main)


async def serve_too(swarm: MemorySwarm, index: int, folder: Path) -> None:
    """A spare becomes a node like the others, with less room, so that it is tried after them."""
    node = swarm.hops[index]
    (spare,) = node.hosts
    node.worker.drop(spare)
    host = await node.worker.host(folder, spare.info.span, "bf16", spare.engine.device, model_name="test")
    host.engine.cache_tokens //= 2


@pytest.mark.parametrize("other", ["0-2", "3-5"])
def test_another_ring_is_better_than_a_star(folder: Path, other: str) -> None:
    """The pair is avoided, not a node of it: with another first hop as well as with another last one."""

    async def main() -> None:
        async with apart(folder, "0-2,3-5", (0, 1), spares=[other]) as swarm:
            await serve_too(swarm, 2, folder)
            for _ in range(2):
                told = await ask(swarm)
                names = ["n2", "n1"] if other == "0-2" else ["n0", "n2"]
                assert [offer.name for offer in told.route] == names and path_of(told) == ("ring", False)

    play(main)


def test_pairs_are_forgotten_and_few() -> None:
    route = [offer("a", 0, 4), offer("b", 4, 8), offer("c", 8, 12)]
    pairs = ApartPairs()
    pairs.note(route, NodeId("b"), 100.0)
    assert pairs.are_in(route, 100.0) and not pairs.are_in(route[1:], 100.0)
    assert pairs.pairs(100.0) == {pair(NodeId("a"), NodeId("b"))}
    assert not pairs.are_in(route, 100.0 + APART_S) and not pairs.pairs(100.0 + APART_S)
    for index in range(2 * MAX_PAIRS):
        pairs.note([offer(f"x{index}", 0, 4), offer("b", 4, 8)], NodeId("b"), 200.0)
    assert len(pairs.pairs(200.0)) == MAX_PAIRS


def test_a_running_ring_becomes_a_star_where_a_replacement_cannot_be_reached(folder: Path) -> None:
    """The only node that holds the lost layers is out of the others' reach, not out of the origin's."""

    async def main() -> None:
        async with apart(folder, "0-1,2-3,4-5", (0, 3), (3, 2), spares=["2-3"]) as swarm:
            calm = await ask(swarm)
            told = await ask(swarm, evict=1)
            assert told.token_ids == calm.token_ids and path_of(calm)[0] == "ring" and path_of(told) == ("star", True)
            assert told.session is not None and [h.offer.name for h in told.session.route.hops] == ["n0", "n3", "n2"]

    play(main)
