"""TCP + TLS 1.3, both sides authenticated: the default wherever a machine can be dialled. Plain asyncio or uvloop.

A caller that is not a member gets no application byte: admission.py keeps it out of the handshake, the handshake verifies the
peer's chain, and the listener sends after the peer's Hello. Allow and deny lists by NodeId sit on top of membership.

The same handshake also runs inside a tunnel that a relay forwards (`dial_over`, `admit_over`; see tunnel.py): such a link
is authenticated and encrypted from end to end. A member may also ask, by ALPN, for a guest (the relay) instead of a link.
"""

import asyncio
import errno
import functools
import logging
import math
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest, LinkClosed, NoAddress
from manyhands.net.admission import Pending, PendingLimits, Tokens, source_of
from manyhands.net.alpn import AlpnDispatcher, HandshakeBuffer
from manyhands.net.arrivals import Arrivals
from manyhands.net.certificate import client_context, node_id_of, peer_of, server_context
from manyhands.net.handshakes import HandshakesUnderWay
from manyhands.net.incoming import Incoming
from manyhands.net.link import SHUTDOWN_S, FramedLink, Handshake
from manyhands.net.listener import BACKLOG, HELLO_S, Listener, descriptor_limit, pending_limits
from manyhands.net.liveness import MAX_STRETCH_S, stretched_s
from manyhands.net.names import LOOKUPS, connected, reason_of
from manyhands.net.shares import Shares
from manyhands.stalls import Stalls, tick_forever
from manyhands.wire.message import Hello, Lane

logger = logging.getLogger(__name__)

# While callers wait for a turn, a handshake has so long: ten round trips of 100 ms.
CROWDED_S = 1.0
# Callers with a valid token that wait for a turn, and those of one source (admission.py); then the oldest of the source with
# the most is turned away.
MAX_WAITING = 256
MAX_WAITING_PER_SOURCE = 128


@dataclass(frozen=True, slots=True)
class TlsPolicy:
    """Whom to admit, and how much of it. `allow` None: every member; `deny` wins. Both apply to dialling too.

    `max_links` counts links that peers dialled and that are still open (incoming.py bounds those of one node). Of the
    callers whose token is valid (admission.py), `max_handshakes` at a time are in the TLS handshake, each for `handshake_s`
    seconds up to its Hello, or CROWDED_S while others wait; both are stretched (liveness.py) while this node's loop runs late.
    """

    allow: frozenset[NodeId] | None = None
    deny: frozenset[NodeId] = frozenset()
    max_links: int = 256
    max_handshakes: int = 32
    handshake_s: float = 5.0

    def admits(self, node: NodeId) -> bool:
        return node not in self.deny and (self.allow is None or node in self.allow)


# By ALPN name: makes the protocol that takes over the connection of an admitted member that asked for it.
Guests = Mapping[str, Callable[[NodeId], asyncio.Protocol]]


class TlsTransport:
    """A Transport (see transport.Transport) for one node of one swarm.

    `secret` is the swarm secret (32 bytes). Owns its listening sockets and one task for each; aclose ends them.
    """

    def __init__(
        self,
        key: Ed25519PrivateKey,
        secret: bytes,
        hello: Callable[[Lane], Hello],
        policy: TlsPolicy | None = None,
        guests: Guests | None = None,
    ) -> None:
        self.node = node_id_of(key.public_key())
        self._hello = hello
        self._policy = policy or TlsPolicy()
        self._guests = guests or {}
        self.tokens = Tokens(secret, os.urandom)
        self._shares = Shares()
        self._handshakes = HandshakesUnderWay(self._limit_s)
        self._turns = asyncio.Semaphore(self._policy.max_handshakes)
        self._stalls = Stalls(0.0)
        self._waiting = Pending[socket.socket](PendingLimits(MAX_WAITING, MAX_WAITING_PER_SOURCE, math.inf))
        self._turn_of: dict[socket.socket, asyncio.Task[None]] = {}
        self._server_context = server_context(key, secret)
        if self._guests:
            self._server_context.set_alpn_protocols(list(self._guests))
        self._client_context = client_context(key, secret)
        self._listeners: list[asyncio.Task[None]] = []
        self._arrivals = Arrivals[FramedLink]()  # bounded by max_links
        self._incoming = Incoming[FramedLink](self._policy.max_links)

    def __repr__(self) -> str:
        return f"<TlsTransport {self.node[:8]} listeners={len(self._listeners)} incoming={len(self._incoming)}>"

    async def listen(self, addr: NodeAddr) -> NodeAddr:
        listener = await _bind(addr)
        port: int = listener.getsockname()[1]
        task = asyncio.create_task(self._serve(listener), name=f"listen {addr.host}:{port}")
        task.add_done_callback(lambda _: listener.close())  # even if it was cancelled before it began
        task.add_done_callback(self._arrivals.end_with)
        self._listeners.append(task)
        return NodeAddr(addr.host, port, self.node)

    async def accept(self) -> FramedLink:
        return await self._arrivals.take()

    async def dial(self, addr: NodeAddr, lane: Lane) -> FramedLink:
        return await self._dial(addr, lane, lambda link: self._connect(link, addr))

    async def dial_over(self, tunnel: asyncio.Transport, addr: NodeAddr, lane: Lane) -> FramedLink:
        """As dial, inside an open tunnel that leads to `addr`. If it fails, the caller aborts the tunnel."""
        link = await self._dial(addr, lane, lambda link: self._wrap(tunnel, link, is_server=False))
        link.health.path_kind = "relay"
        return link

    async def admit_over(self, tunnel: asyncio.Transport) -> None:
        """Let the peer at the far end of `tunnel` dial this node; its link comes out of accept. Takes `tunnel` over."""

        async def connect(link: FramedLink) -> bool:
            link.health.path_kind = "relay"
            await self._wrap(tunnel, link, is_server=True)
            return True

        try:
            if len(self._handshakes) >= self._policy.max_links or not await self._admit(connect):
                tunnel.abort()
        except BaseException:
            tunnel.abort()
            raise

    async def _dial(self, addr: NodeAddr, lane: Lane, connect: Callable[[FramedLink], Awaitable[None]]) -> FramedLink:
        met: list[NodeId] = []
        link = FramedLink(
            Handshake(self._hello, lambda t: self._identify(t, addr.node, met), time.monotonic, lane, self._shares)
        )
        try:
            await connect(link)
            await link.opened()
        except ssl.SSLError as exc:
            raise LinkClosed(f"{addr} is not a member of this swarm (TLS: {exc.reason})") from exc
        except OSError as exc:
            raise LinkClosed(f"{addr} cannot be reached: {reason_of(exc)}") from exc
        except ValueError as exc:  # a host that no resolver takes, from a peer's record or message
            raise LinkClosed(f"{str(addr)[:80]!r} cannot be dialled: {exc}") from exc
        except LinkClosed as exc:
            raise LinkClosed(f"{addr} refused: {exc}", {(addr.host, addr.port): met[0]} if met else None) from exc
        except BaseException:
            link.abort("dial cancelled")
            raise
        return link

    async def aclose(self) -> None:
        self._arrivals.end()
        for task in self._listeners:
            task.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)
        self._listeners.clear()
        await self._arrivals.aclose()

    async def _connect(self, link: FramedLink, addr: NodeAddr) -> None:
        await asyncio.get_running_loop().create_connection(
            lambda: link,
            sock=await connected(addr.host, addr.port),
            ssl=self._client_context,
            server_hostname=self.tokens.make(),
            ssl_handshake_timeout=self._policy.handshake_s + MAX_STRETCH_S,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )

    def _identify(
        self, transport: asyncio.BaseTransport, expected: NodeId | None, met: list[NodeId] | None = None
    ) -> NodeId:
        """The peer's NodeId, from its verified certificate. Raises LinkClosed if it is not wanted; `met` gets that of another
        than `expected`."""
        peer = peer_of(transport.get_extra_info("ssl_object").getpeercert(binary_form=True))
        if expected is not None and peer != expected:
            if met is not None:
                met.append(peer)
            raise LinkClosed(f"it is node {peer[:16]}, expected {expected[:16]}")
        if not self._policy.admits(peer):
            raise LinkClosed(f"node {peer[:16]} is not admitted by this node's allow and deny lists")
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return peer

    async def _serve(self, listening: socket.socket) -> None:
        """Accept for ever. Runs until cancelled, and owns the handshakes of the callers with a valid token."""
        async with asyncio.TaskGroup() as group:
            self._stalls.resume(asyncio.get_running_loop().time())
            group.create_task(tick_forever(self._stalls))
            limits = pending_limits(descriptor_limit(), min(HELLO_S, self._policy.handshake_s))
            await Listener(listening, self.tokens, lambda connection: self._begin(connection, group), limits).serve()

    def _begin(self, connection: socket.socket, group: asyncio.TaskGroup) -> None:
        """Let a caller wait for its turn, and turn away the one that has to go for it."""
        try:
            source = source_of(str(connection.getpeername()[0]))
        except OSError:  # it is gone
            connection.close()
            return
        evicted = self._waiting.enter(connection, source, asyncio.get_running_loop().time())
        if evicted is not None:
            self._turn_of[evicted].cancel()
            evicted.close()
        task = self._turn_of[connection] = group.create_task(self._take_turn(connection))
        task.add_done_callback(lambda _: self._turn_of.pop(connection))

    async def _take_turn(self, connection: socket.socket) -> None:
        """Handshake when it is this caller's turn; callers that wait shorten the time of those under way."""
        try:
            if self._turns.locked():
                self._handshakes.look()
            await self._turns.acquire()
        except BaseException:
            connection.close()
            raise
        finally:
            self._waiting.leave(connection)
        try:
            await self._admit(functools.partial(self._accept_tls, connection))
        finally:
            self._turns.release()

    def _limit_s(self) -> float:
        """How long a handshake may take: stretched where this node's own loop runs late, which holds the caller up."""
        is_crowded = len(self._waiting) > 0
        limit_s = min(CROWDED_S, self._policy.handshake_s) if is_crowded else self._policy.handshake_s
        return stretched_s(limit_s, self._stalls.worst_s(asyncio.get_running_loop().time()))

    async def _admit(self, connect: Callable[[FramedLink], Awaitable[bool]]) -> bool:
        """Handshake with one caller and queue its link; whatever goes wrong costs only this caller.

        `connect` says whether it made a link of the connection (else a guest has it). False: the caller is turned away.
        """
        link = FramedLink(Handshake(self._hello, self._identify_caller, time.monotonic, None, self._shares))
        try:
            async with self._handshakes.deadline():
                if await connect(link):
                    await link.opened()
                    self._incoming.keep(link, self._arrivals)
        except (OSError, LinkClosed) as exc:  # OSError includes SSLError and TimeoutError
            logger.info("refused a link: %s", str(exc) or type(exc).__name__)
            link.abort("refused")
            return False
        except BaseException:
            link.abort("this node stopped listening")
            raise
        return True

    def _identify_caller(self, transport: asyncio.BaseTransport) -> NodeId:
        peer = self._identify(transport, None)
        self._incoming.check_room(peer)
        return peer

    async def _accept_tls(self, connection: socket.socket, link: FramedLink) -> bool:
        """Handshake with a caller. Whether it came for a link: False if a guest took it over."""
        door = AlpnDispatcher(lambda transport: self._guest(transport) or link) if self._guests else None
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: door or link,
            connection,
            ssl=self._server_context,
            ssl_handshake_timeout=self._policy.handshake_s + MAX_STRETCH_S,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )
        return door is None or door.is_for(link)

    def _guest(self, transport: asyncio.BaseTransport) -> asyncio.BaseProtocol | None:
        """The guest that the caller asked for. One that is not admitted gets a link, which will refuse it."""
        make = self._guests.get(transport.get_extra_info("ssl_object").selected_alpn_protocol())
        if make is None:
            return None
        try:
            return make(self._identify(transport, None))
        except LinkClosed:
            return None

    async def _wrap(self, tunnel: asyncio.Transport, link: FramedLink, *, is_server: bool) -> None:
        """TLS inside `tunnel`, then `link` over it. Raises OSError."""
        early = HandshakeBuffer()
        transport = await asyncio.get_running_loop().start_tls(
            tunnel,
            early,
            self._server_context if is_server else self._client_context,
            server_side=is_server,
            server_hostname=None if is_server else self.tokens.make(),
            ssl_handshake_timeout=self._policy.handshake_s + MAX_STRETCH_S,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )
        if transport is None:
            raise ConnectionResetError("the tunnel was closed in the handshake")
        early.hand_over(transport, link)


async def _bind(addr: NodeAddr) -> socket.socket:
    """A listening, non-blocking socket. Raises BadRequest, and NoAddress for what may be possible later."""
    try:
        found = await LOOKUPS.find(addr.host, addr.port)
        family, _, _, _, name = found[0]
        return _listening(family, name)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise NoAddress(f"{addr} is in use: stop what listens there, or choose another port (0: any)") from exc
        if exc.errno == errno.EACCES:
            raise BadRequest(f"cannot listen on {addr}: {reason_of(exc)}; choose a port from 1024 on") from exc
        raise NoAddress(f"cannot listen on {addr}: {reason_of(exc)}; choose an address of this machine") from exc


def _listening(family: int, name: Any) -> socket.socket:
    listener = socket.create_server(name[:2], family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return listener
