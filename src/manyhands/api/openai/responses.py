"""OpenAI's Responses API over the gateway: typed events, function tools, thoughts as reasoning items. Keeps nothing.

response.created ─ in_progress ─ (output_item.added ─ ... deltas ... ─ done)* ─ completed | incomplete | failed
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from manyhands.api.choice import Choice, ask_one
from manyhands.api.delta import Delta
from manyhands.api.formats import ModelFormats
from manyhands.api.gateway import Gateway
from manyhands.api.http.encode import JsonRows, JsonText
from manyhands.api.http.error import error_object
from manyhands.api.http.route import body_of, caller_of, client_of, describe
from manyhands.api.http.sse import Emit, EventStream, Single, Watched, event_pieces
from manyhands.api.openai.forms import extension
from manyhands.api.openai.logprobs import Spelling, token_logprobs
from manyhands.api.openai.namespaces import Called, called_tools
from manyhands.api.preparation.desk import Prepared
from manyhands.api.run import Ask, Caller
from manyhands.text.tools import CallArguments, CallStart, Content, Piece

Object = dict[str, Any]
COUNT_PATH = "/v1/responses/input_tokens"


def responses_router(gateway: Gateway, formats: ModelFormats | None = None) -> APIRouter:
    """/v1/responses and /v1/responses/input_tokens."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    formats = formats or ModelFormats(gateway)

    async def responses(request: Request) -> Response:
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

    describe(router, "/responses", responses, "Answer an input; nothing is kept.")
    describe(router, "/responses/input_tokens", count, "Count the tokens of an input.")
    return router


async def _counted(made: Prepared) -> Object:
    return {"object": "response.input_tokens", "input_tokens": made.num_tokens}


async def _answer(
    gateway: Gateway, formats: ModelFormats, body: bytes, caller: Caller, client: str
) -> EventStream | Single:
    made, ask, choice = await ask_one(formats, "/v1/responses", "responses", body, caller, client)
    spelling = Spelling(formats.known(made.model).grammars) if made.params.logprobs is not None else None
    if spelling is not None:
        await asyncio.to_thread(spelling.load)
    answer = _Answer(made, choice, spelling, called_tools(made.given.get("tools", ())))
    if not made.given.get("stream", False):
        return Single(lambda: _whole(answer, gateway, ask))
    return EventStream(
        lambda emit: _stream(answer, gateway, ask, emit),
        gateway.limits,
        is_running=lambda: choice.has_route,
        on_error=answer.failed,
    )


async def _whole(answer: "_Answer", gateway: Gateway, ask: Ask) -> Object:
    async for delta in answer.choice.read(gateway, ask):
        for _ in answer.events(delta):
            pass
    for _ in answer.end():
        pass
    return answer.response(answer.status)


async def _stream(answer: "_Answer", gateway: Gateway, ask: Ask, emit: Emit) -> None:
    has_begun = False
    deltas: AsyncIterator[Delta] = answer.choice.read(gateway, ask)
    async for delta in deltas:
        if not has_begun:
            has_begun = True
            for event in answer.begin():
                await emit(event)
        for event in answer.events(delta):
            await emit(event)
    for event in answer.end():
        await emit(event)


@dataclass(slots=True)
class _Answer:
    """The output items of one response as they grow, and the events that tell of it."""

    made: Prepared
    choice: Choice
    spelling: Spelling | None
    tools: Mapping[str, Called]  # by the names that the model calls them by
    id: str = field(default_factory=lambda: f"resp_{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    output: list[Object] = field(default_factory=list)
    _number: int = 0
    _is_open: bool = False  # the last item still grows
    _call: Mapping[str, str] = field(default_factory=dict)  # the last one that began
    # Texts of the last tokens, and their log probabilities, which may yet be told.
    _untold: list[tuple[str, JsonRows]] = field(default_factory=list)

    @property
    def status(self) -> str:
        return "incomplete" if self.choice.finish_reason == "length" else "completed"

    def begin(self) -> Iterator[Iterator[bytes]]:
        yield self._event("response.created", response=self.response("in_progress"))
        yield self._event("response.in_progress", response=self.response("in_progress"))

    def events(self, delta: Delta) -> Iterator[Iterator[bytes]]:
        """What one delta changes."""
        if delta.token is not None and self.spelling is not None:
            odds = JsonRows()
            odds.append(token_logprobs(self.spelling, delta.token))
            self._untold.append((delta.token.text, odds))
        if (delta.reasoning or delta.pieces) and not any(isinstance(piece, Content) for piece in delta.pieces):
            self._untold.clear()  # those of thoughts and calls are not told
        if delta.reasoning:
            yield from self._grow_thought(delta.reasoning)
        for piece in delta.pieces:
            yield from self._grow(piece)

    def end(self) -> Iterator[Iterator[bytes]]:
        """Close the last item, and say how it ended."""
        yield from self._close(self.status)
        if not self.output:
            yield from self._open(_message())
            yield from self._close(self.status)
        yield self._event(f"response.{self.status}", response=self.response(self.status))

    def failed(self, error: Exception) -> Iterator[bytes]:
        """The event of an error in the middle of a stream."""
        said = error_object(error)
        failed = {**self.response("failed"), "error": {"code": said["code"], "message": said["message"]}}
        return self._event("response.failed", response=failed)

    def _grow(self, piece: Piece) -> Iterator[Iterator[bytes]]:
        match piece:
            case Content(text):
                if not self._has_open("message"):
                    yield from self._close("completed")
                    yield from self._open(_message())
                part = self.output[-1]["content"][0]
                logprobs = self._logprobs_of(text)
                part["text"].add(text)
                part["logprobs"].take(logprobs)
                yield self._part_event("response.output_text.delta", delta=JsonText(text), logprobs=logprobs)
            case CallStart(index, name):
                yield from self._close("completed")
                self._call = self.choice.calls[index]
                tool = self.tools.get(name) or Called(name, "", is_custom=False)
                call = {"call_id": self._call["id"], **tool.as_item()}
                item: Object
                if tool.is_custom:
                    item = {"id": f"ctc_{uuid4().hex}", "type": "custom_tool_call", **call, "input": ""}
                else:
                    item = {"id": f"fc_{uuid4().hex}", "type": "function_call", **call, "arguments": JsonText()}
                yield from self._open(item)
            case CallArguments(_, text) if "arguments" in self.output[-1]:
                self.output[-1]["arguments"].add(text)
                yield self._item_event("response.function_call_arguments.delta", delta=JsonText(text))

    def _logprobs_of(self, text: str) -> JsonRows:
        """Log probabilities of the last tokens that made `text`. Those before them were marks, and white space around these."""
        first, left = len(self._untold), len(text)
        while first and (left > 0 or not self._untold[first - 1][0]):  # without text: bytes of a character
            first -= 1
            left -= len(self._untold[first][0])
        told = JsonRows()
        for _, odds in self._untold[first:]:
            told.take(odds)
        self._untold.clear()
        return told

    def _grow_thought(self, text: str) -> Iterator[Iterator[bytes]]:
        if not self._has_open("reasoning"):
            yield from self._close("completed")
            part = {"type": "reasoning_text", "text": JsonText()}
            yield from self._open({"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": [], "content": [part]})
        self.output[-1]["content"][0]["text"].add(text)
        yield self._part_event("response.reasoning_text.delta", delta=JsonText(text))

    def _has_open(self, kind: str) -> bool:
        return self._is_open and self.output[-1]["type"] == kind

    def _open(self, item: Object) -> Iterator[Iterator[bytes]]:
        item["status"] = "in_progress"
        self.output.append(item)
        self._is_open = True
        shown = {**item, "content": []} if "content" in item else item
        yield self._event("response.output_item.added", output_index=len(self.output) - 1, item=shown)
        if "content" in item:
            yield self._part_event("response.content_part.added", part=item["content"][0])

    def _close(self, status: str) -> Iterator[Iterator[bytes]]:
        if not self._is_open:
            return
        item = self.output[-1]
        item["status"] = status
        self._is_open = False
        if item["type"] == "message":
            part = item["content"][0]
            yield self._part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        elif item["type"] == "reasoning":
            yield self._part_event("response.reasoning_text.done", text=item["content"][0]["text"])
        elif item["type"] == "custom_tool_call":
            item["input"] = _custom_input(self._call["arguments"])
            yield self._item_event("response.custom_tool_call_input.delta", delta=item["input"])
            yield self._item_event("response.custom_tool_call_input.done", input=item["input"])
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **said)
        if "content" in item:
            yield self._part_event("response.content_part.done", part=item["content"][0])
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _part_event(self, kind: str, **fields: Any) -> Iterator[bytes]:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> Iterator[bytes]:
        index = len(self.output) - 1
        return self._event(kind, item_id=self.output[-1]["id"], output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> Iterator[bytes]:
        number, self._number = self._number, self._number + 1
        return event_pieces({"type": kind, "sequence_number": number, **fields}, kind)

    def response(self, status: str) -> Object:
        """The response object as it stands."""
        given = self.made.given
        is_over = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": JsonText(given["instructions"]) if "instructions" in given else None,
            "max_output_tokens": given.get("max_output_tokens"),
            "model": self.made.model,
            "output": list(self.output),
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": {"effort": given.get("reasoning", {}).get("effort"), "summary": None},
            "store": False,
            "temperature": self.made.params.temperature,
            "text": {"format": {"type": "text"}, **given.get("text", {})},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [_shown_tool(tool) for tool in given.get("tools", ())],
            "top_p": self.made.params.top_p,
            "truncation": given.get("truncation", "disabled"),
            "usage": self._usage() if is_over else None,
            "metadata": given.get("metadata", {}),
            "manyhands": extension(self.choice) if is_over else None,
        }

    def _usage(self) -> Object:
        asked, made = len(self.made.prompts[0]), self.choice.num_tokens
        return {
            "input_tokens": asked,
            "input_tokens_details": {"cached_tokens": self.choice.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": self.choice.reasoning_tokens},
            "total_tokens": asked + made,
        }


def _shown_tool(tool: Object) -> Object:
    return {"strict": False, "parameters": None, **tool} if tool["type"] == "function" else tool


def _custom_input(arguments: str) -> str:
    """The text of a custom tool's call, written as conversation.CUSTOM_INPUT says; as it is, where it broke off.

    An escaped half of a pair of surrogates, which is no text, becomes "?".
    """
    try:
        given = json.loads(arguments)["input"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return arguments
    return given.encode(errors="replace").decode() if isinstance(given, str) else arguments


def _message() -> Object:
    part = {"type": "output_text", "text": JsonText(), "annotations": [], "logprobs": JsonRows()}
    return {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "content": [part]}
