"""The fields of chat completions and completions, as pydantic models (docs/openai.md)."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Tag
from pydantic import Field as Limits
from typing_extensions import TypedDict  # pydantic wants this one below Python 3.12

from manyhands.api.openai.schema import (
    FIRST,
    MAX_ID,
    MAX_ITEMS,
    MAX_TOKENS,
    NEVER,
    STRICT,
    Biases,
    Extension,
    Format,
    Label,
    Message,
    Metadata,
    Refused,
    Shown,
    Stops,
    StreamOptions,
    Text,
    Tool,
    ToolChoice,
    Variables,
)

_FN = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_ONLY_FN = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
_ALLOWED = {"type": "allowed_tools", "allowed_tools": _ONLY_FN}
EXAMPLE_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1]}},
    "required": ["a"],
    "additionalProperties": False,
}
_IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
_HINT = "a label for the operator's books; it has no effect on the answer at OpenAI either, and is not kept"
_EFFORT = (
    "where the template has a switch: `none` turns thoughts off, others on; or a level, where it has levels (Muse's "
    "`reasoning_strength`, Kimi K3's `thinking_effort` too); `none` of a model that has no thoughts; else refused"
)

# -- types ------------------------------------------------------------------------------------------------------------

Temperature = Annotated[float, Limits(ge=0, le=2)]
Penalty = Annotated[float, Limits(ge=-2, le=2)]
NewTokens = Annotated[int, Limits(ge=1, le=MAX_TOKENS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Ids = Annotated[list[Annotated[int, Limits(ge=0, le=MAX_ID)]], FIRST, Limits(min_length=1, max_length=MAX_TOKENS)]
Texts = Annotated[list[Text], FIRST, Limits(min_length=1, max_length=128)]
IdLists = Annotated[list[Ids], FIRST, Limits(min_length=1, max_length=128)]


def _kind_of_prompt(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return "<text>"
    return {int: "<ids>", list: "<lists>"}.get(type(value[0]), "<texts>")


Prompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[Ids, Tag("<ids>")]
    | Annotated[IdLists, Tag("<lists>")],
    Discriminator(_kind_of_prompt),
]


class Common(TypedDict):
    """What all OpenAI paths take."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    model: NotRequired[
        Annotated[
            Label, Shown("one of /v1/models or an alias, else 404; may be left out where one is served", refused=[1])
        ]
    ]
    temperature: NotRequired[
        Annotated[Temperature, Shown("default 1; 0 is greedy", [0, 0.7, 2], [-0.1, 2.1, "1", True])]
    ]
    top_p: NotRequired[
        Annotated[float, Limits(ge=0, le=1), Shown("default 1; 0: the likeliest token alone", [0, 0.1, 1], [-0.1, 1.5])]
    ]
    user: NotRequired[Annotated[Label, Shown(_HINT, ["someone"], [1])]]
    stream: NotRequired[
        Annotated[
            bool,
            Shown("server-sent events, ended by `[DONE]`; each stream pauses with its own reader", [False], ["yes", 1]),
        ]
    ]
    manyhands: NotRequired[
        Annotated[
            Extension,
            Shown(
                "`path` (ring, star), `dtype` (must be what is served), `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`, "
                "`draft` (auto, off, suffix, model: [drafting](speculation.md)), `policy`, `allow_self_as_shard`, `sticky`, "
                "`scope`, `trusted_first`, `trusted_last`, `max_shards_per_request`, `fallback_to_local` "
                "([routing](routing.md#what-a-request-may-ask)), `codec` (lossless, "
                "int8: [with loss](exactness.md#rows-with-loss)), `received` (with `Last-Event-ID`, a text for each choice: "
                "[resume](resume.md))",
                [
                    {"path": "star"},
                    {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
                    {"ignore_eos": True},
                    {"draft": "off"},
                    {"policy": "greedy", "allow_self_as_shard": False, "sticky": True, "scope": "public"},
                    {"max_shards_per_request": 16},
                    {"codec": "int8"},
                ],
                [
                    {"path": "x"},
                    {"hops": 3},
                    {"max_shards_per_request": 0},
                    {"dtype": "w8"},
                    {"codec": "int4"},
                    {"received": "Once"},
                ],
            ),
        ]
    ]


class Sampled(TypedDict):
    """What vLLM and llama.cpp take beside OpenAI's fields; the first three may stand in `manyhands` instead."""

    top_k: NotRequired[Annotated[int, Limits(ge=0, le=MAX_ID), Shown("0 (the default): all tokens", [0, 5], [-1])]]
    min_p: NotRequired[Annotated[float, Limits(ge=0, le=1), Shown("default 0", [0.1], [2])]]
    repetition_penalty: NotRequired[
        Annotated[float, Limits(ge=0.001, le=1000), Shown("1 (the default) is none", [1.1], [0])]
    ]
    cache_prompt: NotRequired[
        Annotated[Literal[True], Shown("only `true`: prompts are [reused](reuse.md) anyway", [True], [False])]
    ]
    stop_token_ids: NotRequired[
        Annotated[
            Annotated[list[Annotated[int, Limits(ge=0, le=MAX_ID)]], FIRST, Limits(max_length=64)],
            Shown("up to 64 tokens that end the text and show none", [[], [5]], [[-1], ["a"], 5, [99999]]),
        ]
    ]


class Labels(TypedDict):
    """What describes a request to OpenAI and does not change its answer."""

    safety_identifier: NotRequired[Annotated[Label, Shown(_HINT, ["someone"], [1])]]
    prompt_cache_key: NotRequired[Annotated[Label, Shown(_HINT, ["k"], [1])]]
    prompt_cache_retention: NotRequired[
        Annotated[Refused, Shown(f"{NEVER}; no cache outlives a request", refused=["24h"])]
    ]
    metadata: NotRequired[Annotated[Metadata, Shown("up to 16 labels; not kept", [{}, {"a": "b"}], [{"a": 1}, "x"])]]
    service_tier: NotRequired[
        Annotated[Literal["auto", "default"], Shown("there is one tier", ["auto", "default"], ["flex", "priority"])]
    ]
    store: NotRequired[
        Annotated[bool, Shown("answers are never kept; the answer to `/v1/responses` says so", [False, True], ["yes"])]
    ]


class _Sampling(TypedDict):
    """How tokens are drawn, and how they are sent."""

    stream_options: NotRequired[
        Annotated[
            StreamOptions,
            Shown(
                "`include_usage`: a last chunk with the usage; obfuscation is not offered; only with `stream`",
                [],
                [{"include_usage": True}, {"include_obfuscation": True}],
            ),
        ]
    ]
    return_progress: NotRequired[
        Annotated[
            bool,
            Shown(
                "with `stream`: chunks without choices whose `prompt_progress` says how far a long prompt is (`total`, "
                "`cache`, `processed`, `time_ms`, as llama.cpp has it)",
                [False],
                [1, True],
            ),
        ]
    ]
    n: NotRequired[
        Annotated[
            int,
            Limits(ge=1, le=128),
            Shown(
                "default 1; each choice draws with a seed of its own and counts as a request; the operator's limit (16) "
                "is lower",
                [1, 2],
                [0, 129, 1.5],
            ),
        ]
    ]
    seed: NotRequired[
        Annotated[
            int,
            Limits(ge=-(1 << 63), le=(1 << 64) - 1),
            Shown("same seed, same text, whatever the swarm does; without one it is random", [7, -1], ["7", 1 << 64]),
        ]
    ]
    stop: NotRequired[
        Annotated[Stops, Shown("up to 16 strings; none of their text is ever shown", ["x", ["x", "yz"]], [[""], "", 3])]
    ]
    presence_penalty: NotRequired[Annotated[Penalty, Shown("on generated tokens, once each", [1.5], [3])]]
    frequency_penalty: NotRequired[Annotated[Penalty, Shown("on generated tokens, by count", [-0.5], [-3])]]
    logit_bias: NotRequired[
        Annotated[
            Biases,
            Shown("token id to bias", [{"65": 5}], [{"65": 101}, {"x": 1}, {"65": "a"}, {"99999": 1}]),
        ]
    ]


class Chat(Common, Sampled, Labels, _Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[
        list[Message],
        FIRST,
        Limits(min_length=1, max_length=MAX_ITEMS),
        Shown(
            "text only; roles system, developer, user, assistant, tool, function",
            refused=[[], "hi", [{"role": "x", "content": "y"}], [{"role": "user"}], _IMAGE],
        ),
    ]
    max_completion_tokens: NotRequired[
        Annotated[
            NewTokens, Shown("default half of what the context leaves; at most all of it", [5], [0, 1.5, -1, 1 << 21])
        ]
    ]
    max_tokens: NotRequired[
        Annotated[NewTokens, Shown("the older name of max_completion_tokens; not both", [5], [0, "5"])]
    ]
    logprobs: NotRequired[
        Annotated[bool, Shown("of the raw distribution, before temperature and penalties", [True, False], [1])]
    ]
    top_logprobs: NotRequired[
        Annotated[int, Limits(ge=0, le=20), Shown("with `logprobs`", [0, 3, 20], [21, -1], {"logprobs": True})]
    ]
    response_format: NotRequired[
        Annotated[
            Format,
            Shown(
                "text, json_object, json_schema: enforced by a grammar, also with `strict: false`",
                [
                    {"type": "text"},
                    {"type": "json_object"},
                    {"type": "json_schema", "json_schema": {"name": "x", "schema": EXAMPLE_SCHEMA}},
                ],
                [
                    {"type": "xml"},
                    {"type": "json_schema"},
                    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}},
                ],
            ),
        ]
    ]
    tools: NotRequired[
        Annotated[
            list[Tool],
            FIRST,
            Limits(max_length=128),
            Shown(
                "functions, where the chat template teaches them in a dialect we read; `strict` arguments are enforced",
                [[], [_FN]],
                [[{"type": "web_search"}], [{"type": "function"}]],
            ),
        ]
    ]
    tool_choice: NotRequired[
        Annotated[
            ToolChoice,
            Shown(
                "none, auto, required, a function, or `allowed_tools`, whose `mode` is auto or required: the model is told "
                "of no other; required and a function are enforced by a grammar",
                ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}, _ALLOWED],
                ["any", {"type": "function", "function": {"name": "g"}}, {"type": "allowed_tools"}],
                {"tools": [_FN]},
            ),
        ]
    ]
    parallel_tool_calls: NotRequired[
        Annotated[
            bool,
            Shown("default true; false: the answer ends with the first call", [True, False], ["no"], {"tools": [_FN]}),
        ]
    ]
    chat_template_kwargs: NotRequired[
        Annotated[
            Variables,
            Shown(
                "up to 16 variables of the chat template, as `enable_thinking`; none that the gateway itself sets",
                [{}, {"enable_thinking": False}],
                [{"messages": "x"}, {"a b": 1}, {"a": [1]}],
            ),
        ]
    ]
    continue_final_message: NotRequired[
        Annotated[
            bool,
            Shown(
                "the answer goes on from the last message, the assistant's; so it does where that has `prefix: true`",
                [False],
                ["x", True],
            ),
        ]
    ]
    add_generation_prompt: NotRequired[
        Annotated[bool, Shown("`false` only with `continue_final_message`", [True], [False, 1])]
    ]
    reasoning_effort: NotRequired[Annotated[Effort, Shown(_EFFORT, ["none"], ["high", "huge"])]]
    modalities: NotRequired[
        Annotated[
            list[Literal["text"]], Limits(min_length=1, max_length=1), Shown("text", [["text"]], [["text", "audio"]])
        ]
    ]
    verbosity: NotRequired[Annotated[Literal["medium"], Shown("only `medium`, the default", ["medium"], ["low"])]]
    audio: NotRequired[Annotated[Refused, Shown(NEVER, refused=[{"voice": "x", "format": "wav"}])]]
    prediction: NotRequired[Annotated[Refused, Shown(NEVER, refused=[{"type": "content", "content": "x"}])]]
    web_search_options: NotRequired[Annotated[Refused, Shown(NEVER, refused=[{}])]]
    functions: NotRequired[Annotated[Refused, Shown("refused: use `tools`", refused=[[{"name": "f"}]])]]
    function_call: NotRequired[Annotated[Refused, Shown("refused: use `tool_choice`", refused=["auto"])]]


class Completions(Common, Sampled, _Sampling):
    """POST /v1/completions."""

    prompt: Annotated[
        Prompt,
        Shown(
            "text, token ids, or lists of either; every prompt gives n choices",
            ["hi", ["a", "b"], [65, 66], [[65], [66]]],
            [[], 5, [[]], [-1], [99999]],
        ),
    ]
    max_tokens: NotRequired[Annotated[NewTokens, Shown("default 16; where the context leaves less, that", [3], [0])]]
    logprobs: NotRequired[
        Annotated[int, Limits(ge=0, le=5), Shown("alternatives per token, of the raw distribution", [0, 5], [6, True])]
    ]
    best_of: NotRequired[
        Annotated[int, Limits(ge=1, le=128), Shown("1, or as `n`: no more are made than are given", [1], [2, 0])]
    ]
    echo: NotRequired[Annotated[Literal[False], Shown("only `false`", [False], [True])]]
    suffix: NotRequired[Annotated[Literal[""], Shown("only empty: not offered", [""], ["x"])]]
