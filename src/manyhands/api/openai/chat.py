"""OpenAI's chat completions, completions and models, over the gateway. Fields: fields.py. Shapes: OpenAI's reference."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple, TypeVar

from fastapi import APIRouter, Request, Response

from manyhands.api.choice import Choice, GenerationPlan, plans_of
from manyhands.api.event_id import BadEventId
from manyhands.api.formats import ModelFormat, ModelFormats
from manyhands.api.gateway import Gateway, OfferedModel
from manyhands.api.http.body import BadField
from manyhands.api.http.error import NotOffered
from manyhands.api.http.route import body_of, caller_of, client_of, describe, last_event_of
from manyhands.api.http.sse import DONE, Emit, EventStream, Single, Template, Watched, to_event
from manyhands.api.jobs import prefill_object
from manyhands.api.openai.forms import ChatForm, Form, TextForm
from manyhands.api.openai.logprobs import Spelling
from manyhands.api.preparation.desk import Prepared
from manyhands.api.run import Admitted, Api, Ask, Caller
from manyhands.api.streams import Claim, Stream, request_digest

Object = dict[str, Any]
T = TypeVar("T")


def openai_router(gateway: Gateway, formats: ModelFormats | None = None) -> APIRouter:
    """Every path under /v1 but /v1/responses. Share `formats` with responses_router: a model's format is read once."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    api = OpenAI(gateway, formats or ModelFormats(gateway))
    describe(router, "/chat/completions", api.chat, "Answer a conversation.")
    describe(router, "/completions", api.completions, "Go on from a text.")

    @router.get("/models")
    async def models(request: Request) -> Object:
        """The models served here that this key may use."""
        served = [(name, offer) for name, offer in gateway.models.items() if _may_use(request, name)]
        ends = {"first_id": served[0][0], "last_id": served[-1][0]} if served else {"first_id": None, "last_id": None}
        return {"object": "list", "data": [model_object(*one, gateway) for one in served], "has_more": False, **ends}

    @router.get("/models/{name:path}", responses={404: {"description": "not served here"}})
    async def model(name: str, request: Request) -> Object:
        """One model."""
        models = gateway.models
        meant = gateway.names.find(name, models)
        caller_of(request).check_model(meant)
        if meant not in models:
            raise gateway.absent(name)
        return model_object(meant, models[meant], gateway)

    @router.post("/embeddings", responses={501: {"description": "always"}})
    async def embeddings() -> None:
        """Not offered: says so."""
        raise NotOffered(
            "/v1/embeddings is not offered: a swarm serves causal language models, ask an embedding server"
        )

    return router


def iso_time(unix_s: float) -> str:
    """As RFC 3339, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def _may_use(request: Request, name: str) -> bool:
    caller = caller_of(request)
    return caller.models is None or name in caller.models


def model_object(name: str, model: OfferedModel, gateway: Gateway) -> Object:
    """As OpenAI and Anthropic both have it, and ours; how its publisher recommends to draw is known once it is loaded."""
    aliases = gateway.names.of_model(name)
    ours: Object = {
        "model_id": model.id,
        "dtype": model.precision,
        "layers": model.num_layers,
        "context": model.context_length,
    }
    if (origin := gateway.origins.get(name)) is not None:
        ours["recommended"] = origin.model.recommended
    created = int(gateway.started_at)
    anthropic = {"type": "model", "display_name": name, "created_at": iso_time(created)}
    head = {"id": name, "object": "model", "created": created, "owned_by": "manyhands"}
    return {**head, **anthropic, "max_model_len": model.context_length, "manyhands": {**ours, "aliases": aliases}}


@dataclass(slots=True)
class _Call:
    """One HTTP request in progress: the choices it makes, and the envelope around them."""

    gateway: Gateway
    model_format: ModelFormat
    id: str
    kind: str
    model: str
    created: int
    plans: Sequence[GenerationPlan]  # one a choice
    caller: Caller
    api: Api
    entry: Admitted
    with_progress: bool  # tell how far the prompt is

    def envelope(self, **fields: Any) -> Object:
        print_ = f"fp_{self.model_format.origin.model.id[:12]}_{self.model_format.origin.model.precision}"
        head = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": print_, **fields}

    def choose(self, index: int) -> tuple[Ask, Choice]:
        return self.plans[index].choose(self.api, self.caller, self.entry)


class _Sender(NamedTuple):
    """Who asks: as the guard found out, from which address, and the id of the last event it has of a stream ("": none)."""

    caller: Caller
    address: str
    last_event: str


class OpenAI:
    """The handlers. What they do for a client, from parsing to the last token, ends with it."""

    def __init__(self, gateway: Gateway, formats: ModelFormats) -> None:
        self.gateway, self.formats = gateway, formats

    async def chat(self, request: Request) -> Response:
        return await self._answered(request, "/v1/chat/completions", "chat", ChatForm)

    async def completions(self, request: Request) -> Response:
        return await self._answered(request, "/v1/completions", "completions", TextForm)

    async def _answered(
        self, request: Request, path: str, api: Api, form: Callable[[Spelling | None], Form]
    ) -> Response:
        body = await body_of(request)
        sender = _Sender(caller_of(request), client_of(request), last_event_of(request))
        work = self._answer(body, path, api, form, sender)
        return Watched(work, request.state.release_body)

    async def _answer(
        self, body: bytes, path: str, api: Api, form: Callable[[Spelling | None], Form], sender: _Sender
    ) -> EventStream | Single:
        entry, claim = self.gateway.claim(sender.caller, api, sender.last_event)
        model_format, made = await self.formats.prepare(path, body, sender.caller, sender.address)
        told = await self._stream_of(path, model_format, made, sender.caller, claim)
        if told is not None:
            made = replace(made, params=replace(made.params, seed=told.position.seed))
        prefix, kind = ("chatcmpl-", "chat.completion") if api == "chat" else ("cmpl-", "text_completion")
        plans = await plans_of(self.formats, model_format, made, sender.caller.name or sender.address)
        name, created = (told.id, told.position.created) if told is not None else (token_hex(16), int(time.time()))
        whose = (sender.caller, api, entry, made.given.get("return_progress", False))
        call = _Call(self.gateway, model_format, prefix + name, kind, made.model, created, plans, *whose)
        shape = form(Spelling(model_format.grammars) if made.params.logprobs is not None else None)
        asked = [call.choose(index) for index in range(len(plans))]
        await shape.prepare()
        if told is None:
            return Single(lambda: _whole(call, shape, asked))
        asked = [(told.ask(index, ask), choice.join(told, index)) for index, (ask, choice) in enumerate(asked)]
        with_usage = bool(made.given.get("stream_options", {}).get("include_usage", False))
        choices = [choice for _, choice in asked]
        return EventStream(
            lambda emit: told.run(lambda: _stream(call, shape, asked, emit, told, with_usage=with_usage)),
            self.gateway.limits,
            is_running=lambda: any(choice.has_route for choice in choices),
        )

    async def _stream_of(
        self, path: str, model_format: ModelFormat, made: Prepared, caller: Caller, claim: Claim | None
    ) -> Stream | None:
        """The stream that is asked for; None if the answer is wanted whole. Raises BadEventId."""
        if made.received and claim is None:
            message = "manyhands.received is of a stream that goes on: send its Last-Event-ID, or leave it out"
            raise BadField(message, "manyhands.received")
        if not made.given.get("stream", False):
            if claim is not None:
                raise BadEventId("Last-Event-ID is for a stream: send stream: true, as before")
            return None
        options = made.given.get("stream_options", {})
        request = await request_digest(
            path, model_format.origin.model.id, made, [name for name in options if options[name]]
        )
        num_choices = len(made.prompts) * made.count
        return self.gateway.streams.open(claim, request, caller, made.params.seed, num_choices)


async def _whole(call: _Call, form: Form, asked: Sequence[tuple[Ask, Choice]]) -> Object:
    async def run(index: int, ask: Ask, choice: Choice) -> Object:
        odds = form.odds()
        async for delta in choice.read(call.gateway, ask):
            if odds is not None and delta.token is not None:
                odds.add(delta.token, choice.num_shown - len(delta.token.text))
        return form.choice(index, choice, odds)

    made = await together([run(index, ask, choice) for index, (ask, choice) in enumerate(asked)])
    return call.envelope(choices=made, usage=usage(call, [choice for _, choice in asked]))


async def _stream(
    call: _Call, form: Form, asked: Sequence[tuple[Ask, Choice]], emit: Emit, told: Stream, *, with_usage: bool
) -> None:
    extra: Object = {"usage": None} if with_usage else {}

    def enveloped(chunk: Object | None, **more: Any) -> Object:
        return call.envelope(choices=[] if chunk is None else [chunk], **extra, object=form.chunk_kind, **more)

    async def run(index: int, ask: Ask, choice: Choice) -> None:
        plain = Template(enveloped(form.plain(index, Template.HOLE)))

        async def tell(chunk: Object | str, *, is_done: bool = False) -> None:
            make = partial(plain.event, chunk) if isinstance(chunk, str) else partial(to_event, enveloped(chunk))
            await emit(partial(told.event, index, make, choice.progress(is_done=is_done)))

        begin: list[Object | str] = [*form.begin(index)]
        async for delta in choice.read(call.gateway, ask, with_progress=call.with_progress):
            if delta.is_progress:
                if index == 0 and not told.is_behind(0) and choice.job is not None:
                    await emit(to_event(enveloped(None, prompt_progress=prefill_object(choice.job, time.time()))))
                continue
            for chunk in begin + form.grow(index, choice, delta):
                await tell(chunk)
            begin = []
        await tell(form.end(index, choice), is_done=True)

    left = [(index, ask, choice) for index, (ask, choice) in enumerate(asked) if not told.had(index).is_done]
    await together([run(*each) for each in left])
    if with_usage:
        used = usage(call, [choice for _, choice in asked])
        made = partial(to_event, call.envelope(choices=[], usage=used, object=form.chunk_kind))
        await emit(partial(told.usage_event, made))
    await emit(DONE)


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side; the first error ends them all and is raised as it is."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    return [task.result() for task in tasks]


def usage(call: _Call, choices: Sequence[Choice]) -> Object:
    """Tokens: every prompt once, whatever n is."""
    asked = sum(len(plan.prompt) for plan in call.plans if plan.index == 0)
    made = sum(choice.num_tokens for choice in choices)
    thought = sum(choice.reasoning_tokens for choice in choices)
    total = {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
    cached = sum(choice.cached_tokens for plan, choice in zip(call.plans, choices, strict=True) if plan.index == 0)
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {**total, **details, "completion_tokens_details": {"reasoning_tokens": thought}}
