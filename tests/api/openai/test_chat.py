"""The OpenAI routes, with OpenAI's own client against a real port."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from manyhands.api.fields import ENDPOINTS, FIELDS, Field, table
from manyhands.config import LimitsConfig
from manyhands.errors import (
    Forbidden,
    NotFound,
    PipelineStalled,
    RateLimited,
    ShardUnavailable,
    TooLarge,
    Unauthorized,
)
from tests.api.served import HERMES_TEMPLATE, MODEL, Served, make_model, post, raw, served
from tests.worker.pipeline import forced

HI: Any = [{"role": "user", "content": "hi"}]
Scene = Callable[[Served], Awaitable[None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("openai") / "m", HERMES_TEMPLATE)


def play(folder: Path, scene: Scene, **options: Any) -> None:
    async def main() -> None:
        async with served(folder, **options) as it:
            await scene(it)
            await it.freed()

    asyncio.run(main())


def base(path: str) -> dict[str, Any]:
    needs = {
        "/v1/chat/completions": {"messages": HI},
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
    }
    limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    return {"model": MODEL, limit: 3, **needs[path]}


def body_of(path: str, field: Field, value: Any) -> bytes:
    body = base(path)
    if field.name == "max_completion_tokens":
        body.pop("max_tokens")
    return json.dumps({**body, **field.shown.needs, field.name: value}).encode()


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_every_field_is_honoured_or_refused_by_name(path: str, folder: Path) -> None:
    """The table of docs/openai.md, row by row: what works gives 200, what is refused 400 and the field's name."""

    async def scene(it: Served) -> None:
        for field in FIELDS[path]:
            for value in field.shown.works:
                status, said = await raw(it.addr, post(path, body_of(path, field, value)))
                assert status == 200, (field.name, value, said)
            for value in field.shown.refused:
                status, said = await raw(it.addr, post(path, body_of(path, field, value)))
                assert status == 400, (field.name, value, said)
                error = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
                assert field.name.split("_")[0] in error["message"] or error["param"] == field.name, (field.name, error)
                assert error["type"] == "invalid_request_error"

    play(folder, scene)


def test_chat_whole(folder: Path) -> None:
    async def scene(it: Served) -> None:
        made = await (await it.client()).chat.completions.create(model=MODEL, messages=HI, max_tokens=9, seed=3)
        assert made.id.startswith("chatcmpl-") and made.object == "chat.completion" and made.model == MODEL
        (choice,) = made.choices
        assert choice.finish_reason == "length" and choice.message.role == "assistant" and choice.message.content
        assert made.usage and (made.usage.prompt_tokens, made.usage.completion_tokens) == (5, 9)
        ours = choice.model_extra["manyhands"]  # type: ignore[index]
        assert ours["exactness"] == "E0" and [hop["layers"] for hop in ours["route"]] == ["0", "1"]
        assert all(hop["arithmetic"].startswith("bf16/") for hop in ours["route"])
        assert ours["hops"] == ours["route"], "nothing was repaired"
        assert ours["repairs"] == [] and ours["timings"]["total_ms"] > 0
        hops = ours["timings"]["hops"]
        assert [hop["node"] for hop in hops] == [hop["node"] for hop in ours["route"]]
        assert sum(hop["compute_ms"] for hop in hops) > 0 and ours["timings"]["per_token"]["compute_ms"] > 0

    play(folder, scene)


def test_answers_of_a_device_of_torch_name_their_class_and_it(folder: Path) -> None:
    async def scene(it: Served) -> None:
        made = await (await it.client()).chat.completions.create(model=MODEL, messages=HI, max_tokens=5)
        ours = made.choices[0].model_extra["manyhands"]  # type: ignore[index]
        assert ours["exactness"] == "E2"
        assert all("/torch-" in hop["arithmetic"] and "torch-cpu" in hop["arithmetic"] for hop in ours["route"])

    with forced("torch-cpu"):
        play(folder, scene)


def test_stream_says_what_the_whole_answer_says(folder: Path) -> None:
    async def scene(it: Served) -> None:
        client = await it.client()
        asked: Any = {"model": MODEL, "messages": HI, "max_tokens": 40, "seed": 6, "logprobs": True, "top_logprobs": 2}
        whole = await client.chat.completions.create(**asked)
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        ]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content and len(chunks) > 10
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        assert all(c.choices[0].finish_reason is None for c in chunks[:-2])
        assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
        assert all(c.usage is None for c in chunks[:-1])
        assert len({c.id for c in chunks}) == 1 == len({c.created for c in chunks})
        streamed = [
            e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content or []
        ]
        assert whole.choices[0].logprobs and streamed == whole.choices[0].logprobs.content
        assert all(len(e.top_logprobs) == 2 and e.logprob <= 0 for e in streamed)
        spelled = b"".join(bytes(e.bytes or []) for e in streamed).decode("utf8", "replace")
        assert re.sub(r"<\|\w+\|>", "", spelled) == text

    play(folder, scene)


def test_same_seed_same_text_and_choices_differ(folder: Path) -> None:
    async def scene(it: Served) -> None:
        async def texts(**more: Any) -> list[str | None]:
            made = await (await it.client()).chat.completions.create(
                model=MODEL, messages=HI, max_tokens=12, n=3, **more
            )
            assert [c.index for c in made.choices] == [0, 1, 2]
            assert made.usage and made.usage.prompt_tokens == 5
            return [c.message.content for c in made.choices]

        first = await texts(seed=11)
        assert first == await texts(seed=11) and len(set(first)) == 3
        assert first != await texts(seed=12)
        assert len(set(await texts(temperature=0))) == 1
        stream = await (await it.client()).chat.completions.create(
            model=MODEL, messages=HI, max_tokens=12, n=3, seed=11, stream=True
        )
        streamed = ["", "", ""]
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert streamed == first

    play(folder, scene)


def test_a_stop_string_is_never_shown(folder: Path) -> None:
    """Every pair of neighbouring characters of an answer as a stop string, across the borders of tokens and chunks."""

    async def scene(it: Served) -> None:
        client = await it.client()
        asked: Any = {"model": MODEL, "messages": HI, "max_tokens": 12, "seed": 3}
        whole = (await client.chat.completions.create(**asked)).choices[0].message.content or ""
        for start in range(0, len(whole) - 3, 2):
            stop = whole[start : start + 3]
            made = await client.chat.completions.create(**asked, stop=["never this", stop])
            assert made.choices[0].message.content == whole[: whole.index(stop)]
            assert made.choices[0].finish_reason == "stop"
            shown = ""
            async for chunk in await client.chat.completions.create(**asked, stop=stop, stream=True):
                shown += chunk.choices[0].delta.content or ""
            assert shown == whole[: whole.index(stop)]

    play(folder, scene)


def test_json_by_grammar(folder: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "blue"]},
            "sizes": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["colour", "sizes"],
        "additionalProperties": False,
    }

    async def scene(it: Served) -> None:
        client = await it.client()
        form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
        for seed in range(4):
            for stream in (False, True):
                made: Any = await client.chat.completions.create(
                    model=MODEL, messages=HI, max_tokens=90, seed=seed, response_format=form, stream=stream
                )
                if stream:
                    chunks = [c async for c in made]
                    text = "".join(c.choices[0].delta.content or "" for c in chunks)
                    assert chunks[-1].choices[0].finish_reason == "stop"
                else:
                    text = made.choices[0].message.content
                thing = json.loads(text)
                assert thing["colour"] in ("red", "blue") and len(thing["sizes"]) <= 3
        anything = await client.chat.completions.create(
            model=MODEL, messages=HI, max_tokens=60, seed=1, response_format={"type": "json_object"}
        )
        content = anything.choices[0].message.content or ""
        assert content.startswith("{") and (
            anything.choices[0].finish_reason == "length" or json.loads(content) is not None
        )

    play(folder, scene)


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "x",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["c", "f"]}, "deep": {"type": "boolean"}},
                "required": ["unit", "deep"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "tide")
]


@pytest.mark.parametrize("taught", ["<tool_call>{}</tool_call>", "<tool_call><function=f>"], ids=["hermes", "qwen3"])
def test_forced_function_calls(taught: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", HERMES_TEMPLATE.replace("<tool_call>{}</tool_call>", taught))

    async def scene(it: Served) -> None:
        client = await it.client()
        named: Any = {"type": "function", "function": {"name": "tide"}}
        for choice, names in (("required", {"weather", "tide"}), (named, {"tide"})):
            asked: Any = {
                "model": MODEL,
                "messages": HI,
                "max_tokens": 300,
                "seed": 1,
                "tools": TOOLS,
                "tool_choice": choice,
            }
            made = await client.chat.completions.create(**asked, parallel_tool_calls=False)
            (one,) = made.choices
            assert one.finish_reason == "tool_calls" and one.message.content is None and one.message.tool_calls
            (call,) = one.message.tool_calls
            assert call.type == "function" and call.id.startswith("call_") and call.function.name in names
            assert json.loads(call.function.arguments).keys() == {"unit", "deep"}
            pieces: list[Any] = []
            reasons = []
            async for chunk in await client.chat.completions.create(**asked, parallel_tool_calls=False, stream=True):
                delta = chunk.choices[0].delta
                pieces += delta.tool_calls or []
                reasons.append(chunk.choices[0].finish_reason)
                assert not delta.content
            assert reasons[-1] == "tool_calls" and len(pieces) > 3
            assert pieces[0].function.name == call.function.name and pieces[0].id
            assert "".join(p.function.arguments or "" for p in pieces if p.function) == call.function.arguments
        assert it.watcher.outcomes == ["done"] * 4

    play(folder, scene)


def test_results_of_tools_go_back(folder: Path) -> None:
    async def scene(it: Served) -> None:
        talk: Any = [
            *HI,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"unit": "c"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "high"}]},
        ]
        made = await (await it.client()).chat.completions.create(
            model=MODEL, messages=talk, max_tokens=3, temperature=0, tools=TOOLS
        )
        assert made.choices[0].finish_reason == "length"

    play(folder, scene)


def test_completions(folder: Path) -> None:
    async def scene(it: Served) -> None:
        client = await it.client()
        made = await client.completions.create(model=MODEL, prompt=["ab", "cd"], n=2, max_tokens=5, seed=1, logprobs=2)
        assert made.object == "text_completion" and [c.index for c in made.choices] == [0, 1, 2, 3]
        assert made.usage and (made.usage.prompt_tokens, made.usage.completion_tokens) == (4, 20)
        logprobs = made.choices[0].logprobs
        assert logprobs and logprobs.tokens and len(logprobs.tokens) == 5 and logprobs.text_offset
        again = await client.completions.create(model=MODEL, prompt=[97, 98], max_tokens=5, seed=1)
        assert again.choices[0].text == made.choices[0].text
        text = ""
        async for chunk in await client.completions.create(model=MODEL, prompt="ab", max_tokens=5, seed=1, stream=True):
            text += chunk.choices[0].text
        assert text == again.choices[0].text

    play(folder, scene)


def test_models_and_what_is_not_offered(folder: Path) -> None:
    async def scene(it: Served) -> None:
        client = await it.client()
        (one,) = (await client.models.list()).data
        assert one == await client.models.retrieve(MODEL) and one.id == MODEL and one.object == "model"
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await client.models.retrieve("gpt-5")
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await client.chat.completions.create(model="gpt-5", messages=HI)
        with pytest.raises(openai.APIStatusError, match="not offered") as refusal:
            await client.embeddings.create(model=MODEL, input="x")
        assert refusal.value.status_code == 501 and refusal.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(openai.BadRequestError, match=r"1024"):
            await client.completions.create(model=MODEL, prompt="x" * 2000, max_tokens=1)
        status, page = await raw(it.addr, b"GET /docs HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert status == 200 and b"/v1/chat/completions" in page and b"<script" not in page
        status, page = await raw(it.addr, b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert status == 200 and b"max_completion_tokens" in page

    play(folder, scene)


def test_thoughts_are_apart(tmp_path: Path) -> None:
    """A template that opens a thought: until the marker comes, all is reasoning."""
    template = HERMES_TEMPLATE.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}").replace(
        "{% if tools %}", "{% set enable_thinking = true %}{# </think> #}{% if tools %}"
    )
    folder = make_model(tmp_path / "m", template)

    async def scene(it: Served) -> None:
        made = await (await it.client()).chat.completions.create(model=MODEL, messages=HI, max_tokens=8, seed=2)
        message = made.choices[0].message
        assert message.content == "" and message.model_extra and message.model_extra["reasoning_content"]
        assert made.usage and made.usage.completion_tokens_details
        assert made.usage.completion_tokens_details.reasoning_tokens == 8
        chunks = [
            c
            async for c in await (await it.client()).chat.completions.create(
                model=MODEL, messages=HI, max_tokens=8, seed=2, stream=True
            )
        ]
        streamed = "".join((c.choices[0].delta.model_extra or {}).get("reasoning_content") or "" for c in chunks)
        assert streamed == message.model_extra["reasoning_content"]

    play(folder, scene)


def test_a_marker_that_only_its_flag_makes_special_is_read(tmp_path: Path) -> None:
    """As mistral's and gpt-oss's, which tokenizer_config.json does not name: decoding drops them."""
    folder = make_model(tmp_path / "m", HERMES_TEMPLATE)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|tool|>", "<tool_call>"))
    (marker,) = (
        each["id"] for each in json.loads(file.read_text())["added_tokens"] if each["content"] == "<tool_call>"
    )

    async def scene(it: Served) -> None:
        wishes: Any = {"model": MODEL, "messages": HI, "max_tokens": 4, "logit_bias": {str(marker): 100}}
        made = await (await it.client()).chat.completions.create(**wishes, tools=TOOLS)
        assert made.choices[0].message.content == "<tool_call>" * 4
        plain = await (await it.client()).chat.completions.create(**wishes)
        assert plain.choices[0].message.content == ""

    play(folder, scene)


def test_a_model_without_tools_in_its_template_refuses_them(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")

    async def scene(it: Served) -> None:
        with pytest.raises(openai.BadRequestError, match="does not support tools"):  # by which Ollama's clients know it
            await (await it.client()).chat.completions.create(model=MODEL, messages=HI, tools=TOOLS)

    play(folder, scene)


def test_edges_draw_by_grammar_too(folder: Path) -> None:
    """Where the last hop would draw, a grammar makes it send logits instead."""

    async def scene(it: Served) -> None:
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
        made = await (await it.client()).chat.completions.create(
            model=MODEL, messages=HI, max_tokens=9, response_format=form
        )
        assert json.loads(made.choices[0].message.content or "") in ("yes", "no")

    play(folder, scene, ends="edges")


def test_the_page_is_current() -> None:
    """docs/openai.md holds the very tables that parse, and every limit and status."""
    page = (Path(__file__).parents[3] / "docs" / "openai.md").read_text("utf8")
    for path in ENDPOINTS:
        assert f"## POST {path}\n\n{table(path)}" in page, f"docs/openai.md: put in table({path!r}) of api/fields.py"
    for limit in dataclasses.fields(LimitsConfig):
        assert f"| `{limit.name}` | {'none' if limit.default is None else limit.default} |" in page
    for error in (Unauthorized, Forbidden, NotFound, TooLarge, RateLimited, ShardUnavailable, PipelineStalled):
        assert f"| {error.http_status} | `{error.code}`" in page
