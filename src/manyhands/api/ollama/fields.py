"""The fields of /api/chat and /api/generate, as pydantic models (docs/ollama.md)."""

from typing import Annotated, Literal, NotRequired

from pydantic import Field as Limits
from pydantic import Tag
from typing_extensions import TypedDict  # pydantic wants this one below Python 3.12

from manyhands.api.openai.schema import (
    FIRST,
    MAX_ID,
    MAX_ITEMS,
    MAX_TOKENS,
    SAID,
    STRICT,
    Label,
    Name,
    Object,
    Shown,
    Stops,
    Text,
    Tool,
    by,
)

_FN = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
NoImages = Annotated[list[Object], Limits(max_length=0)]
Number = Annotated[float, Limits(ge=-1e9, le=1e9)]
Whole = Annotated[int, Limits(ge=-(1 << 40), le=1 << 40)]


class OllamaFunction(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    name: Name
    arguments: Object


class OllamaCall(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    id: NotRequired[Label]
    function: OllamaFunction


class OllamaMessage(TypedDict):
    __pydantic_config__ = SAID  # type: ignore[misc]
    role: Literal["system", "user", "assistant", "tool"]
    content: NotRequired[Text]
    thinking: NotRequired[Text]
    images: NotRequired[NoImages]
    tool_calls: NotRequired[Annotated[list[OllamaCall], FIRST, Limits(max_length=128)]]
    tool_name: NotRequired[Label]
    tool_call_id: NotRequired[Label]


class Options(TypedDict, total=False):
    """Of `options`: how tokens are drawn; then how Ollama loads and computes, which each node's owner decides here."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    temperature: Annotated[float, Limits(ge=0, le=100)]
    top_p: Annotated[float, Limits(ge=0, le=1)]
    top_k: Annotated[int, Limits(ge=0, le=MAX_ID)]
    min_p: Annotated[float, Limits(ge=0, le=1)]
    seed: Annotated[int, Limits(ge=-(1 << 63), le=(1 << 64) - 1)]
    num_predict: Annotated[int, Limits(ge=-2, le=MAX_TOKENS)]
    stop: Stops
    repeat_penalty: Annotated[float, Limits(ge=0.001, le=1000)]
    presence_penalty: Annotated[float, Limits(ge=-2, le=2)]
    frequency_penalty: Annotated[float, Limits(ge=-2, le=2)]
    mirostat: Literal[0]
    typical_p: Literal[1]
    tfs_z: Literal[1]
    repeat_last_n: Whole
    mirostat_eta: Number
    mirostat_tau: Number
    penalize_newline: bool
    num_ctx: Whole
    num_keep: Whole
    num_batch: Whole
    num_gpu: Whole
    main_gpu: Whole
    num_thread: Whole
    num_gqa: Whole
    numa: bool
    low_vram: bool
    f16_kv: bool
    vocab_only: bool
    logits_all: bool
    use_mmap: bool
    use_mlock: bool


KeepAlive = Annotated[Annotated[str, Limits(max_length=64)] | Annotated[float, Limits(ge=-1e9, le=1e9)], "a duration"]
Think = bool | Literal["low", "medium", "high"]
OllamaFormat = Annotated[
    Annotated[Literal["", "json"], Tag("<word>")] | Annotated[Object, Tag("<schema>")],
    by({"word": str, "schema": dict}),
]


class _Asked(TypedDict):
    """What both paths take."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    model: NotRequired[
        Annotated[Label, Shown("as `/api/tags` shows it, `NAME` or `NAME:latest`, or an alias", refused=[1])]
    ]
    stream: NotRequired[Annotated[bool, Shown("default true: lines of JSON", [False], ["no"])]]
    format: NotRequired[
        Annotated[OllamaFormat, Shown("`json`, or a schema: enforced by a grammar", ["", _SCHEMA], ["xml", 5])]
    ]
    options: NotRequired[
        Annotated[
            Options,
            Shown(
                "Ollama's, as docs/ollama.md lists them",
                [{}, {"temperature": 0, "num_predict": 2, "num_ctx": 2048}],
                [{"mirostat": 1}, {"frobnicate": 1}, {"temperature": -1}],
            ),
        ]
    ]
    keep_alive: NotRequired[
        Annotated[
            KeepAlive,
            Shown("taken: nodes keep their layers as long as their owners share them", ["5m", 0, -1], [True, "x" * 65]),
        ]
    ]
    think: NotRequired[
        Annotated[
            Think, Shown("on or off where the template has a switch, a level where it has levels", [False], ["x", True])
        ]
    ]


class OllamaChat(_Asked):
    """POST /api/chat."""

    messages: NotRequired[
        Annotated[
            list[OllamaMessage],
            FIRST,
            Limits(max_length=MAX_ITEMS),
            Shown(
                "text only; none: says that the model is there",
                [[{"role": "user", "content": "hi"}]],
                ["hi", [{"role": "x", "content": "y"}], [{"role": "user", "content": "x", "images": ["aGk="]}]],
            ),
        ]
    ]
    tools: NotRequired[
        Annotated[
            list[Tool],
            FIRST,
            Limits(max_length=128),
            Shown(
                "functions, where the chat template teaches them in a dialect we read", [[], [_FN]], [[{"type": "x"}]]
            ),
        ]
    ]


class OllamaGenerate(_Asked):
    """POST /api/generate."""

    prompt: NotRequired[
        Annotated[Text, Shown("the user's message; with `raw` a text to go on from; none: as /api/chat", ["hi"], [5])]
    ]
    system: NotRequired[Annotated[Text, Shown("a system message before it", ["Be kind."], [5])]]
    raw: NotRequired[Annotated[bool, Shown("without the chat template", [False, True], ["x"])]]
    context: NotRequired[Annotated[NoImages, Shown("only `[]`: answers are not kept", [[]], [[1, 2]])]]
    images: NotRequired[Annotated[NoImages, Shown("only `[]`: text only", [[]], [["aGk="]])]]
    suffix: NotRequired[Annotated[Literal[""], Shown("only empty: not offered", [""], ["x"])]]
    template: NotRequired[Annotated[Literal[""], Shown("only empty: not offered", [""], ["{{ .Prompt }}"])]]
