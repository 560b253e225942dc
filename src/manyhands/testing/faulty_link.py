"""Links and transports that do what Trouble says, for every node of a swarm in one process."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import LinkClosed
from manyhands.net.transport import Link, Transport
from manyhands.testing.trouble import Change, Trouble
from manyhands.testing.wrapped_link import WrappedLink
from manyhands.wire.message import Lane, Message, Step

# How long a frame that is to be overtaken waits for the next one.
OVERTAKE_S = 0.05


class _Frozen(Exception):
    """Ends deliver, so that the next messages wait below until the thaw."""


class FaultyLink(WrappedLink):
    """A Link (see transport.Link) of `owner` that does what Trouble says. Closes the link it wraps."""

    def __init__(self, trouble: Trouble, owner: NodeId, link: Link) -> None:
        self.owner = owner
        super().__init__(link)
        self._trouble = trouble
        self._waiting: list[Message] = []  # sent while frozen
        self._received: Message | None = None  # the first that came while the owner was frozen
        self._held: Sequence[Step] = ()
        self._delayed = deque[Message]()
        self._end: str | None = None
        link.answer_pings_with(self._send_pong)

    @property
    def is_closed(self) -> bool:
        return self._end is not None or self._link.is_closed

    def send(self, message: Message) -> None:
        if self.is_closed:
            raise LinkClosed(self._end or self.health.last_error or "closed")
        change = self._trouble.notice(self.owner, self.peer, message)
        if self.is_closed:  # that was the moment to die
            return
        if change is not None and isinstance(message, Step):
            self._send_changed(message, change)
            return
        delay_s = self._trouble.delays.get((self.owner, self.peer, self.lane), 0.0)
        if delay_s or self._delayed:  # nothing overtakes what is on its way
            self._delayed.append(message)
            asyncio.get_running_loop().call_later(delay_s, self._send_delayed)
        else:
            self._send_now(message)
        self._release()

    def _send_delayed(self) -> None:
        """In the order in which they were sent: timers that end at one time are called in any."""
        self._send_now(self._delayed.popleft())

    def _send_now(self, message: Message) -> None:
        """Send without looking for faults of single frames."""
        if self._trouble.is_cut(self.owner, self.peer, self.lane):
            return
        if self._is_blocked():
            self._waiting.append(message)
        elif not self._link.is_closed:
            self._link.send(message)

    def _send_changed(self, step: Step, change: Change) -> None:
        """What `step` has become, now or after the next message, or OVERTAKE_S."""
        if change.is_late:
            self._held = change.make(step)
            asyncio.get_running_loop().call_later(OVERTAKE_S, self._release)
            return
        for other in change.make(step):
            self._send_now(other)

    def _release(self) -> None:
        held, self._held = self._held, ()
        for step in held:
            self._send_now(step)

    def flush(self) -> None:
        """Send what waited for the thaw, or close if that was decided meanwhile."""
        if self._is_blocked():
            return
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            if not self._link.is_closed:
                self._link.send(message)
        if self._end is not None:
            self._link.abort(self._end)

    def break_off(self, reason: str) -> None:
        self._end = self._end or reason
        self._link.abort(reason)

    async def drain(self) -> None:
        await self._link.drain()

    async def deliver(self, take: Callable[[Message], None]) -> NoReturn:
        while True:
            if self._received is not None:
                await self._trouble.until_thawed(self.owner)
                message, self._received = self._received, None
                take(message)
            with suppress(_Frozen):
                await self._link.deliver(lambda message: self._hand_on(message, take))

    def _hand_on(self, message: Message, take: Callable[[Message], None]) -> None:
        if self.owner in self._trouble.frozen:
            self._received = message
            raise _Frozen
        take(message)

    def ping(self) -> asyncio.Future[float]:
        return asyncio.ensure_future(self._ping())

    async def _ping(self) -> float:
        await self._trouble.until_thawed(self.owner, self.peer)
        if self._trouble.is_cut(self.owner, self.peer, self.lane):
            await asyncio.Event().wait()
        return await self._link.ping()

    def abort(self, reason: str) -> None:
        """A frozen node may give a link up; its peer cannot learn of it before the thaw."""
        self._end = self._end or reason
        if self.owner not in self._trouble.frozen:
            self._link.abort(reason)

    async def aclose(self) -> None:
        self._end = self._end or "closed by this node"
        await self._link.aclose()

    def _send_pong(self, message: Message) -> None:
        if not self.is_closed:
            with suppress(LinkClosed):
                self._send_now(message)

    def _is_blocked(self) -> bool:
        return self._trouble.is_blocked(self.owner, self.peer, self.lane)


class FaultyTransport:
    """A Transport (see transport.Transport) whose links do what Trouble says. `links` are those made so far."""

    def __init__(self, trouble: Trouble, transport: Transport) -> None:
        self._trouble, self._transport = trouble, transport
        self.links: list[FaultyLink] = []

    @property
    def node(self) -> NodeId:
        return self._transport.node

    async def listen(self, addr: NodeAddr) -> NodeAddr:
        return await self._transport.listen(addr)

    async def accept(self) -> FaultyLink:
        while True:
            link = await self._transport.accept()
            if self.node not in self._trouble.dead:
                return self._wrap(link)
            link.abort("dead")

    async def dial(self, addr: NodeAddr, lane: Lane) -> FaultyLink:
        await self._trouble.until_thawed(self.node)
        link = await self._transport.dial(addr, lane)
        try:
            await self._trouble.until_thawed(link.peer)
            if self._trouble.is_cut(self.node, link.peer, lane) or self._trouble.is_cut(link.peer, self.node, lane):
                await asyncio.Event().wait()
        except BaseException:
            link.abort("dial failed")
            raise
        if self._trouble.dead & {self.node, link.peer}:
            link.abort("dead")
            raise LinkClosed(f"{addr} cannot be reached: nothing listens there")
        return self._wrap(link)

    async def aclose(self) -> None:
        await self._transport.aclose()

    def _wrap(self, link: Link) -> FaultyLink:
        self.links.append(FaultyLink(self._trouble, self.node, link))
        return self.links[-1]
