"""Hidden states and logits for a client: by its own origin, or by POST /api/process of a gateway whose operator allows it."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from manyhands.errors import BadRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from manyhands.origin import Origin

Prompt = str | Sequence[Mapping[str, str]]


def check_prompt(prompt: object) -> None:
    """Raise BadRequest for what is neither a text nor a conversation."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, (list, tuple)) or not all(_is_turn(turn) for turn in prompt):
        form = '[{"role": "user", "content": "..."}]'
        raise BadRequest(f"the prompt is {prompt!r:.80}; it must be a text, or a conversation: {form}")


def _is_turn(turn: object) -> bool:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        return False
    content = turn.get("content")
    return isinstance(content, str) or (isinstance(content, list) and all(map(_is_text, content)))


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def said_in(prompt: "Prompt | Sequence[int]") -> str | list[dict[str, str]]:
    """A text, or a conversation whose contents are texts: parts of one are lines of their own, as a gateway has them."""
    from manyhands.api.openai.conversation import text_of

    if isinstance(prompt, str):
        return prompt
    return [{**turn, "content": text_of(turn["content"])} for turn in prompt if not isinstance(turn, int)]


class ServedHop(NamedTuple):
    """A node that had a part in an answer, and its layers."""

    name: str
    node: str
    layers: str


@dataclass(frozen=True, slots=True)
class LayersRequest:
    """`at`: the layers whose inputs are wanted; the number of layers stands for what leaves the last one."""

    prompt: Prompt | Sequence[int]
    at: tuple[int, ...]
    logits: int

    def __post_init__(self) -> None:
        """Raises BadRequest for what is no prompt."""
        if not _ids(self.prompt):
            check_prompt(self.prompt)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """`states[k]` [tokens, hidden] are the hidden states that enter layer k, in fp32; k = number of layers: those that leave
    the last one, before the final norm. `logits` [n, vocab] are those of the last n tokens."""

    token_ids: tuple[int, ...]
    states: "dict[int, NDArray[np.float32]]"
    logits: "NDArray[np.float32] | None"
    route: tuple[ServedHop, ...]


async def own_layers(origin: "Origin", asked: LayersRequest) -> LayerStates:
    """This process is the origin. Raises as run_layers."""
    from manyhands.aside import aside
    from manyhands.core import Span
    from manyhands.origin.layers import run_layers
    from manyhands.wire.rows import numbers

    ids = _ids(asked.prompt) or await aside(origin.model.encode, said_in(asked.prompt))
    end = origin.model.num_layers if asked.logits else max(1, *asked.at, 1)
    made = await run_layers(origin, ids, Span(0, end), asked.at, num_logits=asked.logits)
    route = tuple(ServedHop(hop.name, hop.node, str(hop.info.span)) for hop in made.hops)
    states = {at: numbers(made.states[at], made.dtype) for at in asked.at}
    return LayerStates(ids, states, made.logits, route)


async def gateways_layers(url: str, key: str, model: str | None, asked: LayersRequest) -> LayerStates:
    """A gateway runs them. Raises BadRequest where its operator does not allow it, GatewayError, LinkClosed."""
    from manyhands.aside import aside
    from manyhands.cli.client import GatewayError, call

    named = {} if model is None else {"model": model}
    ids = _ids(asked.prompt)
    if not ids:
        text = said_in(asked.prompt)
        wanted = {**named, "prompt" if isinstance(text, str) else "messages": text}
        ids = tuple((await aside(call, url, key, "POST", "/tokenize", wanted))["tokens"])
    body = {**named, "input_ids": list(ids), "at": list(asked.at), "logits": asked.logits}
    body |= {} if asked.logits else {"layers": f"0-{max(1, *asked.at, 1) - 1}"}
    try:
        told = await aside(call, url, key, "POST", "/api/process", body)
    except GatewayError as error:
        if error.http_status in (404, 405) and "/api/process" in str(error):
            raise BadRequest(
                f"the gateway at {url} gives no hidden states: set debug = true under [api] there"
            ) from error
        raise
    states = {at: _read(told["states"][str(at)]) for at in asked.at}
    logits = None if told["logits"] is None else _read(told["logits"])
    route = tuple(ServedHop(hop["name"], hop["worker_id"], hop["layers"]) for hop in told["assignments"])
    return LayerStates(ids, states, logits, route)


def _ids(prompt: Prompt | Sequence[int]) -> tuple[int, ...]:
    """Token ids, if that is what the prompt is."""
    given = prompt if isinstance(prompt, (list, tuple)) else ()
    ids = tuple(token for token in given if isinstance(token, int))
    return ids if len(ids) == len(given) else ()


def _read(tensor: Mapping[str, Any]) -> "NDArray[np.float32]":
    from manyhands.wire.message import Payload
    from manyhands.wire.rows import numbers, read_rows

    count, width = tensor["shape"]
    return numbers(read_rows(Payload(tensor["dtype"], width, base64.b64decode(tensor["b64"])), count), tensor["dtype"])
