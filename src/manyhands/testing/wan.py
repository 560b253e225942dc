"""An emulated wide area network around any Link: delay, jitter, rate, stalls and cuts, seeded, per direction.

The kernels we test on have no netem, so the delay sits in our own Link; bench/wan.py checks it against the real clock.
Order is kept, nothing is lost (as over TCP: a loss is a stall). A line's arithmetic is pure; timers are the loop's.
"""

import asyncio
import functools
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from manyhands.core import EdgeHealth, NodeAddr, NodeId
from manyhands.errors import LinkClosed
from manyhands.net.inbox import Inbox
from manyhands.net.link import CLOSE_S
from manyhands.net.liveness import LinkEvidence
from manyhands.net.transport import Link, Transport, check_lane, note_rtt
from manyhands.testing.wrapped_link import WrappedLink
from manyhands.wire.frame import wire_size
from manyhands.wire.message import Lane, Message, Ping

HIGH_WATER_BYTES = 4 << 20  # what a sender may have on its line before drain() waits: 30 ms of 1 Gbit/s
_PING_BYTES = wire_size(Ping(0))


@dataclass(frozen=True, slots=True)
class WanProfile:
    """One direction of a line. A message takes size / rate to enter it, then delay_s + uniform(0, jitter_s)."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    rate_bytes_per_s: float = float("inf")
    seed: int = 0


class WanLine:
    """When what enters one direction leaves it. Pure: `now` is an argument, in seconds."""

    def __init__(self, profile: WanProfile) -> None:
        self._profile = profile
        self._random = random.Random(profile.seed)
        self._free_at = 0.0  # when the last message has entered wholly
        self._last_arrival = 0.0
        self.held_until = 0.0
        self.uplink_Bps: float | None = None  # as a kernel would measure it: known once messages had to queue

    def arrival(self, now: float, num_bytes: int) -> float:
        """When a message that is sent at `now` arrives; never before one sent earlier."""
        if self._free_at > now:
            self.uplink_Bps = self._profile.rate_bytes_per_s
        self._free_at = max(now, self._free_at) + num_bytes / self._profile.rate_bytes_per_s
        flight_s = self._profile.delay_s + self._random.uniform(0.0, self._profile.jitter_s)
        self._last_arrival = max(self._free_at + flight_s, self._last_arrival, self.held_until)
        return self._last_arrival

    def stall(self, now: float, seconds: float) -> None:
        """Nothing leaves the line for `seconds`, also not what is on its way."""
        self.held_until = max(self.held_until, now + seconds)


class _Delayed:
    """Callbacks on their way through a line: a queue in order of arrival, and one timer for its head."""

    def __init__(self, profile: WanProfile) -> None:
        self.line = WanLine(profile)
        self._queue: deque[tuple[float, int, Callable[[], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._num_bytes = 0
        self.has_room = asyncio.Event()
        self.is_empty = asyncio.Event()
        self.has_room.set()
        self.is_empty.set()

    def push(self, now: float, num_bytes: int, deliver: Callable[[], None]) -> None:
        """Call `deliver` when a message of `num_bytes` sent at `now` arrives."""
        self._queue.append((self.line.arrival(now, num_bytes), num_bytes, deliver))
        self._count(num_bytes)
        self._arm()

    def drop(self) -> None:
        """Forget everything on its way."""
        self._queue.clear()
        self._count(-self._num_bytes)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        for event, is_set in (
            (self.has_room, self._num_bytes < HIGH_WATER_BYTES),
            (self.is_empty, not self._queue),
        ):
            (event.set if is_set else event.clear)()

    def _arm(self) -> None:
        if self._queue and self._timer is None:
            due = max(self._queue[0][0], self.line.held_until)
            self._timer = asyncio.get_running_loop().call_at(due, self._fire)

    def _fire(self) -> None:
        self._timer = None
        # A timer may fire early by the clock's resolution; half of the finest (asyncio: 1 ns) would spin.
        now = asyncio.get_running_loop().time() + 1e-6
        while self._queue and max(self._queue[0][0], self.line.held_until) <= now:
            _, num_bytes, deliver = self._queue.popleft()
            self._count(-num_bytes)
            deliver()
        self._arm()


class _Full(Exception):
    """Ends deliver, so that the next messages wait below until there is room."""


class WanLink(WrappedLink):
    """A Link (see transport.Link) seen through a WAN: `up` delays what is sent, `down` what is received.

    Takes over `link` and closes it. Owns one task, which ends with the link. Its own ping takes both directions, and
    the peer's pings are answered through both, so two nodes that are each behind a WAN measure the sum.
    """

    def __init__(self, link: Link, up: WanProfile, down: WanProfile | None = None) -> None:
        super().__init__(link)
        self._up = _Delayed(up)
        self._down = _Delayed(down or WanProfile())
        self._inbox = Inbox()
        self._rtt = EdgeHealth()
        self._has_room = asyncio.Event()
        self._pump = asyncio.create_task(self._receive(), name=f"wan {link.peer[:8]}")
        link.answer_pings_with(self._send_pong)

    @property
    def health(self) -> EdgeHealth:
        return replace(self._link.health, rtt_s=self._rtt.rtt_s, rtt_samples=list(self._rtt.rtt_samples))

    def line(self) -> LinkEvidence:
        return self._link.line()._replace(uplink_Bps=self._up.line.uplink_Bps)

    def send(self, message: Message) -> None:
        if self.is_closed:
            raise LinkClosed(self._link.health.last_error or "closed")
        check_lane(message, self.lane)
        self._up.push(self._now(), wire_size(message), functools.partial(self._deliver, message))

    async def drain(self) -> None:
        await self._up.has_room.wait()
        await self._link.drain()

    async def deliver(self, take: Callable[[Message], None]) -> NoReturn:
        ended = self._inbox.hand_to(take)
        self._inbox.hand_on()
        self._has_room.set()
        raise await ended

    def ping(self) -> asyncio.Future[float]:
        return asyncio.ensure_future(self._ping())

    async def _ping(self) -> float:
        begin = self._now()
        await self._until(self._up.line.arrival(begin, _PING_BYTES))
        await self._link.ping()
        await self._until(self._down.line.arrival(self._now(), _PING_BYTES))
        rtt_s = self._now() - begin
        note_rtt(self._rtt, rtt_s)
        return rtt_s

    def stall(self, seconds: float) -> None:
        """Nothing passes for `seconds`, either way, also not what is on its way."""
        for delayed in (self._up, self._down):
            delayed.line.stall(self._now(), seconds)

    def cut(self) -> None:
        """The line breaks now: both ends lose the link, and what was on its way."""
        self.abort("cut by the test")

    def abort(self, reason: str) -> None:
        self._pump.cancel()
        for delayed in (self._up, self._down):
            delayed.drop()
        self._link.abort(reason)
        self._inbox.end(reason, drop=True)
        self._inbox.hand_on()

    async def aclose(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._up.is_empty.wait()
        except TimeoutError:
            self._up.drop()
        await self._link.aclose()
        self.abort("closed by this node")
        await asyncio.wait([self._pump])

    def _deliver(self, message: Message) -> None:
        if not self._link.is_closed:
            self._link.send(message)

    def _send_pong(self, message: Message) -> None:
        leave = functools.partial(self._deliver, message)
        self._down.push(self._now(), _PING_BYTES, lambda: self._up.push(self._now(), _PING_BYTES, leave))

    async def _receive(self) -> None:
        """Move messages from the link to the down line as they arrive, at most an inbox full ahead of deliver."""
        try:
            while True:
                with suppress(_Full):
                    await self._link.deliver(self._enter)
                await self._down.has_room.wait()
                while self._inbox.is_full:
                    self._has_room.clear()
                    await self._has_room.wait()
        except LinkClosed as exc:
            self._down.push(self._now(), 0, functools.partial(self._finish, str(exc)))

    def _enter(self, message: Message) -> None:
        """A message enters the down line now. Raises _Full if it is to be the last for a while."""
        self._down.push(self._now(), wire_size(message), functools.partial(self._leave, message))
        if self._inbox.is_full or not self._down.has_room.is_set():
            raise _Full

    def _finish(self, reason: str) -> None:
        self._inbox.end(reason, drop=False)
        self._inbox.hand_on()

    def _leave(self, message: Message) -> None:
        self._inbox.put(message, wire_size(message))
        self._inbox.hand_on()

    async def _until(self, due: float) -> None:
        await asyncio.sleep(max(due, self._up.line.held_until) - self._now())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class WanTransport:
    """A Transport (see transport.Transport) that puts a whole node behind a WAN, every link with its own lines.

    Dialling takes one round trip more. `links` are those made so far, for stall and cut; each gets its own seed, in
    the order they are made.
    """

    def __init__(self, transport: Transport, up: WanProfile, down: WanProfile | None = None) -> None:
        self._transport = transport
        self._up = up
        self._down = down or WanProfile()
        self.links: list[WanLink] = []

    @property
    def node(self) -> NodeId:
        return self._transport.node

    async def listen(self, addr: NodeAddr) -> NodeAddr:
        return await self._transport.listen(addr)

    async def accept(self) -> WanLink:
        return self._wrap(await self._transport.accept())

    async def dial(self, addr: NodeAddr, lane: Lane) -> WanLink:
        await asyncio.sleep(self._up.delay_s + self._down.delay_s)
        return self._wrap(await self._transport.dial(addr, lane))

    async def aclose(self) -> None:
        await self._transport.aclose()

    def _wrap(self, link: Link) -> WanLink:
        salt = 2 * len(self.links)
        up = replace(self._up, seed=self._up.seed + salt)
        down = replace(self._down, seed=self._down.seed + salt + 1)
        self.links.append(WanLink(link, up, down))
        return self.links[-1]
