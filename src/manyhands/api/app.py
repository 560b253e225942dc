"""The HTTP application around a gateway, and the server that runs it in our own event loop.

    bytes ─ Http (slow headers are cut) ─ Front (Host, Origin) ─ CORS ─ Guard (key, type, size, time of the body) ─ routes

Who is let in, and how much of what they send is read, is decided before any route runs.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from manyhands import __version__
from manyhands.api.access import Access, session_router
from manyhands.api.auth import KeyRing
from manyhands.api.document import with_errors
from manyhands.api.fields import definitions
from manyhands.api.gateway import Gateway
from manyhands.api.hosts import Hosts, check_json, is_loopback, single
from manyhands.api.route import LARGE_PATHS
from manyhands.api.trace import PARENT
from manyhands.config import LimitsConfig
from manyhands.core import NodeAddr
from manyhands.errors import BadRequest, ManyhandsError, PipelineStalled, RateLimited, TooLarge
from manyhands.net.door import Pending, PendingLimits, source_of
from manyhands.net.listener import RESERVED_DESCRIPTORS, descriptor_limit
from manyhands.plain import one_line

logger = logging.getLogger(__name__)

# Nothing behind these tells of a request, a node or a key, so they need none.
OPEN_PATHS = frozenset({"/health", "/ready", "/api/health", "/docs", "/openapi.json"})
STOP_TIMEOUT_S = 2
MAX_MESSAGE_CHARS = 2000  # of an error: it may quote what was sent
# An address, a name, some layers: what routes that do not generate take.
SMALL_BODY_BYTES = 8 << 10
# Bodies of max_body_bytes that are held at once, while they come and until they are answered.
MAX_BODIES = 16
MAX_HEADER_BYTES = 64 << 10
KEEP_ALIVE_S = 75  # an idle connection
# What the system may buffer for one reader; more would only let a reader that has stopped be written for longer.
SEND_BUFFER_BYTES = 64 << 10


class _Documented(FastAPI):
    """Its OpenAPI document says what the guard and the gateway do."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = with_errors(super().openapi(), definitions())
        return self.openapi_schema


def create_app(
    gateway: Gateway,
    *,
    keys: KeyRing | None = None,
    routers: Sequence[APIRouter] = (),
    cors: Sequence[str] = (),
    hosts: Sequence[str] = (),
    open_paths: Sequence[str] = (),
) -> FastAPI:
    """The application: `routers`, /api/session and /docs. Handlers find `app.state.gateway`, `request.state.caller` (a
    Caller) and `request.state.sender` (hosts.py).

    `keys`: once it holds any, everything but OPEN_PATHS and `open_paths` needs one (access.py). `cors`: origins that
    browsers may call from; none unless named. `hosts`: names of this gateway beside those of where it listens.
    """
    app = _Documented(title="manyhands", version=__version__, redoc_url=None, separate_input_output_schemas=False)
    access = Access(keys, Hosts(hosts, cors))
    app.state.gateway, app.state.keys, app.state.access = gateway, keys, access
    for router in (*routers, session_router(access)):
        app.include_router(router)
    app.add_exception_handler(ManyhandsError, _on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(Exception, _on_bug)
    opened = OPEN_PATHS | set(open_paths)
    app.add_middleware(Guard, limits=gateway.limits, access=access, open_paths=opened)
    if cors:
        allowed = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["retry-after"]}
        app.add_middleware(CORSMiddleware, allow_origins=list(cors), **allowed)  # type: ignore[arg-type]
    app.add_middleware(Front, hosts=access.hosts)
    return app


# -- errors -----------------------------------------------------------------------------------------------------------

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_object(error: Exception) -> dict[str, Any]:
    """What OpenAI's clients understand; `code` is ours (errors.py). A bug tells nothing of itself."""
    is_ours = isinstance(error, ManyhandsError)
    status = error.http_status if isinstance(error, ManyhandsError) else 500
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = one_line(error, MAX_MESSAGE_CHARS) if is_ours else "this is a bug in the gateway: see its log"
    code = error.code if isinstance(error, ManyhandsError) else ManyhandsError.code
    return {"message": message, "type": kind, "param": getattr(error, "param", None), "code": code}


def error_response(error: Exception) -> JSONResponse:
    """`error` as HTTP: its status, Retry-After where trying again helps."""
    status = error.http_status if isinstance(error, ManyhandsError) else 500
    headers = {}
    if isinstance(error, RateLimited):
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    elif status == 503:
        headers["retry-after"] = "1"
    elif status == 401:
        headers["www-authenticate"] = "Bearer"
    elif status in (408, 413, 415, 421):  # the rest of the body is not read
        headers["connection"] = "close"
    return JSONResponse({"error": error_object(error)}, status, headers)


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    return error_response(error)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    """What the router itself says: no such path, no such method."""
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    message = f"{request.method} {one_line(request.url.path)}: {error.detail}; /docs lists what there is"
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": body}, error.status_code, error.headers)


async def _on_invalid(_: Request, error: Exception) -> JSONResponse:
    """What FastAPI found wrong with a parameter or a body, one problem at a time."""
    assert isinstance(error, RequestValidationError)
    first: Mapping[str, Any] = error.errors()[0]
    where = one_line(".".join(str(part) for part in first["loc"][1:]) or "the body")
    body = {
        "message": one_line(f"{where}: {first['msg']}", MAX_MESSAGE_CHARS),
        "type": "invalid_request_error",
        "param": where,
        "code": "bad_request",
    }
    return JSONResponse({"error": body}, 400)


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed: %s", request.method, one_line(request.url.path), type(error).__name__)
    return error_response(error)


# -- before the routes ------------------------------------------------------------------------------------------------


class Front:
    """Refuses what a page of another site made a browser send (hosts.py); everything else gets its `sender`."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            state = scope.setdefault("state", {})
            try:
                headers = single(scope["headers"])
                target = state.get("target", b"/").decode("latin-1")
                state["sender"] = self._hosts.sender(scope["method"], scope["http_version"], headers, target)
            except ManyhandsError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Guard:
    """Lets in who has a key, and reads the body, within read_timeout_s, before a route runs.

    A body has at most max_body_bytes on LARGE_PATHS, SMALL_BODY_BYTES elsewhere: those are parsed on the event loop. All
    bodies that are held at once have MAX_BODIES times max_body_bytes.
    """

    def __init__(self, app: ASGIApp, limits: LimitsConfig, access: Access, open_paths: frozenset[str]) -> None:
        self._app, self._limits, self._access, self._open_paths = app, limits, access, open_paths
        self.held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers, state = single(scope["headers"]), scope["state"]
            PARENT.set(headers.get("traceparent"))
            is_open = scope["path"] in self._open_paths
            state["caller"] = self._access.caller(scope["method"], headers, state["sender"], is_open=is_open)
            check_json(headers)
        except ManyhandsError as error:
            await error_response(error)(scope, receive, send)
            return
        held = _Held(self)
        state["release_body"] = held.release
        try:
            body = await self._read(headers, receive, held, self._limit(scope["path"]))
        except ManyhandsError as error:
            held.release()
            await error_response(error)(scope, receive, send)
            return
        try:
            if body is not None:
                await self._app(scope, _replay(body, receive), send)
        finally:
            held.release()

    def _limit(self, path: str) -> int:
        limit = self._limits.max_body_bytes
        return limit if path in LARGE_PATHS else min(limit, SMALL_BODY_BYTES)

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
                    if self.held_bytes > MAX_BODIES * self._limits.max_body_bytes:
                        raise RateLimited(f"bodies of {self.held_bytes} bytes are held now: try again later", 5.0)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise _SlowBody(f"the body did not arrive within {self._limits.read_timeout_s:g} s") from None


class _Held:
    """What one request holds of the guard's `held_bytes`, until it is released."""

    def __init__(self, guard: Guard) -> None:
        self._guard, self.size = guard, 0

    def take(self, size: int) -> None:
        self.size += size
        self._guard.held_bytes += size

    def release(self) -> None:
        """The body is no longer needed. Harmless when repeated."""
        self._guard.held_bytes -= self.size
        self.size = 0


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


# -- the server -------------------------------------------------------------------------------------------------------


class Http(HttpToolsProtocol):
    """Cuts a connection whose next request header does not come within read_timeout_s of its first byte (slowloris).

    Connections whose request is not read whole, idle ones among them, are `pending`: bounded in all and of one address, the
    oldest of the address with the most gives way to a new one (net/door.py).

    A header has at most MAX_HEADER_BYTES; so has anything else that the parser keeps to itself (a trailer), of which it may
    take one read more. `request.state.abort()` ends the connection at once, whatever is still to be written, and while
    `request.state.flow.write_paused` is false, writing waits for nobody.
    """

    read_timeout_s = 30.0
    pending: Pending["Http"]
    _deadline: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _kept_bytes = 0  # since the parser last told of anything

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._cycles: list[RequestResponseCycle] = []  # the last of them, `cycle`, may wait for the others (pipelining)
        self.app_state = {**self.app_state, "abort": transport.abort, "flow": self.flow}
        self._arm()
        self._await_request()

    def data_received(self, data: bytes) -> None:
        if not self._is_busy and self._deadline is None:
            self._arm()
        self._kept_bytes += len(data)
        super().data_received(data)
        if self._kept_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"A header has at most {MAX_HEADER_BYTES} bytes.")
        if self._is_busy:
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.pending.leave(self)
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the header is too large")  # to the parser, which gives up
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._kept_bytes = 0
        self.scope["state"]["target"] = self.url
        if not self._is_busy:
            self._cycles.clear()
        super().on_headers_complete()
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._kept_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._kept_bytes = 0
        self.pending.leave(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_busy and not self.transport.is_closing():
            self._await_request()

    def _await_request(self) -> None:
        """This connection has to send a request now, or it is idle: one of those that may have to go for others."""
        self.pending.leave(self)
        evicted = self.pending.enter(self, source_of(self.client[0] if self.client else ""), self.loop.time())
        if evicted is not None:
            evicted.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """The request has its answer; the parser reads nothing after it, so the connection ends with it."""
        if self._is_busy:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self.read_timeout_s, self.transport.abort)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """Tells when it listens, and leaves signals to the command that runs us."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def pending_requests(max_descriptors: int) -> PendingLimits:
    """Bounds on connections whose request has not come whole, where the process may have so many descriptors."""
    total = max(64, min(2048, max_descriptors - RESERVED_DESCRIPTORS))
    return PendingLimits(total, total // 2, KEEP_ALIVE_S)


@asynccontextmanager
async def serving(app: FastAPI, host: str, port: int, *, insecure: bool = False) -> AsyncIterator[NodeAddr]:
    """Serve `app` while the block runs; yields where (port 0: any). Streams end STOP_TIMEOUT_S after it at the latest.

    Raises BadRequest if the address is taken or unknown, or wider than this machine while nobody needs a key.
    """
    gateway: Gateway = app.state.gateway
    keys: KeyRing | None = app.state.keys
    check_exposure(host, keys, insecure=insecure)
    app.state.access.listen(host, insecure=insecure)
    bound = _bind(host, port)
    waiting = Pending[Http](pending_requests(descriptor_limit()))
    protocol = type("Http", (Http,), {"read_timeout_s": gateway.limits.read_timeout_s, "pending": waiting})
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_TIMEOUT_S,
    )
    server = _Server(config)
    failure: Exception | None = None
    for part in gateway.parts:
        await part.open()
    async with asyncio.TaskGroup() as group:
        watchdog = group.create_task(gateway.watchdog.run(asyncio.get_running_loop().time()))
        task = group.create_task(server.serve(sockets=[bound]))
        await server.is_listening.wait()
        try:
            yield NodeAddr(*bound.getsockname()[:2])
        except Exception as error:  # raised below, as it is and not in a group
            failure = error
        finally:
            server.should_exit = True
            await asyncio.wait([task])
            watchdog.cancel()
            for part in gateway.parts:
                await part.close()
    if failure is not None:
        raise failure


def check_exposure(host: str, keys: KeyRing | None, *, insecure: bool) -> None:
    """Raise BadRequest if others than this machine could come in at `host` and nobody would ask them for a key."""
    if not insecure and not is_loopback(host) and (keys is None or keys.is_empty):
        raise BadRequest(
            f"{host} lets other machines in without a key: make one (manyhands key add NAME) or --insecure"
        )


async def serve(app: FastAPI, host: str, port: int, *, insecure: bool = False) -> None:
    """As `serving`, until cancelled."""
    async with serving(app, host, port, insecure=insecure):
        await asyncio.get_running_loop().create_future()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((host, port), family=family, backlog=2048)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit both
        bound.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        )  # asyncio sees no TCP here (proto 0) and leaves it off
        return bound
    except (OSError, OverflowError, UnicodeError) as error:
        raise BadRequest(f"cannot listen at {host}:{port} ({error}): choose another --api HOST:PORT") from error
