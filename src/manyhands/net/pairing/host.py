"""The listener of a machine that shows a code: it exists while the code is valid, and gives the ticket to who proves the code.

Any program on the network may call, so callers are bounded as at the door of a node (listener.py): one that sends no
ClientHello costs a descriptor for HELLO_S, and of the others PairingQueue says who has its exchange next. Each has EXCHANGE_S,
sends 65 bytes after the handshake, and its arithmetic runs outside the event loop, one at a time. TLS is anonymous here: both
certificates are of fresh keys, signed by a CA that anyone can derive from the swarm's public fingerprint, and prove nothing
but that it is the same machine; exchange.py binds them to the code.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.errors import ProtocolError
from manyhands.net.admission import PendingLimits, Tokens, source_of
from manyhands.net.certificate import own_certificate, server_context
from manyhands.net.listener import HELLO_S, Listener
from manyhands.net.pairing.code import JoinCode
from manyhands.net.pairing.exchange import (
    ELEMENT_BYTES,
    MAX_SEALED_BYTES,
    PROOF_BYTES,
    HostExchange,
    PairingContext,
    load,
)
from manyhands.net.pairing.queue import PairingQueue, QueueLimits

logger = logging.getLogger(__name__)

EXCHANGE_S: Final = 5.0  # TLS and three messages: 0.1 s on a quiet machine
CLOSE_S: Final = 1.0
LOOK_S: Final = 0.125  # while callers wait for their turn
READ_BYTES: Final = 256  # that are held of a caller, twice at most
PENDING: Final = PendingLimits(64, 16, HELLO_S)
ADMITTED, WRONG = b"\0", b"\1"
DEFAULT_LIMITS: Final = QueueLimits()


def door_secret(swarm: str) -> bytes:
    """What the certificates and the first bytes of a pairing are made from; no secret, but another for each swarm."""
    return hashlib.sha256(b"manyhands pairing v1\0" + swarm.encode()).digest()


@dataclass(frozen=True, slots=True)
class CodeAttempt:
    """A caller that came to its proof: from where, whether it was right, and how many wrong ones the code still bears."""

    host: str
    is_right: bool
    tries_left: int


class PairingHost:
    """Serves one code of the swarm with fingerprint `swarm`. `ticket` makes what is given; `tell` gets each attempt."""

    def __init__(
        self,
        code: JoinCode,
        swarm: str,
        ticket: Callable[[], str],
        tell: Callable[[CodeAttempt], None] = lambda attempt: None,
        limits: QueueLimits = DEFAULT_LIMITS,
    ) -> None:
        self.code = code
        self._swarm, self._ticket, self._tell, self._limits = swarm, ticket, tell, limits
        key, secret = Ed25519PrivateKey.generate(), door_secret(swarm)
        self._certificate, self._context = own_certificate(key, secret), server_context(key, secret)
        self._tokens = Tokens(secret, os.urandom)
        self._over, self._news = asyncio.Event(), asyncio.Event()
        self._arithmetic = asyncio.Lock()
        self._raw: set[socket.socket] = set()  # connections that no transport has yet

    def __repr__(self) -> str:
        return f"<PairingHost tries_left={self.code.tries_left} raw={len(self._raw)}>"

    def withdraw(self) -> None:
        """The code opens nothing any more, and `serve` ends."""
        self.code.is_withdrawn = True
        self._over.set()

    async def serve(self, listening: socket.socket) -> None:
        """Accept on `listening`, which it owns, until the code is dead; `code.until` is a time of the event loop."""
        self.queue = PairingQueue[socket.socket](self._limits, asyncio.get_running_loop().time())
        door = Listener(listening, self._tokens, self._enter, PENDING)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(door.serve()), group.create_task(self._take_turns())]
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self.code.until):
                        await self._over.wait()
                for task in tasks:
                    task.cancel()
        finally:
            listening.close()
            for connection in self._raw:
                connection.close()

    # -- whose turn it is ---------------------------------------------------------------------------------------------

    def _enter(self, connection: socket.socket) -> None:
        """A caller whose first bytes are those of a pairing."""
        try:
            source = source_of(str(connection.getpeername()[0]))
        except OSError:  # it is gone
            connection.close()
            return
        self._raw.add(connection)
        evicted = self.queue.enter(connection, source, asyncio.get_running_loop().time())
        if evicted is not None:
            self._close(evicted)
        self._news.set()

    async def _take_turns(self) -> None:
        """Begin exchanges as the queue says, and own them."""
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(load)
        async with asyncio.TaskGroup() as group:
            while True:
                for late in self.queue.overdue(loop.time()):
                    self._close(late)
                while (connection := self.queue.next(loop.time())) is not None:
                    group.create_task(self._exchange(connection))
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S if len(self.queue.waiting) else None):
                        await self._news.wait()

    def _close(self, connection: socket.socket) -> None:
        self._raw.discard(connection)
        connection.close()

    # -- one caller ---------------------------------------------------------------------------------------------------

    async def _exchange(self, connection: socket.socket) -> None:
        """Serve one caller; whatever goes wrong costs only that caller. Logs nothing that it sent."""
        try:
            host = str(connection.getpeername()[0])
            async with asyncio.timeout(EXCHANGE_S):
                await self._talk(connection, host)
        except (OSError, EOFError, ProtocolError) as error:  # OSError includes SSLError and TimeoutError
            logger.debug("a pairing broke off: %s", type(error).__name__)
        except Exception:  # a bug of ours must not end the node that shows the code
            logger.exception("a pairing failed")
        finally:
            if connection in self._raw:
                self._close(connection)
            self.queue.ended(connection)
            self._news.set()
            if not self.code.is_live(asyncio.get_running_loop().time()):
                self._over.set()

    async def _talk(self, connection: socket.socket, host: str) -> None:
        reader = asyncio.StreamReader(limit=READ_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol,
            connection,
            ssl=self._context,
            ssl_handshake_timeout=EXCHANGE_S,
            ssl_shutdown_timeout=CLOSE_S,
        )
        self._raw.discard(connection)
        writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
        try:
            caller = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
            await self._pair(reader, writer, PairingContext(self._swarm, caller, self._certificate), host)
            writer.close()
            await writer.wait_closed()
        except BaseException:
            transport.abort()
            raise

    async def _pair(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, setting: PairingContext, host: str
    ) -> None:
        """The exchange. Raises ProtocolError, EOFError, OSError."""
        first = await reader.readexactly(ELEMENT_BYTES)
        async with self._arithmetic:
            exchange = await asyncio.to_thread(HostExchange, self.code.text, setting)
            writer.write(await asyncio.to_thread(exchange.answer, first))
        proof = await reader.readexactly(PROOF_BYTES)
        now = asyncio.get_running_loop().time()
        if not self.code.is_live(now):
            raise ProtocolError("the code is dead")
        is_right = self.code.admit(lambda: exchange.is_right(proof), now)
        if is_right:
            confirmed, sealed = exchange.seal(self._ticket().encode())
            assert len(sealed) <= MAX_SEALED_BYTES, "a ticket is shorter"
            writer.write(ADMITTED + confirmed + len(sealed).to_bytes(2, "big") + sealed)
        else:
            writer.write(WRONG + bytes([self.code.tries_left]))
        self._tell(CodeAttempt(host, is_right, self.code.tries_left))
        await writer.drain()
