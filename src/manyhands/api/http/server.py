"""The HTTP server that runs an application (app.py) in our own event loop.

bytes ─ Http (slow headers are cut, pending connections are bounded) ─ application
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from manyhands.api.auth import KeyRing, check_exposure
from manyhands.api.gateway import Gateway
from manyhands.api.http.error import error_response
from manyhands.core import NodeAddr
from manyhands.errors import BadRequest, Draining
from manyhands.net.admission import Pending, PendingLimits, source_of
from manyhands.net.listener import RESERVED_DESCRIPTORS, descriptor_limit

STOP_TIMEOUT_S = 2
CUT_S = 1  # that refused and cut requests have to end, before uvicorn waits no longer
MAX_HEADER_BYTES = 64 << 10
# What one read may cost in calls of the parser: a read of 256 KiB holds 13,000 header lines, 43,000 parts of a body of one byte
# each, or 9,000 requests. Browsers send some 20 lines.
MAX_HEADER_LINES = 128
MAX_TARGET_BYTES = 8 << 10
MAX_PARTS, PART_BYTES = 4096, 64
MAX_PIPELINED = 16
KEEP_ALIVE_S = 75  # an idle connection
# Of a body that is refused: so much of it may still come before the connection is closed, and for so long.
DRAIN_BYTES = 256 << 10
DRAIN_S = 2.0
UNREAD_BYTES = 64 << 10  # as much as a transport of asyncio holds before it asks to write no more
# What the system may buffer for one reader; more would only let a reader that has stopped be written for longer.
SEND_BUFFER_BYTES = 64 << 10


class Http(HttpToolsProtocol):
    """Cuts a connection whose next request header does not come within read_timeout_s of its first byte (slowloris).

    Of a body whose answer is complete (a refusal) DRAIN_BYTES more are read, for DRAIN_S, and thrown away; where that is not
    all, the connection ends. One that ends while its reader does not take what was written is cut after read_timeout_s.

    Connections whose request is not read whole, idle ones among them, are `pending`: bounded in all and of one address, the
    oldest of the address with the most gives way to a new one (net/admission.py).

    A header has at most MAX_HEADER_BYTES; so has anything else that the parser keeps to itself (a trailer), of which it may
    take one read more. It has MAX_HEADER_LINES lines at most, trailers among them, and a target of MAX_TARGET_BYTES; a body
    comes in MAX_PARTS parts at most, and one more for each PART_BYTES; MAX_PIPELINED requests wait for those before them. What
    exceeds any of these is answered by 400, and the connection ends. Cookies are dropped: nothing here reads them.

    A reader takes what was written, but for what the transport holds anyway, at UNREAD_BYTES in write_timeout_s, or the
    connection ends: whatever the answer is, and whether it is complete.
    """

    read_timeout_s = write_timeout_s = 30.0
    pending: Pending["Http"]
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None  # ends the connection of a reader that takes nothing
    _header_bytes = _num_lines = 0
    _body_bytes = _num_parts = 0
    _kept_bytes = 0  # since the parser last told of anything
    _is_whole = True  # the last request has come to its end
    _drained = 0  # bytes of its body after its answer
    _is_ending = False
    _refusal = ""  # why the parser was made to give up

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._source = source_of(self.client[0] if self.client else "")
        self._cycles: list[RequestResponseCycle] = []  # the last of them, `cycle`, may wait for the others (pipelining)
        self._arm(self.read_timeout_s)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        if not self._is_busy and self._deadline is None:
            self._arm(self.read_timeout_s)
        self._kept_bytes += len(data)
        super().data_received(data)
        if self._kept_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"at most {MAX_HEADER_BYTES} bytes in a header are taken: send less")
        if self._is_busy:
            self._disarm()
        self._end_in_time()

    def pause_writing(self) -> None:
        """More waits for the reader than the transport is to hold: uvicorn writes no more until it has been taken."""
        super().pause_writing()
        wait_s = self.write_timeout_s * max(1.0, self.transport.get_write_buffer_size() / UNREAD_BYTES)
        self._unread = self.loop.call_later(wait_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.resume_writing()
        self.pending.leave(self)
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._header_bytes = self._num_lines = self._body_bytes = self._num_parts = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._check(len(self.url), MAX_TARGET_BYTES, "bytes in the target of a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        self._num_lines += 1
        self._check(self._header_bytes, MAX_HEADER_BYTES, "bytes in a header")
        self._check(self._num_lines, MAX_HEADER_LINES, "lines in a header")
        if name.lower() != b"cookie":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check(len(self.pipeline) + 1, MAX_PIPELINED, "requests that wait for the answer to one before")
        self._kept_bytes = self._drained = 0
        self._is_whole = False
        self.scope["state"]["target"] = self.url
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        super().on_headers_complete()
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._kept_bytes = 0
        self._body_bytes += len(body)
        self._num_parts += 1
        self._check(self._num_parts, MAX_PARTS + self._body_bytes // PART_BYTES, "parts of a body, by its length")
        super().on_body(body)
        if not self._is_busy:
            self._drained += len(body)
            if self._drained > DRAIN_BYTES:
                self.transport.close()

    def on_message_complete(self) -> None:
        self._kept_bytes = 0
        self._is_whole = True
        super().on_message_complete()
        if self._is_busy:
            self.pending.leave(self)
        elif not self.transport.is_closing():  # its answer came first
            self._disarm()
            self._await_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_busy:
            return
        if self._is_whole and not self.transport.is_closing():
            self._await_request()
        elif not self._is_whole:
            self._arm(DRAIN_S)
        self._end_in_time()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_in_time()

    def _end_in_time(self) -> None:
        """Closing waits for what is to be written, and that for its reader."""
        if self.transport.is_closing() and not self._is_ending:
            self._is_ending = True
            self._arm(self.read_timeout_s)

    def _await_request(self) -> None:
        """This connection has to send a request now, or it is idle: one of those that may have to go for others."""
        self.pending.leave(self)
        evicted = self.pending.enter(self, self._source, self.loop.time())
        if evicted is not None:
            evicted.transport.abort()

    def _should_upgrade(self) -> bool:
        """Never; uvicorn takes the header apart to find out."""
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """The request has its answer; the parser reads nothing after it, so the connection ends with it."""
        if self._is_busy:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def cut(self) -> None:
        """Take no more requests, and drop the connection if part of an answer is sent: it must not look like the whole."""
        self.pipeline.clear()
        begun = any(cycle.response_started and not cycle.response_complete for cycle in self._cycles)
        for cycle in self._cycles:
            cycle.keep_alive, cycle.disconnected = False, cycle.disconnected or begun
        if begun:
            self.transport.abort()

    def _check(self, count: int, most: int, of_what: str) -> None:
        """Have the parser give up beyond `most`, and say so."""
        if count > most:
            self._refusal = f"at most {most} {of_what} are taken: send less"
            raise ValueError(self._refusal)

    def send_400_response(self, msg: str) -> None:
        """`msg`: what the parser says of bytes that mean nothing."""
        super().send_400_response(self._refusal or msg)

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """Tells when it listens, ends when told, and leaves signals to the command that runs us."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()
        self._told_to_end = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    async def main_loop(self) -> None:
        """Until `end`, renew the Date header once a second. uvicorn's own looks ten times a second whether it shall end."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told_to_end.wait(), 1)

    def end(self) -> None:
        """Have `serve` take no more connections and return when those there are have ended, in STOP_TIMEOUT_S or little more.

        Requests without an answer are refused then (`_until_cut`), answers that have begun are cut.
        """
        self.should_exit = True
        self._told_to_end.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        late = asyncio.get_running_loop().call_later(STOP_TIMEOUT_S, self._cut)
        await super().shutdown(sockets)
        late.cancel()

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Http)
            connection.cut()
        for task in self.server_state.tasks:
            task.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _until_cut(app: ASGIApp) -> ASGIApp:
    """`app`, which answers a request that the server cancels; where its answer has begun, the connection is gone by then."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            refusal = Draining("this gateway is stopping: ask again, or ask another one")
            await error_response(refusal, scope["path"])(scope, receive, send)

    return run


def pending_requests(max_descriptors: int) -> PendingLimits:
    """Bounds on connections whose request has not come whole, where the process may have so many descriptors."""
    total = max(64, min(2048, max_descriptors - RESERVED_DESCRIPTORS))
    return PendingLimits(total, total // 2, KEEP_ALIVE_S)


@asynccontextmanager
async def serving(app: FastAPI, host: str, port: int, *, insecure: bool = False) -> AsyncIterator[NodeAddr]:
    """Serve `app` while the block runs; yields where (port 0: any). Streams end STOP_TIMEOUT_S after it at the latest.

    Raises BadRequest if the address is taken or unknown, or wider than this machine while no key is needed.
    """
    gateway: Gateway = app.state.gateway
    keys: KeyRing | None = app.state.keys
    check_exposure(host, keys, insecure=insecure)
    app.state.access.listen(host, insecure=insecure)
    bound = _bind(host, port)
    waiting = Pending[Http](pending_requests(descriptor_limit()))
    limits = gateway.limits
    timeouts = {"read_timeout_s": limits.read_timeout_s, "write_timeout_s": limits.write_timeout_s}
    protocol = type("Http", (Http,), {**timeouts, "pending": waiting})
    config = uvicorn.Config(
        _until_cut(app),
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # what means nothing is answered and not told: any caller could fill a log with it
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_TIMEOUT_S + CUT_S,
    )
    server = _Server(config)
    await asyncio.to_thread(app.openapi)  # FastAPI keeps it, and would make it on the event loop
    failure: Exception | None = None
    for part in gateway.parts:
        await part.open()
    async with asyncio.TaskGroup() as group:
        watchdog = group.create_task(gateway.watchdog.run(lambda: bool(server.server_state.connections)))
        task = group.create_task(server.serve(sockets=[bound]))
        await server.is_listening.wait()
        try:
            yield NodeAddr(*bound.getsockname()[:2])
        except Exception as error:  # raised below, as it is and not in a group
            failure = error
        finally:
            server.end()
            await asyncio.wait([task])
            watchdog.cancel()
            for part in gateway.parts:
                await part.close()
    if failure is not None:
        raise failure


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((host, port), family=family, backlog=2048)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit both
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio leaves it off: the socket's proto is 0
        return bound
    except (OSError, OverflowError, UnicodeError) as error:
        raise BadRequest(f"cannot listen at {host}:{port} ({error}): choose another --api HOST:PORT") from error
