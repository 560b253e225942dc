"""Requests that begin where an earlier one of the same tenant got to: the same text, and only what is new is computed."""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from manyhands.cli.chat_source import OriginSource, Stats
from manyhands.cli.chat_wishes import ChatWishes
from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import EndsAt, PathKind, SamplingParams, SessionId
from manyhands.origin import Answer, Origin
from manyhands.origin.conversations import MIN_PREFIX, Conversations, ParkedConversation
from manyhands.route.offer import Offer
from manyhands.testing.faults import Faults
from manyhands.testing.swarm import MemorySwarm, memory_swarm
from manyhands.testing.tiny import WINDOW, make_tiny
from manyhands.testing.trouble import Phase
from tests.nightly import daily
from tests.origin.scenes import GREEDY, HOT, PROMPT, Oracle, ids_of, play, swarm_of
from tests.route.test_policies import offer

ME = "me"


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("reuse") / "qwen3", seed=3)


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("gemma2", tmp_path_factory.mktemp("reuse") / "gemma2", seed=4)


async def ask(origin: Origin, ids: Sequence[int], params: SamplingParams = GREEDY, **options: Any) -> Answer:
    """An answer for the tenant ME, unless another is given."""
    return await origin.complete(origin.request_ids(ids, params), **{"tenant": ME, **options})


def rows_run(swarm: MemorySwarm) -> list[int]:
    """Rows that each node has computed so far."""
    return [sum(host.engine.rows_run for host in node.hosts) for node in swarm.hops]


def num_parked(swarm: MemorySwarm) -> list[int]:
    return [sum(len(host.parking) for host in node.hosts) for node in swarm.hops]


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt_oss", "minicpm3", "qwen2_moe"])
@pytest.mark.parametrize("ends", ["origin", "edges"])
def test_a_conversation_goes_on_with_the_same_text(tmp_path: Path, kind: str, ends: EndsAt) -> None:
    """Three turns, greedy and hot: what is new is computed, and nothing else; text as without reuse."""
    folder = make_tiny(kind, tmp_path / kind, seed=7)

    async def main() -> None:
        async with swarm_of(folder, "0-1,2-3,4-5", ends=ends) as swarm:
            history = list(PROMPT)
            for turn, params in enumerate([GREEDY, HOT, replace(HOT, seed=5)]):
                wanted = await ids_of(swarm, history, params)
                before = rows_run(swarm)
                answer = await ask(swarm.origin, history, params)
                assert answer.token_ids == wanted
                assert answer.cached_tokens == (len(history) - 6 if turn else 0)  # 5 new, and the last token drawn
                computed = len(history) - answer.cached_tokens + len(wanted) - 1
                done = [now - then for now, then in zip(rows_run(swarm), before, strict=True)]
                assert all(computed <= rows <= computed + 2 for rows in done), (done, computed)
                history += [*wanted, *range(70 + turn, 75 + turn)]
            assert num_parked(swarm) == [1, 1, 1]  # each turn replaces the one before

    play(main)


CACHED = len(PROMPT) + GREEDY.max_tokens - 1  # after one turn: the last token is drawn, not computed


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_every_boundary(tmp_path: Path, kind: str) -> None:
    """Prompts that part from the cached ids at the first one, around MIN_PREFIX, the sliding window and the cached end."""
    folder = make_tiny(kind, tmp_path / kind, seed=9)
    edges = (0, 1, MIN_PREFIX - 1, MIN_PREFIX, WINDOW - 1, WINDOW, WINDOW + 1, 36, 37, CACHED - 1, CACHED)

    async def main() -> None:
        async with swarm_of(folder, "0-2,3-5") as swarm:
            first = await ask(swarm.origin, PROMPT)
            cached = [*PROMPT, *first.token_ids][:CACHED]
            for same in edges:
                for rest in ([], list(range(100, 120))):
                    prompt = [*cached[:same], *rest]
                    if not prompt:
                        continue
                    usable = min(same, len(prompt) - 1)
                    answer = await ask(swarm.origin, prompt, HOT)
                    assert answer.cached_tokens == (usable if usable >= MIN_PREFIX else 0), (same, rest)
                    assert answer.token_ids == await ids_of(swarm, prompt, HOT), (same, rest)
                    swarm.origin.reuse.conversations = Conversations()  # only the first is found
                    await ask(swarm.origin, PROMPT)

    play(main)


@pytest.mark.parametrize("lost", range(1, 8))
@pytest.mark.parametrize("log_bytes", [0, 1 << 20])
def test_hops_that_have_lost_it_are_rebuilt(qwen3: Path, lost: int, log_bytes: int) -> None:
    """Any set of hops has dropped what was parked there; with logs and without."""

    async def main() -> None:
        worker = WorkerConfig(log_bytes=log_bytes)
        async with swarm_of(qwen3, "0-1,2-3,4-5", worker=worker, request=RequestConfig(prefill_chunk=16)) as swarm:
            first = await ask(swarm.origin, PROMPT)
            prompt = [*PROMPT, *first.token_ids, 7, 8, 9]
            wanted = await ids_of(swarm, prompt, HOT)
            for index, node in enumerate(swarm.hops):
                if lost >> index & 1:
                    node.hosts[0].parking.clear()
            before = rows_run(swarm)
            answer = await ask(swarm.origin, prompt, HOT)
            assert answer.token_ids == wanted and not answer.repairs
            done = [now - then for now, then in zip(rows_run(swarm), before, strict=True)]
            if log_bytes:  # only those that have lost it compute it again
                assert [rows > CACHED for rows in done] == [bool(lost >> index & 1) for index in range(3)]
            assert answer.cached_tokens == (0 if lost & 1 or (lost and not log_bytes) else CACHED)

    play(main)


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("when", ["between", "opening", "prefill", "decode", "after"])
def test_deaths_change_no_text(qwen3: Path, victim: int, when: Phase | Literal["between", "after"]) -> None:
    """A hop dies between two turns or during the second; a third turn goes on with what the repair has left."""

    async def main() -> None:
        faults = Faults()
        async with memory_swarm(qwen3, "0-1,2-3,4-5", spares=["0-5"], wrap=faults.wrap) as swarm:
            history = [*PROMPT, *(await ask(swarm.origin, PROMPT)).token_ids, *range(40, 70)]
            wanted = await ids_of(swarm, history, HOT)
            node = swarm.hops[victim]
            if when == "between":
                faults.die(node)
                await asyncio.sleep(0.5)
            elif when != "after":
                faults.at(when, node, lambda: faults.die(node), skip=when == "decode")
            answer = await ask(swarm.origin, history, HOT)
            assert answer.token_ids == wanted
            if when == "after":
                faults.die(node)
            history += [*answer.token_ids, 1, 2, 3]
            wanted = await ids_of(swarm, history, GREEDY)
            again = await ask(swarm.origin, history)
            assert again.token_ids == wanted
            assert again.cached_tokens == (0 if when == "after" and victim == 0 else len(history) - 4)

    play(main)


def test_several_continuations_at_once(qwen3: Path) -> None:
    """Each has a copy: other endings, and other seeds of the same prompt (n > 1). Each can be gone on with."""

    async def main() -> None:
        async with swarm_of(qwen3, "0-2,3-5") as swarm:
            prompt = [*PROMPT, *(await ask(swarm.origin, PROMPT)).token_ids]
            asked = [
                ([*prompt, *range(ending, ending + 5)], replace(HOT, seed=seed)) for ending in (1, 9) for seed in (1, 2)
            ]
            wanted = [await ids_of(swarm, ids, params) for ids, params in asked]
            answers = await asyncio.gather(*(ask(swarm.origin, ids, params) for ids, params in asked))
            assert [answer.token_ids for answer in answers] == wanted
            assert [answer.cached_tokens for answer in answers] == [CACHED] * 4
            for (ids, params), answer in zip(asked, answers, strict=True):
                longer = [*ids, *answer.token_ids, 5]
                again = await ask(swarm.origin, longer, params)
                assert again.cached_tokens == len(longer) - 2
                assert again.token_ids == await ids_of(swarm, longer, params)

    play(main)


def test_where_one_route_is_too_slow_by_now_another_that_has_less_is_gone_on_with(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two routes have a part of a prompt, and the one with more is not worth it any more."""

    async def main() -> None:
        async with swarm_of(qwen3, "0-2,3-5", spares=["3-5"]) as swarm:
            slow = swarm.hops[1].transport.node
            prompt = [*PROMPT, *(await ask(swarm.origin, PROMPT)).token_ids, 7, 8, 9]
            swarm.origin.routes.evicted.add(slow)
            other = [*PROMPT, 1, 2, 3]
            assert (await ask(swarm.origin, other)).cached_tokens == len(PROMPT)
            swarm.origin.routes.evicted.discard(slow)

            async def keeps(route: Sequence[Offer], *_: object) -> bool:
                return slow not in [offer.node for offer in route]

            monkeypatch.setattr(swarm.origin.routes, "keeps", keeps)
            answer = await ask(swarm.origin, prompt, HOT)
            assert answer.cached_tokens == len(PROMPT)
            assert answer.token_ids == await ids_of(swarm, prompt, HOT)

    play(main)


def test_of_each_route_what_has_most_of_a_prompt_is_found_and_of_as_much_the_newest() -> None:
    known, prompt = Conversations(), list(range(100))
    routes = [(offer(f"n{number}", 0, 8),) for number in range(5)]
    for number, (route, length) in enumerate(
        [(0, 30), (0, 40), (0, 20), (1, 40), (2, 90), (3, MIN_PREFIX - 1), (4, 16)]
    ):
        ids = np.array([*prompt[:length], 1000 + number], np.int32)
        known.add(ParkedConversation(ME, SessionId(bytes([number] * 16)), ids, routes[route]), float(number))
    found = known.find(ME, prompt, 10.0)
    assert [(prefix.conversation.name[0], prefix.length) for prefix in found] == [(4, 90), (3, 40), (1, 40)]
    assert not known.find("another", prompt, 10.0)


def test_tenants_share_nothing(qwen3: Path) -> None:
    """Not another tenant, not one without a name, not another origin that learns the name of what is parked."""

    async def main() -> None:
        async with swarm_of(qwen3, "0-2,3-5") as swarm:
            first = await ask(swarm.origin, PROMPT)
            for tenant in ("you", "", None):
                answer = await ask(swarm.origin, PROMPT, tenant=tenant)
                assert answer.cached_tokens == 0 and answer.token_ids == first.token_ids
            assert (await ask(swarm.origin, PROMPT)).cached_tokens == len(PROMPT) - 1

    play(main)


def test_it_can_be_switched_off(qwen3: Path) -> None:
    async def main() -> None:
        async with swarm_of(qwen3, "0-2,3-5", request=RequestConfig(reuse=False)) as swarm:
            for _ in range(2):
                assert (await ask(swarm.origin, PROMPT)).cached_tokens == 0
            assert num_parked(swarm) == [0, 0]

    play(main)


def test_a_client_that_leaves_leaves_its_prompt(qwen3: Path) -> None:
    """Cancelled after some tokens: what was computed until then is there for the next request."""

    async def main() -> None:
        async with swarm_of(qwen3, "0-2,3-5") as swarm:
            wanted = await ids_of(swarm, PROMPT, GREEDY)
            answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, GREEDY))
            async with contextlib.aclosing(swarm.origin.stream(answer, tenant=ME)) as tokens:
                for _ in range(4):
                    await anext(tokens)
            again = await ask(swarm.origin, [*PROMPT, *wanted[:3], 5])
            assert again.cached_tokens == len(PROMPT) + 3
            assert again.token_ids == await ids_of(swarm, [*PROMPT, *wanted[:3], 5], GREEDY)

    play(main)


@pytest.mark.parametrize("seed", daily(range(6), range(6, 12)))
def test_random_conversations(qwen3: Path, gemma2: Path, seed: int) -> None:
    """Prompts, seeds, temperatures, cuts, chunks, drafts, caches too small for all, hops that drop things or die."""
    draw = random.Random(seed)
    folder, cut = draw.choice([qwen3, gemma2]), draw.choice(["0-5", "0-2,3-5", "0-0,1-3,4-5"])
    path: PathKind = draw.choice(["ring", "star"])
    ends: EndsAt = draw.choice(["origin", "edges"])
    request = RequestConfig(prefill_chunk=draw.choice([1, 7, 64]), standby=draw.random() < 0.3)
    worker = WorkerConfig(log_bytes=draw.choice([0, 1 << 14, 1 << 24]), cache_tokens=draw.choice([512, 65536]))

    async def main() -> None:
        faults = Faults()
        options: dict[str, Any] = {
            "ends": ends,
            "request": request,
            "worker": worker,
            "spares": ["0-5"],
            "wrap": faults.wrap,
        }
        async with memory_swarm(folder, cut, **options) as swarm:
            histories = [list(PROMPT)]
            victim = draw.choice(swarm.hops[:-1])
            for turn in range(5):
                history = [*draw.choice(histories), *(draw.randrange(256) for _ in range(draw.randrange(1, 40)))]
                history = history[: draw.randrange(len(history) // 2, len(history)) + 1]
                params = replace(HOT, seed=draw.randrange(99), temperature=draw.choice([0.0, 0.7, 1.3]), max_tokens=8)
                wanted = await ids_of(swarm, history, params)
                if draw.random() < 0.3:
                    draw.choice(swarm.hops).hosts[0].parking.clear()
                if turn == 3:
                    phase: Phase = draw.choice(["opening", "prefill", "decode", "any"])
                    faults.at(phase, victim, lambda: faults.die(victim), skip=draw.randrange(3))
                drafter = Oracle([*history, *wanted], 3, lambda at: at % 3 == 0) if draw.random() < 0.5 else None
                answer = await ask(swarm.origin, history, params, drafter=drafter, path=path)
                assert answer.token_ids == wanted, (turn, answer.cached_tokens)
                histories.append([*history, *wanted])

    play(main)


def test_a_chat_counts_what_was_cached(qwen3: Path) -> None:
    """`manyhands chat` with a ticket is one tenant: /stats of the second answer tell of the first one's positions."""

    async def main() -> None:
        async with swarm_of(qwen3, "0-2,3-5") as swarm:
            source = OriginSource(swarm.origin, "tiny", ChatWishes(SamplingParams(max_tokens=8)), "ring")
            talk, told = [{"role": "user", "content": "A first question, of some length"}], list[Stats]()
            for _ in range(2):
                told.append(Stats())
                text = "".join([piece async for piece in source.answer(talk, told[-1])])
                talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
            assert told[0].cached == 0 and "cached" not in str(told[0])
            assert told[1].cached >= len(talk[0]["content"]) and f"{told[1].cached} cached" in str(told[1])

    play(main)
