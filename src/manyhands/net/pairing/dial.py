"""The side of a pairing that has the code from a person: dial the machine that shows it, and get the ticket."""

import asyncio
import os
import ssl
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.core import NodeAddr
from manyhands.errors import LinkClosed, ProtocolError, WrongCode
from manyhands.net.admission import Tokens
from manyhands.net.certificate import client_context, own_certificate
from manyhands.net.pairing.exchange import (
    ELEMENT_BYTES,
    MAX_SEALED_BYTES,
    PROOF_BYTES,
    JoinerExchange,
    PairingContext,
    load,
)
from manyhands.net.pairing.host import ADMITTED, CLOSE_S, WRONG, door_secret

ASK_S: Final = 15.0  # the host may let others go first


async def ask_ticket(addr: NodeAddr, swarm: str, code: str, timeout_s: float = ASK_S) -> str:
    """The ticket that the machine at `addr`, which shows `code` for the swarm with fingerprint `swarm`, gives.

    Raises WrongCode if it is not the code shown there; LinkClosed if that machine cannot be reached, shows no code any more
    or does not answer in time; ProtocolError for what is no pairing, or a machine that does not know the code itself.
    """
    load()
    try:
        async with asyncio.timeout(timeout_s):
            return await _ask(addr, swarm, code)
    except TimeoutError as error:
        raise LinkClosed(f"{addr} did not answer within {timeout_s:g} s") from error
    except ssl.SSLError as error:
        raise LinkClosed(f"{addr} shows no code of this swarm (TLS: {error.reason})") from error
    except EOFError as error:
        raise LinkClosed(f"{addr} ended the exchange: its code was renewed or is used up") from error
    except OSError as error:
        raise LinkClosed(f"{addr} cannot be reached: {error.strerror or error}") from error


async def _ask(addr: NodeAddr, swarm: str, code: str) -> str:
    key, secret = Ed25519PrivateKey.generate(), door_secret(swarm)
    reader, writer = await asyncio.open_connection(
        addr.host,
        addr.port,
        limit=2 * MAX_SEALED_BYTES,
        ssl=client_context(key, secret),
        server_hostname=Tokens(secret, os.urandom).make(),
        ssl_shutdown_timeout=CLOSE_S,
    )
    try:
        host = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        exchange = JoinerExchange(code, PairingContext(swarm, own_certificate(key, secret), host))
        writer.write(exchange.first())
        writer.write(exchange.prove(await reader.readexactly(ELEMENT_BYTES)))
        verdict = await reader.readexactly(1)
        if verdict == WRONG:
            raise WrongCode(addr.host, (await reader.readexactly(1))[0])
        if verdict != ADMITTED:
            raise ProtocolError(f"{addr} does not speak as a pairing does: update one of the two machines")
        proof = await reader.readexactly(PROOF_BYTES)
        size = int.from_bytes(await reader.readexactly(2), "big")
        if size > MAX_SEALED_BYTES:
            raise ProtocolError(f"{addr} sends {size} bytes; a ticket has at most {MAX_SEALED_BYTES}")
        return exchange.open(proof, await reader.readexactly(size)).decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"{addr} sends no ticket") from error
    finally:
        writer.transport.abort()
