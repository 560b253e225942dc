"""The first rows of a prompt leave right behind the Opens: a round trip less to the first token, and never another text."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manyhands.core import EndsAt, NodeAddr, PathKind, SamplingParams
from manyhands.net.transport import Link, Transport
from manyhands.origin.session import Session
from manyhands.testing.faults import Faults
from manyhands.testing.swarm import MemorySwarm, memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.testing.wan import WanLink, WanProfile, WanTransport
from manyhands.wire.message import Lane
from tests.origin.scenes import GREEDY, HOT, PROMPT, expected, ids_of, play, swarm_of
from tests.worker.pipeline import random_ids

LEG_S = 0.02
LONG = tuple(random_ids(400, seed=5))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("first") / "qwen3", seed=3)


class Lanes(WanTransport):
    """What a node sends takes `delay_s` of its lane."""

    def __init__(self, transport: Transport, delay_s: Callable[[Lane], float]) -> None:
        super().__init__(transport, WanProfile())
        self._delay_s = delay_s

    async def dial(self, addr: NodeAddr, lane: Lane) -> WanLink:
        self._up = WanProfile(self._delay_s(lane))
        return await super().dial(addr, lane)

    def _wrap(self, link: Link) -> WanLink:
        self._up = WanProfile(self._delay_s(link.lane))
        return super()._wrap(link)


async def first_token_s(swarm: MemorySwarm, prompt: tuple[int, ...], path: PathKind) -> float:
    """Seconds of virtual time, in which computing takes none."""
    clock = asyncio.get_running_loop().time
    origin = swarm.origin
    answer = origin.answer(origin.request_ids(prompt, GREEDY))
    began = clock()
    async for _ in origin.stream(answer, path=path):
        return clock() - began
    raise AssertionError("no token came")


@pytest.mark.parametrize("ends", ["origin", "edges"])
@pytest.mark.parametrize(("path", "legs"), [("ring", 4), ("star", 6)])
def test_a_first_token_takes_the_legs_of_its_route_and_no_round_trip_before(
    qwen3: Path, ends: EndsAt, path: PathKind, legs: int
) -> None:
    async def main() -> None:
        far = {"wrap": lambda transport: WanTransport(transport, WanProfile(LEG_S))}
        async with swarm_of(qwen3, "0-1,2-3,4-5", ends=ends, **far) as swarm:
            await first_token_s(swarm, PROMPT, path)  # dials
            took_s = await first_token_s(swarm, PROMPT, path)
            assert took_s == pytest.approx(legs * LEG_S, abs=LEG_S / 4)

    play(main)


@pytest.mark.parametrize("ends", ["origin", "edges"])
@pytest.mark.parametrize("late", ["control", "data"])
@pytest.mark.parametrize("prompt", [PROMPT[:1], PROMPT, LONG], ids=["one token", "one step", "several steps"])
def test_rows_that_come_before_their_open_are_kept_for_it(
    qwen3: Path, ends: EndsAt, late: Lane, prompt: tuple[int, ...]
) -> None:
    """Or long after it, on all hops; nothing is sent again."""

    async def main() -> None:
        slow = {"wrap": lambda transport: Lanes(transport, lambda lane: LEG_S if lane == late else 0.0)}
        async with swarm_of(qwen3, "0-1,2-3,4-5", ends=ends, **slow) as swarm:
            for params in (GREEDY, HOT):
                answer = await swarm.origin.complete(swarm.origin.request_ids(prompt, params), draft="off")
                assert answer.token_ids == expected(qwen3, prompt, params) and not answer.repairs
            rows = 2 * (len(prompt) + GREEDY.max_tokens - 1)
            assert [node.hosts[0].engine.rows_run for node in swarm.hops] == [rows] * 3

    play(main)


def test_a_conversation_whose_cache_one_hop_has_lost_is_the_same(qwen3: Path) -> None:
    """Its first rows were sent from where the others go on; the hop without the cache drops them, unharmed."""

    async def main() -> None:
        slow = {"wrap": lambda transport: Lanes(transport, lambda lane: LEG_S if lane == "control" else 0.0)}
        for lost, cached in (([0], 0), ([1], 50), ([2], 50), ([0, 2], 0), ([0, 1, 2], 0)):
            async with swarm_of(qwen3, "0-1,2-3,4-5", **slow) as swarm:
                first = await swarm.origin.complete(swarm.origin.request_ids(PROMPT, GREEDY), tenant="me")
                history = (*PROMPT, *first.token_ids, 70, 71, 72)
                await asyncio.sleep(1.0)  # until it is parked
                for index in lost:
                    swarm.hops[index].hosts[0].parking.clear()
                sessions, opened = swarm.origin.node.requests, list[Session]()
                opening = sessions.open

                async def counted(*args: Any, opening: Any = opening, opened: list[Session] = opened) -> Session:
                    opened.append(await opening(*args))
                    return opened[-1]

                sessions.open = counted  # type: ignore[method-assign,assignment]
                again = await swarm.origin.complete(swarm.origin.request_ids(history, HOT), tenant="me")
                assert again.token_ids == expected(qwen3, history, HOT) and not again.repairs
                assert again.cached_tokens == cached and len(opened) == 1

    play(main)


@pytest.mark.parametrize("victim", range(3))
def test_a_conversation_whose_hop_is_gone_is_computed_anew_by_its_replacement_alone(qwen3: Path, victim: int) -> None:
    """Nothing is sent before it has answered: it has none of the positions that the others go on from."""

    async def main() -> None:
        faults = Faults()
        async with memory_swarm(qwen3, "0-1,2-3,4-5", spares=["0-5"], wrap=faults.wrap) as swarm:
            first = await swarm.origin.complete(swarm.origin.request_ids(PROMPT, GREEDY), tenant="me")
            history = (*PROMPT, *first.token_ids, 70, 71, 72)
            await asyncio.sleep(1.0)
            faults.die(swarm.hops[victim])
            await asyncio.sleep(1.0)
            living = [node.hosts[0] for index, node in enumerate(swarm.hops) if index != victim]
            before = [host.engine.rows_run for host in living]
            again = await swarm.origin.complete(swarm.origin.request_ids(history, HOT), tenant="me", draft="off")
            assert again.token_ids == expected(qwen3, history, HOT) and not again.repairs
            done = [host.engine.rows_run - rows for host, rows in zip(living, before, strict=True)]
            new, drawn = len(history) - 50, HOT.max_tokens - 1
            assert done == [new + drawn, new + drawn, len(history) + drawn]

    play(main)


def test_many_sessions_at_once_lose_no_row(qwen3: Path) -> None:
    """More than may have early rows on one link, all before their Opens."""

    async def main() -> None:
        slow = {"wrap": lambda transport: Lanes(transport, lambda lane: LEG_S if lane == "control" else 0.0)}
        async with swarm_of(qwen3, "0-1,2-3,4-5", **slow) as swarm:
            params = [SamplingParams(max_tokens=4, ignore_eos=True, seed=i, temperature=0.9) for i in range(40)]
            wanted = [await ids_of(swarm, PROMPT, each) for each in params]
            asked = [swarm.origin.complete(swarm.origin.request_ids(PROMPT, each)) for each in params]
            answers = await asyncio.gather(*asked)
            assert [each.token_ids for each in answers] == wanted
            assert not any(each.repairs for each in answers)

    play(main)
