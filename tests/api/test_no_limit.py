"""Requests that name no limit of tokens, one that no node has room for, or one beyond the context, over a real port."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.config import LimitsConfig, WorkerConfig
from manyhands.origin import growth
from tests.api.served import MODEL, Served, make_model, post, raw_slowly, served

HI: Any = [{"role": "user", "content": "hi"}]
WHOLE = {"model": MODEL, "messages": HI, "manyhands": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("no_limit") / "m", context=320)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "LEASE_TOKENS", 40)
    monkeypatch.setattr(growth, "AHEAD", 12)


async def tokens_of(it: Served, **body: Any) -> tuple[int, str]:
    """How many tokens prompt and answer have, and how the answer ended."""
    status, said = await raw_slowly(it, post("/v1/chat/completions", json.dumps({**WHOLE, **body}).encode()))
    assert status == 200, said
    told = json.loads(said.partition(b"\r\n\r\n")[2])
    return told["usage"]["total_tokens"], told["choices"][0]["finish_reason"]


def test_an_answer_may_have_half_of_what_the_context_leaves(folder: Path) -> None:
    """So a second question may follow it; with a limit it may have all of it."""

    async def main() -> None:
        async with served(folder) as it:
            context, prompt = it.swarm.origin.model.context_length, (await tokens_of(it, max_tokens=1))[0] - 1
            assert await tokens_of(it) == (prompt + (context - prompt) // 2, "length")
            assert await tokens_of(it, max_tokens=context - prompt) == (context, "length")
            await it.freed()

    asyncio.run(main())


def test_the_operator_s_default_holds(folder: Path) -> None:
    async def main() -> None:
        async with served(folder, limits=LimitsConfig(default_max_tokens=7)) as it:
            assert await tokens_of(it) == await tokens_of(it, max_tokens=7)
            await it.freed()

    asyncio.run(main())


def test_limits_are_not_reserved(folder: Path) -> None:
    """Three answers that may each use all of the context are written beside each other; nodes have cache for less than two."""

    async def main() -> None:
        async with served(folder, worker=WorkerConfig(cache_tokens=448)) as it:
            client = await it.client()
            most = it.swarm.origin.model.context_length - (await tokens_of(it, max_tokens=1))[0] + 1
            asked: Any = {"model": MODEL, "messages": HI, "extra_body": {"manyhands": {"ignore_eos": True}}}
            streams = [await client.chat.completions.create(**asked, max_tokens=most, stream=True) for _ in range(3)]
            for stream in streams:
                await anext(aiter(stream))
            assert len(it.gateway.jobs) == 3
            for stream in streams:
                await stream.close()
            await it.freed()

    asyncio.run(main())


def test_the_native_api_has_no_limit_for_a_conversation(folder: Path) -> None:
    """A text goes on for 50 tokens."""

    async def main() -> None:
        async with served(folder) as it:
            for what, given in (("messages", HI), ("prompt", "hi")):
                body = {"model": MODEL, what: given, "seed": 1}
                status, said = await raw_slowly(it, post("/api/infer", json.dumps(body).encode()))
                assert status == 200, said
            most = [job.max_tokens for job in it.watcher.ended_jobs]
            prompts = [job.prompt_tokens for job in it.watcher.ended_jobs]
            assert most == [(it.swarm.origin.model.context_length - prompts[0]) // 2, 50]
            await it.freed()

    asyncio.run(main())


LIMITS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 8000},
    "/v1/completions": {"prompt": ["one two three", "hi"], "max_tokens": 8000},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8000},
    "/v1/messages": {"messages": HI, "max_tokens": 8000},
    "/api/chat": {"messages": HI, "options": {"num_predict": 8000}, "stream": False},
    "/api/generate": {"prompt": "hi", "raw": True, "options": {"num_predict": 8000}, "stream": False},
    "/api/infer": {"prompt": "hi", "max_tokens": 8000},
    "/bus/v1/call": {"input": {"messages": HI, "max_tokens": 8000, "stream": False}},
}
NEVER_ENDS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # paths with manyhands.ignore_eos


@pytest.mark.parametrize("path", LIMITS)
def test_a_limit_beyond_the_context_is_what_the_context_leaves(folder: Path, path: str) -> None:
    """As qwen-code and others ask, of any model: no more is admitted, leased or written. A prompt that leaves nothing is
    refused, though it asks for little."""

    async def main() -> None:
        async with served(folder) as it:
            context, body = it.swarm.origin.model.context_length, LIMITS[path]
            named = {"params": {"model": MODEL}} if path == "/bus/v1/call" else {"model": MODEL}
            endless = {"manyhands": {"ignore_eos": True}} if path in NEVER_ENDS else {}
            status, said = await raw_slowly(it, post(path, json.dumps(named | endless | body).encode()))
            assert status == 200, said
            assert len(it.watcher.ended_jobs) == (2 if path == "/v1/completions" else 1)
            for job in it.watcher.ended_jobs:
                assert job.prompt_tokens + job.max_tokens == context
                if endless:
                    assert (job.completion_tokens, job.finish_reason) == (job.max_tokens, "length")
            long = json.dumps(named | body).replace('"hi"', json.dumps("hi " * 2 * context)).replace("8000", "1")
            status, said = await raw_slowly(it, post(path, long.encode()))
            assert status == 400 and b"maximum context length is 320 tokens" in said, said
            await it.freed()

    asyncio.run(main())
