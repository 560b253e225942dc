"""What programs of OpenAI's users send, as their libraries send it: conversations that are sent back, habits of other servers,
error codes. Written from observed behaviour; no other project's test is copied."""

import json
from typing import Any

import openai
import pytest

from manyhands.api.names import ModelNames
from tests.api.served import MODEL, Served, post, raw, raw_slowly
from tests.compat.conftest import Stage, sent

Object = dict[str, Any]
HI: Object = {"role": "user", "content": "hi"}
CALLED = {"name": "tide", "arguments": "{}"}
CALL: Object = {"id": "c1", "type": "function", "function": CALLED}
FUNCTION: Object = {"name": "tide", "parameters": {"type": "object", "properties": {}}}
TOOL: Object = {"type": "function", "function": FUNCTION}
CALLER: Object = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: Object = {"role": "tool", "tool_call_id": "c1", "content": "high"}


def chat(**fields: Any) -> tuple[str, Object]:
    return "/v1/chat/completions", {"model": MODEL, "max_tokens": 2, "messages": [HI], **fields}


def respond(**fields: Any) -> tuple[str, Object]:
    return "/v1/responses", {"model": MODEL, "max_output_tokens": 2, "input": "hi", **fields}


def said(**fields: Any) -> Object:
    return {"role": "assistant", "content": "x", **fields}


PART: Object = {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
ACCEPTED: dict[str, tuple[str, Object]] = {
    "model_dump of an answer": chat(messages=[HI, said(annotations=None, audio=None, function_call=None), HI]),
    "an object of parse()": chat(messages=[HI, said(parsed=None, refusal=None, tool_calls=[]), HI]),
    "litellm's keys": chat(messages=[HI, said(provider_specific_fields={"refusal": None}), HI]),
    "a key of a library yet to come": chat(messages=[HI, said(thinking_blocks=[{"a": 1}]), HI]),
    "calls of a stream": chat(messages=[HI, {**CALLER, "tool_calls": [{"index": 0, **CALL}]}, RESULT], tools=[TOOL]),
    "parsed arguments": chat(
        messages=[
            HI,
            {**CALLER, "tool_calls": [{**CALL, "function": {**CALLED, "parsed_arguments": {}}}]},
            RESULT,
        ],
        tools=[TOOL],
    ),
    "a tool's name": chat(messages=[HI, CALLER, {**RESULT, "name": "tide"}], tools=[TOOL]),
    "a result of no parts, Zed's": chat(messages=[HI, CALLER, {**RESULT, "content": []}], tools=[TOOL]),
    "functions, before there were tools": chat(
        messages=[
            HI,
            {"role": "assistant", "content": None, "function_call": CALLED},
            {"role": "function", "name": "tide", "content": None},
        ]
    ),
    "a long name, of an MCP server's tool": chat(
        tools=[{"type": "function", "function": {**FUNCTION, "name": "t" * 128}}]
    ),
    "no tools": chat(tools=[]),
    "no tools, auto": chat(tools=[], tool_choice="auto", parallel_tool_calls=True),
    "nulls in a tool": chat(
        tools=[{"type": "function", "function": {"name": "f", "description": None, "strict": None}}]
    ),
    "a user without a name": chat(messages=[{**HI, "name": None}]),
    "log probabilities off": chat(logprobs=False, top_logprobs=0),
    "completions' defaults, sent": (
        "/v1/completions",
        {
            "model": MODEL,
            "prompt": "hi",
            "max_tokens": 2,
            "n": 2,
            "best_of": 2,
            "echo": False,
            "suffix": "",
            "logprobs": None,
        },
    ),
    "thoughts off, of a model that has none": chat(reasoning_effort="none"),
    "a schema without name": chat(
        max_tokens=9,
        response_format={"type": "json_schema", "json_schema": {"description": None, "schema": {"enum": ["a"]}}},
    ),
    "a refusal sent back": chat(messages=[HI, said(content=[{"type": "refusal", "refusal": "no"}]), HI]),
    "cache_control": chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]
    ),
    "vLLM's sampling": chat(top_k=3, min_p=0.1, repetition_penalty=1.1, stop_token_ids=[5]),
    "template variables": chat(chat_template_kwargs={"note": "x"}),
    "metadata and store": chat(metadata={"a": "b"}, store=True),
    "model left out": ("/v1/chat/completions", {"messages": [HI], "max_tokens": 2}),
    "without /v1": ("/chat/completions", chat()[1]),
    "a path that ends in /": ("/v1/chat/completions/", chat()[1]),
    "openai-agents' tools": respond(tools=[]),
    "items of a model_dump": respond(
        input=[
            HI,
            {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": None, "status": None},
            {
                "id": "m",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "phase": None,
                "content": [PART],
            },
            HI,
        ]
    ),
    "Codex": respond(
        instructions="You are a coding agent.",
        client_metadata={"turn_id": "t", "x-codex-turn-metadata": "{" + "x" * 2000 + "}"},
        include=["reasoning.encrypted_content"],
        parallel_tool_calls=True,
        prompt_cache_key="k",
        reasoning={"summary": "auto"},
        store=False,
        tools=[
            {"type": "function", "name": "exec", "description": "x", "strict": False, "parameters": {}},
            {
                "type": "namespace",
                "name": "agents",
                "description": "x",
                "tools": [{"type": "function", "name": "f", "strict": False}],
            },
        ],
        tool_choice="auto",
    ),
    "a coding agent": respond(
        include=["reasoning.encrypted_content"], reasoning={"summary": "auto"}, store=True, truncation="auto"
    ),
    "a custom tool's call": respond(
        input=[
            HI,
            {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "y"},
        ],
        tools=[{"type": "custom", "name": "p", "description": "x", "format": {"type": "text"}}],
    ),
}
REFUSED: dict[str, tuple[tuple[str, Object], int, str, str | None]] = {
    "unknown model": (chat(model="gpt-9"), 404, "model_not_found", "model"),
    "too long": (chat(messages=[{"role": "user", "content": "one two " * 2000}]), 400, "context_length_exceeded", None),
    "unknown field": (chat(frobnicate=1), 400, "unknown_parameter", "frobnicate"),
    "missing field": (("/v1/chat/completions", {"model": MODEL}), 400, "missing_required_parameter", "messages"),
    "type": (chat(temperature="hot"), 400, "invalid_type", "temperature"),
    "value": (chat(top_p=1.1), 400, "invalid_value", "top_p"),
    "an image": (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
        400,
        "invalid_value",
        "messages",
    ),
    "said twice": (chat(top_k=3, manyhands={"top_k": 4}), 400, "invalid_value", "top_k"),
    "the gateway's variable": (
        chat(chat_template_kwargs={"messages": "x"}),
        400,
        "invalid_value",
        "chat_template_kwargs",
    ),
    "many variables": (
        chat(chat_template_kwargs={"v" + "a" * i: 1 for i in range(17)}),
        400,
        "invalid_value",
        "chat_template_kwargs",
    ),
    "much metadata": (chat(metadata={f"k{i}": "v" for i in range(17)}), 400, "invalid_value", "metadata"),
    "many stop ids": (chat(stop_token_ids=[1] * 65), 400, "invalid_value", "stop_token_ids"),
    "a custom tool's grammar": (
        respond(
            tools=[{"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark", "definition": ""}}]
        ),
        400,
        "invalid_value",
        "tools",
    ),
    "a schema's null is a value": (
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": None}}}),
        400,
        "invalid_value",
        "response_format",
    ),
}


def test_what_programs_send_is_taken(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        for name, (path, body) in ACCEPTED.items():
            status, told = await sent(it, path, body)
            assert status == 200, (name, told)

    stage.play(scene)


def test_what_is_refused_has_openais_codes(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        for name, ((path, body), wanted, code, param) in REFUSED.items():
            status, told = await sent(it, path, body)
            error = told["error"]
            assert (status, error["code"], error["param"]) == (wanted, code, param), (name, error)
        (client,) = [await it.client()]
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])
        assert missing.value.code == "model_not_found" and missing.value.request_id

    stage.play(scene)


def test_a_request_has_an_id_that_its_job_has(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        client = await it.client()
        ask: Any = {"model": MODEL, "messages": [HI], "max_tokens": 2}
        for num in (1, 3):
            answer = await client.chat.completions.with_raw_response.create(**ask, n=num)
            assert answer.headers["x-request-id"] == answer.parse()._request_id
            jobs = it.watcher.ended_jobs[-num:]
            assert answer.headers["x-request-id"] in {job.id for job in jobs} and len({job.id for job in jobs}) == len(
                jobs
            )
            assert int(answer.headers["openai-processing-ms"]) >= 0
        async with client.chat.completions.with_streaming_response.create(**ask, stream=True) as stream:
            async for _ in stream.iter_lines():
                pass
            assert stream.headers["x-request-id"] == it.watcher.ended_jobs[-1].id

    stage.play(scene)


def test_aliases(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        it.gateway.names = ModelNames.of(["gpt-4o=tiny", "*=tiny"])
        client = await it.client()
        try:
            await asked(it, client)
        finally:
            it.gateway.names = ModelNames()

    async def asked(it: Served, client: openai.AsyncOpenAI) -> None:
        for name in ("gpt-4o", "gpt-4o:latest", "tiny:latest", "what-ever"):
            made = await client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "hi"}], max_tokens=2
            )
            assert made.model == MODEL
            assert (await client.models.retrieve(name)).id == MODEL
        (one,) = (await client.models.list()).data
        assert one.model_extra and one.model_extra["manyhands"]["aliases"] == ["gpt-4o"]

    stage.play(scene)


def test_head(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        for path in ("/v1/models", "/models/"):
            status, answer = await raw(
                it.addr, f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
            )
            assert status == 200 and answer.endswith(b"\r\n\r\n")

    stage.play(scene)


def test_a_client_of_http_1_0_is_sent_no_chunks(stage: Stage) -> None:
    """It would take their lengths for text."""

    async def scene(it: Served) -> None:
        for streamed in (True, False):
            path, body = chat(stream=streamed)
            asked = post(path, json.dumps(body).encode()).replace(b"HTTP/1.1", b"HTTP/1.0")
            status, answer = await raw_slowly(it, asked)
            head, _, rest = answer.partition(b"\r\n\r\n")
            assert status == 200 and b"transfer-encoding" not in head and b"connection: close" in head
            assert rest.endswith(b"data: [DONE]\n\n") if streamed else json.loads(rest)["object"] == "chat.completion"

    stage.play(scene)


def test_the_answer_goes_on_from_the_last_message(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        client = await it.client()
        ask: Any = {"model": MODEL, "max_tokens": 6, "temperature": 0}
        begun = await client.chat.completions.create(
            messages=[HI, said(content="xy ")],  # type: ignore[list-item]
            **ask,
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
        )
        assert begun.usage is not None
        plain = await client.completions.create(prompt="<|user|>hi<|end|><|assistant|>xy ", **ask)
        assert begun.choices[0].message.content == plain.choices[0].text
        _, told = await sent(it, *chat(messages=[HI, said(content="xy ", prefix=True)], max_tokens=6, temperature=0))
        assert told["choices"][0]["message"]["content"] == plain.choices[0].text
        status, told = await sent(it, *chat(continue_final_message=True, add_generation_prompt=False))
        assert status == 400 and told["error"]["param"] == "continue_final_message"

    stage.play(scene)


def test_no_part_of_the_probability_is_the_likeliest_token(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        texts = []
        for how in ({"temperature": 0}, {"temperature": 2, "top_p": 0}):
            _, told = await sent(it, *chat(max_tokens=6, **how))
            texts.append(told["choices"][0]["message"]["content"])
        assert texts[0] == texts[1]

    stage.play(scene)


@pytest.mark.parametrize(
    "path, field, value",
    [
        ("/v1/chat/completions", "response_format", {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}),
        ("/v1/responses", "text", {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}),
        ("/v1/messages", "output_config", {"format": {"type": "json_schema", "schema": {"not": {}}}}),
        ("/api/chat", "format", {"not": {}}),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_field(
    path: str, field: str, value: Object, stage: Stage
) -> None:
    async def scene(it: Served) -> None:
        body: Object = {"input": "hi"} if path == "/v1/responses" else {"messages": [HI], "max_tokens": 2}
        body = {"messages": [HI]} if path == "/api/chat" else body
        status, told = await sent(it, path, {**body, field: value})
        error = told["error"]
        message = error if isinstance(error, str) else error["message"]
        assert status == 400 and message.startswith(f"{field}: the schema cannot be enforced"), told
        assert isinstance(error, str) or error.get("param", field) == field

    stage.play(scene)


@pytest.mark.parametrize(
    "path, tool",
    [("/v1/responses", {"type": "web_search"}), ("/v1/messages", {"type": "bash_20250124", "name": "bash"})],
)
def test_a_tool_of_anothers_servers_is_refused_for_its_kind(path: str, tool: Object, stage: Stage) -> None:
    async def scene(it: Served) -> None:
        said = {"messages": [HI], "max_tokens": 2} if path == "/v1/messages" else {"input": "hi"}
        status, told = await sent(it, path, {**said, "tools": [tool]})
        assert status == 400 and f'tools.0.type is "{tool["type"]}"' in told["error"]["message"]

    stage.play(scene)


def test_template_variables_reach_the_template(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        client = await it.client()
        sizes = []
        for variables in ({}, {"note": "twelve chars"}):
            made = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=1,
                extra_body={"chat_template_kwargs": variables},
            )
            assert made.usage is not None
            sizes.append(made.usage.prompt_tokens)
        assert sizes[1] - sizes[0] == 12

    stage.play(scene)


def test_a_token_that_stops_shows_nothing(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        client = await it.client()
        ask: Any = {"model": MODEL, "prompt": "hi", "max_tokens": 8, "temperature": 0}
        whole = await client.completions.create(**ask, logprobs=1)
        assert whole.choices[0].logprobs and whole.choices[0].logprobs.tokens
        spelled = whole.choices[0].logprobs.tokens
        third = spelled[2]
        token = (
            int(third.removeprefix("bytes:\\x"), 16) if third.startswith("bytes:") else ord(third)
        )  # a byte tokenizer
        made = await client.completions.create(**ask, logprobs=1, extra_body={"stop_token_ids": [token]})
        assert made.choices[0].finish_reason == "stop" and made.usage
        assert made.usage.completion_tokens == spelled.index(third) + 1
        assert whole.choices[0].text.startswith(made.choices[0].text) and made.choices[0].text != whole.choices[0].text

    stage.play(scene)


def test_log_probabilities_of_completions(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        client = await it.client()
        ask: Any = {"model": MODEL, "prompt": "hi", "max_tokens": 8, "temperature": 2, "seed": 5}
        none = await client.completions.create(**ask, logprobs=0)
        odds = none.choices[0].logprobs
        assert odds and odds.top_logprobs is None and odds.token_logprobs and len(odds.token_logprobs) == 8
        some = (await client.completions.create(**ask, logprobs=2)).choices[0].logprobs
        assert some and some.tokens and some.top_logprobs and some.token_logprobs
        for token, logprob, top in zip(some.tokens, some.token_logprobs, some.top_logprobs, strict=True):
            assert top[token] == logprob and 2 <= len(top) <= 3

    stage.play(scene)


def test_a_call_that_was_cut_shows_none_of_its_marker(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        for count in (1, 3, 9, 14):
            _, told = await sent(it, *chat(tools=[TOOL], tool_choice="required", max_tokens=count))
            (choice,) = told["choices"]
            assert choice["finish_reason"] == "length" and not choice["message"]["content"], (count, choice)

    stage.play(scene)


def test_tools_and_a_format_of_the_answer(stage: Stage) -> None:
    """openai-agents with an output_type, pydantic-ai's NativeOutput: each answer is a call or the JSON, and never else."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    strict: Object = {"type": "function", "function": {"name": "tide", "strict": True, "parameters": nothing}}

    async def scene(it: Served) -> None:
        kinds = set()
        for seed in range(6):
            _, told = await sent(it, *chat(tools=[strict], response_format=form, max_tokens=99, seed=seed))
            (choice,) = told["choices"]
            message, reason = choice["message"], choice["finish_reason"]
            if reason == "tool_calls":
                assert message["tool_calls"][0]["function"]["name"] == "tide" and not message["content"]
            elif reason == "stop":
                assert json.loads(message["content"]) == {"a": 1}
            kinds.add(reason)
        assert kinds & {"stop", "tool_calls"}
        _, told = await sent(it, *chat(tools=[strict], response_format=form, max_tokens=99, tool_choice="required"))
        assert told["choices"][0]["finish_reason"] in ("tool_calls", "length")

    stage.play(scene)


def test_a_custom_tools_input_is_text(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        client = await it.client()
        ask: Any = {
            "model": MODEL,
            "input": "hi",
            "max_output_tokens": 40,
            "temperature": 0,
            "parallel_tool_calls": False,
            "tools": [{"type": "custom", "name": "patch"}],
            "tool_choice": {"type": "custom", "name": "patch"},
        }
        whole = await client.responses.create(**ask)
        (item,) = whole.output
        assert item.type == "custom_tool_call" and item.name == "patch"
        told = [event async for event in await client.responses.create(**ask, stream=True)]
        kinds = [event.type for event in told]
        assert "response.custom_tool_call_input.done" in kinds and "response.function_call_arguments.delta" not in kinds
        assert told[-1].response.output[0].input == item.input

    stage.play(scene)


def test_a_call_says_its_namespace(stage: Stage) -> None:
    """By which Codex knows the MCP server; and so it comes back."""
    tide = {"type": "function", "strict": True, "parameters": FUNCTION["parameters"], "name": "tide"}
    space = {"type": "namespace", "name": "mcp__sea", "description": "The sea.", "tools": [tide]}

    async def scene(it: Served) -> None:
        client = await it.client()
        ask: Any = {"model": MODEL, "max_output_tokens": 99, "tools": [space], "tool_choice": "required"}
        whole = await client.responses.create(**ask, input="hi", parallel_tool_calls=False)
        (item,) = whole.output
        assert item.type == "function_call" and (item.name, item.namespace) == ("tide", "mcp__sea")
        told = [
            e async for e in await client.responses.create(**ask, input="hi", parallel_tool_calls=False, stream=True)
        ]
        (added,) = [event.item for event in told if event.type == "response.output_item.added"]
        assert (added.name, added.namespace) == ("tide", "mcp__sea")
        result = {"type": "function_call_output", "call_id": item.call_id, "output": "high"}
        status, _ = await sent(it, *respond(input=[HI, item.model_dump(), result], tools=[space]))
        assert status == 200 and whole.model_dump()["tools"][0]["tools"][0]["name"] == "tide"

    stage.play(scene)


def test_the_oldest_items_give_way(stage: Stage) -> None:
    async def scene(it: Served) -> None:
        talk: list[Object] = [{"role": "user" if i % 2 == 0 else "assistant", "content": "x" * 90} for i in range(41)]
        asked = {"input": [{"role": "system", "content": "rule"}, *talk], "max_output_tokens": 4}
        status, told = await sent(it, *respond(**asked))
        assert status == 400 and told["error"]["code"] == "context_length_exceeded"
        status, told = await sent(it, *respond(**asked, truncation="auto"))
        assert status == 200 and told["truncation"] == "auto" and told["usage"]["input_tokens"] > 800
        status, told = await sent(it, *respond(input="x" * 2000, truncation="auto"))
        assert status == 400 and told["error"]["code"] == "context_length_exceeded"

    stage.play(scene)
