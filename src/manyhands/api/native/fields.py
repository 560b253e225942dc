"""The fields of /api/infer, /api/infer/stream and /bus/v1/call, as pydantic models (docs/api.md)."""

from typing import Annotated, Literal, Required

from pydantic import Field as Limits
from typing_extensions import TypedDict  # pydantic wants this one below Python 3.12

from manyhands.api.openai.schema import FIRST, MAX_ID, MAX_ITEMS, STRICT, Layers, Shown, Text
from manyhands.config import MAX_HOPS


class ChatTurn(TypedDict):
    """One turn of a conversation."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    role: Literal["system", "user", "assistant"]
    content: Text


class Infer(TypedDict, total=False):
    """What to generate. lattice9's names and defaults, but no penalty unless asked for; what is not listed is refused."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    prompt: Annotated[Text, Shown("text to go on from; either this or messages")]
    messages: Annotated[
        list[ChatTurn],
        FIRST,
        Limits(min_length=1, max_length=MAX_ITEMS),
        Shown("a conversation, by the chat template"),
    ]
    model: Annotated[Text, Limits(max_length=512), Shown("one of GET /v1/models; may be left out where there is one")]
    max_tokens: Annotated[int, Shown("default 50; of a conversation half of what the context leaves")]
    deterministic: Annotated[bool, Shown("plain argmax: every other sampling field is off")]
    temperature: Annotated[float, Shown("default 0.9")]
    top_p: Annotated[float, Shown("default 0.92")]
    top_k: Annotated[int, Shown("default 0: all")]
    min_p: Annotated[float, Shown("default 0")]
    repetition_penalty: Annotated[float, Shown("default 1")]
    presence_penalty: Annotated[float, Shown("default 0")]
    frequency_penalty: Annotated[float, Shown("default 0")]
    seed: Annotated[int, Shown("same seed, same text; left out: drawn, and told in the answer")]
    stop: Annotated[list[Text], FIRST, Limits(max_length=16), Shown("up to 16 strings of 1 to 256 characters")]
    received: Annotated[Text, Shown("with Last-Event-ID: the text that came before the cut")]
    path: Annotated[Literal["ring", "star"], Shown("default ring")]
    draft: Annotated[
        Literal["auto", "off", "suffix", "model"],
        Shown("default as the node's configuration says: what guesses tokens, [the text is the same](speculation.md)"),
    ]
    policy: Annotated[Literal["latency", "greedy"], Shown("default as the node's configuration says")]
    allow_self_as_shard: Annotated[bool, Shown("default as the node's configuration says")]
    sticky: Annotated[bool, Shown("default as the node's configuration says")]
    scope: Annotated[Literal["off", "lan", "trusted", "public"], Shown("default: the node's own")]
    fallback_to_local: Annotated[bool, Shown("default true: this machine may go on alone, where it is set up to")]
    trusted_first: Annotated[Layers, Shown("first layers for nodes of the allow list and this machine alone")]
    trusted_last: Annotated[Layers, Shown("the same of the last layers")]
    max_shards_per_request: Annotated[int, Limits(ge=1, le=MAX_HOPS), Shown("default as the node's configuration says")]
    codec: Annotated[
        Literal["lossless", "int8"],
        Shown("default lossless; int8: half the bytes over slow links, [with loss](exactness.md#rows-with-loss)"),
    ]


class BusParams(TypedDict, total=False):
    """`params` of a call."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    model: Annotated[Text, Limits(max_length=512)]
    ctx: Annotated[int, Limits(ge=1, le=MAX_ID)]
    sharding: Literal["auto"]
    fallback_to_local: bool


class BusInput(TypedDict, total=False):
    """`input` of a call: llm.chat's, without tools."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    messages: Required[Annotated[list[ChatTurn], FIRST, Limits(min_length=1, max_length=MAX_ITEMS)]]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop: Annotated[list[Text], FIRST, Limits(max_length=16)]
    stream: bool


class BusCall(TypedDict, total=False):
    """A call of HearthNet's capability bus (docs/api.md)."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    capability: Annotated[
        Text, Limits(max_length=200), Shown("experimental.distributed_llm.chat, with or without @1.0")
    ]
    version: Annotated[Literal["1.0"], Shown("1.0")]
    params: Annotated[BusParams, Shown("model (may be left out where there is one), ctx, sharding, fallback_to_local")]
    input: Required[Annotated[BusInput, Shown("messages, max_tokens, temperature, top_p, seed, stop, stream")]]
    stream: Annotated[bool, Shown("default true, or as input.stream says: frames, or one object")]
