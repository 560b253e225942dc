"""The fields of /v1/messages and its count_tokens, as pydantic models (docs/anthropic.md)."""

from typing import Annotated, Literal, NotRequired

from pydantic import Field as Limits
from pydantic import Tag
from typing_extensions import TypedDict  # pydantic wants this one below Python 3.12

from manyhands.api.openai.schema import (
    FIRST,
    MAX_ID,
    MAX_ITEMS,
    MAX_TOKENS,
    NEVER,
    SAID,
    STRICT,
    Label,
    Name,
    Object,
    Refused,
    Shown,
    Stop,
    Text,
    by,
    by_key,
)

_TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
_HI = [{"role": "user", "content": "hi"}]


class TextBlock(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    type: Literal["text"]
    text: Text


class ThinkingBlock(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    type: Literal["thinking"]
    thinking: Text


class RedactedBlock(TypedDict):
    """Thoughts that only their maker can read: not told to the model."""

    __pydantic_config__ = SAID  # type: ignore[misc]
    type: Literal["redacted_thinking"]


class CallBlock(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    type: Literal["tool_use"]
    id: Label
    name: Name
    input: Object


TextBlocks = Annotated[list[TextBlock], FIRST, Limits(max_length=MAX_ITEMS)]
TextOrBlocks = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[TextBlocks, Tag("<blocks>")], by({"text": str, "blocks": list})
]


class ResultBlock(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    type: Literal["tool_result"]
    tool_use_id: Label
    content: NotRequired[TextOrBlocks]
    is_error: NotRequired[bool]


_BLOCKS = {
    "text": "text",
    "thinking": "thinking",
    "redacted_thinking": "redacted",
    "tool_use": "call",
    "tool_result": "result",
}
Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedBlock, Tag("<redacted>")]
    | Annotated[CallBlock, Tag("<call>")]
    | Annotated[ResultBlock, Tag("<result>")],
    by_key("type", _BLOCKS),
]
Blocks = Annotated[list[Block], FIRST, Limits(max_length=MAX_ITEMS)]


class MessageTurn(TypedDict):
    """One message."""

    __pydantic_config__ = SAID  # type: ignore[misc]
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[Blocks, Tag("<blocks>")], by({"text": str, "blocks": list})
    ]


class AnthropicTool(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    type: NotRequired[Literal["custom"]]
    name: Name
    description: NotRequired[Text]
    input_schema: Object
    strict: NotRequired[bool]
    input_examples: NotRequired[Annotated[list[Object], FIRST, Limits(max_length=128)]]


class AnthropicChoice(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[Name]
    disable_parallel_tool_use: NotRequired[bool]


class ThinkingOption(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: NotRequired[Literal["summarized", "omitted"]]


class SchemaOutput(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["json_schema"]
    schema: Object


class OutputOptions(TypedDict, total=False):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    effort: Literal["low", "medium", "high", "xhigh", "max"]
    format: SchemaOutput


class MessagesInput(TypedDict):
    """What is said to the model."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    model: NotRequired[
        Annotated[Label, Shown("one of /v1/models or an alias; may be left out where one is served", refused=[1])]
    ]
    messages: Annotated[
        list[MessageTurn],
        FIRST,
        Limits(min_length=1, max_length=MAX_ITEMS),
        Shown(
            "text, thinking, tool_use and tool_result blocks; the answer goes on from an assistant's message at the end",
            [_HI],
            [[], "hi", [{"role": "tool", "content": "x"}], [{"role": "user", "content": [{"type": "image"}]}]],
        ),
    ]
    system: NotRequired[Annotated[TextOrBlocks, Shown("a text, or blocks of text", ["Be kind."], [5])]]
    tools: NotRequired[
        Annotated[
            list[AnthropicTool],
            FIRST,
            Limits(max_length=128),
            Shown(
                "functions, where the chat template teaches them in a dialect we read; `strict` input is enforced",
                [[], [_TOOL]],
                [[{"type": "web_search_20250305", "name": "web_search"}], [{"name": "f"}]],
            ),
        ]
    ]
    tool_choice: NotRequired[
        Annotated[
            AnthropicChoice,
            Shown(
                "auto, any, tool, none; any and tool are enforced by a grammar; `disable_parallel_tool_use`",
                [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}, {"type": "none"}],
                [{"type": "tool", "name": "g"}, {"type": "x"}],
                {"tools": [_TOOL]},
            ),
        ]
    ]
    thinking: NotRequired[
        Annotated[
            ThinkingOption,
            Shown(
                "sets the switch of the template where it has one, else the model thinks as it does; `budget_tokens` is not "
                "told to it: `max_tokens` bounds both; `display: omitted` leaves the blocks without their text",
                [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}],
                [{"type": "x"}, {"type": "adaptive", "display": "x"}],
            ),
        ]
    ]
    output_config: NotRequired[
        Annotated[
            OutputOptions,
            Shown(
                "`format`: json_schema, enforced by a grammar; `effort`: the level, where the template has levels",
                [{"effort": "low"}],
                [{"format": {"type": "xml"}}],
            ),
        ]
    ]
    cache_control: NotRequired[
        Annotated[
            Object,
            Shown("prompts are reused anyway ([reuse.md](reuse.md))", [{"type": "ephemeral"}], [1]),
        ]
    ]
    context_management: NotRequired[
        Annotated[Object, Shown("taken; nothing is left out of the conversation", [{"edits": []}], [1])]
    ]
    diagnostics: NotRequired[
        Annotated[
            Object,
            Shown("taken; none are given: `usage` says what was reused", [{}, {"previous_message_id": "msg_1"}], [1]),
        ]
    ]
    mcp_servers: NotRequired[Annotated[Refused, Shown(NEVER, refused=[[{"url": "x"}]])]]
    speed: NotRequired[Annotated[Literal["standard"], Shown("there is one speed", ["standard"], ["fast"])]]
    inference_geo: NotRequired[Annotated[Refused, Shown(NEVER, refused=["us"])]]
    container: NotRequired[Annotated[Refused, Shown(NEVER, refused=["x"])]]
    thread: NotRequired[
        Annotated[
            Refused,
            Shown(
                "refused: conversations are not kept; the tool runner of Anthropic's client then sends all of it",
                refused=[{"type": "create"}],
            ),
        ]
    ]


class UserLabel(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    user_id: NotRequired[Label]


class Messages(MessagesInput):
    """POST /v1/messages."""

    max_tokens: Annotated[
        int,
        Limits(ge=1, le=MAX_TOKENS),
        Shown("needed; a limit and not a wish: where the context leaves less, that", [5], [0, "5"]),
    ]
    stop_sequences: NotRequired[
        Annotated[
            list[Stop],
            FIRST,
            Limits(max_length=16),
            Shown("up to 16; none of their text is shown", [[], ["x"]], [[""], "x"]),
        ]
    ]
    stream: NotRequired[Annotated[bool, Shown("server-sent events", [False], ["yes"])]]
    temperature: NotRequired[Annotated[float, Limits(ge=0, le=2), Shown("default 1; 0 is greedy", [0, 1], [-1, 3])]]
    top_p: NotRequired[Annotated[float, Limits(ge=0, le=1), Shown("default 1", [0, 0.5], [-1])]]
    top_k: NotRequired[Annotated[int, Limits(ge=0, le=MAX_ID), Shown("0 (the default): all tokens", [5], [-1])]]
    metadata: NotRequired[Annotated[UserLabel, Shown("not kept", [{"user_id": "x"}], [1])]]
    service_tier: NotRequired[
        Annotated[Literal["auto", "standard_only"], Shown("there is one tier", ["auto"], ["priority"])]
    ]


class CountTokens(MessagesInput):
    """POST /v1/messages/count_tokens."""
