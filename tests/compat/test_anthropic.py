"""/v1/messages, with Anthropic's own client where it is installed, and as it is on the wire."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.api.auth import KeyRing
from tests.api.served import HERMES_TEMPLATE, MODEL, Served, make_model, served
from tests.compat.conftest import Stage, sent

anthropic = pytest.importorskip(
    "anthropic", reason="LOUD: the client package `anthropic` is not installed: nothing is tested"
)

HI: Any = [{"role": "user", "content": "hi"}]
GREEDY: Any = {"extra_body": {"temperature": 0}}
TOOL: Any = {
    "name": "tide",
    "description": "x",
    "input_schema": {
        "type": "object",
        "properties": {"unit": {"enum": ["c", "f"]}},
        "required": ["unit"],
        "additionalProperties": False,
    },
}


def client(it: Served, key: str = "none") -> Any:
    return anthropic.AsyncAnthropic(base_url=f"http://{it.addr}", api_key=key, max_retries=0, timeout=30.0)


def test_a_message_whole_and_streamed(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        async with client(it) as asked:
            ask: Any = {"model": MODEL, "messages": HI, "max_tokens": 12, "system": "Be kind.", **GREEDY}
            whole = await asked.messages.create(**ask)
            (block,) = whole.content
            assert whole.id.startswith("msg_") and whole.role == "assistant" and block.type == "text" and block.text
            assert whole.stop_reason == "max_tokens" and whole.stop_sequence is None
            assert whole.usage.output_tokens == 12
            counted = await asked.messages.count_tokens(model=MODEL, messages=HI, system="Be kind.")
            assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
            async with asked.messages.stream(**ask) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
            assert text == block.text == final.content[0].text
            assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12

    stage.play(scene)


def test_what_claude_code_sends(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        sizes = []
        for billed in ([], [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0;"}]):
            rule = {"type": "text", "text": "You are kind.", "cache_control": {"type": "ephemeral"}}
            body = {
                "model": MODEL,
                "max_tokens": 32_000,
                "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
                "system": [*billed, rule, rule],
                "tools": [TOOL],
                "metadata": {"user_id": json.dumps({"session_id": "s"})},
                "thinking": {"type": "adaptive"},
                "output_config": {"effort": "high"},
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                "diagnostics": {"previous_message_id": None},
                "stop_sequences": ["e"],
            }
            status, told = await sent(it, "/v1/messages?beta=true", body)
            assert status == 200, told
            sizes.append(told["usage"]["input_tokens"] + told["usage"]["cache_read_input_tokens"])
        plain = {"messages": HI, "max_tokens": 1, "tools": [TOOL], "system": "You are kind.\nYou are kind."}
        _, told = await sent(it, "/v1/messages", plain)
        assert {*sizes} == {told["usage"]["input_tokens"] + told["usage"]["cache_read_input_tokens"]}

    stage.play(scene)


def test_the_events_of_a_stream(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        async with client(it) as asked:
            told = [e async for e in await asked.messages.create(model=MODEL, messages=HI, max_tokens=4, stream=True)]
            kinds = [event.type for event in told]
            assert kinds[:2] == ["message_start", "content_block_start"]
            assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
            assert set(kinds[2:-3]) == {"content_block_delta"}
            assert told[0].message.content == [] and told[0].message.usage.input_tokens > 0

    stage.play(scene)


def test_examples_of_a_tools_input_are_told(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        async with client(it) as asked:
            sizes = []
            for tool in (
                {**TOOL, "input_examples": [{"unit": "c", "day": None}]},
                {**TOOL, "description": 'x\n\nExamples of its input: [{"unit": "c", "day": null}]'},
                TOOL,
            ):
                counted = await asked.messages.count_tokens(model=MODEL, messages=HI, tools=[tool])
                sizes.append(counted.input_tokens)
            assert sizes[0] == sizes[1] > sizes[2]

    stage.play(scene)


def test_the_text_of_thoughts_is_left_out_where_it_is_not_wanted(tmp_path: Path) -> None:
    opened = HERMES_TEMPLATE.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}{# </think> #}")
    folder = make_model(tmp_path / "m", opened)

    async def scene() -> None:
        async with served(folder) as it:
            told = {}
            for display in ("summarized", "omitted"):
                body = {"messages": HI, "max_tokens": 6, "thinking": {"type": "adaptive", "display": display}}
                _, whole = await sent(it, "/v1/messages", {**body, "temperature": 0})
                (block,) = whole["content"]
                async with client(it) as asked, asked.messages.stream(model=MODEL, **body, **GREEDY) as stream:
                    deltas = [event async for event in stream if event.type == "content_block_delta"]
                    final = await stream.get_final_message()
                assert final.content[0].thinking == block["thinking"] and whole["usage"]["output_tokens"] == 6
                told[display] = block["type"], bool(block["thinking"]), bool(deltas)
            assert told == {"summarized": ("thinking", True, True), "omitted": ("thinking", False, False)}

    asyncio.run(scene())


def test_a_stop_sequence_is_named(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        async with client(it) as asked:
            ask: Any = {"model": MODEL, "messages": HI, "max_tokens": 12, **GREEDY}
            text = (await asked.messages.create(**ask)).content[0].text
            stop = text[3:5]
            made = await asked.messages.create(**ask, stop_sequences=["never this", stop])
            assert made.stop_reason == "stop_sequence" and made.stop_sequence == stop
            assert made.content[0].text == text[: text.index(stop)]

    stage.play(scene)


def test_tools_there_and_back(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        async with client(it) as asked:
            ask: Any = {"model": MODEL, "messages": HI, "max_tokens": 300, **GREEDY, "tools": [TOOL]}
            named = {"type": "tool", "name": "tide", "disable_parallel_tool_use": True}
            made = await asked.messages.create(**ask, tool_choice=named)
            (call,) = made.content
            assert made.stop_reason == "tool_use" and call.type == "tool_use" and call.id.startswith("toolu_")
            assert call.name == "tide" and call.input["unit"] in ("c", "f")
            async with asked.messages.stream(**ask, tool_choice=named) as stream:
                final = await stream.get_final_message()
            assert final.content[0].input == call.input
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "high"}]}
            back = [
                *HI,
                {"role": "assistant", "content": made.to_dict()["content"]},
                {"role": "user", "content": [result]},
            ]
            more = await asked.messages.create(**{**ask, "messages": back, "max_tokens": 3})
            assert more.usage.output_tokens == 3
            cut = await asked.messages.create(**{**ask, "max_tokens": 9}, tool_choice={"type": "any"})
            assert cut.stop_reason == "max_tokens" and all(block.type == "tool_use" for block in cut.content)

    stage.play(scene)


def test_the_answer_goes_on_from_the_assistants_message(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        async with client(it) as asked:
            turns: Any = [*HI, {"role": "assistant", "content": "xy"}]
            made = await asked.messages.create(model=MODEL, messages=turns, max_tokens=6, **GREEDY)
            plain = await (await it.client()).completions.create(
                model=MODEL, prompt="<|user|>hi<|end|><|assistant|>xy", max_tokens=6, temperature=0
            )
            assert made.content[0].text == plain.choices[0].text

    stage.play(scene)


def test_output_by_a_schema(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        form = {"format": {"type": "json_schema", "schema": TOOL["input_schema"]}}
        body = {"model": MODEL, "messages": HI, "max_tokens": 90, "output_config": form}
        status, told = await sent(it, "/v1/messages", body)
        assert status == 200 and json.loads(told["content"][0]["text"])["unit"] in ("c", "f")

    stage.play(scene)


def test_max_tokens_is_a_limit_and_not_a_wish(stage: Stage) -> None:
    """Programs send their model's largest number, whatever the context is."""

    async def scene(it: Served) -> None:
        body: Any = {"messages": [{"role": "user", "content": "x" * 1000}], "max_tokens": 32_000, "temperature": 0}
        status, told = await sent(it, "/v1/messages", body)
        assert status == 200 and told["usage"]["output_tokens"] == 1024 - 1003
        assert told["stop_reason"] == "model_context_window_exceeded"
        status, told = await sent(it, "/v1/messages", {**body, "messages": [{"role": "user", "content": "x" * 2000}]})
        assert status == 400 and told["error"]["type"] == "invalid_request_error" and "1024" in told["error"]["message"]

    stage.play(scene)


def test_errors_have_anthropics_shape(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        async with client(it) as asked:
            with pytest.raises(anthropic.NotFoundError, match="not served") as missing:
                await asked.messages.create(model="claude-9", messages=HI, max_tokens=2)
            assert missing.value.body["error"]["type"] == "not_found_error"
            with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
                await asked.post("/v1/messages", body={"model": MODEL, "messages": HI}, cast_to=object)
            with pytest.raises(anthropic.BadRequestError, match="image"):
                turn: Any = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}
                await asked.messages.create(model=MODEL, messages=[turn], max_tokens=2)
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* 1024 tokens") as long:
                await asked.messages.create(
                    model=MODEL, messages=[{"role": "user", "content": "x" * 2000}], max_tokens=2
                )
            assert long.value.request_id and long.value.body["error"]["message"].count("prompt is too long") == 1
            made = await asked.messages.create(model=MODEL, messages=HI, max_tokens=2)
            assert made._request_id == it.watcher.ended_jobs[-1].id
        _, told = await sent(it, "/v1/messages", {"model": MODEL, "messages": HI, "max_tokens": 2, "mcp_servers": [{}]})
        assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"

    stage.play(scene)


def test_a_thread_is_refused_as_the_tool_runner_reads_it(stage: Stage) -> None:
    """By these details Anthropic's tool runner goes on without a thread; any other error ends it."""

    async def scene(it: Served) -> None:
        ask = {"model": MODEL, "messages": HI, "max_tokens": 2}
        status, told = await sent(it, "/v1/messages", {**ask, "thread": {"type": "create"}})
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert status == 400 and told["error"]["details"] == details
        _, told = await sent(it, "/v1/messages", {**ask, "top_k": -1})
        assert "details" not in told["error"]

    stage.play(scene)


def test_a_key_may_come_as_x_api_key(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> None:
    keys = KeyRing(tmp_path_factory.mktemp("keys") / "keys.json")
    secret = keys.add("someone", 0.0, models=("other",))

    async def scene(it: Served) -> None:
        access = it.access
        access._keys, before = keys, access._keys
        try:
            async with client(it, "mhk_wrong") as asked:
                with pytest.raises(anthropic.AuthenticationError):
                    await asked.messages.create(model=MODEL, messages=HI, max_tokens=2)
            async with client(it, secret) as asked:
                with pytest.raises(anthropic.PermissionDeniedError):
                    await asked.messages.create(model=MODEL, messages=HI, max_tokens=2)
        finally:
            access._keys, access._is_locked = before, False

    stage.play(scene)


def test_models_are_listed_as_anthropic_lists_them(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        async with client(it) as asked:
            (one,) = (await asked.models.list()).data
            assert one.id == MODEL and one.type == "model" and one.display_name == MODEL

    stage.play(scene)
