"""The fields of responses, as pydantic models (docs/openai.md)."""

from typing import Annotated, Literal, NotRequired

from pydantic import Field as Limits
from pydantic import Tag
from typing_extensions import TypedDict  # pydantic wants this one below Python 3.12

from manyhands.api.openai.fields_chat import EXAMPLE_SCHEMA, Common, Effort, Labels, NewTokens, Sampled
from manyhands.api.openai.schema import (
    BY_FORMAT,
    CHOICES,
    FIRST,
    MAX_ITEMS,
    NEVER,
    SAID,
    STRICT,
    Content,
    FunctionTool,
    Label,
    Name,
    Object,
    PlainFormat,
    Refused,
    Shown,
    Text,
    Word,
    by,
    by_key,
)

_RFN = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
_ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
_NOT_KEPT = "refused: answers are not kept, send the whole input"


class _Item(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    id: NotRequired[Label]
    status: NotRequired[Label]


class MessageItem(_Item):
    type: NotRequired[Literal["message"]]
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: Label
    name: Name
    namespace: NotRequired[Name]
    arguments: Text


class CustomCallItem(_Item):
    type: Literal["custom_tool_call"]
    call_id: Label
    name: Name
    namespace: NotRequired[Name]
    input: Text


class OutputItem(_Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Label
    output: Content


class ThoughtItem(_Item):
    type: Literal["reasoning"]


_ITEMS = {
    "message": "message",
    "function_call": "call",
    "custom_tool_call": "custom",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
    "reasoning": "thought",
}
Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<call>")]
    | Annotated[CustomCallItem, Tag("<custom>")]
    | Annotated[OutputItem, Tag("<output>")]
    | Annotated[ThoughtItem, Tag("<thought>")],
    by_key("type", _ITEMS, "message"),
]
Items = Annotated[list[Item], FIRST, Limits(min_length=1, max_length=MAX_ITEMS)]
Input = Annotated[Annotated[Text, Tag("<text>")] | Annotated[Items, Tag("<items>")], by({"text": str, "items": list})]


class FlatTool(FunctionTool):
    type: Literal["function"]


class PlainInput(TypedDict):
    """Text without a grammar of the client's."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["text"]


class CustomTool(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["custom"]
    name: Name
    description: NotRequired[Text]
    format: NotRequired[PlainInput]


_Callable = Annotated[FlatTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")]
_CALLABLES = {"function": "function", "custom": "custom"}
Callables = Annotated[
    list[Annotated[_Callable, by_key("type", _CALLABLES)]], FIRST, Limits(min_length=1, max_length=128)
]


class NamespaceTool(TypedDict):
    """Tools under one name, which a call says beside its own (namespaces.py)."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["namespace"]
    name: Name
    description: NotRequired[Text]
    tools: Callables


ResponsesTool = Annotated[
    _Callable | Annotated[NamespaceTool, Tag("<namespace>")], by_key("type", {**_CALLABLES, "namespace": "namespace"})
]


class FlatNamedTool(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["function", "custom"]
    name: Name


class FlatAllowedChoice(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedTool], FIRST, Limits(min_length=1, max_length=128)]


FlatChoice = Annotated[
    Annotated[Word, Tag("<word>")]
    | Annotated[FlatNamedTool, Tag("<named>")]
    | Annotated[FlatAllowedChoice, Tag("<allowed>")],
    CHOICES,
]


class FlatSchemaFormat(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["json_schema"]
    name: NotRequired[Name]
    description: NotRequired[Text]
    schema: Object
    strict: NotRequired[bool | None]


class TextOptions(TypedDict, total=False):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    format: Annotated[Annotated[PlainFormat, Tag("<plain>")] | Annotated[FlatSchemaFormat, Tag("<schema>")], BY_FORMAT]
    verbosity: Literal["medium"]


class Reasoning(TypedDict, total=False):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    effort: Effort
    summary: Literal["auto"]
    generate_summary: Literal["auto"]


class ResponsesStream(TypedDict, total=False):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    include_obfuscation: Literal[False]


class Responses(Common, Sampled, Labels):
    """POST /v1/responses."""

    input: Annotated[
        Input,
        Shown(
            "text, or messages, function calls and their outputs; reasoning items are not fed back to the model",
            ["hi", [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]],
            [[], 5, [{"type": "item_reference", "id": "x"}], [{"role": "user", "content": [{"type": "input_image"}]}]],
        ),
    ]
    instructions: NotRequired[Annotated[Text, Shown("a system message before the input", ["Be kind."], [5])]]
    max_output_tokens: NotRequired[
        Annotated[NewTokens, Shown("default half of what the context leaves; at most all of it", [5], [0])]
    ]
    stream_options: NotRequired[
        Annotated[ResponsesStream, Shown("obfuscation is not offered", [], [{"include_obfuscation": True}])]
    ]
    top_logprobs: NotRequired[
        Annotated[
            int,
            Limits(ge=0, le=20),
            Shown(
                'with `include: ["message.output_text.logprobs"]`',
                [2],
                [21],
                {"include": ["message.output_text.logprobs"]},
            ),
        ]
    ]
    include: NotRequired[
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Limits(max_length=2),
            Shown(
                "log probabilities of the text; encrypted thoughts are taken, and there are none: thoughts come in the clear",
                [[], ["message.output_text.logprobs"], ["reasoning.encrypted_content"]],
                [["file_search_call.results"]],
            ),
        ]
    ]
    tools: NotRequired[
        Annotated[
            list[ResponsesTool],
            FIRST,
            Limits(max_length=128),
            Shown(
                "functions; `strict` (default false here) arguments are enforced; custom tools whose input is plain text; "
                "both also in namespaces",
                [[], [_RFN], [{"type": "custom", "name": "p"}, {"type": "namespace", "name": "n", "tools": [_RFN]}]],
                [[{"type": "web_search"}], [{"type": "function"}]],
            ),
        ]
    ]
    tool_choice: NotRequired[
        Annotated[
            FlatChoice,
            Shown(
                "none, auto, required, a function, or `allowed_tools`",
                ["none", "auto", "required", {"type": "function", "name": "f"}, _ALLOWED],
                ["any", {"type": "function", "name": "g"}, {**_ALLOWED, "mode": "none"}],
                {"tools": [_RFN]},
            ),
        ]
    ]
    parallel_tool_calls: NotRequired[
        Annotated[
            bool,
            Shown("default true; false: the answer ends with the first call", [True, False], ["no"], {"tools": [_RFN]}),
        ]
    ]
    text: NotRequired[
        Annotated[
            TextOptions,
            Shown(
                "`format`: text, json_object, json_schema, enforced by a grammar",
                [
                    {"format": {"type": "text"}},
                    {"format": {"type": "json_schema", "name": "x", "schema": EXAMPLE_SCHEMA}},
                ],
                [{"format": {"type": "xml"}}, {"verbosity": "low"}],
            ),
        ]
    ]
    reasoning: NotRequired[
        Annotated[
            Reasoning,
            Shown(
                "`effort` as reasoning_effort; thoughts come as they are: `summary` can be `auto`, and there is none",
                [{}, {"summary": "auto"}],
                [{"effort": "high"}, {"summary": "detailed"}],
            ),
        ]
    ]
    client_metadata: NotRequired[Annotated[Object, Shown("Codex's labels; not kept", [{"turn_id": "x"}], ["x"])]]
    previous_response_id: NotRequired[Annotated[Refused, Shown(_NOT_KEPT, refused=["resp_1"])]]
    conversation: NotRequired[Annotated[Refused, Shown(_NOT_KEPT, refused=["conv_1"])]]
    prompt: NotRequired[Annotated[Refused, Shown(NEVER, refused=[{"id": "p"}])]]
    truncation: NotRequired[
        Annotated[
            Literal["disabled", "auto"],
            Shown(
                "`disabled` (the default): too long an input is refused; `auto`: its oldest items are left out until it fits",
                ["disabled", "auto"],
                ["x"],
            ),
        ]
    ]
    background: NotRequired[Annotated[Literal[False], Shown("only `false`", [False], [True])]]
    max_tool_calls: NotRequired[Annotated[Refused, Shown(f"{NEVER}; there are no built-in tools", refused=[1])]]
