"""A node: links in and out, the spans it hosts, the sessions it owns. Every role is a part of this one object.

    pool ─ new links ─► watch.read ─┬─ Open, Feed ─► Worker; Close, Step, Credit ─► its SpanHosts  (hop)
                                    └─ Opened, Step, Credit, Fault ─► Session                      (origin)

`async with Node(...)` owns one TaskGroup; leaving it closes every link and frees every session.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.checkpoint.config_fields import read_facts
from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import ORIGIN_HOP, NodeAddr, NodeId, SamplingParams, SessionId, SpanInfo
from manyhands.errors import LinkClosed, ProtocolError, ShardUnavailable
from manyhands.net.pool import CONNECT_TIMEOUT_S, LinkPool
from manyhands.net.setbacks import Setbacks
from manyhands.net.transport import Link, Transport
from manyhands.net.watch import Watch, read
from manyhands.origin.route import Hop, Lease
from manyhands.origin.sampler import Sampler
from manyhands.origin.session import Session
from manyhands.place.orders import Orders
from manyhands.route.offer import Offer, refuse_twins
from manyhands.text.prompt import load_eos_ids
from manyhands.text.tokenizer import load_tokenizer
from manyhands.weights.provider import WeightClient
from manyhands.weights.seed import WeightServer
from manyhands.wire.message import (
    PROTOCOL_VERSION,
    Close,
    Credit,
    DirectoryUpdate,
    Fault,
    Feed,
    Hello,
    Lane,
    Message,
    Open,
    Opened,
    Probe,
    Progress,
    Reassign,
    Reassigned,
    Step,
    Token,
    WeightRequest,
    WeightsChunk,
    WeightsNotFound,
)
from manyhands.wire.signed import Signer
from manyhands.worker.worker import Worker

logger = logging.getLogger(__name__)


class Node:
    """`make_transport` gets the function that makes this node's Hello; `key` is the transport's. Enter it before use."""

    def __init__(
        self,
        make_transport: Callable[[Callable[[Lane], Hello]], Transport],
        key: Ed25519PrivateKey,
        *,
        name: str = "node",
        worker: WorkerConfig | None = None,
        request: RequestConfig | None = None,
    ) -> None:
        self.name = name
        self.request = request or RequestConfig()
        self.address: NodeAddr | None = None
        self.transport = make_transport(self._hello)
        self.pool = LinkPool(self.transport, self._linked)
        self.worker = Worker(name, worker or WorkerConfig(), self.pool, self.start, _sampling)
        self.hosts = self.worker.hosts  # the same list, nearer: every step looks here
        self.setbacks = Setbacks()  # whom it is no use to dial now
        self._loaded: dict[NodeId, set[SpanInfo]] = {}  # what peers have loaded for sessions of ours since their Hello
        self.sessions: dict[SessionId, Session] = {}
        self._signer = Signer(key)
        self.directory: Callable[[NodeId, bytes], None] | None = None  # takes what peers' directories say
        self.on_linked: Callable[[Link], None] = lambda link: None  # a control link is up
        self.on_unreachable: Callable[[NodeId], None] = lambda node: None  # the last one broke, or a dial failed
        self.wants = WeightClient()  # for weights from peers
        self.orders = Orders()  # to serve other layers: `orders.obey` decides on those that arrive
        self.seed = WeightServer(self.start)  # weights for peers: `await node.seed.add(folder)` offers them
        self.watch = Watch()
        self._tasks = asyncio.TaskGroup()

    def __repr__(self) -> str:
        return f"<Node {self.name} hosts={self.hosts} sessions={len(self.sessions)} {self.pool}>"

    # -- life ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self.start(self.pool.accept())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for session in list(self.sessions.values()):
            session.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                await self.pool.aclose()
                await self.transport.aclose()
        for task in list(self._own):
            task.cancel()
        await self._tasks.__aexit__(None, None, None)
        self.seed.close()

    @property
    def _own(self) -> set["asyncio.Task[Any]"]:
        return self._tasks._tasks

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run `work` as a task of this node until it ends or the node stops. Its failure stops the node."""
        return self._tasks.create_task(work)

    async def listen(self, addr: NodeAddr) -> NodeAddr:
        """Accept peers at `addr` (port 0: any). Raises BadRequest if the port is taken."""
        self.address = await self.transport.listen(addr)
        return self.address

    def _hello(self, lane: Lane) -> Hello:
        return Hello(PROTOCOL_VERSION, lane, self.name, self.address, self.worker.spans, Token(os.urandom(16).hex()))

    # -- owning requests ----------------------------------------------------------------------------------------------

    async def survey(self, addrs: Sequence[NodeAddr]) -> list[Offer]:
        """What the nodes at `addrs` host. Nodes that do not answer are left out; if none does, raises ShardUnavailable."""
        answers = await asyncio.gather(*(self._ask(addr) for addr in addrs), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, LinkClosed | TimeoutError):
                raise answer
        reached = [offer for answer in answers if isinstance(answer, list) for offer in answer]
        refuse_twins(reached)
        if not any(isinstance(answer, list) for answer in answers):
            reasons = "; ".join(
                str(answer) or f"{addr}: no answer" for addr, answer in zip(addrs, answers, strict=True)
            )
            raise ShardUnavailable(f"no node of the ticket can be reached: {reasons or 'it names no address'}")
        return reached

    async def _ask(self, addr: NodeAddr) -> list[Offer]:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            link = await self.pool.get(addr, "control")
        return self._offers_of(addr, link)

    def _offers_of(self, addr: NodeAddr, link: Link) -> list[Offer]:
        """What the peer said it hosts, and what it has loaded for us since."""
        at = NodeAddr(addr.host, addr.port, link.peer)
        spans = (*link.hello.spans, *sorted(self._loaded.get(link.peer, ()), key=lambda info: info.span))
        return [Offer(at, link.peer, link.hello.name, info) for info in spans]

    def known_offers(self, addrs: Sequence[NodeAddr], excluded: Collection[NodeId]) -> list[Offer]:
        """What the nodes at `addrs` said they host, of those that a control link is open to now."""
        links = [(addr, self.pool.find_at(addr, "control")) for addr in addrs]
        usable = [(addr, link) for addr, link in links if link is not None and link.peer not in excluded]
        return [offer for addr, link in usable for offer in self._offers_of(addr, link)]

    async def open_session(self, route: Sequence[Offer], lease: Lease) -> Session:
        """Open a session on every hop of `route`. The caller closes it with `close_session`.

        Raises Busy, WeightsMismatch, BadRequest, ShardUnavailable, PipelineStalled as the hops answer.
        """
        hops = await asyncio.gather(*(self.connect(i, offer, len(route), lease) for i, offer in enumerate(route)))
        session = Session(self._signer, hops, lease, self.request, self.watch.late_s)
        self.sessions[session.id] = session
        self.worker.owners.hold(session.id, self.transport.node)
        try:
            await session.open()
        except BaseException:
            self.close_session(session)
            raise
        return session

    async def connect(self, index: int, offer: Offer, num_hops: int, lease: Lease) -> Hop:
        """Links to hop `index` of a route. Deadline: CONNECT_TIMEOUT_S. Raises ShardUnavailable."""
        needs_data = lease.path == "star" or index in (0, num_hops - 1)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                control = await self.pool.get(offer.addr, "control")
                data = await self.pool.get(offer.addr, "data") if needs_data else None
        except (LinkClosed, TimeoutError) as error:
            self.note_unreachable(offer.node, [offer.addr])
            refusal = ShardUnavailable(f"hop {index} ({offer.name} at {offer.addr}) cannot be reached: {error}")
            refusal.node = offer.node
            raise refusal from error
        return Hop(offer, control, data, self.request.window)

    async def reach(self, addr: NodeAddr, node: NodeId, timeout_s: float) -> Link:
        """A control link to `node`, dialled at `addr` if there is none.

        Raises LinkClosed, at once if `node` or `addr` could not be reached lately (setbacks.py).
        """
        if (link := self.pool.find(node, "control")) is not None:
            return link
        wait_s = self.setbacks.wait_s(node, addr, asyncio.get_running_loop().time())
        if wait_s:
            raise LinkClosed(
                f"{addr} could not be reached lately: it is dialled again in {wait_s:.0f} s at the earliest"
            )
        self.setbacks.began(node, addr)
        try:
            async with asyncio.timeout(timeout_s):
                link = await self.pool.get(NodeAddr(addr.host, addr.port, node), "control")
        except (LinkClosed, TimeoutError) as error:
            self.note_unreachable(node, [addr])
            raise LinkClosed(str(error) or f"{addr} did not answer within {timeout_s:g} s") from error
        finally:
            self.setbacks.ended(addr)
        self.setbacks.reached(node, addr)
        return link

    def note_unreachable(self, node: NodeId, addrs: Sequence[NodeAddr]) -> None:
        """A dial of `node` at `addrs` failed."""
        self.setbacks.failed(node, addrs, asyncio.get_running_loop().time())
        self.on_unreachable(node)

    def close_session(self, session: Session) -> None:
        """Free the session on every hop at once. Harmless when repeated."""
        if self.sessions.pop(session.id, None) is not None:
            self.worker.owners.release(session.id)
        session.close()

    # -- links --------------------------------------------------------------------------------------------------------

    def _linked(self, link: Link) -> None:
        """The pool has a new link: watch it, and tell whoever may want it."""
        self.start(self._read(link))
        if self.watch.add(link):
            self.start(self.watch.run())
        for session in self.sessions.values():
            session.on_linked(link)
        for host in self.hosts:
            host.on_linked(link)
        self.setbacks.reached(link.peer)
        if link.lane == "control":
            self.on_linked(link)

    async def _read(self, link: Link) -> None:
        """Dispatch what arrives on a link until it ends; then tell whoever depended on it."""
        self._lost(link, await read(link, lambda message: self._dispatch(message, link)))

    def _note_loaded(self, offer: Offer) -> None:
        if not offer.info.is_loaded:
            self._loaded.setdefault(offer.node, set()).add(replace(offer.info, is_loaded=True))

    def _lost(self, link: Link, reason: str) -> None:
        if link.lane == "control":
            self._loaded.pop(link.peer, None)
        self.wants.on_lost(link, reason)
        self.orders.on_lost(link, reason)
        if link.lane == "control" and self.pool.find(link.peer, "control") is None:
            self.setbacks.lost(link.peer)
            self.on_unreachable(link.peer)
        for session in list(self.sessions.values()):
            session.on_lost(link, reason)
        self.worker.on_lost(link)

    # -- dispatch -----------------------------------------------------------------------------------------------------

    def _dispatch(self, message: Message, link: Link) -> None:
        session = self.sessions.get(message.session) if hasattr(message, "session") else None
        match message:
            case Step() if session is not None and not self._serves(message, link):
                session.on_step(message, link)
            case Step():
                for host in self.hosts:
                    if (place := host.find(message.session, message.hop)) is not None:
                        host.step(place, message, link)
            case Credit() if session is not None and self._is_owed(session, message, link):
                session.on_credit(message)
            case Credit():
                sender = message.hop if message.hop == ORIGIN_HOP else message.hop - 1
                for host in self.hosts:
                    if (place := host.find(message.session, sender)) is not None and place.successor.peer == link.peer:
                        host.credit(place, message.steps, message.epoch)
            case Open():
                self.worker.on_open(message, link)
            case Close():
                for host in self.hosts:
                    host.close(message.session, link.peer)
            case Probe():
                for host in self.hosts:
                    host.report(message, link.peer)
            case Feed():
                self.worker.on_feed(message, link)
            case Opened() | Progress() | Fault() if session is not None and session.standbys.is_from(message.hop, link):
                session.standbys.on_answer(message)
            case Progress() if session is not None and session.route.is_from(message.hop, link):
                session.on_progress(message)
            case Opened() if session is not None and session.route.is_from(message.hop, link):
                self._note_loaded(session.route.hops[message.hop].offer)
                session.on_opened(message)
            case Fault() if session is not None and session.route.is_from(message.hop, link):
                session.on_fault(message)
            case WeightRequest():
                self.seed.on_want(message, link)
            case WeightsChunk() | WeightsNotFound():
                self.wants.on_answer(message, link)
            case Reassign():
                self.orders.on_asked(message, link)
            case Reassigned():
                self.orders.on_answer(message, link)
            case DirectoryUpdate():
                if self.directory is not None:
                    self.directory(link.peer, message.body)
            case Hello():
                raise ProtocolError("a second Hello")
            case _:
                logger.debug("peer=%s: %s for a session that is gone", link.peer[:8], type(message).__name__)

    def _serves(self, message: Step, link: Link) -> bool:
        """Whether a step of a session of this node's own is for a hop on this node (in a star: unless it is to be sent on)."""
        session = self.sessions[message.session]
        is_to_forward = session.route.lease.path == "star" and link.peer != self.transport.node
        is_for_hop = message.hop != ORIGIN_HOP and not is_to_forward
        return is_for_hop and any(host.find(message.session, message.hop) for host in self.hosts)

    def _is_owed(self, session: Session, message: Credit, link: Link) -> bool:
        """Whether a credit is for what this origin sent: in a ring that is hop 0's, of a hop here the next hop's."""
        return (message.hop == 0 or session.route.lease.path == "star") and session.route.is_from(message.hop, link)


def _sampling(folder: Path, has_head: bool) -> Callable[[SamplingParams], Sampler]:
    """What draws the tokens of the model in `folder`. Where the head is not, nothing is drawn: end tokens are not looked up."""
    eos = load_eos_ids(folder, load_tokenizer(folder)) if has_head else frozenset[int]()
    vocab_size = read_facts(folder).vocab_size
    return lambda params: Sampler(params, vocab_size, eos)
