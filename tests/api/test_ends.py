"""The ends of what the OpenAI routes do: prompts that are no text, markers that are no text, streams that cannot go on."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from manyhands.api.fields import ENDPOINTS
from manyhands.config import RequestConfig
from manyhands.testing.faults import Faults
from tests.api.served import HERMES_TEMPLATE, MODEL, Served, make_model, post, raw, served
from tests.waiting import GUARD_S

Scene = Callable[[Served], Awaitable[None]]
HALF = '"\\ud83d"'  # JSON can say half a surrogate pair; UTF-8 cannot
TOOL: Any = {
    "type": "function",
    "function": {"name": "tide", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer has the markers of function calls as special tokens, as Qwen's has."""
    made = make_model(tmp_path_factory.mktemp("ends") / "m", HERMES_TEMPLATE, vocab=288)
    tokenizer: Any = AutoTokenizer.from_pretrained(made)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    assert len(tokenizer) <= json.loads((made / "config.json").read_text())["vocab_size"]
    tokenizer.save_pretrained(made)
    return made


def play(folder: Path, scene: Scene, **options: Any) -> None:
    async def main() -> None:
        async with served(folder, **options) as it:
            await scene(it)
            await it.freed()

    asyncio.run(main())


def test_half_a_surrogate_is_no_prompt(folder: Path) -> None:
    """Refused by name on every path, wherever a text may stand."""
    bodies = {
        "/v1/chat/completions": [
            f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": {HALF}}}]}}',
            f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "x"}}], "stop": [{HALF}]}}',
        ],
        "/v1/completions": [
            f'{{"model": "{MODEL}", "prompt": {HALF}}}',
            f'{{"model": {HALF}, "prompt": "x"}}',
            f'{{"model": "{MODEL}", "prompt": ["x", {HALF}]}}',
        ],
        "/v1/responses": [f'{{"model": "{MODEL}", "input": {HALF}}}'],
    }
    assert bodies.keys() == set(ENDPOINTS)

    async def scene(it: Served) -> None:
        for path, texts in bodies.items():
            for text in texts:
                status, said = await raw(it.addr, post(path, text.encode()))
                error = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
                assert (status, error["code"]) == (400, "bad_request"), (path, said)
        assert not it.watcher.started_jobs

    play(folder, scene)


def test_markers_that_are_special_tokens_are_read_and_not_shown(folder: Path) -> None:
    """Decoding drops special tokens, so a call would be lost without the marks that go with the request."""

    async def scene(it: Served) -> None:
        client = await it.client()
        asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "seed": 1}
        asked |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300, "logprobs": True}
        made = await client.chat.completions.create(**asked)
        (call,) = made.choices[0].message.tool_calls or []
        assert call.type == "function" and (call.function.name, json.loads(call.function.arguments)) == ("tide", {})
        assert made.choices[0].message.content is None and made.choices[0].finish_reason == "tool_calls"
        spelt = [t.token for t in made.choices[0].logprobs.content or []] if made.choices[0].logprobs else []
        assert spelt[0] == "<tool_call>", "one token, and special"
        told: list[Any] = []
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            assert not chunk.choices[0].delta.content
            told += chunk.choices[0].delta.tool_calls or []
        assert "".join(piece.function.arguments or "" for piece in told) == call.function.arguments

    play(folder, scene)


@pytest.mark.parametrize(
    "path, field, extra",
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, {"max_tokens": 40}),
        ("/v1/completions", {"prompt": "hi"}, {"max_tokens": 40}),
    ],
)
def test_a_stream_that_cannot_go_on_ends_with_openais_error(
    path: str, field: dict[str, Any], extra: dict[str, int], folder: Path
) -> None:
    faults = Faults()

    async def scene(it: Served) -> None:
        faults.at("decode", it.swarm.hops[1], lambda: faults.die(it.swarm.hops[1]), skip=4)
        body = {"model": MODEL, "stream": True, "temperature": 0, "manyhands": {"ignore_eos": True}, **field, **extra}
        reader, writer = await asyncio.open_connection(it.addr.host, it.addr.port)
        writer.write(post(path, json.dumps(body).encode()))
        said = await asyncio.wait_for(reader.read(), GUARD_S)
        writer.close()
        events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith(b"data: ")]
        assert said.startswith(b"HTTP/1.1 200") and len(events) > 3 and b"[DONE]" not in said
        error = events[-1]["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("server_error", "shard_unavailable")
        assert all("error" not in event for event in events[:-1])
        assert it.watcher.outcomes == ["failed"]

    play(folder, scene, request=RequestConfig(patience_s=0.2), wrap=faults.wrap)


def test_the_official_client_raises_what_ended_its_stream(folder: Path) -> None:
    faults = Faults()

    async def scene(it: Served) -> None:
        faults.at("decode", it.swarm.hops[1], lambda: faults.die(it.swarm.hops[1]), skip=4)
        asked: Any = {"model": MODEL, "prompt": "hi", "max_tokens": 40, "temperature": 0, "stream": True}
        said = 0
        with pytest.raises(openai.APIError, match="no other node holds layers 1") as told:
            async for _ in await (await it.client()).completions.create(
                **asked, extra_body={"manyhands": {"ignore_eos": True}}
            ):
                said += 1
        assert said and told.value.code == "shard_unavailable"

    play(folder, scene, request=RequestConfig(patience_s=0.2), wrap=faults.wrap)
