"""HearthNet's capability bus: GET /bus/v1/capabilities and POST /bus/v1/call, which runs experimental.distributed_llm.chat@1.0.

The frames are those of the native stream with diagnostics (frames.py), by the same names: token_delta, shard_status,
shard_failover, pipeline_aborted; `progress` while a long prompt is computed; then `done` or `error` (HN-14, HN-40, F61).
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from manyhands.api.choice import plans_of
from manyhands.api.formats import ModelFormats
from manyhands.api.gateway import Gateway
from manyhands.api.http import encode
from manyhands.api.http.error import NotOffered, error_body, error_object, status_of
from manyhands.api.http.route import body_of, caller_of, client_of, describe
from manyhands.api.http.sse import Emit, EventStream, Single, Watched, event_pieces, to_event
from manyhands.api.jobs import in_ms
from manyhands.api.native.capabilities import CHAT, capabilities
from manyhands.api.native.frames import Frame
from manyhands.api.native.infer import told
from manyhands.api.run import Ask, Run

PATH: Final = "/bus/v1/call"
HEADER: Final = "x-hearthnet-capability"
# Frames of the native stream that have another name here, or none.
_OURS: Final = frozenset({"start", "token", "reshard"})


def bus_router(gateway: Gateway, formats: ModelFormats) -> APIRouter:
    """The two paths."""
    router = APIRouter(tags=["bus"])

    @router.get("/bus/v1/capabilities", summary="HearthNet's names of what there is")
    async def names() -> list[dict[str, Any]]:
        """Capabilities with version, trust and models; `instead`: what nodes do among themselves, and how."""
        return capabilities(list(gateway.models), is_on=_is_on(gateway))

    async def call(request: Request) -> Response:
        """Call a capability: frames, or one object where `stream` is false."""
        body = await body_of(request)
        return Watched(_answer(gateway, formats, body, request), request.state.release_body)

    describe(router, PATH, call, "Call a capability of HearthNet's")
    return router


def _is_on(gateway: Gateway) -> bool:
    return any(not origin.node.worker.is_off for origin in gateway.origins.values())


async def _answer(gateway: Gateway, formats: ModelFormats, body: bytes, request: Request) -> EventStream | Single:
    caller = caller_of(request)
    entry = gateway.enter(caller, "bus")
    named = request.headers.get(HEADER, CHAT)
    if named.partition("@")[0] != CHAT:
        raise NotOffered(f"{named[:80]} is not called here; GET /bus/v1/capabilities lists what is")
    model_format, made = await formats.prepare(PATH, body, caller, client_of(request))
    (plan,) = await plans_of(formats, model_format, made, caller.name or client_of(request))
    ask, _ = plan.choose("bus", caller, entry)
    if not made.given["stream"]:
        return Single(lambda: _whole(gateway, ask))
    runs: list[Run] = []

    async def produce(emit: Emit) -> None:
        async with gateway.run(ask) as run:
            runs.append(run)
            async with aclosing(frames(run)) as made:
                async for frame in made:
                    await emit(event_pieces(frame.data, frame.event))

    def is_running() -> bool:
        return bool(runs) and runs[0].answer.session is not None

    return EventStream(produce, gateway.limits, is_running, _failed)


async def frames(run: Run) -> AsyncGenerator[Frame, None]:
    """The frames of a running call but `error`, which is raised."""
    async with aclosing(told(run, None, diagnostics=True)) as native:
        async for frame in native:
            if frame.event == "prefill":
                done = {"current": frame.data["processed"], "total": frame.data["total"], "stage": "prefill"}
                yield Frame("progress", done)
            elif frame.event == "done":
                yield Frame("done", meta(run))
            elif frame.event not in _OURS:
                yield frame


def meta(run: Run) -> dict[str, Any]:
    """What a finished call says of itself: HearthNet's fields, and ours."""
    job, answer = run.job, run.answer
    stopped = "stop_sequence" if answer.stopped_by is not None else "end"
    return {
        "model": job.model,
        "tokens_in": job.prompt_tokens,
        "tokens_out": job.completion_tokens,
        "stop_reason": "max_tokens" if job.finish_reason == "length" else stopped,
        "ms": in_ms(job.timings.total_s),
        "request_id": job.id,
        "seed": answer.params.seed,
        "exactness": job.exactness,
    }


async def _whole(gateway: Gateway, ask: Ask) -> dict[str, Any]:
    async with gateway.run(ask) as run, aclosing(run.tokens()) as tokens:
        async for _ in tokens:
            pass
        message = {"role": "assistant", "content": encode.JsonText(run.answer.text)}
        return {"output": {"message": message}, "meta": meta(run)}


def _failed(error: Exception) -> bytes:
    """The last frame of a stream that failed after it began."""
    return to_event(error_body(PATH, error_object(error), status_of(error)), "error")
