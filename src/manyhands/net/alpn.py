"""Protocols that hold a transport only until the right one takes over. Know nothing of links' contents."""

import asyncio
from collections.abc import Callable
from typing import cast

from manyhands.net.link import FramedLink


class AlpnDispatcher(asyncio.Protocol):
    """Reads the ALPN name, and no more: the transport goes to the protocol that `choose` names."""

    def __init__(self, choose: Callable[[asyncio.BaseTransport], asyncio.BaseProtocol]) -> None:
        self._choose = choose
        self._chosen: asyncio.BaseProtocol | None = None

    def is_for(self, protocol: asyncio.BaseProtocol) -> bool:
        return self._chosen is protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._chosen = self._choose(transport)
        cast(asyncio.Transport, transport).set_protocol(self._chosen)
        self._chosen.connection_made(transport)


class HandshakeBuffer(asyncio.Protocol):
    """Keeps what arrives between the end of start_tls's handshake and its return, and passes it on with the transport."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._lost: Exception | None = None
        self._is_lost = False

    def data_received(self, data: bytes) -> None:
        self._received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost, self._is_lost = exc, True

    def hand_over(self, transport: asyncio.Transport, link: FramedLink) -> None:
        """Make `link` the transport's protocol as if it had been from the start."""
        transport.set_protocol(link)
        link.connection_made(transport)
        rest = memoryview(self._received)
        while rest and not link.is_closed:
            buffer = link.get_buffer(len(rest))
            num_bytes = min(len(buffer), len(rest))
            buffer[:num_bytes] = rest[:num_bytes]
            link.buffer_updated(num_bytes)
            rest = rest[num_bytes:]
        if self._is_lost:
            link.connection_lost(self._lost)
