"""Anthropic's Messages API over the gateway. Fields: fields.py. Shapes: Anthropic's reference.

message_start ─ (content_block_start ─ deltas ─ content_block_stop)* ─ message_delta ─ message_stop, and ping in between
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from manyhands.api.choice import Choice, ask_one
from manyhands.api.delta import Delta
from manyhands.api.formats import ModelFormats
from manyhands.api.gateway import Gateway
from manyhands.api.http.encode import JsonText, whole_object
from manyhands.api.http.error import error_body, error_object, status_of
from manyhands.api.http.route import body_of, caller_of, client_of, describe
from manyhands.api.http.sse import Emit, EventStream, Framing, Single, Watched, event_pieces, to_event
from manyhands.api.openai.forms import extension
from manyhands.api.preparation.desk import Prepared
from manyhands.api.run import Ask, Caller
from manyhands.text.tools import CallArguments, CallStart, Content, Piece

Object = dict[str, Any]
PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
FRAMING = Framing(b"text/event-stream; charset=utf-8", to_event({"type": "ping"}, "ping"))
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def anthropic_router(gateway: Gateway, formats: ModelFormats) -> APIRouter:
    """/v1/messages and /v1/messages/count_tokens."""
    router = APIRouter(tags=["Anthropic"])

    async def messages(request: Request) -> Response:
        body = await body_of(request)
        work = _answer(gateway, formats, body, caller_of(request), client_of(request))
        return Watched(work, request.state.release_body)

    async def count(request: Request) -> Response:
        body = await body_of(request)

        async def work() -> Single:
            gateway.enter(caller_of(request), "tokens")
            _, made = await formats.prepare(COUNT_PATH, body, caller_of(request), client_of(request))
            return Single(lambda: _counted(made))

        return Watched(work(), request.state.release_body)

    describe(router, PATH, messages, "Answer a conversation.")
    describe(router, COUNT_PATH, count, "Count the tokens of a conversation.")
    return router


async def _counted(made: Prepared) -> Object:
    return {"input_tokens": made.num_tokens}


async def _answer(
    gateway: Gateway, formats: ModelFormats, body: bytes, caller: Caller, client: str
) -> EventStream | Single:
    made, ask, choice = await ask_one(formats, PATH, "messages", body, caller, client)
    message = _Message(made, choice)
    if not made.given.get("stream", False):
        return Single(lambda: _whole(message, gateway, ask))
    return EventStream(
        lambda emit: _stream(message, gateway, ask, emit),
        gateway.limits,
        is_running=lambda: choice.has_route,
        on_error=_failed,
        framing=FRAMING,
    )


def _failed(error: Exception) -> bytes:
    return to_event(error_body(PATH, error_object(error), status_of(error)), "error")


async def _whole(message: "_Message", gateway: Gateway, ask: Ask) -> Object:
    async for delta in message.choice.read(gateway, ask):
        for _ in message.events(delta):
            pass
    return await message.whole()


async def _stream(message: "_Message", gateway: Gateway, ask: Ask, emit: Emit) -> None:
    has_begun = False
    async for delta in message.choice.read(gateway, ask):
        if not has_begun:
            has_begun = True
            await emit(message.begin())
        for event in message.events(delta):
            await emit(event)
    for event in message.end():
        await emit(event)


@dataclass(slots=True)
class _Message:
    """The blocks of one answer as they grow, and the events that tell of it."""

    made: Prepared
    choice: Choice
    id: str = field(default_factory=lambda: f"msg_{uuid4().hex}")
    blocks: list[Object] = field(default_factory=list)
    _is_open: bool = False  # the last block still grows

    def begin(self) -> Iterator[bytes]:
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return event_pieces({"type": "message_start", "message": message}, "message_start")

    def events(self, delta: Delta) -> Iterator[Iterator[bytes]]:
        """What one delta changes."""
        if delta.reasoning:
            if not self._has_open("thinking"):
                yield from self._open({"type": "thinking", "thinking": JsonText(), "signature": ""})
            if self.made.given.get("thinking", {}).get("display") != "omitted":
                self.blocks[-1]["thinking"].add(delta.reasoning)
                yield self._delta({"type": "thinking_delta", "thinking": JsonText(delta.reasoning)})
        for piece in delta.pieces:
            yield from self._grow(piece)

    def end(self) -> Iterator[Iterator[bytes]]:
        """Close the last block, and say how it ended."""
        yield from self._close()
        told = {"delta": self._ending(), "usage": self._usage(), "manyhands": extension(self.choice)}
        yield self._event("message_delta", **told)
        yield self._event("message_stop")

    async def whole(self) -> Object:
        """The answer at its end. A call that broke off before its input was whole is left out."""
        content = [shown for block in self.blocks if (shown := await _shown(block)) is not None]
        told = {**self._ending(), "usage": self._usage(), "manyhands": extension(self.choice)}
        return {**self._head(), "content": content, **told}

    def _grow(self, piece: Piece) -> Iterator[Iterator[bytes]]:
        match piece:
            case Content(text):
                if not self._has_open("text"):
                    yield from self._open({"type": "text", "text": JsonText()})
                self.blocks[-1]["text"].add(text)
                yield self._delta({"type": "text_delta", "text": JsonText(text)})
            case CallStart(index, name):
                call = self.choice.calls[index]
                call["id"] = call["id"].replace("call_", "toolu_", 1)
                yield from self._open({"type": "tool_use", "id": call["id"], "name": name, "input": call})
            case CallArguments(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": JsonText(text)})

    def _has_open(self, kind: str) -> bool:
        return self._is_open and self.blocks[-1]["type"] == kind

    def _open(self, block: Object) -> Iterator[Iterator[bytes]]:
        yield from self._close()
        self.blocks.append(block)
        self._is_open = True
        shown = {**block, "input": {}} if block["type"] == "tool_use" else block
        yield self._event("content_block_start", index=len(self.blocks) - 1, content_block=shown)

    def _close(self) -> Iterator[Iterator[bytes]]:
        if self._is_open:
            self._is_open = False
            yield self._event("content_block_stop", index=len(self.blocks) - 1)

    def _delta(self, delta: Object) -> Iterator[bytes]:
        return self._event("content_block_delta", index=len(self.blocks) - 1, delta=delta)

    def _event(self, kind: str, **fields: Any) -> Iterator[bytes]:
        return event_pieces({"type": kind, **fields}, kind)

    def _head(self) -> Object:
        model = self.made.given.get("model", self.made.model)
        return {"id": self.id, "type": "message", "role": "assistant", "model": model}

    def _ending(self) -> Object:
        stop = self.choice.stopped_by
        reason = "stop_sequence" if stop is not None else _REASONS[self.choice.finish_reason]
        if reason == "max_tokens" and self.made.params.max_tokens < self.made.given["max_tokens"]:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> Object:
        """Tokens that were computed and those that an earlier request had computed, apart, as this API has them."""
        asked, cached = len(self.made.prompts[0]), self.choice.cached_tokens
        return {
            "input_tokens": asked - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.choice.num_tokens,
        }


async def _shown(block: Object) -> Object | None:
    """A block of a whole answer; None for a call without a whole input."""
    if block["type"] != "tool_use":
        return block
    read = await whole_object(block["input"]["arguments"])
    return None if read is None else {**block, "input": read}
