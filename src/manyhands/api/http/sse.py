"""Answers that take their time, as ASGI responses: event streams and single JSON bodies.

Nothing is buffered here: a producer awaits `emit`, which waits for the reader. So a slow reader pauses its own generation
and no other; one that takes nothing is cut (server.py). A client that leaves cancels the producer at once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from manyhands.api.http.encode import HOLE, encode, pieces
from manyhands.api.http.error import error_object, error_response
from manyhands.config import LimitsConfig
from manyhands.errors import ManyhandsError

logger = logging.getLogger(__name__)

Event = bytes | Iterable[bytes]  # whole, or in pieces
# Takes an event, or what makes it when its turn to be written has come; None is nothing to write.
Emit = Callable[[Event | Callable[[], Event | None]], Awaitable[None]]

# No empty line, which ends an event: OpenAI's client and httpx-sse, once they have seen an id, make an empty one of it.
KEEP_ALIVE = b": keep-alive\n"
DONE = b"data: [DONE]\n\n"
_JSON_TYPE = (b"content-type", b"application/json")
_STREAMED = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


@dataclass(frozen=True, slots=True)
class Framing:
    """How a stream is told apart from others: its content type, and what breaks a silence (b"": nothing may)."""

    content_type: bytes
    keep_alive: bytes

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", self.content_type), *_STREAMED]


SSE = Framing(b"text/event-stream; charset=utf-8", KEEP_ALIVE)
# JSON objects, one a line: whatever else came between them would be taken for one.
NDJSON = Framing(b"application/x-ndjson", b"")


def to_event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event. JSON has no line breaks, so it is one line."""
    return b"".join(event_pieces(data, name))


def event_pieces(data: Mapping[str, Any], name: str | None = None) -> Iterator[bytes]:
    """One event that may be large (encode.py)."""
    return pieces(data, f"event: {name}\ndata: ".encode() if name else b"data: ", b"\n\n")


class Template:
    """An event of which one text changes: all else is encoded once. HOLE stands in its place in `data`."""

    HOLE = HOLE

    def __init__(self, data: Mapping[str, Any]) -> None:
        before, after = to_event(data).split(encode(HOLE))
        self._before, self._after = before, after

    def event(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, encode(text), self._after)


def error_event(error: Exception) -> bytes:
    return to_event({"error": error_object(error)})


class _Out:
    """Where one answer goes. `write` waits while its reader does not take what was written; server.py ends one that never does.

    Of that at most the transport's high water mark (64 KiB), one piece and the system's send buffer wait.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    def write(self, data: bytes, headers: list[tuple[bytes, bytes]], *, more: bool = True) -> Awaitable[None]:
        """Write one piece; `headers` go before the first."""
        piece = {"type": "http.response.body", "body": data, "more_body": more}
        return self._send(piece) if self.has_begun else self._begin(headers, piece)

    async def _begin(self, headers: list[tuple[bytes, bytes]], piece: Message) -> None:
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(piece)


class EventStream:
    """Sends what `produce(emit)` emits. Its headers leave with the first event, so that what refuses has its own status.

    `is_running` says whether the route stands: then a silence of keep_alive_s is broken by a comment. An error after the
    first event becomes an event of its own, by `on_error`. Between two pieces of an event the loop does other work.
    """

    def __init__(
        self,
        produce: Callable[[Emit], Awaitable[None]],
        limits: LimitsConfig,
        is_running: Callable[[], bool] = lambda: True,
        on_error: Callable[[Exception], Event] = error_event,
        framing: Framing = SSE,
    ) -> None:
        self._produce, self._limits, self._is_running, self._on_error = produce, limits, is_running, on_error
        self._framing, self._headers = framing, framing.headers
        self._turn = asyncio.Lock()  # held while an event is written
        self._sent_at = 0.0

    async def send_to(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; within a Watched, which ends it when the client leaves."""
        self._clock = asyncio.get_running_loop().time
        out = _Out(send)
        async with asyncio.TaskGroup() as group:
            beat = group.create_task(self._keep_alive(out))
            try:
                await self._produce(partial(self._emit, out))
            except Exception as error:
                if not isinstance(error, ManyhandsError):
                    logger.exception("a stream failed")
                if not out.has_begun:
                    await error_response(error, scope["path"])(scope, receive, send)
                    return
                await self._emit(out, self._on_error(error))
            finally:
                beat.cancel()
            await out.write(b"", self._headers, more=False)

    async def _keep_alive(self, out: _Out) -> None:
        pause_s = self._limits.keep_alive_s
        while True:
            await asyncio.sleep(pause_s)
            is_silent = self._clock() - self._sent_at >= pause_s
            if is_silent and self._framing.keep_alive and self._is_running():
                await self._emit(out, self._framing.keep_alive)

    async def _emit(self, out: _Out, event: Event | Callable[[], Event | None]) -> None:
        async with self._turn:
            made = event() if callable(event) else event
            if made is None:
                return
            if isinstance(made, bytes):
                await out.write(made, self._headers)
            else:
                await _write_all(out, made, self._headers)
        self._sent_at = self._clock()


async def _write_all(out: _Out, parts: Iterable[bytes], headers: list[tuple[bytes, bytes]]) -> None:
    """Write pieces, each in a turn of the event loop of its own."""
    is_first = True
    for piece in parts:
        if not is_first:
            await asyncio.sleep(0)
        is_first = False
        await out.write(piece, headers)


class Single:
    """Sends what `work()` returns as JSON (encode.py), or its error. One of a single piece states its length."""

    def __init__(self, work: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._work = work

    async def send_to(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; within a Watched, which ends it when the client leaves. Until it is taken its caller holds it (app.py)."""
        parts = pieces(await self._work(), note=scope.get("state", {}).get("hold_answer", lambda size: None))
        out, first, second = _Out(send), next(parts), next(parts, None)
        if second is None:
            await out.write(first, [_JSON_TYPE, (b"content-length", b"%d" % len(first))], more=False)
            return
        await _write_all(out, chain((first, second), parts), [_JSON_TYPE])
        await out.write(b"", [_JSON_TYPE], more=False)


class Watched(Response):
    """Awaits `work` and sends the answer that it returns, or its error; a client that leaves cancels both at once.

    `has_begun` is called when the request itself is no longer needed.
    """

    def __init__(self, work: Coroutine[Any, Any, EventStream | Single], has_begun: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._has_begun = work, has_begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._work
            self._has_begun()
            await answer.send_to(scope, receive, send)
        except ManyhandsError as error:
            await error_response(error, scope["path"])(scope, receive, send)


class _Gone(Exception):
    pass


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Await the coroutine `work`; cancel it once the client has left."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise _Gone

    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(watch())
            await work
            watcher.cancel()
    except* _Gone:
        pass
