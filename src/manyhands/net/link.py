"""The one Link there is: frames over anything that looks like an asyncio transport (TLS, memory).

It reads straight into FrameReader's buffers, answers pings, counts, and pauses reading while the consumer is behind, so
memory stays bounded. A peer that breaks the protocol loses this link and nothing else.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from manyhands.core import EdgeHealth, NodeId
from manyhands.errors import LinkClosed, ProtocolError
from manyhands.net.transport import PongRoute, check_lane, note_rtt
from manyhands.wire.frame import FrameReader, encode
from manyhands.wire.message import Chunk, Hello, Lane, Message, Ping, Pong, Step

logger = logging.getLogger(__name__)

# Received and not yet taken. 64 frames: four sessions' default credit (16 each). The last read may go over by one read.
MAX_QUEUED_MESSAGES = 64
MAX_QUEUED_BYTES = 16 << 20
# Joined into one write below this: one TLS record and one system call, for a copy that costs less than either.
JOIN_BYTES = 64 << 10
CLOSE_S = 1.0  # how long aclose waits for queued bytes to leave


class Inbox:
    """Messages that arrived and were not taken yet, with at most one waiting taker."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Message, int]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._end: str | None = None
        self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        return len(self._queue) >= MAX_QUEUED_MESSAGES or self._num_bytes >= MAX_QUEUED_BYTES

    def put(self, message: Message, num_bytes: int) -> None:
        self._queue.append((message, num_bytes))
        self._num_bytes += num_bytes
        self._wake()

    def end(self, reason: str, *, drop: bool) -> None:
        """No more will arrive. `drop` also forgets what did. The first reason stays."""
        self._end = self._end or reason
        if drop:
            self._queue.clear()
            self._num_bytes = 0
        self._wake()

    async def get(self) -> Message:
        """The oldest message. Cancelling loses nothing. Raises LinkClosed at the end."""
        while not self._queue:
            if self._end is not None:
                raise LinkClosed(self._end)
            assert self._waiter is None, "recv has one caller at a time"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message, num_bytes = self._queue.popleft()
        self._num_bytes -= num_bytes
        return message

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(frozen=True, slots=True)
class Handshake:
    """How a link begins. `identify` gives the peer's proven id, or raises LinkClosed to turn it away.

    `dialled` is the lane asked for, None on the listening side, which follows the peer. `clock` is monotonic seconds.
    """

    hello: Callable[[Lane], Hello]
    identify: Callable[[asyncio.BaseTransport], NodeId]
    clock: Callable[[], float]
    dialled: Lane | None


class FramedLink(asyncio.BufferedProtocol):
    """A Link (see transport.Link). Made as an asyncio protocol; usable once `opened` has returned."""

    def __init__(self, handshake: Handshake) -> None:
        self.health = EdgeHealth()
        self._handshake = handshake
        self._reader = FrameReader(handshake.dialled)
        self._inbox = Inbox()
        self._transport: asyncio.Transport | None = None
        self._peer: NodeId | None = None
        self._hello: Hello | None = None
        self._closed: str | None = None
        self._opened = asyncio.Event()  # greeted, or closed before
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._lost = asyncio.Event()
        self._is_reading = True
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._num_pings = 0
        self._pong: PongRoute = self._send_pong

    def __repr__(self) -> str:
        state = self._closed or ("open" if self._hello else "opening")
        return f"<FramedLink {(self._peer or '?')[:8]} {self._reader.lane} {state}>"

    # --- what the node sees -------------------------------------------------------------------------------------

    @property
    def peer(self) -> NodeId:
        assert self._peer is not None, "peer is known once opened"
        return self._peer

    @property
    def hello(self) -> Hello:
        assert self._hello is not None, "hello is known once opened"
        return self._hello

    @property
    def lane(self) -> Lane:
        assert self._reader.lane is not None, "lane is known once opened"
        return self._reader.lane

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    async def opened(self) -> None:
        """Wait until both sides said Hello. Raises LinkClosed. Deadline: the caller's."""
        await self._opened.wait()
        self._check_open()

    def send(self, message: Message) -> None:
        self._check_open()
        check_lane(message, self.lane)
        self._write(message)

    async def drain(self) -> None:
        self._check_open()
        await self._can_write.wait()
        self._check_open()

    async def recv(self) -> Message:
        message = await self._inbox.get()
        if not self._is_reading and not self._inbox.is_full and self._transport is not None:
            self._is_reading = True
            self._transport.resume_reading()
        return message

    async def ping(self) -> float:
        self._num_pings += 1
        nonce = self._num_pings
        answered = self._pings[nonce] = asyncio.get_running_loop().create_future()
        begin = self._handshake.clock()
        try:
            self.send(Ping(nonce))
            await answered
        finally:
            del self._pings[nonce]
        self._check_open()
        rtt_s = self._handshake.clock() - begin
        note_rtt(self.health, rtt_s)
        return rtt_s

    def answer_pings_with(self, pong: PongRoute) -> None:
        self._pong = pong

    def abort(self, reason: str) -> None:
        self._end(reason, drop=True)
        if self._transport is not None:
            self._transport.abort()

    async def aclose(self) -> None:
        self._end("closed by this node", drop=True)
        if self._transport is None:
            return
        self._transport.close()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._lost.wait()
        finally:
            self._transport.abort()  # harmless when lost
        await self._lost.wait()

    # --- what asyncio sees --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        if self._closed is not None:  # given up while connecting
            self._transport.abort()
            return
        try:
            self._peer = self._handshake.identify(transport)
        except LinkClosed as exc:
            self.abort(str(exc))
            return
        if self._handshake.dialled is not None:
            self._write(self._handshake.hello(self._handshake.dialled))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self.health.bytes_received += nbytes
        if self._closed is not None:
            return
        try:
            messages = self._reader.buffer_updated(nbytes)
        except ProtocolError as exc:
            logger.warning("peer=%s lane=%s broke the protocol: %s", self._peer, self._reader.lane, exc)
            self.abort(f"peer broke the protocol: {exc}")
            return
        for message in messages:
            self._receive(message)
        if self._inbox.is_full and self._is_reading and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()

    def eof_received(self) -> None:
        return None  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"lost: {exc}" if exc is not None else "closed by the peer", drop=False)
        self._lost.set()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    # --- inside -------------------------------------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        self.health.frames_received += 1
        match message:
            case Hello():
                self._greet(message)
            case Ping():
                self._pong(Pong(message.nonce))
            case Pong():
                answered = self._pings.get(message.nonce)
                if answered is not None and not answered.done():
                    answered.set_result(None)
            case Step():
                self._inbox.put(message, len(message.payload.data) if message.payload is not None else 0)
            case Chunk():
                self._inbox.put(message, len(message.data))
            case _:
                self._inbox.put(message, 0)

    def _greet(self, hello: Hello) -> None:
        self._hello = hello
        if self._handshake.dialled is None:
            self._write(self._handshake.hello(hello.lane))
        self._opened.set()

    def _send_pong(self, message: Message) -> None:
        if self._can_write.is_set() and not self.is_closed:  # a peer that does not read gets no answers
            self._write(message)

    def _write(self, message: Message) -> None:
        assert self._transport is not None
        parts = encode(message)
        num_bytes = sum(map(len, parts))
        self.health.frames_sent += 1
        self.health.bytes_sent += num_bytes
        if num_bytes <= JOIN_BYTES:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise LinkClosed(self._closed)

    def _end(self, reason: str, *, drop: bool) -> None:
        """Closed from now on, for `reason`; wake everyone who waits. The first reason stays."""
        if self._closed is None:
            who = f"link to {self._peer[:16]}" if self._peer else "link"
            self._closed = f"{who}: {reason}"
            self.health.last_error = reason
        self._inbox.end(self._closed, drop=drop)
        self._opened.set()
        self._can_write.set()
        for answered in self._pings.values():
            if not answered.done():
                answered.set_result(None)
