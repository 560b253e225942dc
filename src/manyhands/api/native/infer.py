"""POST /api/infer, the whole answer, and /api/infer/stream, its events as it grows (frames.py)."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response

from manyhands.api.choice import GenerationPlan, plans_of
from manyhands.api.event_id import BadEventId
from manyhands.api.formats import ModelFormat, ModelFormats
from manyhands.api.gateway import Gateway
from manyhands.api.http.arrival import new_job_id
from manyhands.api.http.body import BadField
from manyhands.api.http.encode import JsonBytes
from manyhands.api.http.error import error_object
from manyhands.api.http.route import body_of, caller_of, client_of, describe, last_event_of
from manyhands.api.http.sse import Emit, EventStream, Single, Watched, event_pieces, to_event
from manyhands.api.native.frames import REPEATED, EventEncoder, Frame, result_object
from manyhands.api.preparation.desk import Prepared
from manyhands.api.run import Ask, Run
from manyhands.api.streams import ChoiceProgress, Stream, request_digest
from manyhands.errors import BadRequest, ManyhandsError


def infer_router(gateway: Gateway, formats: ModelFormats) -> APIRouter:
    router = APIRouter()

    async def infer(request: Request) -> Response:
        """Generate, and tell which workers did."""
        body = await body_of(request)

        async def work() -> Single:
            if last_event_of(request):
                raise BadEventId("Last-Event-ID is for a stream: send it to /api/infer/stream")
            entry = gateway.enter(caller_of(request), "native")
            wanted = await _prepare(formats, body, request)
            _check_received(wanted, is_resumed=False)
            ask, _ = (await wanted.plan()).choose("native", caller_of(request), entry)
            return Single(lambda: _whole(gateway, ask, wanted.prompt))

        return Watched(work(), request.state.release_body)

    async def stream(request: Request) -> Response:
        """Server-sent events: start, token, reshard, done or error."""
        body, diagnostics = await body_of(request), _flag(request, "diagnostics")

        async def work() -> EventStream:
            caller = caller_of(request)
            entry, claim = gateway.claim(caller, "native", last_event_of(request))
            wanted = await _prepare(formats, body, request)
            _check_received(wanted, is_resumed=claim is not None)
            names = ["diagnostics"] if diagnostics else []
            digest = await request_digest("/api/infer/stream", wanted.model_format.origin.model.id, wanted.made, names)
            told = gateway.streams.open(claim, digest, caller, wanted.made.params.seed, 1, new_job_id())
            ask, _ = (await wanted.plan(told.position.seed)).choose("native", caller, entry)
            ask = replace(told.ask(0, ask), job_id=told.id)
            return _events(gateway, ask, wanted.prompt, told, diagnostics=diagnostics)

        return Watched(work(), request.state.release_body)

    wanted: dict[str, Any] = {"name": "diagnostics", "in": "query", "schema": {"type": "boolean", "default": False}}
    wanted["description"] = "Add HearthNet's diagnostic frames."
    describe(router, "/infer", infer, "A whole answer", schema_of="/api/infer")
    describe(router, "/infer/stream", stream, "An answer as it grows", schema_of="/api/infer", parameters=[wanted])
    return router


def _flag(request: Request, name: str) -> bool:
    """A query parameter that is true or false. Raises BadRequest."""
    value = request.query_params.get(name, "false").lower()
    if value not in _FLAGS:
        raise BadRequest(f"{name} is {value[:40]!r}; it can be true or false")
    return _FLAGS[value]


_FLAGS = {"true": True, "1": True, "on": True, "yes": True, "false": False, "0": False, "off": False, "no": False}


class _Wanted(NamedTuple):
    """What to generate, and the text to echo."""

    formats: ModelFormats
    model_format: ModelFormat
    made: Prepared

    @property
    def prompt(self) -> JsonBytes | None:
        return JsonBytes(self.made.shown) if self.made.shown else None

    async def plan(self, seed: int | None = None) -> GenerationPlan:
        """The one choice of the request, by another seed where one is given."""
        made = self.made
        if seed is not None:
            made = replace(made, params=replace(made.params, seed=seed))
        (plan,) = await plans_of(self.formats, self.model_format, made, "")  # this path has no grammars
        return plan


async def _prepare(formats: ModelFormats, body: bytes, request: Request) -> _Wanted:
    """Raises BadRequest, NotFound, RateLimited."""
    return _Wanted(formats, *await formats.prepare("/api/infer", body, caller_of(request), client_of(request)))


def _check_received(wanted: _Wanted, *, is_resumed: bool) -> None:
    """Raise BadField for a text of which nothing would be made."""
    if wanted.made.received and not is_resumed:
        raise BadField(
            "received is what a client has of a stream that goes on: send its Last-Event-ID, or leave it out",
            "received",
        )


async def _whole(gateway: Gateway, ask: Ask, prompt: JsonBytes | None) -> dict[str, Any]:
    async with gateway.run(ask) as run, aclosing(run.tokens()) as tokens:
        async for _ in tokens:
            pass
        return {"prompt": prompt, **result_object(run)}


def _events(gateway: Gateway, ask: Ask, prompt: JsonBytes | None, stream: Stream, *, diagnostics: bool) -> EventStream:
    runs: list[Run] = []

    async def produce(emit: Emit) -> None:
        async with gateway.run(ask) as run:
            runs.append(run)
            async with aclosing(told(run, prompt, diagnostics=diagnostics)) as frames:
                async for frame in frames:
                    make = partial(event_pieces, frame.data, frame.event)
                    if frame.event in REPEATED:
                        job, is_done = run.job, frame.event == "done"
                        progress = ChoiceProgress(job.completion_tokens, 0, job.hops, is_done, job.exactness)
                        await emit(partial(stream.event, 0, make, progress))
                    elif not stream.is_behind(0):
                        await emit(make())

    def is_running() -> bool:
        return bool(runs) and runs[0].answer.session is not None

    return EventStream(lambda emit: stream.run(lambda: produce(emit)), gateway.limits, is_running, _error_event)


async def told(run: Run, prompt: JsonBytes | None, *, diagnostics: bool) -> AsyncGenerator[Frame, None]:
    """The frames of a running request but `error`, which is raised. The first comes with the first token: until then the
    request may still be refused with a status of its own."""
    telling = EventEncoder(run, diagnostics=diagnostics)
    async with aclosing(run.happenings()) as tokens:
        try:
            async for token in tokens:
                if token is not None and run.job.completion_tokens == 1:
                    yield telling.start(prompt)
                for frame in telling.news() if token is None else telling.token(token):
                    yield frame
        except ManyhandsError:
            if run.job.completion_tokens:
                for frame in telling.news():
                    yield frame
            raise
    yield telling.done()


def _error_event(error: Exception) -> bytes:
    """The last frame of a stream that failed after it began."""
    said = error_object(error)
    return to_event({"detail": said["message"], "code": said["code"]}, "error")
