"""Sessions that another origin goes on with: warm hops are adopted, the tokens drawn again in one batch, the text the same."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import EndsAt, PathKind, SamplingParams
from manyhands.origin import Answer, Origin
from manyhands.origin.adoption import Adoption, HopMark
from manyhands.testing.faults import Faults
from manyhands.testing.swarm import MemorySwarm, memory_node
from manyhands.testing.tiny import make_tiny
from manyhands.worker.execute import Device
from manyhands.worker.parking import ORPHANED_S
from tests.nightly import daily
from tests.origin.scenes import GREEDY, HOT, PROMPT, Oracle, ids_of, play, swarm_of

HANDLE = b"h" * 16
LONG = replace(HOT, max_tokens=24, logprobs=2)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("adoption") / "qwen3", seed=3)


@asynccontextmanager
async def another(swarm: MemorySwarm, name: str = "other", wrap: Any = None) -> AsyncIterator[Origin]:
    """Another origin of the same model."""
    device = Device.start(1)
    try:
        async with memory_node(swarm.network, name, wrap) as node:
            yield Origin(node, swarm.origin.model, device, swarm.addrs)
    finally:
        device.close()


async def begin(origin: Origin, params: SamplingParams, tokens: int, **options: Any) -> Answer:
    """An answer that is cut after so many tokens."""
    answer = origin.answer(origin.request_ids(PROMPT, params))
    async with contextlib.aclosing(origin.stream(answer, adoption=Adoption(HANDLE), **options)) as stream:
        for _ in range(tokens):
            await anext(stream)
    return answer


def marks_of(answer: Answer) -> tuple[HopMark, ...]:
    assert answer.session is not None
    return tuple(
        HopMark(hop.offer.node[:12], hop.offer.info.span.start, hop.offer.info.span.end)
        for hop in answer.session.route.hops
    )


async def go_on(origin: Origin, params: SamplingParams, cut: Answer, tokens: int, **options: Any) -> Answer:
    adoption = Adoption(options.pop("handle", HANDLE), marks_of(cut), tokens)
    return await origin.complete(origin.request_ids(PROMPT, params), adoption=adoption, **options)


def rows_run(swarm: MemorySwarm) -> list[int]:
    return [sum(host.engine.rows_run for host in node.hosts) for node in swarm.hops]


@pytest.mark.parametrize("ends", ["origin", "edges"])
@pytest.mark.parametrize("path", ["ring", "star"])
def test_another_origin_goes_on(qwen3: Path, ends: EndsAt, path: PathKind) -> None:
    """Cut after 1, 9 and all tokens: nothing is computed again but the last position, odds are the same."""
    params = LONG if ends == "origin" else replace(LONG, logprobs=None)

    async def main() -> None:
        async with swarm_of(qwen3, "0-1,2-3,4-5", ends=ends) as swarm, another(swarm) as other:
            whole = await swarm.origin.complete(swarm.origin.request_ids(PROMPT, params))
            for tokens in (1, 9, 24):
                cut = await begin(swarm.origin, params, tokens, path=path)
                before = rows_run(swarm)
                answer = await go_on(other, params, cut, tokens, path=path)
                assert answer.token_ids == whole.token_ids and answer.redrawn == tokens
                done = [now - then for now, then in zip(rows_run(swarm), before, strict=True)]
                assert all(rows <= 26 - tokens for rows in done), (tokens, done)
            worse = Adoption(HANDLE, marks_of(cut), 24, "E2")  # part of it was computed in another class
            again = await other.complete(other.request_ids(PROMPT, params), path=path, adoption=worse)
            assert (again.token_ids, again.exactness, answer.exactness) == (whole.token_ids, "E2", "E0")

    play(main)


@pytest.mark.parametrize(("lost", "log_bytes"), [*((lost, 1 << 20) for lost in range(1, 8)), (2, 0), (5, 0)])
def test_hops_that_have_lost_it(qwen3: Path, lost: int, log_bytes: int) -> None:
    """Any set of hops has dropped it, with logs and without: rebuilt, or computed anew; the text is the same."""

    async def main() -> None:
        worker = WorkerConfig(log_bytes=log_bytes)
        async with swarm_of(qwen3, "0-1,2-3,4-5", worker=worker) as swarm, another(swarm) as other:
            wanted = await ids_of(swarm, PROMPT, LONG)
            cut = await begin(swarm.origin, LONG, 9)
            await asyncio.sleep(0.1)
            for index, node in enumerate(swarm.hops):
                if lost >> index & 1:
                    node.hosts[0].parking.clear()
            answer = await go_on(other, LONG, cut, 9)
            assert answer.token_ids == wanted
            assert answer.redrawn == (9 if log_bytes and lost < 4 else 0)
            assert answer.cached_tokens == (0 if lost & 1 or (lost and not log_bytes) else len(PROMPT) - (lost > 3))

    play(main)


@pytest.mark.parametrize("victim", range(3))
def test_a_hop_that_dies_with_the_origin(qwen3: Path, victim: int) -> None:
    """Another takes its place as the session is adopted. (Rows were awaited of one in the last hop's place, which had none.)"""

    async def main() -> None:
        faults = Faults()
        options: dict[str, Any] = {"spares": ["0-5"], "wrap": faults.wrap}
        async with swarm_of(qwen3, "0-1,2-3,4-5", **options) as swarm, another(swarm, wrap=faults.wrap) as other:
            wanted = await ids_of(swarm, PROMPT, LONG)
            cut = await begin(swarm.origin, LONG, 9)
            await asyncio.sleep(0.1)
            faults.die(swarm.hops[victim])
            began = asyncio.get_running_loop().time()
            answer = await go_on(other, LONG, cut, 9)
            assert (answer.token_ids, answer.redrawn) == (wanted, 9 if victim < 2 else 0)
            assert not answer.repairs and asyncio.get_running_loop().time() < began + 5

    play(main)


@pytest.mark.parametrize("seed", daily(range(3), range(3, 12)))
def test_an_origin_that_dies(qwen3: Path, seed: int) -> None:
    """At a random token, with drafts in flight, perhaps after a repair: its hops keep the session, another origin adopts it."""
    draw = random.Random(seed)
    params = replace(LONG, temperature=draw.choice([0.0, 0.8]), presence_penalty=draw.choice([0.0, 0.7]))

    async def main() -> None:
        faults = Faults()
        options: dict[str, Any] = {"spares": ["0-5"], "wrap": faults.wrap, "request": RequestConfig(draft="auto")}
        async with swarm_of(qwen3, "0-1,2-3,4-5", **options) as swarm:
            wanted = await ids_of(swarm, PROMPT, params)
            async with another(swarm, "first", faults.wrap) as first, another(swarm, "second") as second:
                if draw.random() < 0.5:
                    victim = draw.choice(swarm.hops[:3])
                    faults.at("decode", victim, lambda: faults.die(victim), skip=draw.randrange(4))
                tokens = draw.randrange(1, 23)
                answer = first.answer(first.request_ids(PROMPT, params))
                stream = first.stream(answer, adoption=Adoption(HANDLE))
                for _ in range(tokens):
                    await anext(stream)
                marks = marks_of(answer)
                faults.die(first.node)
                await asyncio.sleep(0.1)
                adoption = Adoption(HANDLE, marks, tokens)
                rest = await second.complete(second.request_ids(PROMPT, params), adoption=adoption)
                assert rest.token_ids == wanted
                with contextlib.suppress(Exception):
                    await stream.aclose()

    play(main)


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("ends", ["origin", "edges"])
def test_after_a_repair_with_windows_in_flight(qwen3: Path, victim: int, ends: EndsAt) -> None:
    """What the replacement has computed again is adopted like the rest, the last hop's rows too, with penalties and stop
    strings; what a drafter has sent ahead of the cut is not."""
    params = replace(LONG, logprobs=None, presence_penalty=0.6, repetition_penalty=1.1, stop=("never said",))

    async def main() -> None:
        faults = Faults()
        options: dict[str, Any] = {"spares": ["0-5"], "wrap": faults.wrap, "ends": ends}
        async with swarm_of(qwen3, "0-1,2-3,4-5", **options) as swarm, another(swarm, wrap=faults.wrap) as other:
            wanted = await ids_of(swarm, PROMPT, params)
            faults.at("window", swarm.hops[victim], lambda: faults.die(swarm.hops[victim]), skip=1)
            drafter = Oracle([*PROMPT, *wanted], 3, lambda at: at % 5 == 0, ahead=True)
            cut = await begin(swarm.origin, params, 14, drafter=drafter)
            assert cut.repairs and cut.drafting.accepted
            await asyncio.sleep(0.1)
            answer = await go_on(other, params, cut, 14)
            assert (answer.token_ids, answer.redrawn, answer.cached_tokens) == (wanted, 14, len(PROMPT))

    play(main)


@pytest.mark.parametrize("is_dead", [True, False])
@pytest.mark.parametrize("ends", ["origin", "edges"])
@pytest.mark.parametrize("path", ["ring", "star"])
def test_an_attempt_that_is_behind_its_client_and_guesses_wrong(
    qwen3: Path, path: PathKind, ends: EndsAt, is_dead: bool
) -> None:
    """The client has 14 tokens. A second attempt, whose caches were gone, has drawn 9 of them again and has wrong guesses for
    the rest on all hops, when it dies too or is cut off: the third goes on with what is committed of it."""
    params = LONG if ends == "origin" else replace(LONG, logprobs=None)

    async def main() -> None:
        faults = Faults()
        async with swarm_of(qwen3, "0-1,2-3,4-5", wrap=faults.wrap, ends=ends) as swarm:
            wanted = await ids_of(swarm, PROMPT, params)
            async with another(swarm, "second", faults.wrap) as second, another(swarm, "third") as third:
                drafter = Oracle([*PROMPT, *wanted], 8, lambda _: True)
                answer = second.answer(second.request_ids(PROMPT, params))
                stream = second.stream(answer, adoption=Adoption(HANDLE), drafter=drafter, path=path)
                for _ in range(9):
                    await anext(stream)
                await asyncio.sleep(0.1)
                marks = marks_of(answer)
                if is_dead:
                    faults.die(second.node)
                    await asyncio.sleep(0.1)
                adoption = Adoption(HANDLE, marks, 14)
                rest = await third.complete(third.request_ids(PROMPT, params), adoption=adoption, path=path)
                assert rest.token_ids == wanted
                assert (rest.redrawn, rest.cached_tokens) == (10, len(PROMPT))  # the tenth is of a row that is no guess
                with contextlib.suppress(Exception):
                    await stream.aclose()

    play(main)


def test_who_lacks_the_handle_adopts_nothing(qwen3: Path) -> None:
    """Neither by another handle nor by what a hop was told; and what is not adopted is gone in time."""

    async def main() -> None:
        async with swarm_of(qwen3, "0-2,3-5") as swarm, another(swarm) as other:
            cut = await begin(swarm.origin, LONG, 9)
            for handle in (b"x" * 16, HANDLE[:-1] + b"i"):
                answer = await go_on(other, LONG, cut, 9, handle=handle)
                assert answer.redrawn == 0 and answer.cached_tokens == 0
            assert (await go_on(other, LONG, cut, 9)).redrawn == 9
            await swarm.origin.node.pool.aclose()
            await asyncio.sleep(1)
            held = [len(node.hosts[0].parking) for node in swarm.hops]
            assert all(held)
            await asyncio.sleep(ORPHANED_S)
            owner = swarm.origin.node.transport.node
            assert [node.hosts[0].parking.held_by(owner) for node in swarm.hops] == [0, 0]

    play(main)


def test_it_is_off_with_reuse(qwen3: Path) -> None:
    async def main() -> None:
        async with swarm_of(qwen3, "0-2,3-5", request=RequestConfig(reuse=False)) as swarm, another(swarm) as other:
            cut = await begin(swarm.origin, GREEDY, 5)
            assert [len(node.hosts[0].parking) for node in swarm.hops] == [0, 0]
            assert (await go_on(other, GREEDY, cut, 5)).redrawn == 0

    play(main)
