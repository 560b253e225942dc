"""The fields of every OpenAI request we take: one table that parses, documents (docs/openai.md) and tests them.

A field has a JSON schema for what is honoured; anything else is refused with 400 naming the field, and so is a field that
is not in the table. Nothing is ignored. `null` is the same as leaving a field out, as in OpenAI's own API.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.api.schema import (
    BOOLEAN,
    LABEL,
    NAME,
    NOTHING,
    OBJECT,
    STRING,
    BadField,
    Schema,
    array,
    check,
    either,
    integer,
    number,
    only,
    read_json,
    record,
    show,
)


@dataclass(frozen=True, slots=True)
class Field:
    """One field: what is honoured, how, and examples on both sides of the border, which the tests send."""

    name: str
    schema: Schema
    says: str
    works: Sequence[Any] = ()
    refused: Sequence[Any] = ()
    needs: Mapping[str, Any] = field(default_factory=dict)  # other fields that the examples want


_STOP = either(
    {"type": "string", "minLength": 1, "maxLength": 256},
    array({"type": "string", "minLength": 1, "maxLength": 256}, 0, 16),
)
_TEXT_PART = record(
    {
        "type": only("text", "input_text", "output_text"),
        "text": STRING,
        "annotations": array(OBJECT),
        "logprobs": array(OBJECT),
    },
    "type",
    "text",
)
_CONTENT = either(STRING, array(_TEXT_PART, 1))
_CALL = record(
    {
        "id": LABEL,
        "type": only("function"),
        "function": record({"name": NAME, "arguments": STRING}, "name", "arguments"),
    },
    "id",
    "function",
)
_MESSAGE = either(
    record({"role": only("system", "developer", "user"), "content": _CONTENT, "name": LABEL}, "role", "content"),
    record(
        {
            "role": only("assistant"),
            "content": either(_CONTENT, {"type": "null"}),
            "tool_calls": either(array(_CALL, 1, 128), {"type": "null"}),
            "reasoning_content": either(STRING, {"type": "null"}),
            "refusal": {"type": "null"},
            "audio": {"type": "null"},
            "annotations": array(OBJECT, 0, 0),
            "function_call": {"type": "null"},
            "name": LABEL,
        },
        "role",
    ),
    record({"role": only("tool"), "content": _CONTENT, "tool_call_id": LABEL}, "role", "content", "tool_call_id"),
)
_FUNCTION = {"name": NAME, "description": STRING, "parameters": OBJECT, "strict": either(BOOLEAN, {"type": "null"})}
_TOOL = record({"type": only("function"), "function": record(_FUNCTION, "name")}, "type", "function")
_CHOICES = only("none", "auto", "required")
_FORMAT = either(
    record({"type": only("text", "json_object")}, "type"),
    record(
        {
            "type": only("json_schema"),
            "json_schema": record(
                {"name": NAME, "description": STRING, "schema": OBJECT, "strict": either(BOOLEAN, {"type": "null"})},
                "name",
                "schema",
            ),
        },
        "type",
        "json_schema",
    ),
)
_EXTENSION = record(
    {
        "path": only("ring", "star"),
        "dtype": only("bf16", "fp32", "fp16", "int8"),
        "top_k": integer(0, 1 << 24),
        "min_p": number(0, 1),
        "repetition_penalty": number(0.001, 1000),
        "ignore_eos": BOOLEAN,
    }
)

# -- the table --------------------------------------------------------------------------------------------------------

_FN = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_GREETING = [{"role": "user", "content": "hi"}]
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
_NEVER = "not offered: refused"
_HINT = "a label for the operator's books; it has no effect on the answer at OpenAI either, and is not kept"

_COMMON = (
    Field("model", {"type": "string", "maxLength": 512}, "one of /v1/models, else 404", refused=[1]),
    Field("temperature", number(0, 2), "default 1; 0 is greedy", [0, 0.7, 2], [-0.1, 2.1, "1", True]),
    Field("top_p", {**number(0, 1), "exclusiveMinimum": 0}, "default 1", [0.1, 1], [0, 1.5]),
    Field("user", LABEL, _HINT, ["someone"], [1]),
)
_SAFETY = (
    Field("safety_identifier", LABEL, _HINT, ["someone"], [1]),
    Field("prompt_cache_key", LABEL, _HINT, ["k"], [1]),
    Field("prompt_cache_retention", NOTHING, f"{_NEVER}; no cache outlives a request", refused=["24h"]),
    Field("metadata", {"type": "object", "maxProperties": 0}, "only `{}`: answers are not kept", [{}], [{"a": "b"}]),
    Field("service_tier", only("auto", "default"), "there is one tier", ["auto", "default"], ["flex", "priority"]),
    Field("store", only(False), "only `false`: answers are not kept", [False], [True]),
)
_STREAM = (
    Field(
        "stream",
        BOOLEAN,
        "server-sent events, ended by `[DONE]`; each stream pauses with its own reader",
        [False],
        ["yes", 1],
    ),
    Field(
        "stream_options",
        record({"include_usage": BOOLEAN, "include_obfuscation": only(False)}),
        "`include_usage`: a last chunk with the usage; obfuscation is not offered; only with `stream`",
        [],
        [{"include_usage": True}, {"include_obfuscation": True}],
    ),
)
_SAMPLING = (
    Field(
        "n",
        integer(1, 128),
        "default 1; each choice draws with a seed of its own and counts as a request; the operator's limit (16) is lower",
        [1, 2],
        [0, 129, 1.5],
    ),
    Field(
        "seed",
        integer(-(1 << 63), (1 << 64) - 1),
        "same seed, same text, whatever the swarm does; without one it is random",
        [7, -1],
        ["7", 1 << 64],
    ),
    Field("stop", _STOP, "up to 16 strings; none of their text is ever shown", ["x", ["x", "yz"]], [[""], "", 3]),
    Field("presence_penalty", number(-2, 2), "on generated tokens, once each", [1.5], [3]),
    Field("frequency_penalty", number(-2, 2), "on generated tokens, by count", [-0.5], [-3]),
    Field(
        "logit_bias",
        {
            "type": "object",
            "additionalProperties": number(-100, 100),
            "propertyNames": {"pattern": r"^\d{1,7}$"},
            "maxProperties": 1024,
        },
        "token id to bias",
        [{"65": 5}],
        [{"65": 101}, {"x": 1}, {"65": "a"}, {"99999": 1}],
    ),
)
EXTENSION = Field(
    "manyhands",
    _EXTENSION,
    "`path` (ring, star), `dtype` (must be what is served), `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`",
    [{"path": "star"}, {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}, {"ignore_eos": True}],
    [{"path": "x"}, {"hops": 3}, {"dtype": "int8"}],
)

CHAT = (
    *_COMMON,
    Field(
        "messages",
        array(_MESSAGE, 1, 4096),
        "text only; roles system, developer, user, assistant, tool",
        refused=[
            [],
            "hi",
            [{"role": "x", "content": "y"}],
            [{"role": "user"}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        ],
    ),
    Field(
        "max_completion_tokens",
        integer(1, 1 << 20),
        "default 1024, or what the context leaves if that is less",
        [5],
        [0, 1.5, -1, 1 << 21],
    ),
    Field("max_tokens", integer(1, 1 << 20), "the older name of max_completion_tokens; not both", [5], [0, "5"]),
    *_STREAM,
    *_SAMPLING,
    Field("logprobs", BOOLEAN, "of the raw distribution, before temperature and penalties", [True, False], [1]),
    Field("top_logprobs", integer(0, 20), "with `logprobs`", [0, 3, 20], [21, -1], {"logprobs": True}),
    Field(
        "response_format",
        _FORMAT,
        "text, json_object, json_schema: enforced by a grammar, also with `strict: false`",
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
        ],
        [
            {"type": "xml"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}},
        ],
    ),
    Field(
        "tools",
        array(_TOOL, 1, 128),
        "functions, where the chat template teaches them in a dialect we read; `strict` arguments are enforced",
        [[_FN]],
        [[], [{"type": "web_search"}], [{"type": "function"}]],
    ),
    Field(
        "tool_choice",
        either(
            _CHOICES, record({"type": only("function"), "function": record({"name": NAME}, "name")}, "type", "function")
        ),
        "none, auto, required or a function; the last two are enforced by a grammar",
        ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}],
        ["any", {"type": "function", "function": {"name": "g"}}],
        {"tools": [_FN]},
    ),
    Field(
        "parallel_tool_calls",
        BOOLEAN,
        "default true; false: the answer ends with the first call",
        [True, False],
        ["no"],
        {"tools": [_FN]},
    ),
    Field(
        "reasoning_effort",
        only("none", "minimal", "low", "medium", "high"),
        "where the template has a switch: `none` turns thoughts off, others on; or a level, where it has levels; else refused",
        refused=["none", "high", "huge"],
    ),
    *_SAFETY,
    Field("modalities", array(only("text"), 1, 1), "text", [["text"]], [["text", "audio"]]),
    Field("verbosity", only("medium"), "only `medium`, the default", ["medium"], ["low"]),
    Field("audio", NOTHING, _NEVER, refused=[{"voice": "x", "format": "wav"}]),
    Field("prediction", NOTHING, _NEVER, refused=[{"type": "content", "content": "x"}]),
    Field("web_search_options", NOTHING, _NEVER, refused=[{}]),
    Field("functions", NOTHING, "refused: use `tools`", refused=[[{"name": "f"}]]),
    Field("function_call", NOTHING, "refused: use `tool_choice`", refused=["auto"]),
    EXTENSION,
)

COMPLETIONS = (
    *_COMMON,
    Field(
        "prompt",
        either(
            STRING, array(STRING, 1, 128), array(integer(0, 1 << 24), 1), array(array(integer(0, 1 << 24), 1), 1, 128)
        ),
        "text, token ids, or lists of either; every prompt gives n choices",
        ["hi", ["a", "b"], [65, 66], [[65], [66]]],
        [[], 5, [[]], [-1], [99999]],
    ),
    Field("max_tokens", integer(1, 1 << 20), "default 16", [3], [0]),
    *_STREAM,
    *_SAMPLING,
    Field("logprobs", integer(0, 5), "alternatives per token, of the raw distribution", [0, 5], [6, True]),
    Field("best_of", only(1), "only 1", [1], [2]),
    Field("echo", only(False), "only `false`", [False], [True]),
    Field("suffix", NOTHING, _NEVER, refused=["x"]),
    EXTENSION,
)

_INPUT = either(
    record(
        {
            "type": only("message"),
            "id": LABEL,
            "status": LABEL,
            "role": only("system", "developer", "user", "assistant"),
            "content": _CONTENT,
        },
        "role",
        "content",
    ),
    record(
        {
            "type": only("function_call"),
            "id": LABEL,
            "status": LABEL,
            "call_id": LABEL,
            "name": NAME,
            "arguments": STRING,
        },
        "type",
        "call_id",
        "name",
        "arguments",
    ),
    record(
        {"type": only("function_call_output"), "id": LABEL, "status": LABEL, "call_id": LABEL, "output": _CONTENT},
        "type",
        "call_id",
        "output",
    ),
    record(
        {
            "type": only("reasoning"),
            "id": LABEL,
            "status": LABEL,
            "summary": array(OBJECT),
            "content": array(OBJECT),
            "encrypted_content": {"type": "null"},
        },
        "type",
    ),
)
_RTOOL = record({"type": only("function"), **_FUNCTION}, "type", "name")
_RFN = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
_RFORMAT = either(
    record({"type": only("text", "json_object")}, "type"),
    record(
        {
            "type": only("json_schema"),
            "name": NAME,
            "description": STRING,
            "schema": OBJECT,
            "strict": either(BOOLEAN, {"type": "null"}),
        },
        "type",
        "name",
        "schema",
    ),
)

RESPONSES = (
    *_COMMON,
    Field(
        "input",
        either(STRING, array(_INPUT, 1, 4096)),
        "text, or messages, function calls and their outputs; reasoning items are not fed back to the model",
        ["hi", [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]],
        [[], 5, [{"type": "item_reference", "id": "x"}], [{"role": "user", "content": [{"type": "input_image"}]}]],
    ),
    Field("instructions", STRING, "a system message before the input", ["Be kind."], [5]),
    Field(
        "max_output_tokens", integer(1, 1 << 20), "default 1024, or what the context leaves if that is less", [5], [0]
    ),
    Field("stream", BOOLEAN, "typed events", [False], ["yes"]),
    Field(
        "stream_options",
        record({"include_obfuscation": only(False)}),
        "obfuscation is not offered",
        [],
        [{"include_obfuscation": True}],
    ),
    Field(
        "top_logprobs",
        integer(0, 20),
        'with `include: ["message.output_text.logprobs"]`',
        [2],
        [21],
        {"include": ["message.output_text.logprobs"]},
    ),
    Field(
        "include",
        array(only("message.output_text.logprobs"), 0, 1),
        "log probabilities of the text",
        [[], ["message.output_text.logprobs"]],
        [["reasoning.encrypted_content"]],
    ),
    Field(
        "tools",
        array(_RTOOL, 1, 128),
        "functions; `strict` (default false here) arguments are enforced",
        [[_RFN]],
        [[{"type": "web_search"}], [{"type": "function"}]],
    ),
    Field(
        "tool_choice",
        either(_CHOICES, record({"type": only("function"), "name": NAME}, "type", "name")),
        "none, auto, required or a function",
        ["none", "auto", "required", {"type": "function", "name": "f"}],
        ["any", {"type": "function", "name": "g"}],
        {"tools": [_RFN]},
    ),
    Field(
        "parallel_tool_calls",
        BOOLEAN,
        "default true; false: the answer ends with the first call",
        [True, False],
        ["no"],
        {"tools": [_RFN]},
    ),
    Field(
        "text",
        record({"format": _RFORMAT, "verbosity": only("medium")}),
        "`format`: text, json_object, json_schema, enforced by a grammar",
        [{"format": {"type": "text"}}, {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}}],
        [{"format": {"type": "xml"}}, {"verbosity": "low"}],
    ),
    Field(
        "reasoning",
        record(
            {
                "effort": either(only("none", "minimal", "low", "medium", "high"), {"type": "null"}),
                "summary": {"type": "null"},
                "generate_summary": {"type": "null"},
            }
        ),
        "`effort` as reasoning_effort; thoughts come as they are, without a summary",
        [{}],
        [{"effort": "none"}, {"summary": "auto"}],
    ),
    Field("previous_response_id", NOTHING, "refused: answers are not kept, send the whole input", refused=["resp_1"]),
    Field("conversation", NOTHING, "refused: answers are not kept, send the whole input", refused=["conv_1"]),
    Field("prompt", NOTHING, _NEVER, refused=[{"id": "p"}]),
    Field("truncation", only("disabled"), "only `disabled`: too long an input is refused", ["disabled"], ["auto"]),
    Field("background", only(False), "only `false`", [False], [True]),
    Field("max_tool_calls", NOTHING, f"{_NEVER}; there are no built-in tools", refused=[1]),
    *_SAFETY,
    EXTENSION,
)

ENDPOINTS: Mapping[str, Sequence[Field]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
}
REQUIRED: Mapping[str, Sequence[str]] = {
    "/v1/chat/completions": ("model", "messages"),
    "/v1/completions": ("model", "prompt"),
    "/v1/responses": ("model", "input"),
}


# -- parsing ----------------------------------------------------------------------------------------------------------


def parse(path: str, body: bytes) -> dict[str, Any]:
    """The fields that a request sets, checked by the table. Raises BadField, or BadRequest for what is not JSON."""
    sent = read_json(body)
    table = {f.name: f for f in ENDPOINTS[path]}
    for name in sent:
        if name not in table:
            raise BadField(f"{name[:100]!r} is not a parameter of {path}: leave it out (docs/openai.md)", name[:100])
    given = {name: value for name, value in sent.items() if value is not None}
    for name in REQUIRED[path]:
        if name not in given:
            raise BadField(f"{name} is missing: {path} needs it", name)
    for name, value in given.items():
        if (problem := check(table[name].schema, value, name)) is not None:
            raise BadField(f"{problem} ({table[name].says})", name)
    return given


# -- documentation ----------------------------------------------------------------------------------------------------


def body_schema(path: str) -> dict[str, Any]:
    """The request body as OpenAPI wants it."""
    properties = {f.name: (f.schema if f.schema is not NOTHING else {"type": "null"}) for f in ENDPOINTS[path]}
    return {**record(properties, *REQUIRED[path])}


def table(path: str) -> str:
    """The Markdown table of a path's fields, as it stands in docs/openai.md."""
    rows = ["| field | honoured | refused (400), for instance |", "|---|---|---|"]
    for f in ENDPOINTS[path]:
        refused = ", ".join(f"`{show(value).replace('|', chr(92) + '|')}`" for value in f.refused[:2]) or "-"
        rows.append(f"| `{f.name}` | {f.says.replace('|', chr(92) + '|')} | {refused} |")
    return "\n".join(rows) + "\n"
