"""The side of a pairing that has the code from a person: dial the machine that shows it, and get the ticket."""

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.core import NodeAddr
from manyhands.errors import LinkClosed, ProtocolError, WrongCode
from manyhands.net.admission import Tokens
from manyhands.net.certificate import client_context, own_certificate
from manyhands.net.names import connected, reason_of
from manyhands.net.pairing.exchange import (
    ELEMENT_BYTES,
    MAX_SEALED_BYTES,
    PROOF_BYTES,
    JoinerExchange,
    PairingContext,
    load,
)
from manyhands.net.pairing.host import ADMITTED, CLOSE_S, WRONG, door_secret

CONNECT_S: Final = 4.0
ASK_S: Final = 15.0  # the host may let others go first


async def ask_ticket(ways: Sequence[NodeAddr], swarm: str, code: str) -> str:
    """The ticket that a machine which shows `code` for the swarm with fingerprint `swarm` gives.

    `ways`: addresses of that machine. The first that takes a connection is asked, once: each exchange is one guess at the
    code for a machine that only pretends to know it. Raises WrongCode if it is not the code shown there; LinkClosed if that
    machine cannot be reached, shows no code any more or does not answer in time; ProtocolError for what is no pairing, or a
    machine that does not know the code itself.
    """
    load()
    addr, connection = await _connect(ways)
    try:
        async with asyncio.timeout(ASK_S):
            return await _ask(addr, connection, swarm, code)
    except TimeoutError as error:
        raise LinkClosed(f"{addr} did not answer within {ASK_S:g} s") from error
    except ssl.SSLError as error:
        raise LinkClosed(f"{addr} shows no code of this swarm (TLS: {error.reason})") from error
    except EOFError as error:
        raise LinkClosed(f"{addr} ended the exchange") from error
    except OSError as error:
        raise LinkClosed(f"{addr} closed the connection: {error.strerror or error}") from error


async def _connect(ways: Sequence[NodeAddr]) -> tuple[NodeAddr, socket.socket]:
    """A TCP connection to the first address that takes one within CONNECT_S. Raises LinkClosed."""
    failures = []
    for addr in ways:
        try:
            async with asyncio.timeout(CONNECT_S):
                return addr, await connected(addr.host, addr.port)
        except OSError as error:
            failures.append(f"{addr}: {reason_of(error) or f'no answer within {CONNECT_S:g} s'}")
    raise LinkClosed(f"cannot be reached at {'; '.join(failures) or 'no address'}")


async def _ask(addr: NodeAddr, connection: socket.socket, swarm: str, code: str) -> str:
    key, secret = Ed25519PrivateKey.generate(), door_secret(swarm)
    try:
        reader, writer = await asyncio.open_connection(
            sock=connection,
            limit=2 * MAX_SEALED_BYTES,
            ssl=client_context(key, secret),
            server_hostname=Tokens(secret, os.urandom).make(),
            ssl_shutdown_timeout=CLOSE_S,
        )
    except BaseException:
        connection.close()
        raise
    try:
        host = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return await _exchange(reader, writer, PairingContext(swarm, own_certificate(key, secret), host), code, addr)
    finally:
        writer.transport.abort()


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: PairingContext, code: str, addr: NodeAddr
) -> str:
    """The joiner's side of exchange.py. Raises WrongCode, ProtocolError, EOFError, OSError."""
    exchange = JoinerExchange(code, context)
    writer.write(exchange.first())
    writer.write(exchange.prove(await reader.readexactly(ELEMENT_BYTES)))
    verdict = await reader.readexactly(1)
    if verdict == WRONG:
        raise WrongCode(addr.host, (await reader.readexactly(1))[0])
    if verdict != ADMITTED:
        raise ProtocolError(f"{addr} does not follow the pairing protocol: update one of the two machines")
    return await _open(reader, exchange, addr)


async def _open(reader: asyncio.StreamReader, exchange: JoinerExchange, addr: NodeAddr) -> str:
    """The ticket, of a host that knows the code. Raises ProtocolError, EOFError, OSError."""
    proof = await reader.readexactly(PROOF_BYTES)
    size = int.from_bytes(await reader.readexactly(2), "big")
    if size > MAX_SEALED_BYTES:
        raise ProtocolError(f"{addr} sends {size} bytes; a ticket has at most {MAX_SEALED_BYTES}")
    text = exchange.open(proof, await reader.readexactly(size))
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"{addr} sends no ticket") from error
