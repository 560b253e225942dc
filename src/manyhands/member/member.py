"""A node with its directory: it comes in by a ticket, says what it hosts, is found again, and leaves without a trace.

    links up, links lost ─► DirectoryRunner (of the ticket's kind) ─► records ─► nodes, their addresses, what is missing
    hosting.py ─► spans and claims ─► signed records ─► the others

`async with Member(...)`: leaving the block withdraws everything at once. `leave` before it hands the sessions over.
"""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import EdgeHealth, NodeAddr, NodeId, Span, SpanInfo, SpanLoad
from manyhands.errors import LinkClosed
from manyhands.member.bootstrap import Bootstrap, suspended_s
from manyhands.member.config import MemberConfig
from manyhands.member.neighbours import Neighbours, say_not_admitted
from manyhands.member.own_addresses import OwnAddresses
from manyhands.member.surroundings import stated
from manyhands.member.view import SwarmSnapshot
from manyhands.member.weights import ServedModel
from manyhands.net.reach import Book
from manyhands.net.transport import Link, Transport
from manyhands.origin.node import FullNode
from manyhands.place.shape import ModelShape
from manyhands.swarm.announce import Announcer, Profile
from manyhands.swarm.backends import backend_of
from manyhands.swarm.directory import DirectoryRunner, Peer
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.members import Members
from manyhands.swarm.record import Record
from manyhands.swarm.ticket import Ticket
from manyhands.wire.message import DirectoryUpdate, Hello, Lane

MakeTransport = Callable[[Callable[[Lane], Hello], Book], Transport]

REACH_S = 8.0  # to dial a node for the directory
FIRST_NEWS_S = 3.0  # for the first records after the first answer
IDLE_POLL_S = 0.05
TICKET_ADDRESSES = 4  # of a ticket that is given out: this node's own, and others that it knows


class Member:
    """Enter it to listen and to announce itself; then `meet`. `claims`: spans that are being loaded (see hosting.py).

    `clock` is monotonic and decides everything; `unix_clock` stamps records and is compared with others' for complaints.
    """

    def __init__(
        self,
        key: NodeKey,
        ticket: Ticket,
        config: MemberConfig,
        make_transport: MakeTransport,
        *,
        worker: WorkerConfig | None = None,
        request: RequestConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
        suspended: Callable[[], float] = suspended_s,
        rng: random.Random | None = None,
    ) -> None:
        self.key, self.ticket, self.config, self.clock, self.unix_clock = key, ticket, config, clock, unix_clock
        self.node = FullNode(
            lambda hello: make_transport(hello, self.book),
            key.private_key,
            name=config.name,
            worker=worker,
            request=request,
        )
        self.announcer = Announcer(key, self._profile(), secrets.token_bytes, unix_clock())
        self.directory = DirectoryRunner(
            backend_of(ticket.directory, key.node_id, rng or random.Random(secrets.token_bytes(16))),
            self.announcer,
            self._told,
            self._send,
            key.node_id,
            Members(config.scope, config.allow, config.deny),
            clock,
            unix_clock,
        )
        self.notes: list[str] = []  # for people: what is not as it should be
        self.own = OwnAddresses(self.node, config, self.notes, self._on_moved, self.records)
        self.bootstrap = Bootstrap(self.node, self.id, ticket, config.nodes, lambda: self.own.all, suspended)
        self.claims: list[SpanInfo] = []
        self.layer_s: dict[Span, float] = {}  # measured before the first request
        self.span_bytes: dict[Span, int] = {}  # weights and cache of what is served
        self.is_leaving = False
        self._until_leaving: set[asyncio.Task[None]] = set()
        self._registered: list[Callable[[], None]] = []  # undo what this member registered with its node

    def __repr__(self) -> str:
        return f"<Member {self.config.name} {self.id[:8]} of {self.ticket.name} {self.node}>"

    @property
    def id(self) -> NodeId:
        return self.key.node_id

    @property
    def addresses(self) -> tuple[NodeAddr, ...]:
        """Where others find this member, directly first; they may change. None: it is a visitor."""
        return self.own.all

    # -- life ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.node.__aenter__()
        try:
            await self.own.listen()
            self._note_place()
            await self.directory.__aenter__()
        except BaseException:
            await self.node.__aexit__(None, None, None)
            raise
        self._registered = [
            self.node.handle(DirectoryUpdate, self._on_update),
            self.node.observe_links(linked=self._on_linked, gone=self._on_gone, unreachable=self._on_unreachable),
        ]
        self.node.start(self.bootstrap.keep_linked(self.own.look))
        self.node.start(self.own.keep_relays())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_leaving = True
        self.bootstrap.stop()
        for undo in self._registered:
            undo()
        try:
            await self.directory.__aexit__(kind, error, trace)
        finally:
            await self.node.__aexit__(kind, error, trace)

    async def leave(self) -> None:
        """Offer nothing any more, load nothing, hand the sessions over, return when none is left. Deadline: the caller's."""
        self.is_leaving = True
        for task in self._until_leaving:
            task.cancel()
        self.bootstrap.stop()
        self.directory.announce()
        await self.node.worker.drain()

    def start_until_leaving(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which changes what is served, as a task of the node. It is cancelled when this member leaves."""
        task = self.node.start(work)
        self._until_leaving.add(task)
        task.add_done_callback(self._until_leaving.discard)

    def switch(self, *, on: bool) -> None:
        """Off: withdraw what is offered, hand the sessions over, take none; weights stay loaded. On: as before."""
        self.node.worker.switch(on=on)
        self.directory.announce()

    async def idle(self, ends_at: float) -> bool:
        """Wait until this node's own requests have ended, or (False) for the loop's time to be `ends_at`."""
        clock = asyncio.get_running_loop().time
        while self.node.sessions and clock() < ends_at:  # noqa: ASYNC110  # once in a member's life
            await asyncio.sleep(IDLE_POLL_S)
        return not self.node.sessions

    def _note_place(self) -> None:
        """What this node says of itself names where it is found; what runs at this machine's own address is local."""
        self.announcer.profile = replace(self.announcer.profile, addresses=self.addresses)
        self.directory.members = Neighbours(self.config.scope, self.config.allow, self.config.deny, self.own.host)

    def _on_moved(self) -> None:
        self._note_place()
        if not self.is_leaving:
            self.directory.announce()

    def _profile(self) -> Profile:
        config, run = self.config, secrets.randbits(32)
        machine = config.memory_bytes, config.cores, config.device
        return Profile(config.name, (), config.iroh_url, config.scope, *machine, run)

    # -- coming in ----------------------------------------------------------------------------------------------------

    async def meet(self) -> None:
        """Call every node that the ticket names, and wait for the records of the first of them. Raises as `call`."""
        if await self.call():
            await self.wait_until(
                lambda: any(record.node != self.id for record in self.directory.records()), FIRST_NEWS_S
            )

    async def call(self) -> int:
        """Call every node that the ticket names; returns how many answered. Raises as Bootstrap.call."""
        return await self.bootstrap.call()

    async def wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for the directory to change so that `is_so`, at most so long. Returns whether it is."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while not is_so() and loop.time() < end:
            try:
                async with asyncio.timeout_at(end), self.directory.changed:
                    await self.directory.changed.wait()
            except TimeoutError:
                break
        return is_so()

    def found_on_lan(self, addrs: Iterable[NodeAddr]) -> None:
        """LAN discovery found members of this swarm at `addrs`: dial those without a link (see Bootstrap.found_on_lan)."""
        self.bootstrap.found_on_lan(addrs)

    # -- what the directory needs -------------------------------------------------------------------------------------

    def _told(self) -> list[tuple[SpanInfo, SpanLoad]] | None:
        """`hosted`, with what the links show of the network in what all records say; None: this member says nothing."""
        if self.config.is_visitor:
            return None
        said = self.announcer.profile
        near = stated(said.near, {node: edge.rtt_s for node, edge in self.edges().items()})
        self.announcer.profile = replace(said, near=near, uplink_Bps=self.node.watch.uplink_Bps())
        return self.hosted()

    def hosted(self) -> list[tuple[SpanInfo, SpanLoad]]:
        """Spans that are served, as busy as they are now, and those that are being loaded."""
        if self.is_leaving or self.node.worker.is_off:
            return []
        serving = [(host.info, host.load) for host in self.node.hosts if not (host.is_draining or host.is_private)]
        told = [(i, self._completed(i.span, load)) for i, load in serving]
        told += [(info, SpanLoad()) for info in self.node.worker.spans if not info.is_loaded]
        named = {info.span for info, _ in told}
        return told + [(claim, SpanLoad()) for claim in self.claims if claim.span not in named]

    def _completed(self, span: Span, load: SpanLoad) -> SpanLoad:
        """With what was measured before the first request, and what the span was given."""
        memory_bytes = self.span_bytes.get(span, 0)
        return replace(load, layer_s=load.layer_s or self.layer_s.get(span, 0.0), memory_bytes=memory_bytes)

    def book(self, node: NodeId) -> list[NodeAddr]:
        """Where `node` can be dialled, as its records say, and the ticket."""
        named = [a for a in self.ticket.addresses if a.node == node]
        return list(dict.fromkeys(NodeAddr(a.host, a.port, node) for a in (*self.directory.addresses(node), *named)))

    def _peer(self, node: NodeId, link: Link | None = None) -> Peer:
        """`node` with its addresses; where there is no record of it yet, the one that it said on its link."""
        link = link or self.node.pool.find(node, "control")
        said = None if link is None else link.hello.listen
        ways = self.book(node) or ([NodeAddr(said.host, said.port, node)] if said is not None else [])
        return Peer(node, tuple(ways))

    async def _send(self, peer: Peer, body: bytes) -> None:
        link = self.node.pool.find(peer.node, "control") or await self._reach(peer)
        link.send(DirectoryUpdate(body))
        await link.drain()

    async def _reach(self, peer: Peer) -> Link:
        """A link to `peer`: as its records say (the transport tries every way of them), else by what others said of it."""
        reason = LinkClosed(f"node {peer.node[:16]} has no address, and it has not called")
        book = self.book(peer.node)[:1]
        for way in book or [NodeAddr(a.host, a.port, peer.node) for a in peer.addresses]:
            try:
                return await self.node.reach(way, peer.node, REACH_S, is_hearsay=not book)
            except LinkClosed as error:
                reason = error
        raise reason

    def _on_update(self, message: DirectoryUpdate, link: Link) -> bool:
        self.directory.receive(self._peer(link.peer), message.body)
        return True

    def _on_linked(self, link: Link) -> None:
        if link.lane != "control":
            return
        self.bootstrap.note_linked(link)
        self.directory.joined(self._peer(link.peer, link), [info.model for info in link.hello.spans])

    def _on_gone(self, node: NodeId) -> None:
        if node != self.id:
            self.directory.lost(node)

    def _on_unreachable(self, node: NodeId) -> None:
        if node != self.id:
            self.directory.unreached(node)

    # -- what people ask ----------------------------------------------------------------------------------------------

    def snapshot(self, shapes: Mapping[ServedModel, ModelShape], tokens: int, api: str) -> SwarmSnapshot:
        """The swarm as this member sees it now. `tokens`: positions of cache that a span is planned with."""
        return SwarmSnapshot(
            self.ticket.name,
            self.id,
            self.unix_clock(),
            self.records(),
            self.edges(),
            shapes,
            len(self.node.sessions),
            tokens,
            tuple(self.complaints()),
            api,
            tuple(self.notes),
            self.ticket.directory,
            self.node.request.mix_classes,
            frozenset(self.directory.backend.left()),
        )

    def records(self) -> list[Record]:
        """What the swarm offers now, this node's own included."""
        return self.directory.records()

    def edges(self) -> dict[NodeId, EdgeHealth]:
        """Control links to others."""
        return self.bootstrap.edges()

    def complaints(self) -> list[str]:
        """What a person should mend: clocks, keys used twice."""
        lines = self.directory.complaints()
        unmeant = (record for record in self.directory.not_admitted() if record.node not in self.config.deny)
        lines += say_not_admitted(unmeant, self.config.scope)
        if (twin := self.announcer.twin) is not None:
            where = ", ".join(str(addr) for addr in twin.addresses) or "an unknown address"
            lines.append(
                f"another node uses this node's key ({twin.name} at {where}): start one of the two with --key FILE"
            )
        return lines

    def invitation(self) -> Ticket:
        """The ticket to give to others: this node first, direct addresses before relayed ones, then some linked nodes."""
        linked = self.edges()
        records = sorted(self.records(), key=lambda record: record.node not in linked)
        others = {r.node: r.addresses[0] for r in records if r.addresses and r.node != self.id}
        return self._ticket_to([*self.config.nodes, *list(others.values())[: TICKET_ADDRESSES - 1]])

    def remembered(self) -> Ticket:
        """The ticket to save: as many addresses as it holds. This node's, linked nodes', then those known from earlier."""
        linked, known = self.edges(), self.bootstrap.met
        met = [addr for node, addr in reversed(known.items()) if node in linked]
        gone = [addr for node, addr in reversed(known.items()) if node not in linked]
        others = [a for a in self.ticket.addresses if a.node not in known and a.node != self.id]
        return self._ticket_to([*reversed(others), *gone[::-1], *met[::-1]])

    def _ticket_to(self, others: Sequence[NodeAddr]) -> Ticket:
        """To this node first, then to `others`, the last of them first."""
        ticket = replace(self.ticket, addresses=())
        for addr in [*others, *reversed(self.addresses)]:
            if not addr.host.startswith("iroh%"):
                ticket = ticket.with_address(addr)
        return ticket
