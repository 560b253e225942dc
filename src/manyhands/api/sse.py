"""Answers that take their time, as ASGI responses: event streams and single JSON bodies.

Nothing is buffered here: a producer awaits `emit`, which waits for the reader. So a slow reader pauses its own generation
and no other; one that takes nothing for write_timeout_s is cut. A client that leaves cancels the producer at once.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from manyhands.api.app import error_object, error_response
from manyhands.config import LimitsConfig
from manyhands.errors import ManyhandsError

logger = logging.getLogger(__name__)

Emit = Callable[[bytes], Awaitable[None]]

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def to_event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event. JSON has no line breaks, so it is one line."""
    text = f"data: {_JSON.encode(data)}\n\n"
    return (f"event: {name}\n{text}" if name else text).encode()


class Template:
    """An event of which one text changes: all else is encoded once. HOLE stands in its place in `data`."""

    HOLE = uuid4().hex  # nobody can say it

    def __init__(self, data: Mapping[str, Any]) -> None:
        before, after = to_event(data).split(_JSON.encode(self.HOLE).encode())
        self._before, self._after = before, after

    def event(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, _JSON.encode(text).encode(), self._after)


def error_event(error: Exception) -> bytes:
    return to_event({"error": error_object(error)})


class EventStream:
    """Sends what `produce(emit)` emits. Its headers leave with the first event, so that what refuses has its own status.

    `is_running` says whether the route stands: then a silence of keep_alive_s is broken by a comment. An error after the
    first event becomes an event of its own, by `on_error`.
    """

    def __init__(
        self,
        produce: Callable[[Emit], Awaitable[None]],
        limits: LimitsConfig,
        is_running: Callable[[], bool] = lambda: True,
        on_error: Callable[[Exception], bytes] = error_event,
    ) -> None:
        self._produce, self._limits, self._is_running, self._on_error = produce, limits, is_running, on_error
        self._has_begun = False
        self._sent_at = 0.0

    async def send_to(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; within a Watched, which ends it when the client leaves."""
        state = scope.get("state", {})
        self._abort, self._flow = state.get("abort"), state.get("flow")
        self._clock = asyncio.get_running_loop().time
        await self._run(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.TaskGroup() as group:
            beat = group.create_task(self._keep_alive(send))
            try:
                await self._produce(partial(self._emit, send))
            except _ReaderStalled:
                return
            except Exception as error:
                if not isinstance(error, ManyhandsError):
                    logger.exception("a stream failed")
                if not self._has_begun:
                    await error_response(error)(scope, receive, send)
                    return
                await self._emit(send, self._on_error(error))
            finally:
                beat.cancel()
            await self._emit(send, b"", more=False)

    async def _keep_alive(self, send: Send) -> None:
        pause_s = self._limits.keep_alive_s
        while True:
            await asyncio.sleep(pause_s)
            is_silent = self._clock() - self._sent_at >= pause_s
            if is_silent and self._is_running():
                try:
                    await self._emit(send, KEEP_ALIVE)
                except _ReaderStalled:
                    return  # the connection is cut, and the producer with it

    async def _emit(self, send: Send, event: bytes, *, more: bool = True) -> None:
        if (
            self._has_begun and self._flow is not None and not self._flow.write_paused
        ):  # nothing to wait for, nor to time
            await send({"type": "http.response.body", "body": event, "more_body": more})
        else:
            await self._emit_in_time(send, event, more)
        self._sent_at = self._clock()

    async def _emit_in_time(self, send: Send, event: bytes, more: bool) -> None:
        try:
            async with asyncio.timeout(self._limits.write_timeout_s):
                if not self._has_begun:
                    self._has_begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                await send({"type": "http.response.body", "body": event, "more_body": more})
        except TimeoutError:
            if self._abort is not None:
                self._abort()
            raise _ReaderStalled from None


class _ReaderStalled(Exception):
    pass


class Single:
    """Sends what `work()` returns as JSON, or its error."""

    def __init__(self, work: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._work = work

    async def send_to(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; within a Watched, which ends it when the client leaves."""
        await JSONResponse(await self._work())(scope, receive, send)


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
            await error_response(error)(scope, receive, send)


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
