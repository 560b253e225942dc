"""Ollama's /api/chat and /api/generate over the gateway: one JSON object, or one a line as the answer grows."""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from manyhands.api.choice import Choice, plans_of
from manyhands.api.delta import Delta
from manyhands.api.formats import ModelFormats
from manyhands.api.gateway import Gateway
from manyhands.api.http.encode import JsonText, encode, pieces, whole_object
from manyhands.api.http.error import error_object
from manyhands.api.http.route import body_of, caller_of, client_of, describe
from manyhands.api.http.sse import NDJSON, Emit, EventStream, Single, Watched
from manyhands.api.ollama.models import models_router
from manyhands.api.preparation.desk import Prepared
from manyhands.api.run import Ask, Caller, Job
from manyhands.text.tools import Content

Object = dict[str, Any]
Path = Literal["/api/chat", "/api/generate"]


def ollama_router(gateway: Gateway, formats: ModelFormats) -> APIRouter:
    """Every path of Ollama's that is offered."""
    router = APIRouter(tags=["Ollama"])
    router.include_router(models_router(gateway, formats))

    def handler(path: Path) -> Callable[[Request], Any]:
        async def generate(request: Request) -> Response:
            body = await body_of(request)
            work = _answer(gateway, formats, path, body, caller_of(request), client_of(request))
            return Watched(work, request.state.release_body)

        return generate

    describe(router, "/api/chat", handler("/api/chat"), "Answer a conversation, as Ollama does.")
    describe(router, "/api/generate", handler("/api/generate"), "Answer a prompt, as Ollama does.")
    return router


async def _answer(
    gateway: Gateway, formats: ModelFormats, path: Path, body: bytes, caller: Caller, client: str
) -> EventStream | Single:
    began = time.monotonic()
    entry = gateway.enter(caller, "ollama")
    model_format, made = await formats.prepare(path, body, caller, client)
    shape = _Shape(path, made, began)
    if not made.prompts:  # a program asks that the model be loaded
        return Single(shape.loaded)
    (plan,) = await plans_of(formats, model_format, made, caller.name or client)
    ask, choice = plan.choose("ollama", caller, entry)
    if not made.given.get("stream", True):
        return Single(lambda: _whole(shape, gateway, ask, choice))
    return EventStream(
        lambda emit: _stream(shape, gateway, ask, choice, emit),
        gateway.limits,
        is_running=lambda: choice.has_route,
        on_error=_failed,
        framing=NDJSON,
    )


async def _whole(shape: "_Shape", gateway: Gateway, ask: Ask, choice: Choice) -> Object:
    async for _ in choice.read(gateway, ask):
        pass
    said = shape.said(choice.content, choice.reasoning, await _calls(choice))
    return {**shape.head(), **said, **shape.ending(choice)}


async def _stream(shape: "_Shape", gateway: Gateway, ask: Ask, choice: Choice, emit: Emit) -> None:
    async for delta in choice.read(gateway, ask):
        text = _text_of(delta)
        if text or delta.reasoning:
            await emit(_line({**shape.head(), **shape.said(text, delta.reasoning), "done": False}))
    if calls := await _calls(choice):
        await emit(_line({**shape.head(), **shape.said("", "", calls), "done": False}))
    await emit(_line({**shape.head(), **shape.said("", ""), **shape.ending(choice)}))


def _text_of(delta: Delta) -> str:
    return "".join(piece.text for piece in delta.pieces if isinstance(piece, Content))


def _line(value: Object) -> Iterator[bytes]:
    return pieces(value, after=b"\n")


def _failed(error: Exception) -> bytes:
    return encode({"error": error_object(error)["message"]}) + b"\n"


async def _calls(choice: Choice) -> list[Object]:
    """The calls whose arguments are whole: they are objects here."""
    out: list[Object] = []
    for call in choice.calls:
        if (arguments := await whole_object(call["arguments"])) is not None:
            function = {"index": len(out), "name": call["name"], "arguments": arguments}
            out.append({"id": call["id"], "function": function})
    return out


class _Shape:
    """How the objects of one answer look. `began`: when it was asked for."""

    def __init__(self, path: Path, made: Prepared, began: float) -> None:
        self._is_chat, self._made, self._began = path == "/api/chat", made, began
        self._model = made.given.get("model", made.model)

    def head(self) -> Object:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now}

    def said(self, text: str, thought: str, calls: list[Object] | None = None) -> Object:
        """What an object says."""
        told: Object = {"thinking": JsonText(thought)} if thought else {}
        if not self._is_chat:
            return {"response": JsonText(text), **told}
        if calls:
            told["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": JsonText(text), **told}}

    async def loaded(self) -> Object:
        """The answer to a request without a prompt."""
        reason = "unload" if self._made.given.get("keep_alive") in (0, "0", "0s", "0m") else "load"
        return {**self.head(), **self.said("", ""), "done": True, "done_reason": reason}

    def ending(self, choice: Choice) -> Object:
        """What the last object says more. Durations are in ns."""
        job = choice.job
        assert job is not None
        reason = "length" if choice.finish_reason == "length" else "stop"
        total = round((time.monotonic() - self._began) * 1e9)
        counted = {"prompt_eval_count": len(self._made.prompts[0]), "eval_count": choice.num_tokens}
        return {"done": True, "done_reason": reason, "total_duration": total, **_durations(job), **counted}


def _durations(job: Job) -> Object:
    """`load_duration`: until a route was open; then the prompt, to the first token; then the others. In ns."""
    timings = job.timings
    opened, first, total = timings.open_s or 0.0, timings.ttft_s or 0.0, timings.total_s or 0.0
    spent = {
        "load_duration": (job.queue_s or 0.0) + opened,
        "prompt_eval_duration": max(0.0, first - opened),
        "eval_duration": max(0.0, total - first),
    }
    return {name: round(seconds * 1e9) for name, seconds in spent.items()}
