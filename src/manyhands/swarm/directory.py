"""The directory that nobody owns: one small protocol, its back-ends (gossip, dht, static), and what drives them.

A back-end is sans-I/O: statements, bodies and times go in, bodies to send come out. `DirectoryRunner` is its one driver in a
live node; the same back-ends run in virtual time under `testing.overlay`. Whoever implements `Backend` keeps its
statements on a `shelf.Shelf`, which checks them, so that no back-end has to.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from manyhands.core import ModelId, NodeAddr, NodeId, SpanInfo, SpanLoad
from manyhands.errors import LinkClosed, ManyhandsError
from manyhands.swarm.announce import Announcer
from manyhands.swarm.members import Members
from manyhands.swarm.record import BEAT_S, Key, Record

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 48 << 10
TICK_S = 0.5
SEND_TIMEOUT_S = 10.0  # to dial a node and hand it a body
LEAVE_TIMEOUT_S = 2.0
MAX_QUEUED = 64  # bodies for one peer; beyond, the oldest are dropped (back-ends repeat themselves)


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node and where it can be dialled (perhaps nowhere: then only over a link that it opened)."""

    node: NodeId
    addresses: tuple[NodeAddr, ...] = ()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A body for the same back-end of another node. It may get lost; bodies between two nodes arrive in order."""

    to: Peer
    body: bytes  # 1 to MAX_BODY_BYTES


class Directory(Protocol):
    """The five calls of LP-29: all that the rest of a node knows of the directory. Statements come back as records."""

    @property
    def me(self) -> NodeId: ...

    async def publish(self, data: bytes) -> None:
        """Tell the swarm a statement of this node (`record.sign`); a withdrawal works the same way."""

    def records(self, model: ModelId | None = None) -> list[Record]:
        """What may be offered now: fresh, not withdrawn, this node's own included."""

    def peers(self) -> list[Peer]:
        """The other nodes that have something on offer, each once."""

    async def send(self, peer: Peer, body: bytes) -> None:
        """Send bytes to a node by its id. Raises LinkClosed if it cannot be reached."""


class Backend(Protocol):
    """What a back-end decides. None of the calls raises for what a peer sent; all of them may return nothing."""

    def publish(self, data: bytes, now: float) -> list[Outgoing]:
        """Our own statement: new, the same with a further beat, or a withdrawal."""

    def receive(self, sender: Peer, body: bytes, now: float) -> list[Outgoing]:
        """Hostile bytes from a node whose id the link proved: counted and dropped if they mean nothing."""

    def tick(self, now: float) -> list[Outgoing]:
        """To be called every 0.5 s or so."""

    def joined(self, peer: Peer, now: float) -> list[Outgoing]:
        """A link to `peer` is up: it called us, or a bootstrap address proved to be this node."""

    def lost(self, node: NodeId, now: float) -> list[Outgoing]:
        """The link to `node` broke, or it could not be dialled: its records are suspect at once."""

    def records(self, now: float) -> list[Record]:
        """Fresh records, our own included."""


class DirectoryRunner:
    """Drives a back-end in a live node; the node's `Directory`. `async with` it: leaving withdraws all records at once.

    `send(peer, body)` dials if need be and raises a ManyhandsError or OSError if it cannot. `hosted()` says what the node
    offers and how busy that is *now*. `members` filters what is offered to others of this program, and who may speak.
    The node calls `receive`, `joined` and `lost`; `changed` is notified whenever the offered records changed.
    """

    def __init__(
        self,
        backend: Backend,
        announcer: Announcer,
        hosted: Callable[[], Sequence[tuple[SpanInfo, SpanLoad]]],
        send: Callable[[Peer, bytes], Awaitable[None]],
        me: NodeId,
        members: Members,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.backend, self.announcer, self.members = backend, announcer, members
        self.changed = asyncio.Condition()
        self._hosted, self._send, self._me, self._clock = hosted, send, me, clock
        self._queues: dict[NodeId, deque[Outgoing]] = {}
        self._seen: dict[Key, int] = {}
        self._tasks = asyncio.TaskGroup()
        self._loops: list[asyncio.Task[None]] = []
        self._deliveries: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._loops = [self._tasks.create_task(self._tick()), self._tasks.create_task(self._speak())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for loop in self._loops:
            loop.cancel()
        self._publish(self.announcer.withdraw(self._clock()))
        if self._deliveries:
            await asyncio.wait(self._deliveries, timeout=LEAVE_TIMEOUT_S)
        for task in self._deliveries:
            task.cancel()
        await self._tasks.__aexit__(None, None, None)

    # The five calls

    @property
    def me(self) -> NodeId:
        return self._me

    async def publish(self, data: bytes) -> None:
        self._publish([data])

    def records(self, model: ModelId | None = None) -> list[Record]:
        offered = (record for record in self.backend.records(self._clock()) if self._admits(record))
        return [
            record for record in offered if model is None or (record.info is not None and record.info.model == model)
        ]

    def peers(self) -> list[Peer]:
        found = {record.node: Peer(record.node, record.addresses) for record in self.records()}
        found.pop(self._me, None)
        return list(found.values())

    async def send(self, peer: Peer, body: bytes) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send(peer, body)
        except TimeoutError as exc:
            raise LinkClosed(f"node {peer.node[:16]} took no message within {SEND_TIMEOUT_S:.0f} s") from exc
        except OSError as exc:
            raise LinkClosed(f"node {peer.node[:16]} cannot be reached: {exc}") from exc

    # What the node tells

    def receive(self, sender: Peer, body: bytes) -> None:
        if self.members.may_speak(sender.node):
            self._post(self.backend.receive(sender, body, self._clock()))

    def joined(self, peer: Peer) -> None:
        """A link to `peer` is up, or a bootstrap address proved to be it."""
        if self.members.may_speak(peer.node):
            self._post(self.backend.joined(peer, self._clock()))

    def lost(self, node: NodeId) -> None:
        self._post(self.backend.lost(node, self._clock()))

    def speak(self) -> None:
        """Say now what this node hosts, without waiting for the next beat: it took or gave up a span."""
        self._publish(self.announcer.speak(self._hosted(), self._clock()))

    # Loops

    async def _tick(self) -> None:
        while True:
            now = self._clock()
            self._post(self.backend.tick(now))
            self._publish(self.announcer.answer(self.backend.records(now), now))
            await asyncio.sleep(TICK_S)

    async def _speak(self) -> None:
        while True:
            self.speak()
            await asyncio.sleep(BEAT_S)

    def _publish(self, statements: Sequence[bytes]) -> None:
        for data in statements:
            self._post(self.backend.publish(data, self._clock()))

    def _post(self, outgoing: Sequence[Outgoing]) -> None:
        """Queue what is to be sent, in order for every peer, and tell those who wait if the directory changed."""
        for item in outgoing:
            queue = self._queues.get(item.to.node)
            if queue is None:
                queue = self._queues[item.to.node] = deque(maxlen=MAX_QUEUED)
                self._start_delivery(item.to.node, queue)
            queue.append(item)
        seen = {record.key: record.sequence for record in self.records()}
        if seen != self._seen:
            self._seen = seen
            self._tasks.create_task(self._notify())

    def _start_delivery(self, node: NodeId, queue: deque[Outgoing]) -> None:
        task = self._tasks.create_task(self._deliver(node, queue))
        self._deliveries.add(task)
        task.add_done_callback(self._deliveries.discard)

    async def _deliver(self, node: NodeId, queue: deque[Outgoing]) -> None:
        try:
            while queue:
                item = queue.popleft()
                await self.send(item.to, item.body)
        except ManyhandsError as exc:
            logger.info("directory: node %s: %s", node[:16], exc)
            del self._queues[node]
            self.lost(node)
        else:
            del self._queues[node]

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _admits(self, record: Record) -> bool:
        return record.node == self._me or self.members.admits(record.node, [addr.host for addr in record.addresses])
