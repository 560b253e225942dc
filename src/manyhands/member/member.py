"""A node with its directory: it comes in by a ticket, says what it hosts, is found again, and leaves without a trace.

    links up, links lost ─► DirectoryRunner (of the ticket's kind) ─► records ─► who there is, whom to dial, what is missing
    hosting.py ─► spans and claims ─► signed records ─► the others

`async with Member(...)`: leaving the block withdraws everything at once. `leave` before it hands the sessions over.
"""

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import TracebackType
from typing import Self

from manyhands.config import BalanceConfig, RequestConfig, WorkerConfig
from manyhands.core import EdgeHealth, NodeAddr, NodeId, Span, SpanInfo, SpanLoad
from manyhands.errors import BadRequest, LinkClosed, ShardUnavailable
from manyhands.member.neighbours import Neighbours, reachable, say_stranger
from manyhands.net.reach import Book
from manyhands.net.relay.tunnel import relayed
from manyhands.net.transport import Link, Transport
from manyhands.origin.node import FullNode
from manyhands.swarm.announce import Announcer, Profile
from manyhands.swarm.backends import backend_of
from manyhands.swarm.directory import DirectoryRunner, Peer
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.members import Members
from manyhands.swarm.record import Record, Scope
from manyhands.swarm.ticket import Ticket
from manyhands.wire.message import DirectoryUpdate, Hello, Lane

MakeTransport = Callable[[Callable[[Lane], Hello], Book], Transport]

DIAL_S = 5.0  # for one address of the ticket to answer
REACH_S = 8.0  # to dial a node for the directory
FIRST_NEWS_S = 3.0  # for the first records after somebody answered
KNOCK_AGAIN_S = (
    10.0  # while no node is linked, and for nodes of the list that are not; else at one address known from earlier
)
LOOK_S = 1.0  # between looks at whether something calls for dialling at once
SUSPENDED_S = 2.0  # the machine slept for so long: links may be dead, addresses may have changed
MAX_HEARD = 32  # addresses that the local network told of
MAX_MET = 64  # nodes that were linked, whose addresses are remembered
IDLE_POLL_S = 0.05
TICKET_ADDRESSES = 4  # of a ticket that is given out: this node's own, and others that it knows


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """What a member is, beside its key and ticket. `span`: layers it was told to host; it then never moves.

    `relays`: members that others can dial, where this node waits for calls. `memory_bytes`: for the model, all told.
    `nodes`: others to stay linked to. `is_visitor`: it only looks and asks: it does not listen, and nobody hears of it.
    `is_spare`: it serves only where no other node does, and never moves. `can_load`: layers that it would load beside its
    own, at most, while no other node holds them.
    """

    name: str
    listen: NodeAddr
    memory_bytes: int
    advertise: NodeAddr | None = None
    relays: tuple[NodeAddr, ...] = ()
    iroh_url: str | None = None
    scope: Scope = "lan"
    allow: frozenset[NodeId] = frozenset()
    deny: frozenset[NodeId] = frozenset()
    nodes: tuple[NodeAddr, ...] = ()
    is_visitor: bool = False
    span: Span | None = None
    tokens: int = 4096  # positions of cache to find room for on every layer
    max_pipes: int = 2  # complete copies of the model to aim at
    cores: int = 1
    device: str = "cpu"
    settle_s: float = 0.3  # how long a claim waits for the claims of others
    gap_s: float = 3.0  # how long layers may be missing before those with room take them
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    is_spare: bool = False
    can_load: int = 0


def suspended_s() -> float:
    """For how long this machine has been suspended since it started; 0 where the system does not tell."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if clock is None else time.clock_gettime(clock) - time.monotonic()


class Member:
    """Enter it to listen and to speak; then `meet`. `claims`: spans that are being loaded (see hosting.py).

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
        self.key, self.ticket, self.config = key, ticket, config
        self.clock, self.unix_clock, self._suspended = clock, unix_clock, suspended
        self.node = FullNode(
            lambda hello: make_transport(hello, self.book),
            key.private_key,
            name=config.name,
            worker=worker,
            request=request,
        )
        self.announcer = Announcer(key, self._profile(()), secrets.token_bytes, unix_clock())
        self.directory = DirectoryRunner(
            backend_of(ticket.directory, key.node_id, rng or random.Random(secrets.token_bytes(16))),
            self.announcer,
            lambda: None if config.is_visitor else self.hosted(),
            self._send,
            key.node_id,
            Members(config.scope, config.allow, config.deny),
            clock,
            unix_clock,
        )
        self.addresses: tuple[NodeAddr, ...] = ()
        self._behind: dict[NodeAddr, NodeId] = {}  # who answered at an address
        self._met: dict[NodeId, NodeAddr] = {}  # who was linked, and where to dial it; the latest last
        self._heard: list[NodeAddr] = []
        self._news = asyncio.Event()  # `_heard` has changed
        self._turn = 0
        self.claims: list[SpanInfo] = []
        self.layer_s: dict[Span, float] = {}  # measured before the first request
        self.notes: list[str] = []  # for people: what is not as it should be
        self.is_leaving = False
        self._registered: list[Callable[[], None]] = []  # undo what this member registered with its node

    def __repr__(self) -> str:
        return f"<Member {self.config.name} {self.id[:8]} of {self.ticket.name} {self.node}>"

    @property
    def id(self) -> NodeId:
        return self.key.node_id

    # -- life ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.node.__aenter__()
        try:
            await self._listen()
            await self.directory.__aenter__()
        except BaseException:
            await self.node.__aexit__(None, None, None)
            raise
        self._registered = [
            self.node.handle(DirectoryUpdate, self._on_update),
            self.node.observe_links(linked=self._on_linked, unreachable=self._on_unreachable),
        ]
        self.node.start(self._keep_linked())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_leaving = True
        for undo in self._registered:
            undo()
        try:
            await self.directory.__aexit__(kind, error, trace)
        finally:
            await self.node.__aexit__(kind, error, trace)

    async def leave(self) -> None:
        """Offer nothing any more, hand the sessions over, return when none is left. Deadline: the caller's."""
        self.is_leaving = True
        self.directory.speak()
        await self.node.worker.drain()

    async def idle(self) -> None:
        """Wait until this node's own requests have ended. Deadline: the caller's."""
        while self.node.sessions:  # noqa: ASYNC110  # once in a member's life
            await asyncio.sleep(IDLE_POLL_S)

    async def _listen(self) -> None:
        if self.config.is_visitor:
            self._be_near(reachable(self.config.listen).host)
            return
        bound = await self.node.listen(self.config.listen)
        shown = self.config.advertise or reachable(bound)
        direct = NodeAddr(shown.host, shown.port or bound.port, self.id)
        others: list[NodeAddr] = []
        for relay in self.config.relays:
            try:
                others.append(await self.node.transport.listen(relayed(relay)))
            except BadRequest as error:
                self.notes.append(f"not reachable by way of the relay: {error}")
        if self.config.iroh_url is not None:
            others.append(await self.node.transport.listen(NodeAddr("iroh%0.0.0.0", 0)))
        self.addresses = (direct, *others)
        self.node.address = direct
        self.announcer.profile = self._profile(self.addresses)
        self._be_near(direct.host)

    def _be_near(self, host: str) -> None:
        """What runs at this machine's own address is local."""
        self.directory.members = Neighbours(self.config.scope, self.config.allow, self.config.deny, host)

    def _profile(self, addresses: tuple[NodeAddr, ...]) -> Profile:
        config = self.config
        return Profile(
            config.name, addresses, config.iroh_url, config.scope, config.memory_bytes, config.cores, config.device
        )

    # -- coming in ----------------------------------------------------------------------------------------------------

    async def meet(self) -> None:
        """Call everybody the ticket names, and wait for what the first of them knows. Raises as `call`."""
        if await self.call():
            await self.wait_until(
                lambda: any(record.node != self.id for record in self.directory.records()), FIRST_NEWS_S
            )

    async def call(self) -> int:
        """Call everybody the ticket names. Returns how many answered.

        Raises BadRequest if one of them has this node's own key; ShardUnavailable with the reasons if the ticket names
        others and none answers.
        """
        addresses = self._bootstrap_addresses()
        answers = await asyncio.gather(*(self._dial_bootstrap(addr) for addr in addresses), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, LinkClosed | TimeoutError):
                raise answer
        opened = sum(not isinstance(answer, BaseException) for answer in answers)
        if addresses and not opened:
            reasons = "; ".join(
                str(a) or f"{d}: no answer within {DIAL_S:g} s" for d, a in zip(addresses, answers, strict=True)
            )
            raise ShardUnavailable(
                f"nobody of swarm {self.ticket.name} answers ({reasons}): is it up there, and is this its newest ticket?"
            )
        return opened

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

    def hear(self, addrs: Iterable[NodeAddr]) -> None:
        """The local network tells of members of this swarm at `addrs` (at most MAX_HEARD count): dial those not linked."""
        heard = list(islice(addrs, MAX_HEARD))
        if heard != self._heard:
            self._heard = heard
            self._news.set()

    def _bootstrap_addresses(self) -> list[NodeAddr]:
        mine = {(addr.host, addr.port) for addr in self.addresses}
        known = (*self.ticket.addresses, *self.config.nodes, *self._heard, *self._met.values())
        named = {(a.host, a.port): a for a in reversed(known) if a.node != self.id}
        return [addr for place, addr in named.items() if place not in mine]

    async def _dial_bootstrap(self, addr: NodeAddr) -> None:
        async with asyncio.timeout(DIAL_S):
            link = await self.node.pool.get(addr, "control")
        if link.peer == self.id:
            raise BadRequest(
                f"the node at {addr} has the same key as this one: move node.key away here, or start with --key FILE"
            )
        self._behind[addr] = link.peer

    async def _keep_linked(self) -> None:
        """Knock again at who is not linked, every KNOCK_AGAIN_S; at once if the local network tells of members, or the machine
        was suspended."""
        loop = asyncio.get_running_loop()
        due, slept = loop.time() + KNOCK_AGAIN_S, self._suspended()
        while not self.is_leaving:
            has_news = await self._hears_news()
            has_slept = self._suspended() - slept > SUSPENDED_S
            if not has_news and not has_slept and loop.time() < due:
                continue
            due, slept = loop.time() + KNOCK_AGAIN_S, self._suspended()
            shut = self._unlinked_addresses(is_all=has_slept)
            await asyncio.gather(*(self._dial_bootstrap(addr) for addr in shut), return_exceptions=True)

    async def _hears_news(self) -> bool:
        """Whether there is news within LOOK_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._news.wait()
        has_news = self._news.is_set()
        self._news.clear()
        return has_news

    def _unlinked_addresses(self, *, is_all: bool) -> list[NodeAddr]:
        """Where to dial: with links, at nodes of the list and of the local network, and at one other known address in turn."""
        linked = self.edges()
        shut = [
            addr
            for addr in self._bootstrap_addresses()
            if addr.node not in linked and self._behind.get(addr) not in linked
        ]
        if is_all or not linked:
            return shut
        always = [addr for addr in shut if addr in self.config.nodes or addr in self._heard]
        others = [addr for addr in shut if addr not in always]
        self._turn += 1
        return always + ([others[self._turn % len(others)]] if others else [])

    # -- what the directory needs -------------------------------------------------------------------------------------

    def hosted(self) -> list[tuple[SpanInfo, SpanLoad]]:
        """Spans that are served, as busy as they are now, and those that are being loaded."""
        if self.is_leaving:
            return []
        serving = [(host.info, host.load) for host in self.node.hosts if not host.is_draining]
        told = [(i, replace(load, layer_s=load.layer_s or self.layer_s.get(i.span, 0.0))) for i, load in serving]
        told += [(info, SpanLoad()) for info in self.node.worker.spans if not info.is_loaded]
        named = {info.span for info, _ in told}
        return told + [(claim, SpanLoad()) for claim in self.claims if claim.span not in named]

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
        for way in self.book(peer.node)[:1] or [NodeAddr(a.host, a.port, peer.node) for a in peer.addresses]:
            try:
                return await self.node.reach(way, peer.node, REACH_S)
            except LinkClosed as error:
                reason = error
        raise reason

    def _on_update(self, message: DirectoryUpdate, link: Link) -> bool:
        self.directory.receive(self._peer(link.peer), message.body)
        return True

    def _on_linked(self, link: Link) -> None:
        if link.lane != "control":
            return
        said = link.hello.listen
        if said is not None and link.peer != self.id:
            self._met.pop(link.peer, None)
            self._met[link.peer] = NodeAddr(said.host, said.port, link.peer)
            if len(self._met) > MAX_MET:
                del self._met[next(iter(self._met))]
        self.directory.joined(self._peer(link.peer, link), [info.model for info in link.hello.spans])

    def _on_unreachable(self, node: NodeId) -> None:
        if node != self.id:
            self.directory.lost(node)

    # -- what people ask ----------------------------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """What the swarm offers now, this node's own included."""
        return self.directory.records()

    def edges(self) -> dict[NodeId, EdgeHealth]:
        """Control links to others."""
        health = self.node.pool.health().items()
        return {peer: edge for (peer, lane), edge in health if lane == "control" and peer != self.id}

    def complaints(self) -> list[str]:
        """What a person should mend: clocks, keys used twice."""
        lines = self.directory.complaints()
        strangers = {record.node: record for record in self.directory.strangers()}
        lines += [say_stranger(record, self.config.scope) for record in strangers.values()]
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
        linked = self.edges()
        met = [addr for node, addr in reversed(self._met.items()) if node in linked]
        gone = [addr for node, addr in reversed(self._met.items()) if node not in linked]
        known = {self.id, *self._met}
        return self._ticket_to(
            [*reversed([a for a in self.ticket.addresses if a.node not in known]), *gone[::-1], *met[::-1]]
        )

    def _ticket_to(self, others: Sequence[NodeAddr]) -> Ticket:
        """To this node first, then to `others`, the last of them first."""
        ticket = replace(self.ticket, addresses=())
        for addr in [*others, *reversed(self.addresses)]:
            if not addr.host.startswith("iroh%"):
                ticket = ticket.with_address(addr)
        return ticket
