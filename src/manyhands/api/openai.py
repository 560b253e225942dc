"""OpenAI's chat completions, completions and models, over the gateway. Fields: fields.py. Shapes: OpenAI's reference."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from manyhands.api.choice import (
    Choice,
    Plan,
    Voice,
    Voices,
    check_choices,
    encode_text,
    off_loop,
    options,
    plan_chat,
    sampling,
)
from manyhands.api.conversation import conversation_of
from manyhands.api.fields import body_schema, parse
from manyhands.api.forms import ChatForm, Form, TextForm
from manyhands.api.gateway import Api, Ask, Caller, Gateway
from manyhands.api.logprobs import Spelling
from manyhands.api.schema import BadField
from manyhands.api.sse import DONE, Emit, EventStream, Single, Template, to_event
from manyhands.errors import ManyhandsError
from manyhands.origin import Origin

Object = dict[str, Any]


class NotOffered(ManyhandsError):
    code = "not_offered"
    http_status = 501


def openai_router(gateway: Gateway, voices: Voices | None = None) -> APIRouter:
    """Every path under /v1 but /v1/responses. Share `voices` with responses_router: what a model's voice costs is paid once."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    api = OpenAI(gateway, voices or Voices(gateway))
    describe(router, "/chat/completions", api.chat, "Answer a conversation.")
    describe(router, "/completions", api.completions, "Go on from a text.")

    @router.get("/models")
    async def models(request: Request) -> Object:
        """The models served here that this key may use."""
        served = [(name, origin) for name, origin in gateway.origins.items() if _may_use(request, name)]
        return {"object": "list", "data": [model_object(name, origin, gateway) for name, origin in served]}

    @router.get("/models/{name:path}", responses={404: {"description": "not served here"}})
    async def model(name: str, request: Request) -> Object:
        """One model."""
        caller_of(request).check_model(name)
        return model_object(name, gateway.origin(name), gateway)

    @router.post("/embeddings", responses={501: {"description": "always"}})
    async def embeddings() -> None:
        """Not offered: says so."""
        raise NotOffered(
            "/v1/embeddings is not offered: a swarm serves causal language models, ask an embedding server"
        )

    return router


class _Direct(APIRoute):
    """Its handler takes the Request itself, and FastAPI has nothing to look up, parse or check for it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


def describe(router: APIRouter, path: str, handler: Callable[[Request], Awaitable[Response]], says: str) -> None:
    """Mount a POST handler that parses its own body, with the schema of the table in the OpenAPI document."""
    schema = body_schema(f"{router.prefix}{path}")
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    answers: dict[str, Any] = {"application/json": {}, "text/event-stream": {}}
    said: dict[int | str, dict[str, Any]] = {200: {"description": "the answer; events if stream", "content": answers}}
    router.add_api_route(
        path,
        handler,
        methods=["POST"],
        summary=says,
        openapi_extra={"requestBody": body},
        responses=said,
        response_model=None,
        route_class_override=_Direct,
    )


def caller_of(request: Request) -> Caller:
    """Whose request it is, as the guard found out (app.py)."""
    caller: Caller = request.state.caller
    return caller


def _may_use(request: Request, name: str) -> bool:
    caller = caller_of(request)
    return caller.models is None or name in caller.models


def model_object(name: str, origin: Origin, gateway: Gateway) -> Object:
    model = origin.model
    ours = {"model_id": model.id, "dtype": model.precision, "layers": model.num_layers, "context": model.context_length}
    created = int(gateway.started_at)
    return {"id": name, "object": "model", "created": created, "owned_by": "manyhands", "manyhands": ours}


@dataclass(slots=True)
class _Call:
    """One HTTP request in progress: the choices it makes, and the envelope around them."""

    gateway: Gateway
    voice: Voice
    id: str
    kind: str
    model: str
    created: int
    plans: Sequence[Plan]  # one a choice
    indices: Sequence[int]  # of the choice among those of its prompt
    caller: Caller
    api: Api

    def envelope(self, **fields: Any) -> Object:
        print_ = f"fp_{self.voice.origin.model.id[:12]}_{self.voice.origin.model.precision}"
        head = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": print_, **fields}

    async def choose(self, index: int) -> tuple[Ask, Choice]:
        return await self.plans[index].choose(self.model, self.api, self.caller, self.indices[index])


class OpenAI:
    """The handlers. They parse, plan, and hand the work to a response that ends with its client."""

    def __init__(self, gateway: Gateway, voices: Voices) -> None:
        self.gateway, self.voices = gateway, voices

    async def chat(self, request: Request) -> Response:
        given = parse("/v1/chat/completions", await request.body())
        voice = self._voice(request, given)
        count = check_choices(given, self.gateway.limits.max_choices)
        talk = conversation_of(given)
        logprobs = _chat_logprobs_wanted(given)
        plan = await plan_chat(
            voice,
            talk,
            given,
            wanted=_max_tokens(given),
            default=self.gateway.limits.default_max_tokens,
            logprobs=logprobs,
        )
        call = self._call(request, given, voice, "chat", [plan] * count, range(count))
        form = ChatForm(Spelling(voice.grammars) if logprobs is not None else None)
        return await self._answer(call, form, given)

    async def completions(self, request: Request) -> Response:
        given = parse("/v1/completions", await request.body())
        voice = self._voice(request, given)
        count = check_choices(given, self.gateway.limits.max_choices)
        prompts = [await off_loop(len(p), partial(encode_text, voice, p)) for p in _prompts(given["prompt"])]
        if len(prompts) * count > 128:
            raise BadField(f"prompt: {len(prompts)} prompts with n = {count} make more than 128 choices", "prompt")
        logprobs = given.get("logprobs")
        params = sampling(given, given.get("max_tokens", 16), logprobs)
        plans = [Plan(voice, p, params, ask=options(voice, given)) for p in prompts for _ in range(count)]
        call = self._call(request, given, voice, "completions", plans, [*range(count)] * len(prompts))
        form = TextForm(Spelling(voice.grammars) if logprobs is not None else None)
        return await self._answer(call, form, given)

    def _voice(self, request: Request, given: Mapping[str, Any]) -> Voice:
        caller_of(request).check_model(given["model"])
        return self.voices.find(given["model"])

    def _call(
        self,
        request: Request,
        given: Mapping[str, Any],
        voice: Voice,
        api: Api,
        plans: Sequence[Plan],
        indices: Sequence[int],
    ) -> _Call:
        prefix, kind = ("chatcmpl-", "chat.completion") if api == "chat" else ("cmpl-", "text_completion")
        for plan in plans:
            voice.origin.request_ids(plan.prompt, plan.params)  # refuses what does not fit before anything is sent
        return _Call(
            self.gateway,
            voice,
            prefix + uuid4().hex,
            kind,
            given["model"],
            int(time.time()),
            plans,
            indices,
            caller_of(request),
            api,
        )

    async def _answer(self, call: _Call, form: Form, given: Mapping[str, Any]) -> Response:
        asked = [await call.choose(index) for index in range(len(call.plans))]
        await form.prepare()
        if not given.get("stream", False):
            if "stream_options" in given:
                raise BadField("stream_options is for stream: true", "stream_options")
            return Single(lambda: _whole(call, form, asked))
        with_usage = bool(given.get("stream_options", {}).get("include_usage", False))
        choices = [choice for _, choice in asked]
        return EventStream(
            lambda emit: _stream(call, form, asked, emit, with_usage=with_usage),
            self.gateway.limits,
            is_running=lambda: any(choice.has_route for choice in choices),
        )


async def _whole(call: _Call, form: Form, asked: Sequence[tuple[Ask, Choice]]) -> Object:
    async def run(ask: Ask, choice: Choice) -> None:
        async for _ in choice.read(call.gateway, ask):
            pass

    await together([run(ask, choice) for ask, choice in asked])
    choices = [choice for _, choice in asked]
    body = [form.choice(index, choice) for index, choice in enumerate(choices)]
    return call.envelope(choices=body, usage=usage(call, choices))


async def _stream(
    call: _Call, form: Form, asked: Sequence[tuple[Ask, Choice]], emit: Emit, *, with_usage: bool
) -> None:
    extra: Object = {"usage": None} if with_usage else {}

    def enveloped(chunk: Object) -> Object:
        return call.envelope(choices=[chunk], **extra, object=form.chunk_kind)

    async def run(index: int, ask: Ask, choice: Choice) -> None:
        plain = Template(enveloped(form.plain(index, Template.HOLE)))
        begin: list[Object | str] = [*form.begin(index)]
        async for delta in choice.read(call.gateway, ask):
            for chunk in begin + form.grow(index, choice, delta):
                await emit(plain.event(chunk) if isinstance(chunk, str) else to_event(enveloped(chunk)))
            begin = []
        await emit(to_event(enveloped(form.end(index, choice))))

    await together([run(index, ask, choice) for index, (ask, choice) in enumerate(asked)])
    if with_usage:
        used = usage(call, [choice for _, choice in asked])
        await emit(to_event(call.envelope(choices=[], usage=used, object=form.chunk_kind)))
    await emit(DONE)


async def together(work: Sequence[Any]) -> None:
    """Run coroutines side by side; the first error ends them all and is raised as it is."""
    if len(work) == 1:
        await work[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


def usage(call: _Call, choices: Sequence[Choice]) -> Object:
    """Tokens: every prompt once, whatever n is."""
    prompts = {id(plan): len(plan.prompt) for plan, index in zip(call.plans, call.indices, strict=True) if index == 0}
    asked, made = sum(prompts.values()), sum(len(choice.tokens) for choice in choices)
    thought = sum(choice.reasoning_tokens for choice in choices)
    total = {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
    return {**total, "completion_tokens_details": {"reasoning_tokens": thought}}


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise BadField("max_tokens is the older name of max_completion_tokens: send one of them", "max_tokens")
    wanted: int | None = given.get("max_completion_tokens", given.get("max_tokens"))
    return wanted


def _chat_logprobs_wanted(given: Mapping[str, Any]) -> int | None:
    if "top_logprobs" in given and not given.get("logprobs"):
        raise BadField("top_logprobs is for logprobs: true", "top_logprobs")
    return given.get("top_logprobs", 0) if given.get("logprobs") else None


def _prompts(prompt: Any) -> list[Any]:
    return list(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
