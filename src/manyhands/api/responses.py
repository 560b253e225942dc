"""OpenAI's Responses API over the gateway: typed events, function tools, thoughts as reasoning items. Keeps nothing.

response.created ─ in_progress ─ (output_item.added ─ ... deltas ... ─ done)* ─ completed | incomplete | failed
"""

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from manyhands.api.app import error_object
from manyhands.api.choice import Choice, Delta, Plan, Voices, plan_chat
from manyhands.api.conversation import Conversation, call_of, format_of, functions_of, message_of, text_of
from manyhands.api.fields import parse
from manyhands.api.forms import extension
from manyhands.api.gateway import Ask, Gateway
from manyhands.api.logprobs import Spelling, token_logprobs
from manyhands.api.openai import caller_of, describe
from manyhands.api.schema import BadField
from manyhands.api.sse import Emit, EventStream, Single, to_event
from manyhands.text.tools import CallArguments, CallStart, Content, Piece

Object = dict[str, Any]
_LOGPROBS = "message.output_text.logprobs"


def responses_router(gateway: Gateway, voices: Voices | None = None) -> APIRouter:
    """/v1/responses."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    voices = voices or Voices(gateway)

    async def responses(request: Request) -> Response:
        given = parse("/v1/responses", await request.body())
        caller_of(request).check_model(given["model"])
        voice = voices.find(given["model"])
        logprobs = _logprobs_wanted(given)
        plan = await plan_chat(
            voice,
            _conversation(given),
            given,
            wanted=given.get("max_output_tokens"),
            default=gateway.limits.default_max_tokens,
            logprobs=logprobs,
        )
        voice.origin.request_ids(plan.prompt, plan.params)
        ask, choice = await plan.choose(given["model"], "responses", caller_of(request), 0)
        spelling = Spelling(voice.grammars) if logprobs is not None else None
        if spelling is not None:
            spelling.load()
        answer = _Answer(given, plan, choice, spelling)
        if not given.get("stream", False):
            if "stream_options" in given:
                raise BadField("stream_options is for stream: true", "stream_options")
            return Single(lambda: _whole(answer, gateway, ask))
        return EventStream(
            lambda emit: _stream(answer, gateway, ask, emit),
            gateway.limits,
            is_running=lambda: choice.has_route,
            on_error=answer.failed,
        )

    describe(router, "/responses", responses, "Answer an input; nothing is kept.")
    return router


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

    given: Mapping[str, Any]
    plan: Plan
    choice: Choice
    spelling: Spelling | None
    id: str = field(default_factory=lambda: f"resp_{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    output: list[Object] = field(default_factory=list)
    _number: int = 0
    _is_open: bool = False  # the last item still grows
    _logprobs: list[Object] = field(default_factory=list)  # of the text not told yet

    @property
    def status(self) -> str:
        return "incomplete" if self.choice.finish_reason == "length" else "completed"

    def begin(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self.response("in_progress"))
        yield self._event("response.in_progress", response=self.response("in_progress"))

    def events(self, delta: Delta) -> Iterator[bytes]:
        """What one delta changes."""
        if delta.token is not None and self.spelling is not None:
            self._logprobs.append(token_logprobs(self.spelling, delta.token))
        if delta.reasoning:
            yield from self._grow_thought(delta.reasoning)
        for piece in delta.pieces:
            yield from self._grow(piece)

    def end(self) -> Iterator[bytes]:
        """Close the last item, and say how it ended."""
        yield from self._close(self.status)
        if not self.output:
            yield from self._open(_message())
            yield from self._close(self.status)
        yield self._event(f"response.{self.status}", response=self.response(self.status))

    def failed(self, error: Exception) -> bytes:
        """The event of an error in the middle of a stream."""
        said = error_object(error)
        failed = {**self.response("failed"), "error": {"code": said["code"], "message": said["message"]}}
        return self._event("response.failed", response=failed)

    def _grow(self, piece: Piece) -> Iterator[bytes]:
        match piece:
            case Content(text):
                if not self._has_open("message"):
                    yield from self._close("completed")
                    yield from self._open(_message())
                part = self.output[-1]["content"][0]
                logprobs, self._logprobs = self._logprobs, []
                part["text"] += text
                part["logprobs"] += logprobs
                yield self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)
            case CallStart(index, name):
                yield from self._close("completed")
                call = {"type": "function_call", "call_id": self.choice.calls[index]["id"], "name": name}
                yield from self._open({"id": f"fc_{uuid4().hex}", **call, "arguments": ""})
            case CallArguments(_, text):
                self.output[-1]["arguments"] += text
                yield self._item_event("response.function_call_arguments.delta", delta=text)

    def _grow_thought(self, text: str) -> Iterator[bytes]:
        if not self._has_open("reasoning"):
            yield from self._close("completed")
            part = {"type": "reasoning_text", "text": ""}
            yield from self._open({"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": [], "content": [part]})
        self.output[-1]["content"][0]["text"] += text
        yield self._part_event("response.reasoning_text.delta", delta=text)

    def _has_open(self, kind: str) -> bool:
        return self._is_open and self.output[-1]["type"] == kind

    def _open(self, item: Object) -> Iterator[bytes]:
        item["status"] = "in_progress"
        self.output.append(item)
        self._is_open = True
        shown = {**item, "content": []} if "content" in item else item
        yield self._event("response.output_item.added", output_index=len(self.output) - 1, item=shown)
        if "content" in item:
            yield self._part_event("response.content_part.added", part=item["content"][0])

    def _close(self, status: str) -> Iterator[bytes]:
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
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **said)
        if "content" in item:
            yield self._part_event("response.content_part.done", part=item["content"][0])
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        index = len(self.output) - 1
        return self._event(kind, item_id=self.output[-1]["id"], output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return to_event({"type": kind, "sequence_number": number, **fields}, kind)

    def response(self, status: str) -> Object:
        """The response object as it stands."""
        given = self.given
        is_over = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "model": given["model"],
            "output": list(self.output),
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": {"effort": given.get("reasoning", {}).get("effort"), "summary": None},
            "store": False,
            "temperature": self.plan.params.temperature,
            "text": {"format": {"type": "text"}, **given.get("text", {})},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [{"strict": False, "parameters": None, **tool} for tool in given.get("tools", ())],
            "top_p": self.plan.params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "metadata": {},
            "manyhands": extension(self.choice) if is_over else None,
        }

    def _usage(self) -> Object:
        asked, made = len(self.plan.prompt), len(self.choice.tokens)
        return {
            "input_tokens": asked,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": self.choice.reasoning_tokens},
            "total_tokens": asked + made,
        }


def _message() -> Object:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "content": [part]}


# -- from fields to a conversation ------------------------------------------------------------------------------------


def _conversation(given: Mapping[str, Any]) -> Conversation:
    tools = given.get("tools", ())
    functions, word = functions_of(tools, given.get("tool_choice"))
    if not tools and {"tool_choice", "parallel_tool_calls"} & given.keys() and word != "none":
        raise BadField("tool_choice and parallel_tool_calls are for requests with tools", "tool_choice")
    said: list[Object] = []
    if "instructions" in given:
        said.append({"role": "system", "content": given["instructions"]})
    wanted = given["input"]
    said += [{"role": "user", "content": wanted}] if isinstance(wanted, str) else _messages(wanted)
    shown = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in tools]
    form = format_of(given.get("text", {}).get("format"))
    effort = given.get("reasoning", {}).get("effort")
    return Conversation(said, functions, shown, word, given.get("parallel_tool_calls", True), form, effort)


def _messages(items: list[Mapping[str, Any]]) -> list[Object]:
    """Messages of input items: calls join the assistant's turn, their outputs are the tool's."""
    out: list[Object] = []
    for item in items:
        match item.get("type", "message"):
            case "message":
                out.append(message_of(item))
            case "function_call":
                if not out or out[-1]["role"] != "assistant":
                    out.append({"role": "assistant", "content": ""})
                call = call_of(item["call_id"], item["name"], item["arguments"])
                out[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                out.append({"role": "tool", "tool_call_id": item["call_id"], "content": text_of(item["output"])})
    return out


def _logprobs_wanted(given: Mapping[str, Any]) -> int | None:
    is_on = _LOGPROBS in given.get("include", ())
    if "top_logprobs" in given and not is_on:
        raise BadField(f'top_logprobs is for include: ["{_LOGPROBS}"]', "top_logprobs")
    return given.get("top_logprobs", 0) if is_on else None
