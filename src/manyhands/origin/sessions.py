"""The sessions that a node owns: offers of nodes, links to them, open sessions, and the messages that belong to them."""

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

from manyhands.config import RequestConfig
from manyhands.core import ORIGIN_HOP, ModelId, NodeAddr, NodeId, Precision, SessionId, Span, SpanInfo
from manyhands.errors import LinkClosed, ShardUnavailable
from manyhands.net.transport import Link, try_send
from manyhands.node import Node
from manyhands.origin.route import Hop, Lease, Resume
from manyhands.origin.session import First, Session
from manyhands.route.offer import Offer, refuse_twins
from manyhands.wire.attest_message import Attested
from manyhands.wire.message import Close, Credit, Extended, Fault, Opened, Progress, Step
from manyhands.wire.signed import Signer
from manyhands.worker.early import EARLY_SESSIONS
from manyhands.worker.owners import Owners

MAX_LOADED: Final = 64  # spans of one node, of which there are no more records either; the oldest are forgotten first


class Sessions:
    """`open` gives a session and `close` frees it. `owners`: whose sessions the spans of this node hold. `ended` is told of
    each that is closed."""

    def __init__(
        self,
        node: Node,
        signer: Signer,
        owners: Owners,
        ended: Callable[[SessionId], None],
        request: RequestConfig,
    ) -> None:
        self.request = request
        self.active: dict[SessionId, Session] = {}
        self._node, self._owners, self._ended, self._signer = node, owners, ended, signer
        self._num_opening = 0
        # What peers have loaded for sessions of ours since their Hello: as they said it last, the latest last.
        self._loaded: dict[NodeId, dict[tuple[ModelId, Precision, Span], SpanInfo]] = {}

    def register(self) -> None:
        """Take the messages of these sessions, before the spans of this node take theirs."""
        self._node.handle(Step, self._on_step)
        self._node.handle(Credit, self._on_credit)
        self._node.handle(Opened, self._on_opened)
        self._node.handle(Progress, self._on_progress)
        self._node.handle(Extended, self._on_extended)
        self._node.handle(Fault, self._on_fault)
        self._node.handle(Attested, self._on_attested)
        self._node.observe_links(linked=self._on_linked, lost=self._on_lost)
        self._node.wait_for(self._hops)

    # -- which nodes offer what ---------------------------------------------------------------------------------------

    async def survey(self, addrs: Sequence[NodeAddr]) -> list[Offer]:
        """What the nodes at `addrs` host. Nodes that do not answer are left out; if none does, raises ShardUnavailable."""
        answers = await asyncio.gather(*(self._ask(addr) for addr in addrs), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, LinkClosed | TimeoutError):
                raise answer
        linked = [(a, link) for a, link in zip(addrs, answers, strict=True) if not isinstance(link, BaseException)]
        reached = self._offers_over(linked)
        homes = [(addr, link) for addr, link in linked if self._node.pool.has_dialled(link.peer, addr)]
        refuse_twins([offer for addr, link in homes for offer in self._offers_of(addr, link)])
        if not addrs:
            raise ShardUnavailable(
                "there is no node to ask: none is named, or all that were started here have ended: start anew"
            )
        if not linked:
            reasons = "; ".join(
                str(answer) or f"{addr}: no answer" for addr, answer in zip(addrs, answers, strict=True)
            )
            raise ShardUnavailable(f"no node of the ticket can be reached: {reasons}")
        return reached

    async def _ask(self, addr: NodeAddr) -> Link:
        async with asyncio.timeout(self._node.pool.connect_s):
            return await self._node.pool.get(addr, "control")

    def _offers_over(self, linked: Sequence[tuple[NodeAddr, Link]]) -> list[Offer]:
        """What the peers at the ends of the links host. A link that several addresses of its node led to counts once, at one
        where that was dialled: another may be that of the node before it was restarted."""
        found: dict[Link, NodeAddr] = {}
        for addr, link in linked:
            if link not in found or self._node.pool.has_dialled(link.peer, addr):
                found[link] = addr
        return [offer for link, addr in found.items() for offer in self._offers_of(addr, link)]

    def _offers_of(self, addr: NodeAddr, link: Link) -> list[Offer]:
        """What the peer said it hosts, and what it has loaded for us since."""
        at = NodeAddr(addr.host, addr.port, link.peer)
        spans = (*link.hello.spans, *sorted(self._loaded.get(link.peer, {}).values(), key=lambda info: info.span))
        return [Offer(at, link.peer, link.hello.name, info) for info in spans]

    def known_offers(self, addrs: Sequence[NodeAddr], excluded: Collection[NodeId]) -> list[Offer]:
        """What the nodes at `addrs` said they host, of those that a control link is open to now."""
        links = [(addr, self._node.pool.find_at(addr, "control")) for addr in addrs]
        return self._offers_over(
            [(addr, link) for addr, link in links if link is not None and link.peer not in excluded]
        )

    # -- sessions -----------------------------------------------------------------------------------------------------

    async def open(
        self,
        route: Sequence[Offer],
        lease: Lease,
        resume: Resume | None = None,
        first: First | None = None,
        *,
        open_s: float = math.inf,
    ) -> Session:
        """Open a session on every hop of `route`. The caller closes it with `close`. `open_s`: for hops to answer, if that is
        less than the configuration gives them. `first` sends rows meanwhile, unless hops have layers to load, or too many other
        sessions are at it.

        Raises Busy, WeightsMismatch, BadRequest, ShardUnavailable, Unanswered as the hops answer.
        """
        hops = await asyncio.gather(*(self.connect(i, offer, len(route), lease) for i, offer in enumerate(route)))
        request = self.request
        if open_s < request.open_timeout_s:
            request = replace(request, open_timeout_s=open_s)
        session = Session(self._signer, hops, lease, request, self._node.watch.late_s)
        self.active[session.id] = session
        self._owners.hold(session.id, self._node.transport.node)
        self._num_opening += 1
        can_hold = self._num_opening <= EARLY_SESSIONS and all(offer.info.is_loaded for offer in route)
        if first is not None and can_hold:
            session.first = asyncio.create_task(first(session))  # begins once the Opens have left
        try:
            await session.open(resume)
        except BaseException:
            self.close(session)
            raise
        finally:
            self._num_opening -= 1
        return session

    async def connect(self, index: int, offer: Offer, num_hops: int, lease: Lease) -> Hop:
        """Links to hop `index` of a route. Deadline: `pool.connect_s`. Raises ShardUnavailable."""
        # A hop before one of this node's own finds its way to it by this link: an origin that only asks cannot be dialled.
        needs_data = lease.path == "star" or index in (0, num_hops - 1) or self.request.own_last > 0
        try:
            async with asyncio.timeout(self._node.pool.connect_s):
                control = await self._node.pool.get(offer.addr, "control")
                data = await self._node.pool.get(offer.addr, "data") if needs_data else None
        except (LinkClosed, TimeoutError) as error:
            self._node.note_unreachable(offer.node, [offer.addr], error)
            why = str(error) or f"no link within {self._node.pool.connect_s:g} s"
            refusal = ShardUnavailable(f"hop {index} ({offer.name} at {offer.addr}) cannot be reached: {why}")
            refusal.node = offer.node
            raise refusal from error
        return Hop(offer, control, data, self.request.credits)

    def close(self, session: Session, parked_as: SessionId | None = None, positions: int = 0) -> None:
        """Free the session on every hop at once, or park it (Session.close). Only the first call counts."""
        if self.active.pop(session.id, None) is not None:
            self._owners.release(session.id)
            self._ended(session.id)
            session.close(parked_as, positions)

    def forget(self, name: SessionId, route: Sequence[Offer]) -> None:
        """Tell the nodes of `route` that what was parked as `name` is not wanted any more."""
        for node in {offer.node for offer in route}:
            if (link := self._node.pool.find(node, "control")) is not None:
                try_send(link, Close(name))

    def close_all(self) -> None:
        """Close every session: the node stops. Streams are left to their hops, which keep them for another origin."""
        for session in list(self.active.values()):
            if session.route.lease.handle is None:
                session.close()

    def _hops(self) -> list[NodeId]:
        return [hop.offer.node for session in self.active.values() for hop in session.route.hops]

    # -- links and messages -------------------------------------------------------------------------------------------

    def _on_linked(self, link: Link) -> None:
        for session in self.active.values():
            session.on_linked(link)

    def _on_lost(self, link: Link, reason: str) -> None:
        if link.lane == "control":
            self._loaded.pop(link.peer, None)
        for session in list(self.active.values()):
            session.on_lost(link, reason)
            session.stir()  # it may have been a standby's

    def _on_step(self, message: Step, link: Link) -> bool:
        """Steps for the origin, and in a star those that it is to send on. A step for a hop on this node is the worker's."""
        session = self.active.get(message.session)
        if session is None:
            return False
        me, hop = self._node.transport.node, message.hop
        is_mine = link.peer == me and (session.route.node_of(hop) == me or session.standbys.is_from(hop, link))
        is_to_forward = session.route.lease.path == "star" and not is_mine
        if message.hop != ORIGIN_HOP and not is_to_forward:
            return False
        session.on_step(message, link)
        return True

    def _on_credit(self, message: Credit, link: Link) -> bool:
        """Credits for what this origin sent: in a ring hop 0's. A hop on this node gets the next hop's, in a star if both are
        here: no step between them came by."""
        session = self.active.get(message.session)
        if session is None:
            return False
        hop, route, me = message.hop, session.route, self._node.transport.node
        is_mine = hop == 0 or (route.lease.path == "star" and not (link.peer == me == route.node_of(hop - 1)))
        if not (is_mine and route.is_from(hop, link)):
            return False
        session.on_credit(message)
        return True

    def _on_opened(self, message: Opened, link: Link) -> bool:
        def take(session: Session) -> None:
            self._note_loaded(session.route.hops[message.hop].offer)
            session.on_opened(message)

        return self._hand_on(message, link, take)

    def _on_progress(self, message: Progress, link: Link) -> bool:
        return self._hand_on(message, link, lambda session: session.on_progress(message))

    def _on_extended(self, message: Extended, link: Link) -> bool:
        def take(session: Session) -> None:
            if session.route.extended(message):
                session.wake()

        return self._hand_on(message, link, take)

    def _on_fault(self, message: Fault, link: Link) -> bool:
        return self._hand_on(message, link, lambda session: session.on_fault(message))

    def _on_attested(self, message: Attested, link: Link) -> bool:
        session, hop = self.active.get(message.session), message.hop
        if session is not None and (session.route.is_from(hop, link) or session.standbys.is_from(hop, link)):
            session.attested[link.peer, hop] = message
            session.stir()
        return session is not None

    def _hand_on(
        self, message: Opened | Progress | Extended | Fault, link: Link, take: Callable[[Session], None]
    ) -> bool:
        """Give the answer of a standby to the session's standbys, and that of a hop of its route to `take`."""
        session = self.active.get(message.session)
        if session is None:
            return False
        if session.standbys.is_from(message.hop, link):
            session.standbys.on_answer(message)
            session.stir()
        elif session.route.is_from(message.hop, link):
            take(session)
        return True

    def _note_loaded(self, offer: Offer) -> None:
        info = offer.info
        if not info.is_loaded:
            mine = self._loaded.setdefault(offer.node, {})
            mine.pop((info.model, info.precision, info.span), None)
            mine[info.model, info.precision, info.span] = replace(info, is_loaded=True)
            if len(mine) > MAX_LOADED:
                del mine[next(iter(mine))]
