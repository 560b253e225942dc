"""A node: links in and out, the spans it hosts, the sessions it owns. Every role is a part of this one object.

    links ─ deliver ─┬─ Open, Close, Step, Credit ─► SpanHost   (hop)
                     └─ Opened, Step, Credit, Fault ─► Session  (origin)

`async with Node(...)` owns one TaskGroup; leaving it closes every link and frees every session.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from manyhands.config import RequestConfig, WorkerConfig, home_from_env
from manyhands.core import ORIGIN_HOP, NodeAddr, NodeId, Precision, SamplingParams, SessionId, Span, SpanInfo
from manyhands.errors import BadRequest, LinkClosed, ManyhandsError, ProtocolError, ShardUnavailable
from manyhands.generate.hop import Hop, Lease
from manyhands.generate.sample import Sampler
from manyhands.generate.session import Session
from manyhands.model.admit import admit
from manyhands.model.load import context_length, read_config
from manyhands.model.manifest import build_manifest
from manyhands.model.prove import proven_class
from manyhands.model.wants import Wants
from manyhands.net.pool import LinkPool
from manyhands.net.transport import Link, Transport
from manyhands.place.orders import Orders
from manyhands.route.search import Offer
from manyhands.text.prompt import load_eos_ids, load_tokenizer
from manyhands.wire.message import (
    PROTOCOL_VERSION,
    Chunk,
    Close,
    Credit,
    Directory,
    Fault,
    Feed,
    Hello,
    Lack,
    Lane,
    Message,
    Open,
    Opened,
    Probe,
    Progress,
    Reassign,
    Reassigned,
    Step,
    Want,
)
from manyhands.worker.execute import Device, SpanModel
from manyhands.worker.log import LogBudget
from manyhands.worker.seed import Seed
from manyhands.worker.serve import SpanHost
from manyhands.worker.session import HopSession

logger = logging.getLogger(__name__)

# How long a hop waits for the links that an Open implies (its successor's, or the origin's data lane).
CONNECT_TIMEOUT_S = 10.0
# Heartbeat on every control link, and how long one may go unanswered before the peer counts as gone.
HEARTBEAT_S = 1.0
SUSPECT_S = 3.0


@dataclass(slots=True)
class Loadable:
    """Layers that a node would load on demand (`info.is_loaded` is false), `num_loaded` of at most `max_layers` so far."""

    info: SpanInfo
    folder: Path
    device: Device
    max_layers: int
    num_loaded: int = 0


class Node:
    """`make_transport` gets the function that makes this node's Hello. Enter it before use."""

    def __init__(
        self,
        make_transport: Callable[[Callable[[Lane], Hello]], Transport],
        *,
        name: str = "node",
        worker: WorkerConfig | None = None,
        request: RequestConfig | None = None,
    ) -> None:
        self.name = name
        self.worker = worker or WorkerConfig()
        self.request = request or RequestConfig()
        self.address: NodeAddr | None = None
        self.transport = make_transport(self._hello)
        self.pool = LinkPool(self.transport)
        self.hosts: list[SpanHost] = []
        self.logs = LogBudget(self.worker.log_bytes)
        self.loadable: list[Loadable] = []
        self._loaded: dict[NodeId, set[SpanInfo]] = {}  # what peers have loaded for sessions of ours since their Hello
        self.sessions: dict[SessionId, Session] = {}
        self.directory: Callable[[NodeId, bytes], None] | None = None  # takes what peers' directories say
        self.on_linked: Callable[[Link], None] = lambda link: None  # a control link is up
        self.on_unreachable: Callable[[NodeId], None] = lambda node: None  # the last one broke, or a dial failed
        self.wants = Wants()  # for weights from peers
        self.orders = Orders()  # to serve other layers: `orders.obey` decides on those that arrive
        self.seed = Seed(self.start)  # weights for peers: `await node.seed.add(folder)` offers them
        self._readers: set[Link] = set()
        self._running: dict[SpanHost, asyncio.Task[None]] = {}
        self._arrival = asyncio.Condition()
        self._tasks = asyncio.TaskGroup()

    def __repr__(self) -> str:
        return f"<Node {self.name} hosts={self.hosts} sessions={len(self.sessions)} {self.pool}>"

    # -- life ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self.start(self._accept())
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

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task of this node until it ends or the node stops. Its failure stops the node."""
        self._tasks.create_task(work)

    async def listen(self, addr: NodeAddr) -> NodeAddr:
        """Accept peers at `addr` (port 0: any). Raises BadRequest if the port is taken."""
        self.address = await self.transport.listen(addr)
        return self.address

    def _hello(self, lane: Lane) -> Hello:
        return Hello(PROTOCOL_VERSION, lane, self.name, self.address, self.spans)

    # -- hosting ------------------------------------------------------------------------------------------------------

    @property
    def spans(self) -> tuple[SpanInfo, ...]:
        """What this node says it hosts, and then what it would load."""
        return (*(host.info for host in self.hosts), *(loadable.info for loadable in self.loadable))

    async def host(
        self,
        folder: Path,
        span: Span,
        precision: Precision,
        device: Device,
        *,
        model_name: str,
        has_ends: bool = False,
        is_spare: bool = False,
        is_lazy: bool = False,
    ) -> SpanHost:
        """Load a span (if lazy: when it is first opened) and serve it until the node stops. Raises ModelError, CutError."""
        info = await device.run(lambda: _describe(folder, span, precision, model_name, has_ends, is_spare, self.worker))
        host = self._make_host(folder, info, device)
        if not is_lazy:
            await host.ensure_loaded()
        self._add_host(host)
        return host

    def _add_host(self, host: SpanHost) -> None:
        self.hosts.append(host)
        self._running[host] = self._tasks.create_task(host.run())

    def _make_host(self, folder: Path, info: SpanInfo, device: Device) -> SpanHost:
        """A host that is not loaded yet."""
        eos = load_eos_ids(folder, load_tokenizer(folder)) if info.has_ends else frozenset()
        vocab_size = int(read_config(folder).vocab_size)

        def make_sampler(params: SamplingParams) -> Sampler:
            return Sampler(params, vocab_size, eos)

        return SpanHost(
            info,
            lambda: SpanModel(folder, info.span, info.precision, info.has_ends, device.num_threads),
            device,
            self.worker,
            make_sampler,
            self.logs,
        )

    async def offer_to_load(
        self, folder: Path, span: Span, precision: Precision, device: Device, *, model_name: str, max_layers: int
    ) -> None:
        """Offer to load any part of `span` when nobody else holds it: a session that opens there waits while it is loaded.

        At most `max_layers` in all; what was loaded stays, as a spare. Raises ModelError, CutError.
        """
        info = await device.run(lambda: _describe(folder, span, precision, model_name, False, True, self.worker))
        self.loadable.append(Loadable(replace(info, is_loaded=False), folder, device, max_layers))

    def drop(self, host: SpanHost) -> None:
        """Serve a span no more and free its memory, whoever still uses it: drain it before."""
        self.hosts.remove(host)
        self._running.pop(host).cancel()

    async def drain(self) -> None:
        """Leave politely: accept no session, hand those here over, return when none is left, `worker.drain_s` at most."""
        for host in self.hosts:
            host.drain()
        for host in self.hosts:
            await host.emptied()

    # -- owning requests ----------------------------------------------------------------------------------------------

    async def survey(self, addrs: Sequence[NodeAddr]) -> list[Offer]:
        """What the nodes at `addrs` host. Nodes that do not answer are left out; if none does, raises ShardUnavailable."""
        answers = await asyncio.gather(*(self._ask(addr) for addr in addrs), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, LinkClosed | TimeoutError):
                raise answer
        reached = [offer for answer in answers if isinstance(answer, list) for offer in answer]
        _refuse_twins(reached)
        if not any(isinstance(answer, list) for answer in answers):
            reasons = "; ".join(
                str(answer) or f"{addr}: no answer" for addr, answer in zip(addrs, answers, strict=True)
            )
            raise ShardUnavailable(f"no node of the ticket can be reached: {reasons or 'it names no address'}")
        return reached

    async def _ask(self, addr: NodeAddr) -> list[Offer]:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            link = await self.link(addr, "control")
        at = NodeAddr(addr.host, addr.port, link.peer)
        return [Offer(at, link.peer, link.hello.name, info) for info in self._spans_of(link)]

    def _spans_of(self, link: Link) -> tuple[SpanInfo, ...]:
        """What the peer said it hosts, and what it has loaded for us since."""
        return (*link.hello.spans, *sorted(self._loaded.get(link.peer, ()), key=lambda info: info.span))

    def known_offers(self, addrs: Sequence[NodeAddr], excluded: Collection[NodeId]) -> list[Offer]:
        """What the nodes at `addrs` said they host, of those that a control link is open to now."""
        links = [(addr, self.pool.find_at(addr, "control")) for addr in addrs]
        return [
            Offer(NodeAddr(addr.host, addr.port, link.peer), link.peer, link.hello.name, info)
            for addr, link in links
            if link is not None and link.peer not in excluded
            for info in self._spans_of(link)
        ]

    async def open_session(self, route: Sequence[Offer], lease: Lease) -> Session:
        """Open a session on every hop of `route`. The caller closes it with `close_session`.

        Raises Busy, WeightsMismatch, BadRequest, ShardUnavailable, PipelineStalled as the hops answer.
        """
        hops = await asyncio.gather(*(self.connect(i, offer, len(route), lease) for i, offer in enumerate(route)))
        session = Session(self.transport.node, hops, lease, self.request)
        self.sessions[session.id] = session
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
                control = await self.link(offer.addr, "control")
                data = await self.link(offer.addr, "data") if needs_data else None
        except (LinkClosed, TimeoutError) as error:
            self.on_unreachable(offer.node)
            refusal = ShardUnavailable(f"hop {index} ({offer.name} at {offer.addr}) cannot be reached: {error}")
            refusal.node = offer.node
            raise refusal from error
        return Hop(offer, control, data, self.request.window)

    def close_session(self, session: Session) -> None:
        """Free the session on every hop at once. Harmless when repeated."""
        self.sessions.pop(session.id, None)
        session.close()

    # -- links --------------------------------------------------------------------------------------------------------

    async def link(self, addr: NodeAddr, lane: Lane) -> Link:
        """An open link, watched by a reader. Deadline: the caller's. Raises LinkClosed."""
        link = await self.pool.get(addr, lane)
        self._watch(link)
        return link

    async def _link_back(self, node: NodeId, lane: Lane) -> Link:
        """A link that `node` dialled or is about to. Deadline: the caller's."""
        async with self._arrival:
            while (link := self.pool.find(node, lane)) is None:
                await self._arrival.wait()
            return link

    async def _accept(self) -> None:
        while True:
            try:
                link = await self.transport.accept()
            except LinkClosed:
                return
            self.pool.add(link)
            self._watch(link)
            async with self._arrival:
                self._arrival.notify_all()

    def _watch(self, link: Link) -> None:
        if link not in self._readers:
            self._readers.add(link)
            self.start(self._read(link))
            for session in self.sessions.values():
                session.on_linked(link)
            for host in self.hosts:
                host.on_linked(link)
            if link.lane == "control":
                self.start(self._measure(link))
                self.on_linked(link)

    async def _read(self, link: Link) -> None:
        """Dispatch what arrives on a link until it ends; then tell whoever depended on it."""
        try:
            await link.deliver(lambda message: self._dispatch(message, link))
        except LinkClosed as error:
            reason = str(error)
        except ProtocolError as error:
            reason = str(error)
            logger.warning("peer=%s sent nonsense: %s", link.peer[:8], error)
            link.abort(reason)
        finally:
            self._readers.discard(link)
        self._lost(link, reason)

    async def _measure(self, link: Link) -> None:
        """Heartbeats, both ways: a peer that is frozen or cut off is told from one that is merely slow."""
        with contextlib.suppress(LinkClosed):
            while not link.is_closed:
                try:
                    async with asyncio.timeout(SUSPECT_S):
                        await link.ping()
                except TimeoutError:
                    link.abort(f"no heartbeat for {SUSPECT_S:g} s")
                    return
                await asyncio.sleep(HEARTBEAT_S)

    def _note_loaded(self, offer: Offer) -> None:
        if not offer.info.is_loaded:
            self._loaded.setdefault(offer.node, set()).add(replace(offer.info, is_loaded=True))

    def _lost(self, link: Link, reason: str) -> None:
        if link.lane == "control":
            self._loaded.pop(link.peer, None)
        self.wants.on_lost(link, reason)
        self.orders.on_lost(link, reason)
        if link.lane == "control" and self.pool.find(link.peer, "control") is None:
            self.on_unreachable(link.peer)
        for session in list(self.sessions.values()):
            session.on_lost(link, reason)
        for host in self.hosts:
            host.drop_origin(link)
            host.drop_successor(link)

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
                        host.credit(place, message.steps)
            case Open():
                self._on_open(message, link)
            case Close():
                for host in self.hosts:
                    host.close(message.session, link.peer)
            case Probe():
                for host in self.hosts:
                    host.report(message, link.peer)
            case Feed():
                for host in self.hosts:
                    if (place := host.feeder(message, link.peer)) is not None:
                        self.start(self._feed(place, message))
            case Opened() | Progress() | Fault() if session is not None and session.shadows.is_from(message.hop, link):
                session.shadows.on_answer(message)
            case Progress() if session is not None and session.route.is_from(message.hop, link):
                session.on_progress(message)
            case Opened() if session is not None and session.route.is_from(message.hop, link):
                self._note_loaded(session.route.hops[message.hop].offer)
                session.on_opened(message)
            case Fault() if session is not None and session.route.is_from(message.hop, link):
                session.on_fault(message)
            case Want():
                self.seed.on_want(message, link)
            case Chunk() | Lack():
                self.wants.on_answer(message, link)
            case Reassign():
                self.orders.on_asked(message, link)
            case Reassigned():
                self.orders.on_answer(message, link)
            case Directory():
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

    def _on_open(self, message: Open, link: Link) -> None:
        try:
            host = self._find_host(message)
            host.reserve(message, link)
        except ManyhandsError as error:
            _try_send(link, _refusal(message, error.code, str(error)))
            return
        self.start(self._open(host, message, link))

    def _find_host(self, message: Open) -> SpanHost:
        """The host of the layers: one that has the session already, or the right weights, or any (which will refuse)."""
        holding = [host for host in self.hosts if host.info.span.covers(message.span)]
        exact = [h for h in holding if (h.info.model, h.info.precision) == (message.model, message.precision)]
        if not exact and (loadable := self._find_loadable(message)) is not None:
            return self._add_loadable(loadable, message.span)
        if not holding:
            held = ", ".join(str(host.info.span) for host in self.hosts) or "none"
            raise ShardUnavailable(f"{self.name} does not hold layers {message.span} (it holds {held})")
        here = [h for h in holding if h.has_place(message)]
        return (here or exact or holding)[0]

    def _find_loadable(self, message: Open) -> Loadable | None:
        """What could be loaded to serve `message`. Raises ShardUnavailable if only the limit is in the way."""
        wanted = (message.model, message.precision)
        for loadable in self.loadable:
            if (loadable.info.model, loadable.info.precision) == wanted and loadable.info.span.covers(message.span):
                if loadable.num_loaded + len(message.span) > loadable.max_layers:
                    raise ShardUnavailable(
                        f"{self.name} loads at most {loadable.max_layers} layers on demand and has loaded "
                        f"{loadable.num_loaded}; layers {message.span} are too many"
                    )
                return loadable
        return None

    def _add_loadable(self, loadable: Loadable, span: Span) -> SpanHost:
        """A host for exactly `span`, loaded when its first session is opened (at once)."""
        loadable.num_loaded += len(span)
        info = replace(loadable.info, span=span, is_loaded=True)
        host = self._make_host(loadable.folder, info, loadable.device)
        self._add_host(host)
        return host

    async def _open(self, host: SpanHost, message: Open, origin: Link) -> None:
        """Connect to the successor, then open. A failure is the session's alone: its origin gets a Fault.

        A successor that cannot be reached is blamed; a session that had its place before keeps it.
        """
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if message.successor is not None:
                    successor = await self.link(message.successor, "data")
                else:
                    successor = await self._link_back(origin.peer, "data")
            await host.open(message, origin, successor)
        except Exception as error:  # also what a failing load raises: this session's trouble, not the node's
            is_cut_off = isinstance(error, LinkClosed | TimeoutError)
            blame = message.hop + 1 if is_cut_off and message.successor is not None else None
            if not host.abandon(message, keep=blame is not None):
                return
            if is_cut_off:
                error = ShardUnavailable(f"its successor {message.successor or 'origin'} cannot be reached: {error}")
            code = error.code if isinstance(error, ManyhandsError) else ManyhandsError.code
            _try_send(origin, replace(_refusal(message, code, str(error)), blame=blame))

    async def _feed(self, place: HopSession, message: Feed) -> None:
        """Deadline: CONNECT_TIMEOUT_S to reach the shadow and for what was sent to it before to leave.

        In a star it goes by way of the origin, as all steps do.
        One at a time for each place: an origin that asks for more meanwhile is not heard, so that what waits to be sent stays
        bounded by one log. A failure leaves the shadow behind, nothing else.
        """
        if place.is_feeding:
            return
        place.is_feeding = True
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                is_star = place.opened.path == "star"
                shadow = place.successor if is_star else await self.link(message.to, "data")
                await shadow.drain()
            if place.opened.epoch == message.epoch:
                place.feed(shadow, message.start, message.until)
        except (LinkClosed, TimeoutError) as error:
            logger.info("session=%s: its shadow cannot be fed: %s", place.name, error)
        finally:
            place.is_feeding = False


def _describe(
    folder: Path,
    span: Span,
    precision: Precision,
    model_name: str,
    has_ends: bool,
    is_spare: bool,
    worker: WorkerConfig,
) -> SpanInfo:
    config = read_config(folder)
    admit(config, home_from_env())
    return SpanInfo(
        model=build_manifest(folder).id,
        model_name=model_name,
        span=span,
        num_layers=int(config.num_hidden_layers),
        precision=precision,
        arithmetic=proven_class(precision, home_from_env()),
        hidden_size=int(config.hidden_size),
        context_length=context_length(config),
        has_ends=has_ends,
        free_tokens=worker.cache_tokens,
        max_sessions=worker.max_sessions,
        is_spare=is_spare,
    )


def _refuse_twins(offers: Sequence[Offer]) -> None:
    """Raise BadRequest if two nodes have one key: everything that is sent to one might go to the other."""
    homes: dict[NodeId, NodeAddr] = {}
    for offer in offers:
        first = homes.setdefault(offer.node, offer.addr)
        if (first.host, first.port) != (offer.addr.host, offer.addr.port):
            raise BadRequest(f"{first} and {offer.addr} have the same node key: start one of them with another --key")


def _refusal(message: Open, code: str, detail: str) -> Fault:
    return Fault(message.session, message.epoch, message.hop, code, detail)


def _try_send(link: Link, message: Fault) -> None:
    with contextlib.suppress(LinkClosed):
        link.send(message)
