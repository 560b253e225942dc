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

from manyhands.api.auth import KeyRing, check_exposure
from manyhands.api.gateway import Gateway
from manyhands.api.http.connection import Http, until_closed
from manyhands.api.http.error import error_response
from manyhands.aside import aside
from manyhands.core import NodeAddr
from manyhands.errors import BadRequest, Draining, NoAddress
from manyhands.net.admission import Pending, PendingLimits
from manyhands.net.listener import RESERVED_DESCRIPTORS, descriptor_limit

STOP_TIMEOUT_S = 2
CUT_S = 1  # that refused and cut requests have to end, before uvicorn waits no longer
KEEP_ALIVE_S = 75  # an idle connection
# What the system may buffer for one reader; more would only let a reader that has stopped be written for longer.
SEND_BUFFER_BYTES = 64 << 10


class _Server(uvicorn.Server):
    """Tells when it listens, ends when told, and leaves signals to the command that runs us."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()
        self._told_to_end = asyncio.Event()
        self._grace_s = float(STOP_TIMEOUT_S)

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

    def end_now(self) -> None:
        """As `end`, or after it: refuse and cut without delay."""
        self._grace_s = 0.0
        self.end()
        self._cut()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        late = asyncio.get_running_loop().call_later(self._grace_s, self._cut)
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
        if scope["http_version"] == "1.0":
            send = until_closed(send.__self__)  # type: ignore[attr-defined]
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
    """Serve `app` while the block runs; yields where (port 0: any). Streams end STOP_TIMEOUT_S after it at the latest, and
    at once where it is cancelled, in the block or behind it.

    Raises BadRequest if the address is taken or unknown, or wider than this machine while no key is needed.
    """
    gateway: Gateway = app.state.gateway
    keys: KeyRing | None = app.state.keys
    await aside(check_exposure, host, keys, insecure=insecure)
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
        except asyncio.CancelledError:
            server.end_now()
            raise
        finally:
            server.end()
            try:
                await _ended(task, server)
            finally:
                watchdog.cancel()
                for part in gateway.parts:
                    await part.close()
    if failure is not None:
        raise failure


async def _ended(task: "asyncio.Task[None]", server: _Server) -> None:
    """Wait for `server` to end; where this is cancelled, have it end now."""
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        server.end_now()
        await asyncio.wait([task])
        raise


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((host, port), family=family, backlog=2048)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit both
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio leaves it off: the socket's proto is 0
        return bound
    except (OSError, OverflowError, UnicodeError) as error:
        kind = NoAddress if isinstance(error, OSError) else BadRequest
        raise kind(f"cannot listen at {host}:{port} ({error}): choose another --api HOST:PORT") from error
