"""What a request may hold, as pydantic models: the parts that the OpenAI paths share. No number, list or name without a bound.

Models are typed dictionaries: what has been checked stays the dictionary that was sent. Only what they name is taken, and
types are strict. Lists end at their first fault.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Discriminator, FailFast, Tag
from pydantic import Field as Limits
from typing_extensions import TypedDict  # pydantic wants this one below Python 3.12

from manyhands.config import MAX_HOPS
from manyhands.core import Precision

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
# Of what is said: programs send back what they were answered, with keys of their own; keys that are not named are dropped.
SAID = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
MAX_ITEMS = 4096  # messages, parts of a message: more than any context holds at a few tokens each
MAX_TOKENS = 1 << 20
MAX_ID = 1 << 24


@dataclass(frozen=True, slots=True)
class Shown:
    """What docs/openai.md says of a field, and examples on both sides of the border, which the tests send."""

    says: str
    works: Sequence[Any] = ()
    refused: Sequence[Any] = ()
    needs: Mapping[str, Any] = field(default_factory=dict)  # other fields that the examples want


class _First(FailFast):
    """FailFast, as an alternative of a union can have it."""

    def __hash__(self) -> int:
        return id(self)


FIRST = _First()  # a list ends at its first fault


def by(kinds: Mapping[str, type]) -> Discriminator:
    """Tells alternatives apart by the type of what was sent; the first stands for all others."""

    def tag(value: Any) -> str:
        return next((f"<{name}>" for name, kind in kinds.items() if isinstance(value, kind)), f"<{next(iter(kinds))}>")

    return Discriminator(tag)


def by_key(key: str, tags: Mapping[str, str], default: str = "") -> Discriminator:
    """Tells objects apart by the value of one key; what is none of `tags` is checked against the first."""

    def tag(value: Any) -> str:
        kind = value.get(key, default) if isinstance(value, Mapping) else None
        found = tags.get(kind) if isinstance(kind, str) else None
        return f"<{found or next(iter(tags.values()))}>"

    return Discriminator(tag)


Text = str
NEVER = "not offered: refused"
Label = Annotated[str, Limits(max_length=512)]
Name = Annotated[str, Limits(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]  # 64 at OpenAI; MCP's and Anthropic's are longer
Object = dict[str, Any]
Refused = Annotated[None, "null is left out before a model looks, so no value is taken"]
Stop = Annotated[str, Limits(min_length=1, max_length=256)]


class TextPart(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    type: Literal["text", "input_text", "output_text"]
    text: Text


class RefusalPart(TypedDict):
    """What a model said in place of an answer."""

    __pydantic_config__ = SAID  # type: ignore[misc]
    type: Literal["refusal"]
    refusal: Text


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    by_key("type", {"text": "text", "refusal": "refusal"}),
]
Parts = Annotated[list[Part], FIRST, Limits(max_length=MAX_ITEMS)]
Content = Annotated[Annotated[Text, Tag("<text>")] | Annotated[Parts, Tag("<parts>")], by({"text": str, "parts": list})]


class CalledFunction(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    name: Name
    arguments: Text


class Call(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    id: Label
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class SpokenMessage(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    role: Literal["system", "developer", "user"]
    content: Content
    name: NotRequired[Label]


class AssistantMessage(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    role: Literal["assistant"]
    content: NotRequired[Content]
    refusal: NotRequired[Text]
    tool_calls: NotRequired[Annotated[list[Call], FIRST, Limits(max_length=128)]]
    function_call: NotRequired[CalledFunction]  # before there were tools
    prefix: NotRequired[bool]  # as DeepSeek and Mistral have it: the answer goes on from this message, the last one
    reasoning_content: NotRequired[Text]
    reasoning: NotRequired[Any]  # vLLM's newer name of it, where it is a text
    name: NotRequired[Label]


class ToolMessage(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    role: Literal["tool"]
    content: Content
    tool_call_id: Label
    name: NotRequired[Label]


class FunctionMessage(TypedDict):
    """The answer to a `function_call`."""

    __pydantic_config__ = SAID  # type: ignore[misc]
    role: Literal["function"]
    name: Name
    content: NotRequired[Content]


Message = Annotated[
    Annotated[SpokenMessage, Tag("<spoken>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")]
    | Annotated[FunctionMessage, Tag("<function>")],
    by_key("role", {"user": "spoken", "assistant": "assistant", "tool": "tool", "function": "function"}),
]


class FunctionTool(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    name: Name
    description: NotRequired[Text]
    parameters: NotRequired[Object]
    strict: NotRequired[bool | None]


class Tool(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    name: Name


class NamedTool(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(TypedDict):
    """Some of the tools of a request: no other is called."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], FIRST, Limits(min_length=1, max_length=128)]


class AllowedChoice(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Word = Literal["none", "auto", "required"]


def _choice_tag(value: Any) -> str:
    """Tells a word, a function and the tools that are allowed apart."""
    if not isinstance(value, Mapping):
        return "<word>"
    return "<allowed>" if value.get("type") == "allowed_tools" else "<named>"


CHOICES = Discriminator(_choice_tag)
ToolChoice = Annotated[
    Annotated[Word, Tag("<word>")] | Annotated[NamedTool, Tag("<named>")] | Annotated[AllowedChoice, Tag("<allowed>")],
    CHOICES,
]


class JsonSchema(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    name: NotRequired[Name]
    description: NotRequired[Text]
    schema: Object
    strict: NotRequired[bool | None]


class PlainFormat(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["text", "json_object"]


class SchemaFormat(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["json_schema"]
    json_schema: JsonSchema


BY_FORMAT = by_key("type", {"text": "plain", "json_object": "plain", "json_schema": "schema"})
Format = Annotated[Annotated[PlainFormat, Tag("<plain>")] | Annotated[SchemaFormat, Tag("<schema>")], BY_FORMAT]


# What a request may say of its route (route/offer.py:Rules).
ROUTE_WISHES = {
    "policy": "policy",
    "allow_self_as_shard": "allow_self",
    "sticky": "sticky",
    "scope": "scope",
    "trusted_first": "trusted_first",
    "trusted_last": "trusted_last",
    "max_shards_per_request": "max_hops",
    "fallback_to_local": "fallback",
    "codec": "codec",
}
Layers = Annotated[int, Limits(ge=0, le=1 << 16)]


class Extension(TypedDict, total=False):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    path: Literal["ring", "star"]
    dtype: Precision
    top_k: Annotated[int, Limits(ge=0, le=MAX_ID)]
    min_p: Annotated[float, Limits(ge=0, le=1)]
    repetition_penalty: Annotated[float, Limits(ge=0.001, le=1000)]
    ignore_eos: bool
    draft: Literal["auto", "off", "suffix", "model"]
    policy: Literal["latency", "greedy"]
    allow_self_as_shard: bool
    sticky: bool
    scope: Literal["off", "lan", "trusted", "public"]
    fallback_to_local: bool
    trusted_first: Layers
    trusted_last: Layers
    max_shards_per_request: Annotated[int, Limits(ge=1, le=MAX_HOPS)]
    codec: Literal["lossless", "int8"]
    received: Annotated[list[Text], FIRST, Limits(min_length=1, max_length=128)]


class StreamOptions(TypedDict, total=False):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    include_usage: bool
    include_obfuscation: Literal[False]


TokenName = Annotated[str, Limits(pattern=r"^\d{1,7}$")]
# What a chat template is told beside the conversation. No digits: names of our own in a template have some.
Variable = bool | int | float | Annotated[str, Limits(max_length=512)]
VariableName = Annotated[str, Limits(pattern=r"^[A-Za-z_]{1,64}$")]
Variables = Annotated[dict[VariableName, Variable], Limits(max_length=16)]
Metadata = Annotated[
    dict[Annotated[str, Limits(max_length=64)], Annotated[str, Limits(max_length=512)]], Limits(max_length=16)
]
Biases = Annotated[dict[TokenName, Annotated[float, Limits(ge=-100, le=100)]], Limits(max_length=1024)]
Stops = Annotated[
    Annotated[Stop, Tag("<text>")] | Annotated[Annotated[list[Stop], FIRST, Limits(max_length=16)], Tag("<list>")],
    by({"text": str, "list": list}),
]
