"""Where a client's answers come from: this process as the origin of a ticket's swarm, or a gateway's OpenAI API."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from manyhands.client.layers import LayersRequest, LayerStates, Prompt, ServedHop, gateways_layers, own_layers, said_in
from manyhands.core import PathKind, SamplingParams

if TYPE_CHECKING:
    from manyhands.origin import Answer, Origin, Token


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one token (or, from a gateway, one event) added: text, thought, and its odds if they were asked for.

    `token` is the text of the token alone; `top` the likeliest tokens instead of it, with their log probabilities.
    """

    text: str
    thought: str = ""
    token: str | None = None
    logprob: float | None = None
    top: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class Completion:
    """One answer as it grows. `finish_reason`: stop, length, or cancelled; None until it has ended.

    `repairs` counts nodes that were replaced on the way: the text does not show them. `pieces` are kept where log
    probabilities were asked for. `exactness`: E0 same bits, E2 same distribution.
    """

    text: str = ""
    thought: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    seed: int | None = None
    exactness: str | None = None
    repairs: int = 0
    route: tuple[ServedHop, ...] = ()
    pieces: list[TextDelta] = field(default_factory=list)

    def take(self, piece: TextDelta) -> None:
        """Grow by one piece."""
        self.text += piece.text
        self.thought += piece.thought
        if piece.logprob is not None:
            self.pieces.append(piece)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class PythonRequest:
    """What a program asks for. A conversation goes by the model's chat template."""

    prompt: Prompt
    params: SamplingParams
    path: PathKind = "ring"


class AnswerSource(Protocol):
    """Lives on the client's loop."""

    async def models(self) -> list[str]: ...

    def pieces(self, asked: PythonRequest, made: Completion) -> AsyncGenerator[TextDelta, None]:
        """The answer as it grows; fills `made` but its texts. Closing it ends the request. Raises ManyhandsError."""
        ...

    async def layers(self, asked: LayersRequest) -> LayerStates:
        """Hidden states and logits. Raises ManyhandsError."""
        ...


class SwarmAnswers:
    """This process is the origin."""

    def __init__(self, origin: "Origin", model: str) -> None:
        self._origin, self._model = origin, model

    async def models(self) -> list[str]:
        return [self._model]

    async def pieces(self, asked: PythonRequest, made: Completion) -> AsyncGenerator[TextDelta, None]:
        from manyhands.aside import aside

        origin = self._origin
        answer = origin.answer(await aside(origin.request, said_in(asked.prompt), asked.params))
        made.seed, made.prompt_tokens = asked.params.seed, len(answer.prompt)
        try:
            async with aclosing(origin.stream(answer, path=asked.path, tenant="local")) as tokens:
                async for token in tokens:
                    yield self._piece(token)
        finally:
            _tell(answer, made)

    async def layers(self, asked: LayersRequest) -> LayerStates:
        return await own_layers(self._origin, asked)

    def _piece(self, token: "Token") -> TextDelta:
        if token.logprob is None:
            return TextDelta(token.text)
        top = tuple((self._text_of(other), logprob) for other, logprob in token.top or ())
        return TextDelta(token.text, "", self._text_of(token.id), token.logprob, top)

    def _text_of(self, token: int) -> str:
        text: str = self._origin.model.tokenizer.decode([token], skip_special_tokens=False)
        return text


def _tell(answer: "Answer", made: Completion) -> None:
    """What is known of an answer that has ended."""
    made.finish_reason, made.exactness = answer.finish_reason, answer.exactness
    made.completion_tokens, made.cached_tokens = len(answer.token_ids), answer.cached_tokens
    made.repairs = len(answer.repairs)
    made.route = tuple(ServedHop(offer.name, offer.node, str(offer.info.span)) for offer in answer.route)


class GatewayAnswers:
    """A gateway answers, by POST /v1/chat/completions or /v1/completions with stream."""

    def __init__(self, url: str, key: str, model: str | None) -> None:
        from manyhands.cli.client import check_address

        self._url, self._key, self._model = url.rstrip("/"), key, model
        check_address(self._url)

    async def models(self) -> list[str]:
        from manyhands.aside import aside
        from manyhands.cli.client import call

        told = await aside(call, self._url, self._key, "GET", "/v1/models")
        return [str(model["id"]) for model in told["data"]]

    async def pieces(self, asked: PythonRequest, made: Completion) -> AsyncGenerator[TextDelta, None]:
        from manyhands.cli.chat_events import events_of

        path, body = _body(asked, self._model)
        made.seed = asked.params.seed
        async with aclosing(events_of(self._url, self._key, body, path=path)) as events:
            async for _, event in events:
                for piece in _read(event, made):
                    yield piece

    async def layers(self, asked: LayersRequest) -> LayerStates:
        return await gateways_layers(self._url, self._key, self._model, asked)


def _body(asked: PythonRequest, model: str | None) -> tuple[str, dict[str, Any]]:
    """The path of a request, and what to send."""
    params = asked.params
    ours = {"path": asked.path, "top_k": params.top_k, "min_p": params.min_p, "ignore_eos": params.ignore_eos}
    body: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stream": True,
        "stream_options": {"include_usage": True},
        "manyhands": {**ours, "repetition_penalty": params.repetition_penalty},
    }
    body |= {"model": model} if model is not None else {}
    body |= {"stop": list(params.stop)} if params.stop else {}
    if isinstance(asked.prompt, str):
        body |= {"logprobs": params.logprobs} if params.logprobs is not None else {}
        return "/v1/completions", {**body, "prompt": asked.prompt, "max_tokens": params.max_tokens}
    body |= {"logprobs": True, "top_logprobs": params.logprobs} if params.logprobs is not None else {}
    messages = [dict(message) for message in asked.prompt]
    return "/v1/chat/completions", {**body, "messages": messages, "max_completion_tokens": params.max_tokens}


def _read(event: Mapping[str, Any], made: Completion) -> list[TextDelta]:
    """The pieces of one event; what else it holds goes into `made`. Raises GatewayError for an error."""
    from manyhands.cli.chat_events import check_event

    check_event(event)
    out: list[TextDelta] = []
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        text, thought = choice.get("text") or delta.get("content") or "", delta.get("reasoning_content") or ""
        odds = _odds(choice.get("logprobs") or {})
        first = odds[0] if odds else (None, None, ())
        if text or thought or odds:
            out.append(TextDelta(text, thought, *first))
        made.finish_reason = choice.get("finish_reason") or made.finish_reason
        if ours := choice.get("manyhands"):
            made.exactness, made.repairs = ours["exactness"], len(ours["repairs"])
            made.route = tuple(ServedHop(hop["name"], hop["node"], hop["layers"]) for hop in ours["route"])
    if usage := event.get("usage"):
        made.prompt_tokens, made.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        made.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return out


def _odds(told: Mapping[str, Any]) -> list[tuple[str, float, tuple[tuple[str, float], ...]]]:
    """Log probabilities of chat completions or of completions: token, its own, those of the likeliest."""
    if "content" in told:
        return [
            (e["token"], e["logprob"], tuple((t["token"], t["logprob"]) for t in e["top_logprobs"]))
            for e in told["content"] or ()
        ]
    tops = told.get("top_logprobs") or [{}] * len(told.get("tokens", ()))
    return [
        (token, logprob, tuple(top.items()))
        for token, logprob, top in zip(told.get("tokens", ()), told.get("token_logprobs", ()), tops, strict=True)
    ]


# -- opening ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def gateway_backend(url: str, key: str, model: str | None) -> AsyncIterator[AnswerSource]:
    """A gateway that answers and serves the model. Raises LinkClosed, GatewayError, ModelNotFound, BadRequest."""
    from manyhands.errors import BadRequest

    found = GatewayAnswers(url, key, model)
    known = await found.models()
    if model is None and len(known) != 1:
        raise BadRequest(f"the gateway has {', '.join(known) or 'no model'}: name one, connect(url, model)")
    yield found


@asynccontextmanager
async def ticket_backend(ticket: str, model: str, threads: int | None) -> AsyncIterator[AnswerSource]:
    """This process as an origin of the ticket's swarm. Raises as cli/swarm_origin.py."""
    from manyhands.cli.options import Computing, RouteOptions
    from manyhands.cli.swarm_origin import swarm_origin

    async with swarm_origin(model, ticket, Computing(threads=threads), RouteOptions()) as origin:
        yield SwarmAnswers(origin, model)


@asynccontextmanager
async def local_backend(model: str, nodes: int, cut: str, threads: int | None) -> AsyncIterator[AnswerSource]:
    """Node processes on this machine and this process as their origin. Raises as cli/local.py:local_swarm."""
    from manyhands.aside import aside
    from manyhands.cli.local import LocalPlan, local_swarm
    from manyhands.cli.options import Computing

    precision = await aside(Computing().precision, model)  # its config may be the hub's
    plan = LocalPlan(model, nodes, cut, precision=precision, threads=threads)
    async with local_swarm(plan) as (origin, _):
        yield SwarmAnswers(origin, model)
