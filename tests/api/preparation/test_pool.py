"""Where requests are prepared: whose turn it is, what is killed, and that a process prepares as the loop does."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.api.formats import ModelFormat
from manyhands.api.preparation import pool
from manyhands.api.preparation.child import STARVED
from manyhands.api.preparation.desk import NeedsProcess, PreparationDesk
from manyhands.api.preparation.pool import INLINE_BYTES, FairTurns, Preparing, TurnQueue
from manyhands.api.preparation.prepare import prepare
from manyhands.api.preparation.process import PreparationJob, read_answer
from manyhands.errors import BadRequest, ContextOverflow, NotFound, RateLimited
from manyhands.testing.swarm import memory_swarm
from tests.api.preparation.answers import told
from tests.api.served import HERMES_TEMPLATE, MODEL, make_model
from tests.waiting import GUARD_S, until

HI = [{"role": "user", "content": "hi"}]
SLOW = "{% for i in range(99999) %}{% set x = range(99999) | list | length %}{% endfor %}"  # ends after 2 s


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


def job(sent: bytes, path: str = "/v1/completions") -> PreparationJob:
    return PreparationJob(path, sent, None, None, 16, 1024)


# -- turns ------------------------------------------------------------------------------------------------------------


def test_keys_take_turns_and_none_has_all_places() -> None:
    turns = FairTurns(size=2, max_waiting=10)
    for number in range(4):
        turns.ask("greedy", number)
    turns.ask("other", 9)
    assert (turns.next(), turns.next(), turns.next()) == (0, 9, None)
    turns.leave(9)
    assert turns.next() is None, "one key has one of two places"
    turns.leave(0)
    assert turns.next() == 1


def test_a_newcomer_displaces_the_newest_of_the_key_that_has_most() -> None:
    turns = FairTurns(size=1, max_waiting=4)
    assert [turns.ask("greedy", number) for number in range(4)] == [None] * 4
    assert turns.ask("other", 9) == 3
    with pytest.raises(RateLimited):
        turns.ask("greedy", 4)
    assert turns.num_waiting == 4


def test_a_turn_is_waited_for_and_ends_with_its_block() -> None:
    """Also where its owner leaves before the turn comes, or within it."""
    done: list[str] = []

    async def work(turns: TurnQueue, key: str, end: asyncio.Event) -> None:
        async with turns.of(key):
            done.append(key)
            await end.wait()

    async def main() -> None:
        turns, ends = TurnQueue(FairTurns(1, max_waiting=3)), [asyncio.Event() for _ in range(4)]
        tasks = [
            asyncio.create_task(work(turns, key, end)) for key, end in zip(("a", "a", "a", "b"), ends, strict=True)
        ]
        await until(lambda: turns.turns.num_waiting == 3)
        tasks[1].cancel()
        ends[0].set()
        await until(lambda: done == ["a", "a"])
        tasks[2].cancel()
        await until(lambda: done == ["a", "a", "b"])
        ends[3].set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not turns.turns.running and not turns.turns.num_waiting

    asyncio.run(main())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=60))
def test_turns_are_bounded_whatever_comes(steps: list[tuple[str, int]]) -> None:
    turns = FairTurns(size=2, max_waiting=5)
    for number, (key, kind) in enumerate(steps):
        if kind == 0:
            try:
                turns.ask(key, number)
            except RateLimited:
                assert turns.num_waiting == 5
        elif kind == 1:
            turns.next()
        elif turns.running:
            turns.leave(next(iter(turns.running)))
        assert turns.num_waiting <= 5 and len(turns.running) <= 2


# -- processes --------------------------------------------------------------------------------------------------------


def play(folder: Path, scene: Callable[[Preparing, ModelFormat], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with memory_swarm(folder, "0,1") as swarm:
            model_format = ModelFormat.of(MODEL, swarm.origin)
            specs = [model_format.spec]
            preparing = Preparing(lambda: specs, **options)
            try:
                await scene(preparing, model_format)
            finally:
                await preparing.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("preparing") / "m", HERMES_TEMPLATE)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello é"}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "n": 2, "stop": ["x"], "logit_bias": {"5": 1.5}}),
    ("/v1/chat/completions", {"messages": HI, "tools": [TOOL], "seed": 1 << 63}),
    ("/v1/responses", {"input": "hi", "instructions": "be brief"}),
    ("/api/infer", {"prompt": "hi", "seed": 3}),
]


def test_a_process_prepares_as_the_loop_does(folder: Path) -> None:
    async def scene(preparing: Preparing, model_format: ModelFormat) -> None:
        desk = PreparationDesk({MODEL: model_format.speaker}, 16, 1024, lambda grammar: 0, is_inline=True)
        for path, fields in CASES:
            sent = body(**fields)
            here, there = prepare(path, sent, desk), await preparing.run("k", job(sent, path))
            assert here == await read_back(here)
            assert replace(there, params=here.params) == here, "but for a seed that is drawn"
            assert "seed" not in fields or there.params == here.params
        with pytest.raises(ContextOverflow, match="token ids; this model"):
            await preparing.run("k", job(body(prompt=[1] * 9000)))
        with pytest.raises(NotFound, match="not served here"):
            await preparing.run("k", job(body(prompt="x").replace(MODEL.encode(), b"nope")))
        assert preparing.num_started == 1 and preparing.num_killed == 0

    play(folder, scene)


async def read_back(made: Any) -> Any:
    """Through the bytes of an answer."""
    return await read_answer(told(made))


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Only CPU time counts: with deadlines as short as here, a busy machine may not let a process run for six of them."""
    monkeypatch.setattr(pool, "STARVED", GUARD_S / 0.2)
    return monkeypatch


def test_a_job_that_takes_too_long_is_killed_and_the_next_is_served(
    tmp_path: Path, unhurried: pytest.MonkeyPatch
) -> None:
    async def scene(preparing: Preparing, model_format: ModelFormat) -> None:
        with pytest.raises(BadRequest, match=r"more than 0.5 s"):
            await preparing.run("k", job(body(messages=HI), "/v1/chat/completions"))
        made = await preparing.run("k", job(body(prompt="hi")))
        assert made.prompts and preparing.num_killed == 1 and preparing.num_started == 2

    play(make_model(tmp_path / "m", SLOW), scene, deadline_s=0.5)


def test_a_process_that_is_not_let_run_has_its_time_left(folder: Path, unhurried: pytest.MonkeyPatch) -> None:
    """Stopped for three deadlines, as on a machine that has no CPU for it, a request is prepared all the same; one whose
    process never runs again ends, and the next is served."""
    assert STARVED > 3

    async def scene(preparing: Preparing, model_format: ModelFormat) -> None:
        await preparing.run("k", job(body(prompt="hi")))
        (process, _) = preparing._idle[0]
        os.kill(process.pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.6, os.kill, process.pid, signal.SIGCONT)
        assert (await preparing.run("k", job(body(prompt="hi")))).prompts and preparing.num_killed == 0
        os.kill(process.pid, signal.SIGSTOP)
        with unhurried.context() as patch, pytest.raises(BadRequest, match=r"more than 0.2 s"):
            patch.setattr(pool, "STARVED", STARVED)
            await preparing.run("k", job(body(prompt="hi")))
        assert (await preparing.run("k", job(body(prompt="hi")))).prompts and preparing.num_killed == 1

    play(folder, scene, deadline_s=0.2)


def test_a_process_that_is_expected_to_be_needed_is_started_once_and_used(folder: Path) -> None:
    async def scene(preparing: Preparing, model_format: ModelFormat) -> None:
        preparing.expect()
        preparing.expect()
        await until(lambda: preparing.num_started == 1)
        assert (await preparing.run("k", job(body(prompt="hi")))).prompts
        preparing.expect()
        assert (await preparing.run("k", job(body(prompt="hi")))).prompts and preparing.num_started == 1

    play(folder, scene)


def test_a_client_that_leaves_takes_its_process_along(tmp_path: Path) -> None:
    async def scene(preparing: Preparing, model_format: ModelFormat) -> None:
        await preparing.run("k", job(body(prompt="hi")))
        (process, _) = preparing._idle[0]
        running = asyncio.create_task(preparing.run("k", job(body(messages=HI), "/v1/chat/completions")))
        waiting = asyncio.create_task(preparing.run("k", job(body(prompt="hi"))))
        await until(lambda: preparing.turns.num_waiting == 1)
        waiting.cancel()
        running.cancel()
        await asyncio.wait((running, waiting))
        assert not preparing.turns.num_waiting and not preparing.turns.running
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)

    play(make_model(tmp_path / "m", SLOW), scene)


def test_what_is_done_inline_is_short(folder: Path) -> None:
    """CPU time of the worst bodies that are prepared on the loop; about 1 ms, 4 ms where the machine is slow."""

    async def scene(preparing: Preparing, model_format: ModelFormat) -> None:
        desk = PreparationDesk({MODEL: model_format.speaker}, 16, 1024, lambda grammar: 0, is_inline=True)
        for sent in (
            body(messages=HI * ((INLINE_BYTES - 100) // 36)),
            body(messages=[{"role": "user", "content": "a" * (INLINE_BYTES - 100)}]),
            body(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 250}]),
            body(messages=HI, tools=[{**TOOL, "x": [[]] * 1900}]),
        ):
            assert INLINE_BYTES - 600 < len(sent) <= INLINE_BYTES or len(sent) > 6000
            times = []
            for _ in range(5):
                began = time.thread_time()
                try:
                    prepare("/v1/chat/completions", sent, desk)
                except (BadRequest, NeedsProcess):
                    pass
                times.append(time.thread_time() - began)
            assert min(times) < 0.02

    play(folder, scene)


@pytest.mark.parametrize(
    "fields, is_inline",
    [
        ({"prompt": "Once upon a time there was " * 290}, True),
        ({"prompt": "7" * 7900}, False),
        ({"prompt": "!?" * 3900}, False),
        ({"prompt": ["7" * 50] * 100}, False),
        ({"prompt": "7" * 3200}, True),
    ],
)
def test_texts_of_many_tokens_are_no_work_for_the_loop(folder: Path, fields: dict[str, Any], is_inline: bool) -> None:
    """8 KiB of digits took SmolLM's tokenizer 22 ms, each digit a token; of words 3 ms."""

    async def scene(preparing: Preparing, model_format: ModelFormat) -> None:
        speaker = replace(model_format.speaker, context=1 << 17)
        desk = PreparationDesk({MODEL: speaker}, 128, 1024, lambda grammar: 0, is_inline=True)
        sent = body(**fields)
        assert len(sent) <= INLINE_BYTES
        if is_inline:
            assert prepare("/v1/completions", sent, desk).prompts
        else:
            with pytest.raises(NeedsProcess):
                prepare("/v1/completions", sent, desk)

    play(folder, scene)


def test_a_token_that_the_model_does_not_have_is_named(folder: Path) -> None:
    """Also one that its tokenizer made of a text: vocabularies may be larger than models."""

    async def scene(preparing: Preparing, model_format: ModelFormat) -> None:
        speaker = replace(model_format.speaker, vocab_size=100)
        desk = PreparationDesk({MODEL: speaker}, 128, 1024, lambda grammar: 0, is_inline=True)
        for prompt, odd in (([5, 999, 7], 999), ("a\u00e9", 195)):
            with pytest.raises(BadRequest, match=f"from 0 to 99, the last of this model; it has {odd}"):
                prepare("/v1/completions", body(prompt=prompt), desk)

    play(folder, scene)
