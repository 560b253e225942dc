"""Transports without a network, for tests: the same frames, the same FrameReader, the same flow control, no sockets.

Keys are not proven here: each transport is simply given its NodeId.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest, LinkClosed
from manyhands.net.arrivals import Arrivals
from manyhands.net.link import FramedLink, Handshake
from manyhands.net.shares import Shares
from manyhands.wire.message import Hello, Lane

HIGH_WATER_BYTES = 64 << 10  # as asyncio's sockets


class MemoryPipe(asyncio.Transport):
    """One end of a connection. What is written here is read by the protocol of `other`, in a later loop iteration."""

    def __init__(self, node: NodeId, protocol: FramedLink) -> None:
        super().__init__(extra={"node": node})  # the node at the far end
        self._protocol = protocol
        self._other: MemoryPipe | None = None
        self._arriving: deque[memoryview] = deque()
        self._num_arriving = 0
        self._is_pumping = False
        self._is_paused = False
        self._is_ending = False  # the far end closed: lost once everything has arrived
        self._is_lost = False

    def connect(self, other: "MemoryPipe") -> None:
        """Join two ends and tell their protocols."""
        self._other, other._other = other, self
        self._protocol.connection_made(self)
        other._protocol.connection_made(other)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._other is not None and not self._is_lost:
            self._other._arrive(memoryview(bytes(data)))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for data in list_of_data:
            self.write(data)

    def get_write_buffer_size(self) -> int:
        return 0 if self._other is None else self._other._num_arriving

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._schedule()

    def is_closing(self) -> bool:
        return self._is_lost

    def close(self) -> None:
        if self._other is not None and not self._is_lost:
            self._other._is_ending = True
            self._other._schedule()
        self._lose()

    def abort(self) -> None:
        if self._other is not None:
            self._other._arriving.clear()
        self.close()

    def _arrive(self, data: memoryview) -> None:
        if self._is_lost:
            return
        self._arriving.append(data)
        self._num_arriving += len(data)
        if self._num_arriving > HIGH_WATER_BYTES and self._other is not None:
            self._other._protocol.pause_writing()
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_pumping:
            self._is_pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pumping = False
        while self._arriving and not self._is_paused and not self._is_lost:
            self._deliver()
        if self._is_ending and not self._arriving:
            self._lose()

    def _deliver(self) -> None:
        data = self._arriving.popleft()
        buffer = self._protocol.get_buffer(-1)
        num_bytes = min(len(buffer), len(data))
        buffer[:num_bytes] = data[:num_bytes]
        if num_bytes < len(data):
            self._arriving.appendleft(data[num_bytes:])
        was_high = self._num_arriving > HIGH_WATER_BYTES
        self._num_arriving -= num_bytes
        if was_high and self._num_arriving <= HIGH_WATER_BYTES and self._other is not None:
            self._other._protocol.resume_writing()
        self._protocol.buffer_updated(num_bytes)

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._arriving.clear()
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)


class MemoryNetwork:
    """Where memory transports find each other, by host and port."""

    def __init__(self) -> None:
        self._listening: dict[tuple[str, int], MemoryTransport] = {}
        self._next_port = 1

    def transport(self, node: NodeId, hello: Callable[[Lane], Hello]) -> "MemoryTransport":
        """A transport for `node` on this network."""
        return MemoryTransport(self, node, hello)

    def bind(self, addr: NodeAddr, transport: "MemoryTransport") -> NodeAddr:
        """Route calls for `addr` to `transport`. Raises BadRequest if it is taken."""
        port = addr.port
        if port == 0:
            port, self._next_port = self._next_port, self._next_port + 1
        if (addr.host, port) in self._listening:
            raise BadRequest(f"{addr} is in use: stop what listens there, or choose another port (0: any)")
        self._listening[addr.host, port] = transport
        return NodeAddr(addr.host, port, transport.node)

    def find(self, addr: NodeAddr) -> "MemoryTransport | None":
        return self._listening.get((addr.host, addr.port))

    def unbind(self, transport: "MemoryTransport") -> None:
        self._listening = {addr: other for addr, other in self._listening.items() if other is not transport}


class MemoryTransport:
    """A Transport (see transport.Transport) of a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, node: NodeId, hello: Callable[[Lane], Hello]) -> None:
        self.node = node
        self._network = network
        self._hello = hello
        self._shares = Shares()
        self._arrivals = Arrivals[FramedLink]()

    async def listen(self, addr: NodeAddr) -> NodeAddr:
        return self._network.bind(addr, self)

    async def accept(self) -> FramedLink:
        return await self._arrivals.take()

    async def dial(self, addr: NodeAddr, lane: Lane) -> FramedLink:
        target = self._network.find(addr)
        if target is None:
            raise LinkClosed(f"{addr} cannot be reached: nothing listens there")
        if addr.node not in (None, target.node):
            refusal = f"{addr} refused: it is node {target.node[:16]}, expected {addr.node}"
            raise LinkClosed(refusal, {(addr.host, addr.port): target.node})
        near, far = self._link(lane), target._link(None)
        MemoryPipe(target.node, near).connect(MemoryPipe(self.node, far))
        try:
            await near.opened()
        except BaseException:
            near.abort("dial failed")
            raise
        target._arrivals.put(far)
        return near

    async def aclose(self) -> None:
        self._arrivals.end()
        self._network.unbind(self)
        await self._arrivals.aclose()

    def _link(self, dialled: Lane | None) -> FramedLink:
        clock = asyncio.get_running_loop().time  # virtual under testing/clock.py
        return FramedLink(
            Handshake(self._hello, lambda t: NodeId(t.get_extra_info("node")), clock, dialled, self._shares)
        )
