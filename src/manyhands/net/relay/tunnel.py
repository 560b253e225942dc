"""Links through a relay (see relay.py): be found there, call others there. The TLS inside is tls.py's own.

An address `relay%HOST:PORT` with a node means "that node, by way of the relay at HOST:PORT". The percent sign cannot
occur in a host's name, so such an address passes through records, tickets and Open as any other.
"""

import asyncio
import contextlib
import logging
import ssl
from dataclasses import replace
from functools import cached_property
from typing import NoReturn, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest, LinkClosed
from manyhands.net.certificate import client_context
from manyhands.net.link import SHUTDOWN_S, FramedLink
from manyhands.net.names import connected, reason_of
from manyhands.net.relay.relay import (
    ALIVE,
    ALIVE_S,
    ANSWER,
    CALL,
    CALL_ID_BYTES,
    FULL,
    LISTEN,
    OK,
    RELAY_ALPN,
    RING,
    keep_alive,
)
from manyhands.net.tls import TlsTransport
from manyhands.wire.message import Lane

logger = logging.getLogger(__name__)

PREFIX = "relay%"
HANDSHAKE_S = 5.0
# Calls being answered at once, of five nodes and more (RelayLimits.per_pair); others are left to ring, and their callers told
# by the relay's deadline.
MAX_ANSWERING = 64
RETRY_S, MAX_RETRY_S = 0.5, 30.0
# Relays where a node waits for calls, as many as a record has addresses. With one more the one looked at longest ago is left,
# of those that are away if any is: a member that replaces its relay again and again does not ask all of them for ever.
MAX_MAILBOXES = 8
MAX_UNREAD_BYTES = 4 << 10  # a relay that talks without being asked is dropped


def relayed(relay: NodeAddr, node: NodeId | None = None) -> NodeAddr:
    """The address of `node` by way of the relay at `relay`."""
    return NodeAddr(PREFIX + relay.host, relay.port, node)


def relay_of(addr: NodeAddr) -> NodeAddr:
    """Where the relay of a relayed address listens."""
    return NodeAddr(addr.host.removeprefix(PREFIX), addr.port)


class Tunnels:
    """This node's ways in and out through relays. Links that peers dial come out of `tls.accept`."""

    def __init__(self, key: Ed25519PrivateKey, secret: bytes, tls: TlsTransport) -> None:
        self._tls = tls
        self._key, self._secret = key, secret
        self._mailboxes: dict[NodeAddr, asyncio.Task[None]] = {}  # by relay, the one that was looked at last at the end
        self._away: set[NodeAddr] = set()  # relays that were lost and are not back

    def __repr__(self) -> str:
        return f"<Tunnels relays={[str(relay) for relay in self._mailboxes]}>"

    @cached_property
    def _context(self) -> ssl.SSLContext:
        """Made when a relay is first asked: most nodes ask none, and it takes as long as ten modules to load."""
        context = client_context(self._key, self._secret)
        context.set_alpn_protocols([RELAY_ALPN])
        return context

    @property
    def relays(self) -> tuple[NodeAddr, ...]:
        """The relays at which this node can be called now."""
        return tuple(relay for relay in self._mailboxes if relay not in self._away)

    async def listen(self, addr: NodeAddr) -> NodeAddr:
        """Be found at a relay from now on, across its restarts. Raises BadRequest if it is not there now."""
        relay = relay_of(addr)
        if relay in self._away:
            raise BadRequest(f"the relay at {relay} is away; it is asked again and again")
        if relay not in self._mailboxes:
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    mailbox = await self._ask(relay, LISTEN)
            except (LinkClosed, TimeoutError) as exc:
                said = str(exc) if str(relay) in str(exc) else f"no relay at {relay}: {str(exc) or 'no answer'}"
                raise BadRequest(f"{said}; name a member that others can dial") from exc
            self._mailboxes[relay] = asyncio.create_task(self._keep(relay, mailbox), name=f"mailbox at {relay}")
            if len(self._mailboxes) > MAX_MAILBOXES:
                longest_ago = next(iter(self._mailboxes))
                await self._leave(next((known for known in self._mailboxes if known in self._away), longest_ago))
        else:
            self._mailboxes[relay] = self._mailboxes.pop(relay)
        return replace(addr, node=self._tls.node)

    async def _leave(self, relay: NodeAddr) -> None:
        task = self._mailboxes.pop(relay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._away.discard(relay)
        logger.info("left the relay at %s: there are newer ones", relay)

    async def dial(self, addr: NodeAddr, lane: Lane) -> FramedLink:
        """As Transport.dial, through the relay that `addr` names."""
        if addr.node is None:
            raise LinkClosed(f"{addr} cannot be dialled: a relay must be told which node to call")
        line = await self._ask(relay_of(addr), CALL + bytes.fromhex(addr.node))
        try:
            return await self._tls.dial_over(line.transport, addr, lane)
        except BaseException:
            line.transport.abort()
            raise

    async def aclose(self) -> None:
        """Leave the relays. Links through them belong to their takers."""
        for task in self._mailboxes.values():
            task.cancel()
        await asyncio.gather(*self._mailboxes.values(), return_exceptions=True)
        self._mailboxes.clear()

    # -- being found --------------------------------------------------------------------------------------------------

    async def _keep(self, relay: NodeAddr, mailbox: "RelayConnection") -> None:
        """Answer calls at a relay for ever; come back to it when the connection breaks."""
        async with asyncio.TaskGroup() as answers:
            while True:
                try:
                    await self._answer_calls(relay, mailbox, answers)
                except LinkClosed as exc:
                    logger.info("lost the relay at %s: %s", relay, exc)  # a member; `up` tells who is gone
                self._away.add(relay)
                mailbox = await self._come_back(relay)
                self._away.remove(relay)

    async def _answer_calls(self, relay: NodeAddr, mailbox: "RelayConnection", answers: asyncio.TaskGroup) -> NoReturn:
        """Raises LinkClosed when the mailbox is lost."""
        slots = asyncio.Semaphore(MAX_ANSWERING)
        alive = answers.create_task(self._stay_alive(mailbox))
        try:
            while True:
                call_id = await mailbox.ring()
                if not slots.locked():
                    answers.create_task(self._answer(relay, call_id, slots))
        finally:
            alive.cancel()
            mailbox.transport.abort()

    async def _come_back(self, relay: NodeAddr) -> "RelayConnection":
        wait_s = RETRY_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_S)
            with contextlib.suppress(LinkClosed, TimeoutError):
                async with asyncio.timeout(HANDSHAKE_S):
                    mailbox = await self._ask(relay, LISTEN)
                logger.info("back at the relay at %s", relay)
                return mailbox

    async def _stay_alive(self, mailbox: "RelayConnection") -> NoReturn:
        """Speak every ALIVE_S; a relay that has answered nothing since the last time but one is gone."""
        while True:
            mailbox.transport.write(ALIVE)
            mailbox.num_unanswered += 1
            if mailbox.num_unanswered > 2:
                mailbox.transport.abort()
            await asyncio.sleep(ALIVE_S)

    async def _answer(self, relay: NodeAddr, call_id: bytes, slots: asyncio.Semaphore) -> None:
        async with slots:
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    line = await self._open(relay)
            except (LinkClosed, TimeoutError) as exc:
                logger.info("cannot answer a call at %s: %s", relay, str(exc) or "no answer")
                return
            line.transport.write(ANSWER + call_id)
            await self._tls.admit_over(line.transport)

    # -- connections to relays ----------------------------------------------------------------------------------------

    async def _ask(self, relay: NodeAddr, request: bytes) -> "RelayConnection":
        """Open a connection, send a request, wait for OK. Deadline: the caller's. Raises LinkClosed."""
        line = await self._open(relay)
        try:
            line.transport.write(request)
            answer = await line.read(1)
            if answer == OK:
                return line
            raise LinkClosed(
                f"the relay at {relay} {'has reached its limit' if answer == FULL else 'does not know it'}"
            )
        except BaseException:
            line.transport.abort()
            raise

    async def _open(self, relay: NodeAddr) -> "RelayConnection":
        line = RelayConnection()
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: line,
                sock=await connected(relay.host, relay.port),
                ssl=self._context,
                server_hostname=self._tls.tokens.make(),
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except ssl.SSLError as exc:
            raise LinkClosed(f"the relay at {relay} is not a member of this swarm (TLS: {exc.reason})") from exc
        except (OSError, ValueError) as exc:  # ValueError: a host that no resolver takes
            reason = reason_of(exc) if isinstance(exc, OSError) else exc
            raise LinkClosed(f"the relay at {relay} cannot be reached: {reason}") from exc
        if line.transport.get_extra_info("ssl_object").selected_alpn_protocol() != RELAY_ALPN:
            line.transport.abort()
            raise LinkClosed(f"{relay} is a member but no relay")
        return line


class RelayConnection(asyncio.Protocol):
    """A connection to a relay until it becomes a tunnel: a few bytes to wait for."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._has_news = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self.is_lost = False
        self.num_unanswered = 0

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None, "the transport is known once connected"
        return self._transport

    async def read(self, num_bytes: int) -> bytes:
        """Exactly so many bytes. Raises LinkClosed if the connection ends before."""
        while len(self._received) < num_bytes:
            if self.is_lost:
                raise LinkClosed("the relay closed the connection")
            self._has_news.clear()
            await self._has_news.wait()
        taken = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return taken

    async def ring(self) -> bytes:
        """On a mailbox: the next call's id. Raises LinkClosed."""
        while (kind := await self.read(1)) != RING:
            if kind != ALIVE:
                raise LinkClosed(f"the relay said {kind!r}, which means nothing")
            self.num_unanswered = 0
        return await self.read(CALL_ID_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._has_news.set()
        if len(self._received) > MAX_UNREAD_BYTES:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._has_news.set()
