"""The directory, which has no owner: one small protocol, its back-ends (gossip, dht, static), and what drives them.

A back-end is sans-I/O: statements, bodies and times go in, bodies to send come out. `DirectoryRunner` is its one driver in a
live node; they run in virtual time in tests/swarm/overlay.py. A `Backend` keeps its statements in a RecordStore, which
checks them. The ticket names the back-end of a swarm (`backends.py`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import ClassVar, Protocol, Self

from manyhands.config import DIRECTORIES
from manyhands.core import ModelId, NodeAddr, NodeId, SpanInfo, SpanLoad
from manyhands.errors import LinkClosed, ManyhandsError
from manyhands.swarm.announce import Announcer
from manyhands.swarm.complaints import ClockJumps, complaints, other_kinds, skews_of
from manyhands.swarm.members import Members
from manyhands.swarm.peer_queue import PeerQueue
from manyhands.swarm.record import BEAT_S, Record
from manyhands.swarm.record_store import Forks

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = (48 << 10) - 1  # with its letter: wire.message.MAX_DIRECTORY_BYTES
TICK_S = 0.5
SEND_TIMEOUT_S = 10.0  # to dial a node and hand it a body
LEAVE_TIMEOUT_S = 2.0
MAX_MENTIONED = 16  # models that peers named, while this node names none
MAX_OTHERS = 64  # nodes that are remembered for keeping another directory
_KINDS = {kind[0].encode(): kind for kind in DIRECTORIES}


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
    """The calls of LP-29: all that the rest of a node uses of the directory. Statements come back as records.

    `changed` is notified whenever what `records` returns may have changed.
    """

    changed: asyncio.Condition
    members: Members  # whose records `records` returns

    @property
    def me(self) -> NodeId: ...

    async def publish(self, data: bytes) -> None:
        """Tell the swarm a statement of this node (`record.sign`), also a withdrawal."""

    def records(self) -> list[Record]:
        """What may be offered now: fresh, not withdrawn, this node's own included. Walks through all that there is."""

    def records_of(self, nodes: Iterable[NodeId], model: ModelId) -> list[Record]:
        """Those of a model, of these nodes; it takes no longer for what others say. A model that was asked for once is kept at
        hand from then on; its first records may take a while to come."""

    def in_turn(self, model: ModelId | None = None, without: Container[object] = ()) -> Iterator[Record]:
        """Records of a model, or of all, as RecordStore.in_turn orders them. To be taken from at once."""

    def peers(self) -> list[Peer]:
        """The other nodes that have something on offer, each once."""

    async def send(self, peer: Peer, body: bytes) -> None:
        """Send bytes to a node by its id. Raises LinkClosed if it cannot be reached."""


class Exchange(Protocol):
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
        """The link to `node` broke: its records are suspect at once."""

    def unreached(self, node: NodeId, now: float) -> list[Outgoing]:
        """A dial of `node` failed: as `lost`, unless it was seen lately."""

    def records(self, now: float) -> list[Record]:
        """Fresh records, our own included."""


class Backend(Exchange, Protocol):
    """An Exchange, and what its owner asks of it."""

    kind: ClassVar[str]  # one of config.DIRECTORIES
    silent_s: ClassVar[float]  # a node of which nothing came for so long does not live

    def watch(self, model: ModelId) -> None:
        """Keep the records of `model` at hand, until `unwatch`. Others may be there too."""

    def unwatch(self, model: ModelId) -> None:
        """This node asks for `model` no more."""

    def addresses(self, node: NodeId) -> tuple[NodeAddr, ...]:
        """Where `node` can be dialled, as its records say, also those that are not fresh."""

    def left(self) -> set[NodeId]:
        """Nodes that have withdrawn all their records, as far as it is remembered: they left, and were not lost."""

    def held_of(self, node: NodeId) -> list[Record]:
        """What is held of `node`, withdrawn and stale records too."""

    def records_of(self, nodes: Iterable[NodeId], model: ModelId, now: float) -> list[Record]:
        """As Directory.records_of, of nodes that are not admitted too."""

    def in_turn(self, model: ModelId | None, without: Container[object], now: float) -> Iterator[Record]:
        """As Directory.in_turn, of nodes that are not admitted too."""

    @property
    def num_news(self) -> int:
        """Statements and beats that were news, since the start."""

    @property
    def forks(self) -> Forks:
        """Nodes whose keys said two different things with one number (record_store.RecordStore)."""


class DirectoryRunner:
    """Drives a back-end in a live node; the node's `Directory`. `async with` it: leaving withdraws all records at once.

    `send(peer, body)` dials if need be and raises a ManyhandsError or OSError if it cannot. `hosted()` says what the node
    offers and how busy that is *now*; None: this node only looks, and says nothing of itself. `members` filters what is
    offered to others of this program, and whose records are taken. The node calls `receive`, `joined` and `lost`; `changed` is
    notified whenever the offered records changed. `clock` is monotonic: all that is decided goes by it. `unix_clock` only
    stamps what this node signs, and is compared with others' for `complaints`.
    """

    def __init__(
        self,
        backend: Backend,
        announcer: Announcer,
        hosted: Callable[[], Sequence[tuple[SpanInfo, SpanLoad]] | None],
        send: Callable[[Peer, bytes], Awaitable[None]],
        me: NodeId,
        members: Members,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self.backend, self.announcer, self.members = backend, announcer, members
        self.changed = asyncio.Condition()
        self._hosted, self._send, self._me = hosted, send, me
        self._clock, self._unix_clock = clock, unix_clock
        self._jumps = ClockJumps(clock, unix_clock)
        self._queues: dict[NodeId, PeerQueue] = {}
        self._num_news = self._num_fresh = 0
        self._asked, self._mentioned, self._watched = set[ModelId](), set[ModelId](), set[ModelId]()
        self._others: dict[NodeId, str] = {}  # peers with another kind of directory
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
        while self._loops:  # without them `announce` says nothing any more
            self._loops.pop().cancel()
        self._publish(self.announcer.withdraw(self._unix_clock()))
        if self._deliveries:
            await asyncio.wait(self._deliveries, timeout=LEAVE_TIMEOUT_S)
        for task in self._deliveries:
            task.cancel()
        await self._tasks.__aexit__(None, None, None)

    @property
    def me(self) -> NodeId:
        return self._me

    async def publish(self, data: bytes) -> None:
        self._publish([data])

    def records(self) -> list[Record]:
        return [record for record in self.backend.records(self._clock()) if self._admits(record)]

    def records_of(self, nodes: Iterable[NodeId], model: ModelId) -> list[Record]:
        self._keep_at_hand(model)
        return [record for record in self.backend.records_of(nodes, model, self._clock()) if self._admits(record)]

    def in_turn(self, model: ModelId | None = None, without: Container[object] = ()) -> Iterator[Record]:
        if model is not None:
            self._keep_at_hand(model)
        return filter(self._admits, self.backend.in_turn(model, without, self._clock()))

    def peers(self) -> list[Peer]:
        found = {record.node: Peer(record.node, record.addresses) for record in self.records()}
        found.pop(self._me, None)
        return list(found.values())

    async def send(self, peer: Peer, body: bytes) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send(peer, self.backend.kind[0].encode() + body)
        except TimeoutError as exc:
            raise LinkClosed(f"node {peer.node[:16]} took no message within {SEND_TIMEOUT_S:.0f} s") from exc
        except OSError as exc:
            raise LinkClosed(f"node {peer.node[:16]} cannot be reached: {exc}") from exc

    # What the node calls

    def receive(self, sender: Peer, body: bytes) -> None:
        if not self.members.may_speak(sender.node):
            return
        kind = _KINDS.get(body[:1], "means that this node does not know")
        if kind == self.backend.kind:
            self._post(self.backend.receive(sender, body[1:], self._clock()))
        elif len(self._others) < MAX_OTHERS:
            self._others[sender.node] = kind

    def joined(self, peer: Peer, models: Iterable[ModelId] = ()) -> None:
        """A link to `peer` is up, or a bootstrap address proved to be it. `models`: those that it says it hosts."""
        if self.members.may_speak(peer.node):
            self._post(self.backend.joined(peer, self._clock()))
            self._tell_changed()
            self._mentioned.update(islice(set(models) - self._mentioned, MAX_MENTIONED - len(self._mentioned)))
            self._attend()

    def lost(self, node: NodeId) -> None:
        self._others.pop(node, None)
        self._post(self.backend.lost(node, self._clock()))
        self._tell_changed()

    def unreached(self, node: NodeId) -> None:
        self._post(self.backend.unreached(node, self._clock()))
        self._tell_changed()

    def announce(self) -> None:
        """Say now what this node hosts, without waiting for the next beat: it took or gave up a span. Nothing once it left."""
        if self._loops and (hosted := self._hosted()) is not None:
            self._publish(self.announcer.announce(hosted, self._unix_clock()))

    # For the node itself, and for people

    def addresses(self, node: NodeId) -> tuple[NodeAddr, ...]:
        """Where `node` can be dialled, as its records say, also those that are not fresh."""
        return self.backend.addresses(node)

    def not_admitted(self) -> list[Record]:
        """What nodes say that this one does not share with: by its scope and lists."""
        return [record for record in self.backend.records(self._clock()) if not self._admits(record)]

    def complaints(self) -> list[str]:
        """What a person should mend, a line each."""
        others = (record for record in self.backend.records(self._clock()) if record.node != self._me)
        skews = skews_of(others, self._unix_clock()) if self._jumps.since_s() > self.backend.silent_s else {}
        said = complaints(skews, self.backend.forks)
        return said + other_kinds(self._others, self.backend.kind)

    def _keep_at_hand(self, model: ModelId) -> None:
        if model not in self._asked:
            self._asked.add(model)
            self._attend()

    def _attend(self) -> None:
        """Keep at hand what is hosted here and what was asked for; while that is nothing, the models that peers named."""
        hosted = {info.model for info, _ in self._hosted() or ()}
        wanted = (hosted | self._asked) or set(self._mentioned)
        for model in wanted - self._watched:
            self.backend.watch(model)
        for model in self._watched - wanted:
            self.backend.unwatch(model)
        self._watched = wanted

    async def _tick(self) -> None:
        while True:
            now, backend = self._clock(), self.backend
            self._jumps.since_s()
            self._attend()
            self._post(backend.tick(now))
            self._publish(self.announcer.answer(backend.held_of(self._me), self._unix_clock(), now, backend.silent_s))
            before, self._num_fresh = self._num_fresh, len(backend.records(now))
            if before != self._num_fresh:  # records also end by time alone
                self._tell_changed()
            await asyncio.sleep(TICK_S)

    async def _speak(self) -> None:
        while True:
            self.announce()
            await asyncio.sleep(BEAT_S)

    def _publish(self, statements: Sequence[bytes]) -> None:
        for data in statements:
            self._post(self.backend.publish(data, self._clock()))

    def _post(self, outgoing: Sequence[Outgoing]) -> None:
        """Queue what is to be sent, in order for every peer, and wake what waits if the directory changed."""
        for item in outgoing:
            queue = self._queues.get(item.to.node)
            if queue is None:
                queue = self._queues[item.to.node] = PeerQueue()
                task = self._tasks.create_task(self._deliver(item.to.node, queue))
                self._deliveries.add(task)
                task.add_done_callback(self._deliveries.discard)
            queue.put(item)
        if self.backend.num_news != self._num_news:
            self._tell_changed()

    def _tell_changed(self) -> None:
        self._num_news = self.backend.num_news
        self._tasks.create_task(self._notify())

    async def _deliver(self, node: NodeId, queue: PeerQueue) -> None:
        try:
            while (item := queue.take()) is not None:
                await self.send(item.to, item.body)
        except ManyhandsError as exc:
            logger.info("directory: node %s: %s", node[:16], exc)
            del self._queues[node]
            self.unreached(node)
        else:
            del self._queues[node]

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _admits(self, record: Record) -> bool:
        return record.node == self._me or self.members.admits(record.node, [addr.host for addr in record.addresses])
