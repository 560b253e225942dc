"""/tokenize, /detokenize and /props, as programs written for llama.cpp's and vLLM's servers ask."""

import json

from tests.api.served import MODEL, Served, raw
from tests.compat.conftest import Stage, sent


def test_there_and_back(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        status, told = await sent(it, "/tokenize", {"content": "ab é"})
        assert status == 200 and told["count"] == len(told["tokens"]) == 5 and told["max_model_len"] == 1024
        status, back = await sent(it, "/detokenize", {"tokens": told["tokens"]})
        assert back["content"] == back["prompt"] == "ab é"
        _, pieces = await sent(it, "/tokenize", {"model": MODEL, "prompt": "ab", "with_pieces": True})
        assert [token["piece"] for token in pieces["tokens"]] == ["a", "b"]
        _, empty = await sent(it, "/tokenize", {"content": ""})
        assert empty["tokens"] == [] and empty["count"] == 0
        _, talk = await sent(it, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
        _, counted = await sent(it, "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]})
        assert talk["count"] == counted["input_tokens"] == 5
        _, counted = await sent(it, "/v1/responses/input_tokens", {"input": "hi", "max_output_tokens": 5000})
        assert counted == {"object": "response.input_tokens", "input_tokens": 5}

    stage.play(scene)


def test_more_than_the_context_is_counted_but_not_without_end(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        _, told = await sent(it, "/tokenize", {"content": "x" * 2000})
        assert told["count"] == 2000
        status, told = await sent(it, "/tokenize", {"content": "x" * 400_000})
        assert status == 400 and told["error"]["code"] == "context_length_exceeded"
        status, told = await sent(it, "/detokenize", {"tokens": [1] * 90_000})
        assert status == 400

    stage.play(scene)


def test_props(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        status, answer = await raw(it.addr, b"GET /props HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        told = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert status == 200 and told["default_generation_settings"]["n_ctx"] == 1024
        assert told["model_alias"] == MODEL and told["total_slots"] >= 1 and "messages" in told["chat_template"]
        status, answer = await raw(
            it.addr, b"GET /props?model=x HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        assert status == 404 and b"model_not_found" in answer

    stage.play(scene)
