"""Ollama's paths, with its own client where it is installed, and as they are on the wire."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from manyhands.api.ollama.models import OLLAMA_VERSION
from tests.api.served import MODEL, Served, post, raw_slowly
from tests.compat.conftest import Stage, sent

ollama = pytest.importorskip("ollama", reason="LOUD: the client package `ollama` is not installed: nothing is tested")

HI: Any = [{"role": "user", "content": "hi"}]
OPTIONS = {"num_predict": 6, "temperature": 0}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "x",
        "parameters": {"type": "object", "properties": {"unit": {"type": "string"}}, "required": ["unit"]},
    },
}


@asynccontextmanager
async def client(it: Served) -> AsyncIterator[Any]:
    made = ollama.AsyncClient(host=f"http://{it.addr}", timeout=30.0)
    async with made._client:
        yield made


def test_models(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        async with client(it) as asked:
            (one,) = (await asked.list()).models
            assert one.model == f"{MODEL}:latest" and one.size > 1000 and one.details.family == "qwen3"
            shown = await asked.show(MODEL)
            assert {"completion", "tools"} <= set(shown.capabilities) and shown.template
            assert shown.modelinfo["qwen3.context_length"] == 1024 and shown.modelinfo["general.basename"] == MODEL
            assert shown.parameters == "num_ctx 1024"
            (running,) = (await asked.ps()).models
            assert running.model == one.model and running.context_length == 1024
            with pytest.raises(ollama.ResponseError, match="not served"):
                await asked.show("llama9")
            status, told = await sent(it, "/api/show", {"name": f"{MODEL}:latest", "verbose": True})
            assert status == 200 and told["details"]["quantization_level"] == "bf16"
            assert told["details"]["parameter_size"] == f"{told['model_info']['general.parameter_count'] / 1e6:.1f}M"
            assert told["details"]["format"] == "safetensors" and told["model_info"]["qwen3.attention.head_count"] > 0
            status, told = await sent(it, "/api/show", {})
            assert status == 200 and told["model_info"]["general.basename"] == MODEL
            answer = await raw_slowly(it, b"GET /api/version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert answer[0] == 200 and json.loads(answer[1].partition(b"\r\n\r\n")[2])["version"] == OLLAMA_VERSION

    stage.play(scene)


def test_what_ollamas_own_program_sends(stage: Stage) -> None:
    """`ollama run`: all fields, most of them empty."""
    empty: Any = {"system": "", "template": "", "options": None}
    generate: Any = {"model": MODEL, "suffix": "", **empty, "keep_alive": "5m0s", "stream": False}
    hi = {"role": "user", "content": "hi"}

    async def scene(it: Served) -> None:
        for path, body in (
            ("/api/show", {"model": MODEL, **empty, "verbose": False, "name": ""}),
            ("/api/generate", {**generate, "prompt": ""}),
            ("/api/generate", {**generate, "prompt": "hi", "options": OPTIONS}),
            ("/api/chat", {"model": MODEL, "messages": [hi], "format": "", "options": OPTIONS, "stream": False}),
        ):
            status, told = await sent(it, path, body)
            assert status == 200, (path, told)
        status, told = await sent(it, "/api/show", {"model": MODEL, "system": "Be kind."})
        assert status == 400 and "system" in told["error"]

    stage.play(scene)


def test_a_body_need_not_say_that_it_is_json(stage: Stage) -> None:
    """Ollama's documentation asks it with a bare `curl -d`, which says that the body is a form; litellm says nothing."""

    async def scene(it: Served) -> None:
        show, generate = {"model": MODEL}, {"model": MODEL, "prompt": "hi", "options": OPTIONS}
        asked = [("/api/show", show, 200), ("/api/generate", generate, 200), ("/api/pull", show, 501)]
        for path, body, status in asked:
            for kind in ("", "content-type: application/x-www-form-urlencoded\r\n"):
                data = json.dumps(body).encode()
                head = (
                    f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{kind}content-length: {len(data)}"
                )
                assert (await raw_slowly(it, head.encode() + b"\r\n\r\n" + data))[0] == status, (path, kind)

    stage.play(scene)


def test_a_chat_whole_and_streamed(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        async with client(it) as asked:
            whole = await asked.chat(model=MODEL, messages=HI, options=OPTIONS)
            assert whole.done and whole.done_reason == "length" and whole.message.role == "assistant"
            assert whole.eval_count == 6 and whole.prompt_eval_count == 5 and whole.model == MODEL
            spent = (whole.total_duration, whole.load_duration, whole.prompt_eval_duration, whole.eval_duration)
            assert all(isinstance(one, int) and one >= 0 for one in spent) and whole.total_duration > 1000
            told = [part async for part in await asked.chat(model=MODEL, messages=HI, options=OPTIONS, stream=True)]
            assert "".join(part.message.content for part in told) == whole.message.content
            assert [part.done for part in told] == [False] * (len(told) - 1) + [True] and told[-1].eval_count == 6
            generated = await asked.generate(model=MODEL, prompt="hi", options=OPTIONS)
            assert generated.response == whole.message.content
            parts = [
                part async for part in await asked.generate(model=MODEL, prompt="hi", options=OPTIONS, stream=True)
            ]
            assert "".join(part.response for part in parts) == generated.response

    stage.play(scene)


def test_raw_system_stop_and_seed(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        async with client(it) as asked:
            plain = await (await it.client()).completions.create(model=MODEL, prompt="hi", max_tokens=6, temperature=0)
            made = await asked.generate(model=MODEL, prompt="hi", raw=True, options=OPTIONS)
            assert made.response == plain.choices[0].text
            system = await asked.generate(model=MODEL, prompt="hi", system="Be kind.", options=OPTIONS)
            assert system.prompt_eval_count > 5
            text = made.response
            stopped = await asked.generate(model=MODEL, prompt="hi", raw=True, options={**OPTIONS, "stop": [text[2]]})
            assert stopped.response == text[: text.index(text[2])] and stopped.done_reason == "stop"
            hot = {"num_predict": 6, "seed": 3}
            first, again = [await asked.chat(model=MODEL, messages=HI, options=hot) for _ in range(2)]
            assert first.message.content == again.message.content

    stage.play(scene)


def test_formats_and_tools(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        async with client(it) as asked:
            schema = {
                "type": "object",
                "properties": {"a": {"enum": [None, 1]}},
                "required": ["a"],
                "additionalProperties": False,
            }
            made = await asked.chat(model=MODEL, messages=HI, format=schema, options={"num_predict": 60})
            assert json.loads(made.message.content)["a"] in (None, 1)
            made = await asked.chat(model=MODEL, messages=HI, tools=[TOOL], options=OPTIONS)
            assert made.done
            call = {"function": {"name": "tide", "arguments": {"unit": "c"}}}
            back: Any = [
                *HI,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "high", "tool_name": "tide"},
            ]
            made = await asked.chat(model=MODEL, messages=back, tools=[TOOL], options=OPTIONS)
            assert made.done

    stage.play(scene)


def test_a_program_that_wants_a_model_loaded_or_unloaded(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        for path in ("/api/chat", "/api/generate"):
            for keep_alive, reason in (("5m", "load"), (0, "unload")):
                status, told = await sent(it, path, {"model": MODEL, "keep_alive": keep_alive})
                assert status == 200 and told["done"] is True and told["done_reason"] == reason
        assert not it.gateway.jobs

    stage.play(scene)


def test_what_cannot_be_is_said(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        async with client(it) as asked:
            with pytest.raises(ollama.ResponseError, match="does not support thinking"):
                await asked.chat(model=MODEL, messages=HI, think=True)
            with pytest.raises(ollama.ResponseError, match="images"):
                await asked.chat(model=MODEL, messages=[{"role": "user", "content": "x", "images": [b"x"]}])
            status, told = await sent(
                it, "/api/chat", {"model": MODEL, "messages": [{"role": "user", "content": "x" * 2000}]}
            )
            assert status == 400 and "1024" in told["error"]
            long = {
                "messages": [{"role": "user", "content": "x" * 1000}],
                "options": {"num_predict": -1},
                "stream": False,
            }
            status, told = await sent(it, "/api/chat", long)
            assert status == 200 and told["eval_count"] == 1024 - 1003 and told["done_reason"] == "length"

    stage.play(scene)


def test_what_is_not_offered_is_said_with_a_remedy(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        async with client(it) as asked:
            with pytest.raises(ollama.ResponseError, match="ask an embedding server") as refused:
                await asked.embed(model=MODEL, input="hi")
            assert refused.value.status_code == 501
            acts: Any = (asked.pull, ["llama9"]), (asked.delete, [MODEL]), (asked.copy, [MODEL, "x"])
            for act, given in acts:
                with pytest.raises(ollama.ResponseError, match="manyhands pull"):
                    await act(*given)
        for path in ("/v1/v1/messages", "/v1/api/chat"):
            status, told = await sent(it, path, {})
            assert status == 404 and "end its base URL before /v1" in told["error"]["message"]

    stage.play(scene)


def test_lines_are_json_and_nothing_else(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        body = json.dumps({"model": MODEL, "messages": HI, "options": OPTIONS}).encode()
        status, answer = await raw_slowly(it, post("/api/chat", body))
        head, _, chunks = answer.partition(b"\r\n\r\n")
        assert (
            status == 200
            and b"content-type: application/x-ndjson" in head.lower()
            and chunks.count(b'"done":true') == 1
        )

    stage.play(scene)
