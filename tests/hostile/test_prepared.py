"""Large requests wait for their turns: what they hold meanwhile is bounded in bytes, for a caller and for the node.

A queue of 256 bounds their number alone: with a context of 131,072 tokens of 40 bytes each, and those that run, 1.7 GB.
"""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from manyhands.api.auth import KeyRing
from manyhands.api.http import app
from manyhands.api.preparation.desk import PreparationDesk, Speaker
from manyhands.api.preparation.prepare import prepare
from manyhands.api.preparation.process import read_answer
from manyhands.api.run import Ask
from manyhands.config import LimitsConfig
from manyhands.core import SamplingParams
from manyhands.text.dialects import find_dialect
from manyhands.text.grammar import check_grammar, json_grammar
from manyhands.text.heap import heap_bytes
from manyhands.text.tokenizer import load_tokenizer
from tests.api.preparation.answers import told
from tests.api.served import HERMES_TEMPLATE, MODEL, Served, make_model, post, raw, raw_slowly, served
from tests.waiting import GUARD_S

TEXT = "/v1/completions"
CONTEXT = 1024
PROMPTS = 10  # of a large request: 400 KB of ids
HI = [{"role": "user", "content": "hi"}]
OF_ONE, OF_ALL = 1_000_000, 2_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("prepared") / "m", HERMES_TEMPLATE)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_PREPARED_BYTES", OF_ALL)
    monkeypatch.setattr(app, "MAX_PREPARED_BYTES_OF_ONE", OF_ONE)


def large(prompts: int = PROMPTS) -> bytes:
    return json.dumps({"model": MODEL, "prompt": [[1] * (CONTEXT - 4)] * prompts, "max_tokens": 1}).encode()


@asynccontextmanager
async def crowded(folder: Path, keys: KeyRing) -> AsyncIterator[tuple[Served, AsyncExitStack]]:
    """A gateway whose one place is taken until the stack is closed."""
    async with served(folder, keys=keys, limits=LimitsConfig(max_running=1)) as it, AsyncExitStack() as taken:
        await taken.enter_async_context(it.gateway.run(Ask(MODEL, "chat", [1, 2], SamplingParams(max_tokens=1))))
        yield it, taken
        await taken.aclose()
        await it.freed()


async def wait(it: Served, key: str, stack: AsyncExitStack) -> int:
    """Send a large request of `key` and leave it in the queue, until `stack` is closed; 0, or how it was refused."""
    before = it.gateway.num_waiting
    asking = asyncio.create_task(raw(it.addr, post(TEXT, large(), authorization=key)))
    stack.callback(asking.cancel)
    async with asyncio.timeout(GUARD_S):
        while not asking.done() and it.gateway.num_waiting < before + PROMPTS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return asking.result()[0] if asking.done() else 0


def play(folder: Path, tmp_path: Path, scene: Any) -> None:
    async def main() -> None:
        keys = KeyRing(tmp_path / "keys.json")
        callers = [f"Bearer {keys.add(name, 0.0)}" for name in ("a", "b", "c")]
        async with crowded(folder, keys) as (it, taken):
            await scene(it, taken, callers)

    asyncio.run(main())


def test_one_key_fills_its_part_and_leaves_others_theirs(folder: Path, tmp_path: Path) -> None:
    async def scene(it: Served, taken: AsyncExitStack, callers: list[str]) -> None:
        mine, others, _ = callers
        async with AsyncExitStack() as stack:
            said = [await wait(it, mine, stack) for _ in range(5)]
            assert said == [0, 0, 429, 429, 429] and it.gateway.num_waiting == 2 * PROMPTS
            assert await wait(it, others, stack) == 0
        while it.gateway.num_waiting:  # noqa: ASYNC110 - clients have left
            await asyncio.sleep(0.01)
        async with AsyncExitStack() as stack:
            assert [await wait(it, mine, stack) for _ in range(3)] == [0, 0, 429], "and what they had is free"

    play(folder, tmp_path, scene)


def test_many_keys_fill_what_the_node_has_and_no_more(folder: Path, tmp_path: Path) -> None:
    async def scene(it: Served, taken: AsyncExitStack, callers: list[str]) -> None:
        async with AsyncExitStack() as stack:
            said = [await wait(it, caller, stack) for caller in callers for _ in range(2)]
            assert said == [0, 0, 0, 0, 429, 429]
            status, told = await raw_slowly(it, post(TEXT, large(), authorization=callers[2]))
            assert status == 429 and b"wait or run now, of 2000000: try again later" in told and b"retry-after" in told

    play(folder, tmp_path, scene)


def test_what_is_answered_is_held_no_longer(folder: Path, tmp_path: Path) -> None:
    async def scene(it: Served, taken: AsyncExitStack, callers: list[str]) -> None:
        await taken.aclose()
        for _ in range(4):
            status, told = await raw_slowly(it, post(TEXT, large(), authorization=callers[0]))
            assert status == 200, told[-300:]

    play(folder, tmp_path, scene)


def test_a_request_that_one_may_never_hold_is_told_so(folder: Path, tmp_path: Path) -> None:
    async def scene(it: Served, taken: AsyncExitStack, callers: list[str]) -> None:
        status, told = await raw_slowly(it, post(TEXT, large(3 * PROMPTS), authorization=callers[0]))
        assert status == 413 and b"bytes of memory; at most 1000000 are given to one" in told

    play(folder, tmp_path, scene)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"anyOf": [{"": [[0]]}] * 2000}}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"prompt": [[300 + i for i in range(1000)] for _ in range(16)]}),
        (TEXT, {"prompt": "ab" * 400, "n": 4, "manyhands": {"received": ["xy" * 4000] * 4}, "stream": True}),
        ("/api/infer", {"prompt": "é" * 400}),
        ("/v1/chat/completions", {"messages": HI, "tools": [TOOL]}),
        (
            TEXT,
            {"prompt": "x", "logit_bias": {str(i): 1.5 for i in range(100)}, "stop": ["ab" * i for i in range(1, 9)]},
        ),
    ],
)
def test_what_is_counted_is_what_is_held(folder: Path, path: str, fields: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(folder)
    dialect = find_dialect(tokenizer)
    speaker = Speaker(MODEL, tokenizer, 1 << 17, 4096, 16, "bf16", dialect, None, {}, level=None)
    desk = PreparationDesk({MODEL: speaker}, 16, 1024, lambda grammar: 0)
    parts = told(prepare(path, json.dumps({"model": MODEL, **fields}).encode(), desk))
    gc.collect()
    tracemalloc.start()
    made = asyncio.run(read_answer(parts))
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 1.1 * made.size + 8192, (held, made.size)
    assert made.size < 5 * held + 8192, "ids below 257 take their places alone"


def test_a_compiled_grammar_counts(folder: Path) -> None:
    speaker = Speaker(MODEL, load_tokenizer(folder), 1 << 17, 4096, 16, "bf16", None, None, {}, level=None)
    fields = {"model": MODEL, "messages": HI, "response_format": {"type": "json_object"}}
    desk = PreparationDesk({MODEL: speaker}, 16, 1024, lambda grammar: 5_000_000)
    assert prepare("/v1/chat/completions", json.dumps(fields).encode(), desk).size > 5_000_000


@pytest.mark.skipif(heap_bytes() == 0, reason="another C library than glibc")
def test_a_grammar_is_weighed_as_it_is_compiled() -> None:
    wide = json_grammar({"enum": [str(7919 * number) for number in range(1500)]})
    assert 500_000 < check_grammar(wide) < 2_000_000
