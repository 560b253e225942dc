"""The one Link there is: frames over anything that looks like an asyncio transport (TLS, memory).

It reads straight into FrameReader's buffers, answers pings, counts, and pauses reading while the consumer is behind, so
memory stays bounded. A peer that breaks the protocol loses this link and nothing else.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn, cast

from manyhands.core import EdgeHealth, NodeId
from manyhands.errors import LinkClosed, ProtocolError
from manyhands.net.inbox import Inbox
from manyhands.net.kernel import acknowledged, local_host
from manyhands.net.liveness import LinkEvidence
from manyhands.net.pings import ANSWERED, PER_S, PingBudget
from manyhands.net.shares import Shares
from manyhands.net.transport import PongRoute, check_lane, note_rtt
from manyhands.net.unread import Unread
from manyhands.wire.frame import FrameReader, encode
from manyhands.wire.message import LANES, Hello, Lane, Message, Ping, Pong

logger = logging.getLogger(__name__)

# Joined into one write below this: one TLS record and one system call, for a copy that costs less than either.
JOIN_BYTES = 64 << 10
OWN = (Hello, Ping, Pong)  # messages that a link takes itself
CLOSE_S, CLOSE_LOOKS = 1.0, 4  # how long aclose waits for queued bytes to leave, in so many parts
SHUTDOWN_S = 5.0  # after which TLS drops them by itself, wherever this loop was held up


@dataclass(frozen=True, slots=True)
class Handshake:
    """How a link begins. `identify` gives the peer's proven id, or raises LinkClosed to turn it away.

    `dialled`: the lane asked for; None on the listening side, which follows the peer. `clock`: monotonic seconds.
    """

    hello: Callable[[Lane], Hello]
    identify: Callable[[asyncio.BaseTransport], NodeId]
    clock: Callable[[], float]
    dialled: Lane | None
    shares: Shares = field(default_factory=Shares)  # of the transport


class FramedLink(asyncio.BufferedProtocol):
    """A Link (see transport.Link). Made as an asyncio protocol; usable once `opened` has returned."""

    def __init__(self, handshake: Handshake) -> None:
        self.health = EdgeHealth()
        self._handshake = handshake
        self._reader = FrameReader(handshake.dialled)
        self._carried: tuple[type, ...] = () if handshake.dialled is None else LANES[handshake.dialled]
        self._inbox = Inbox()
        self._transport: asyncio.Transport | None = None
        self._peer: NodeId | None = None
        self._hello: Hello | None = None
        self._greeting: Hello | None = None
        self._closed: str | None = None
        self._opened = asyncio.Event()  # greeted, or closed before
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._lost = asyncio.Event()
        self._is_reading = True
        self._uplink_Bps: float | None = None  # the last that the system told
        self._unread = Unread()
        self._num_noted = 0  # of `num_received`, in what all links share
        self._is_waiting = False  # for its turn, to hand on what came
        self._pings: dict[int, tuple[asyncio.Future[float], float]] = {}  # by nonce: who waits, and since when
        self._budget = PingBudget(handshake.clock())
        self._num_pings = 0
        self._pong: PongRoute | None = None  # None: itself

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
    def greeting(self) -> Hello:
        assert self._greeting is not None, "greeting is known once opened"
        return self._greeting

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
        if self._closed is not None or type(message) not in self._carried:
            self._check_open()
            check_lane(message, self.lane)
        self._write(message)

    async def drain(self) -> None:
        self._check_open()
        await self._can_write.wait()
        self._check_open()

    async def deliver(self, take: Callable[[Message], None]) -> NoReturn:
        ended = self._inbox.hand_to(take)
        self._hand_on()
        try:
            raise await ended
        finally:
            del ended  # or the error, whose traceback leads here, would lead to itself

    def ping(self) -> "asyncio.Future[float]":
        self._check_open()
        self._num_pings += 1
        answered: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._pings[self._num_pings] = answered, self._handshake.clock()
        self._write(Ping(self._num_pings))
        return answered

    def line(self) -> LinkEvidence:
        known, host = acknowledged(self._transport), local_host(self._transport)
        if known is None:
            return LinkEvidence(self.health.bytes_received, self._is_reading, local_host=host)
        self._uplink_Bps = known.rate_Bps or self._uplink_Bps
        seen = self.health.bytes_received, self._is_reading, *known[:2], self._uplink_Bps, known.least_rtt_s
        return LinkEvidence(*seen, host)

    def num_received(self) -> int:
        return self._reader.num_open + self._inbox.num_bytes

    def num_unsent(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

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
            for _ in range(CLOSE_LOOKS):  # of a time in which this loop is held up only a part is lost
                with suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_S / CLOSE_LOOKS):
                        await self._lost.wait()
        finally:
            if self._transport is not None:
                self._transport.abort()
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
            self._greet(self._handshake.dialled)

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
        if messages and self._receive(messages, self._reader.num_read // len(messages)):
            self._hand_on()
        else:
            self._note_received()

    def eof_received(self) -> None:
        return None  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"lost: {exc}" if exc is not None else "closed by the peer", drop=False)
        self._transport = None  # it leads back here, and TLS holds 300 KB: freed now, not by the cyclic collector
        self._lost.set()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()
        self._handshake.shares.unsent.share(self, 0)

    # --- inside -------------------------------------------------------------------------------------------------

    def _receive(self, messages: list[Message], frame_bytes: int) -> bool:
        """Keep what the node takes, then do what the link does itself: a write that reads more must find these in order.

        Whether there is any for the node. `frame_bytes`: of one frame, on average.
        """
        self.health.frames_received += len(messages)
        own: list[Message] = []
        for message in messages:
            if isinstance(message, OWN):
                own.append(message)
            else:
                self._inbox.put(message, frame_bytes)
        if own and not self._budget.take(len(own), self._handshake.clock()):
            logger.warning("peer=%s lane=%s floods with pings", self._peer, self._reader.lane)
            self.abort(f"the peer sent more than {PER_S:g} pings a second")
            return False
        num_answers = ANSWERED
        for message in own:
            match message:
                case Hello():
                    self._greeted(message)
                case Ping() if num_answers:
                    num_answers -= 1
                    (self._pong or self._send_pong)(Pong(message.nonce))
                case Pong():
                    self._ponged(message.nonce)
        return len(own) < len(messages)

    def _ponged(self, nonce: int) -> None:
        asked = self._pings.pop(nonce, None)
        if asked is not None and not asked[0].done():
            rtt_s = self._handshake.clock() - asked[1]
            note_rtt(self.health, rtt_s)
            asked[0].set_result(rtt_s)

    def _hand_on(self) -> None:
        """Give what waits to `deliver`, as far as this turn of the event loop has time for it; the rest in the next ones."""
        turn = self._handshake.shares.turn
        if not self._is_waiting and turn.run(self._inbox.hand_on):
            self._is_waiting = True
            turn.later(self._go_on)
        if self._is_reading == self._inbox.is_full:
            self._pace()
        if self._num_noted or self._reader.num_open or self._inbox.waiting:
            self._note_received()

    def _note_received(self) -> None:
        """Tell all links' budget what this one holds."""
        num_received = 0 if self._closed is not None else self.num_received()
        if num_received != self._num_noted:
            self._num_noted = num_received
            self._handshake.shares.received.share(self, num_received)

    def _go_on(self) -> None:
        self._is_waiting = False
        self._hand_on()

    def _pace(self) -> None:
        """Read while there is room for what would come."""
        if self._transport is None or self._closed is not None:
            return
        self._is_reading = not self._is_reading
        if self._is_reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _greet(self, lane: Lane) -> None:
        self._greeting = self._handshake.hello(lane)
        self._write(self._greeting)

    def _greeted(self, hello: Hello) -> None:
        self._hello, self._carried = hello, LANES[hello.lane]
        if self._handshake.dialled is None:
            self._greet(hello.lane)
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
        if not self._can_write.is_set() and self._reader.lane is not None:
            self._check_is_read(self._reader.lane)

    def _check_is_read(self, lane: Lane) -> None:
        """Close the link if more waits than a peer that reads would leave."""
        num_unsent = self.num_unsent()
        why = self._unread.judge(lane, num_unsent, self.health.bytes_sent - num_unsent, self._handshake.clock())
        if why is not None:
            logger.warning("peer=%s lane=%s does not read: %s", self._peer, lane, why)
            self.abort(f"the peer does not read: {why}")
        else:
            self._handshake.shares.unsent.share(self, num_unsent)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise LinkClosed(self._closed)

    def _end(self, reason: str, *, drop: bool) -> None:
        """Closed from now on, for `reason`; wake all that waits. The first reason stays."""
        if self._closed is None:
            who = f"link to {self._peer[:16]}" if self._peer else "link"
            self._closed = f"{who}: {reason}"
            self.health.last_error = reason
        self._inbox.end(self._closed, drop=drop)
        self._reader.end(reason)
        self._handshake.shares.unsent.share(self, 0)
        self._hand_on()
        self._opened.set()
        self._can_write.set()
        for answered, _ in self._pings.values():
            if not answered.done():
                answered.set_exception(LinkClosed(self._closed))
        self._pings.clear()
