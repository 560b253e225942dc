"""The HTTP application around a gateway (server.py runs it).

    Http (server.py) ─ HostGuard (Host, Origin) ─ CORS ─ BodyGuard (key, type, size, time of the body) ─ routes

Who is let in, and how much of what they send is read, is decided before any route runs.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manyhands import __version__
from manyhands.api.access import Access, session_router
from manyhands.api.auth import KeyRing
from manyhands.api.fields import body_schema, definitions
from manyhands.api.gateway import Gateway
from manyhands.api.http.arrival import arrived
from manyhands.api.http.body import unread
from manyhands.api.http.document import with_bodies, with_errors
from manyhands.api.http.error import error_response, routing_error
from manyhands.api.http.hosts import Hosts, UnsupportedMediaType, check_json, single
from manyhands.api.http.page import document, icon_path, page_files, page_router
from manyhands.api.http.reference import render
from manyhands.api.http.route import LARGE_PATHS, PROCESS_BYTES, PROCESS_PATH
from manyhands.api.keys import keys_router
from manyhands.api.preparation.desk import KEEP
from manyhands.api.run import Caller
from manyhands.api.sign_in import REDEEM_PATH, sign_in_router
from manyhands.api.trace import PARENT
from manyhands.config import LimitsConfig
from manyhands.errors import ManyhandsError, PipelineStalled, RateLimited, TooLarge
from manyhands.net.admission import source_of
from manyhands.plain import one_line

logger = logging.getLogger(__name__)

# Nothing behind these shows a request, a node or a key, so they need none; a link is redeemed by who shows it.
OPEN_PATHS = frozenset(
    {"/health", "/ready", "/api/health", "/docs", "/openapi.json", REDEEM_PATH}
)  # and the files of the page
# An address, a name, some layers: what routes that do not generate take.
SMALL_BODY_BYTES = 8 << 10
# Bodies of max_body_bytes that are held at once, while they come and until they are answered; of one key, or of one address of
# those without.
MAX_BODIES = 16
MAX_BODIES_OF_ONE = 8
# What bodies have become once they are prepared, in bytes of memory, while requests wait for their turns and until they are
# answered: ids of prompts above all, 40 each (preparation/desk.py:bytes_of). The same of one caller.
MAX_PREPARED_BYTES = 256 << 20
MAX_PREPARED_BYTES_OF_ONE = 128 << 20


class _Documented(FastAPI):
    """Its OpenAPI document says what the guard and the gateway do."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = with_errors(with_bodies(super().openapi(), body_schema), definitions())
        return self.openapi_schema


def create_app(
    gateway: Gateway,
    *,
    keys: KeyRing | None = None,
    routers: Sequence[APIRouter] = (),
    cors: Sequence[str] = (),
    hosts: Sequence[str] = (),
) -> FastAPI:
    """The application: `routers`, /api/session, /api/keys, /docs and the page at /. Handlers find `app.state.gateway`,
    `request.state.caller` (a Caller) and `request.state.sender` (hosts.py).

    `keys`: once it holds any, everything but OPEN_PATHS needs one (access.py). `cors`: origins that
    browsers may call from; none unless named. `hosts`: names of this gateway beside those of where it listens.
    """
    app = _Documented(
        title="manyhands",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # ours: trace.py, metrics.py, log.py
    )
    access = Access(keys, Hosts(hosts, cors))
    app.state.gateway, app.state.keys, app.state.access = gateway, keys, access
    ours = (session_router(access), sign_in_router(access.links), keys_router(gateway, keys), page_router())
    for router in (*routers, *ours):
        app.router.routes += router.routes  # include_router would look for each request's route twice
    app.add_route("/docs", _docs, include_in_schema=False)
    app.add_exception_handler(ManyhandsError, _on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(Exception, _on_bug)
    opened = OPEN_PATHS.union(page_files())
    app.add_middleware(BodyGuard, limits=gateway.limits, access=access, open_paths=opened)
    if cors:
        allowed = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["retry-after", "x-request-id"]}
        app.add_middleware(CORSMiddleware, allow_origins=list(cors), **allowed)  # type: ignore[arg-type]
    app.add_middleware(HostGuard, hosts=access.hosts)
    return app


async def _docs(request: Request) -> Response:
    """The OpenAPI document for people, rendered once."""
    state = request.app.state
    if not hasattr(state, "reference"):
        state.reference = render(request.app.openapi(), icon_path())
    return document(state.reference)


# -- errors -----------------------------------------------------------------------------------------------------------


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    return error_response(error, request.url.path)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return routing_error(request.method, request.url.path, error.status_code, error.detail, error.headers)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    """What FastAPI found wrong with a parameter or a body, one problem at a time."""
    assert isinstance(error, RequestValidationError)
    return error_response(unread(error.errors()[0], one_line(request.url.path)), request.url.path)


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed: %s", request.method, one_line(request.url.path), type(error).__name__)
    return error_response(error, request.url.path)


# -- before the routes ------------------------------------------------------------------------------------------------


class HostGuard:
    """Refuses what a page of another site made a browser send (hosts.py); gives others their `sender` (and arrival.py)."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope, send = arrived(scope, send)
            state = scope.setdefault("state", {})
            try:
                headers = state["headers"] = single(scope["headers"])
                target = state.get("target", b"/").decode("latin-1")
                state["sender"] = self._hosts.sender(scope["method"], scope["http_version"], headers, target)
            except ManyhandsError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyGuard:
    """Admits clients with a key, and reads the body, within read_timeout_s, before a route runs.

    A body has at most max_body_bytes on LARGE_PATHS. Elsewhere it is parsed on the event loop, and has SMALL_BODY_BYTES, or
    PROCESS_BYTES. All bodies that are held at once have MAX_BODIES times max_body_bytes; those of one caller, with the whole
    answers that wait for its connections to take them, MAX_BODIES_OF_ONE times. What they become has MAX_PREPARED_BYTES.
    """

    def __init__(self, app: ASGIApp, limits: LimitsConfig, access: Access, open_paths: frozenset[str]) -> None:
        self._app, self._limits, self._access, self._open_paths = app, limits, access, open_paths
        self.held_bytes = 0
        self.held_of = Counter[str]()  # by caller, of those who have any
        self.prepared_of = Counter[str]()  # the same of what is prepared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            state = scope["state"]
            headers = state["headers"]
            PARENT.set(headers.get("traceparent"))
            is_open = scope["path"] in self._open_paths
            state["caller"] = await self._access.caller(scope["method"], headers, state["sender"], is_open=is_open)
            if _is_untyped_json(scope):
                others = [header for header in scope["headers"] if header[0] != b"content-type"]
                scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
        except ManyhandsError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        held = _Held(self, _who(state["caller"], scope))
        state["release_body"], state["hold_answer"] = held.release_body, held.wait
        KEEP.set(held.keep)
        state["check_room"] = partial(self._check_room, held)
        try:
            body = await self._read(headers, receive, held, self._limit(scope["path"]))
        except ManyhandsError as error:
            held.release()
            await error_response(error, scope["path"])(scope, receive, send)
            return
        try:
            if body is not None:
                await self._app(scope, _replay(body, receive), send)
        finally:
            held.release()

    def _limit(self, path: str) -> int:
        limit = self._limits.max_body_bytes
        if path in LARGE_PATHS:
            return limit
        return min(limit, PROCESS_BYTES if path == PROCESS_PATH else SMALL_BODY_BYTES)

    async def _read(self, headers: Mapping[str, str], receive: Receive, held: "_Held", limit: int) -> bytes | None:
        """The body, counted in `held` as it comes; None if the client left. Raises TooLarge before it is read where its length
        says so, RateLimited if too much is held for others."""
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise TooLarge(f"the body has {length} bytes; at most {limit} are read: send less")
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self._limits.read_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    held.take(len(parts[-1]))
                    if held.size > limit:
                        raise TooLarge(f"the body has more than {limit} bytes, no more are read: send less")
                    self._check_room(held)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise _SlowBody(f"the body did not arrive within {self._limits.read_timeout_s:g} s") from None

    def _check_room(self, held: "_Held") -> None:
        """Raise RateLimited if too much is held, of its caller or of all."""
        most, own = self._limits.max_body_bytes, self.held_of[held.who]
        if own > MAX_BODIES_OF_ONE * most:
            said = f"bodies and answers of {own} bytes are held for this caller now"
            raise RateLimited(f"{said}: take the answers, or try again later", 5.0)
        if self.held_bytes > MAX_BODIES * most:
            raise RateLimited(f"bodies of {self.held_bytes} bytes are held now: try again later", 5.0)

    def check_prepared(self, who: str, size: int) -> None:
        """Raise RateLimited if too much is prepared, of its caller or of all; TooLarge for a request that is never taken."""
        own, held = self.prepared_of[who], self.prepared_of.total()
        if size > MAX_PREPARED_BYTES_OF_ONE:
            said = f"this request takes {size} bytes of memory; at most {MAX_PREPARED_BYTES_OF_ONE} are given to one"
            raise TooLarge(f"{said}: send fewer or shorter prompts at once")
        if own > MAX_PREPARED_BYTES_OF_ONE:
            said = f"requests of {own} bytes wait or run for this caller now, of {MAX_PREPARED_BYTES_OF_ONE}"
            raise RateLimited(f"{said}: try again later", 5.0)
        if held > MAX_PREPARED_BYTES:
            said = f"requests of {held} bytes wait or run now, of {MAX_PREPARED_BYTES}"
            raise RateLimited(f"{said}: try again later", 5.0)


def _is_untyped_json(scope: Scope) -> bool:
    """As check_json; what no route takes is refused by its path and not by its type."""
    state = scope["state"]
    try:
        return check_json(state["headers"], scope["path"], state["sender"])
    except UnsupportedMediaType:
        if any(route.matches(scope)[0] is Match.FULL for route in scope["app"].router.routes):
            raise
        return False


def _who(caller: Caller, scope: Scope) -> str:
    """A caller by its key, else by where it is."""
    host = scope["client"][0] if scope.get("client") else ""
    return source_of(host) if caller.name is None else f"key {caller.name}"


class _Held:
    """What one request holds of what the guard counts, until it is released. `who`: by whom it was sent; `size` is the body's,
    `waiting` the answer's, `prepared` that of what the body has become."""

    def __init__(self, guard: BodyGuard, who: str) -> None:
        self._guard, self.who, self.size, self.waiting, self.prepared = guard, who, 0, 0, 0

    def take(self, size: int) -> None:
        self.size += size
        self._guard.held_bytes += size
        self._guard.held_of[self.who] += size

    def wait(self, size: int) -> None:
        """So many bytes of an answer wait to be taken."""
        self.waiting += size
        self._guard.held_of[self.who] += size

    def keep(self, size: int) -> None:
        """The body has become so many bytes. Raises RateLimited and TooLarge."""
        self.prepared += size
        self._guard.prepared_of[self.who] += size
        self._guard.check_prepared(self.who, size)

    def release(self) -> None:
        """It is answered, or refused."""
        self.release_body()
        self._guard.prepared_of[self.who] -= self.prepared
        self.prepared = 0
        self._guard.prepared_of += Counter()

    def release_body(self) -> None:
        """The body is no longer needed, and what there is of an answer has been taken. Harmless when repeated."""
        self._guard.held_bytes -= self.size
        self._guard.held_of[self.who] -= self.size + self.waiting
        self.size = self.waiting = 0
        self._guard.held_of += Counter()  # forgets those who have none


class _SlowBody(PipelineStalled):
    code = "request_timeout"
    http_status = 408


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` as it was before the body was read."""
    kept = [body]  # given away, not kept for the minutes that the answer may take

    async def again() -> Message:
        if not kept:
            return await receive()
        return {"type": "http.request", "body": kept.pop(), "more_body": False}

    return again
