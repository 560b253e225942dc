"""What one node serves: spans that it has loaded, spans that it would load, and the sessions that peers open on them.

    Open ─► Worker: a host ─ reserve ─► links ─► SpanHost.open     (a Step goes from the node to its host at once)

Knows nothing of the requests that this node owns.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from manyhands.checkpoint.manifest import HashProgress, Silent
from manyhands.config import WorkerConfig
from manyhands.core import ORIGIN_HOP, Precision, SamplingParams, Span, SpanInfo
from manyhands.errors import DeviceLost, Draining, LinkClosed, ShardUnavailable
from manyhands.net.pool import LinkPool
from manyhands.net.setbacks import Setbacks
from manyhands.net.transport import Link
from manyhands.node import Node
from manyhands.wire.message import Close, Credit, Extend, Feed, Open, Probe, Retract, Step
from manyhands.wire.signed import Serials, is_session_of
from manyhands.worker.dials import Dials
from manyhands.worker.early import Unopened
from manyhands.worker.execute import Device, Draws, SpanModel
from manyhands.worker.feeding import MAX_FEED_ROWS, feed
from manyhands.worker.hosted import KnownSpan, describe_span
from manyhands.worker.leases import CacheBudget
from manyhands.worker.loadable import UNUSED_S, Loadable, find_loadable
from manyhands.worker.loading import UNSEEN, Loading
from manyhands.worker.log import LogBudget
from manyhands.worker.opening import Opening, check_signed, cut_off, open_within, refuse
from manyhands.worker.owners import Owners
from manyhands.worker.parking import Parking
from manyhands.worker.serve import SpanHost

logger = logging.getLogger(__name__)

Sampling = Callable[[Path, bool], Callable[[SamplingParams], Draws]]
# How long an Open may wait for its layers. Origins wait for 120 s (load_timeout_s) where they know that these are to be loaded;
# who gives up sooner, as for layers that were evicted, has closed the session by then.
LOAD_S = 100.0
# To connect to the successor that a repair gives a hop: its origin waits 5 s for the answer (reopen_timeout_s) and would take
# this hop for dead, where it is the successor that cannot be reached.
RECONNECT_S = 4.0
PRIVATE_IDLE_S = 60.0  # after which a private span that was loaded on demand (a fallback) is dropped from memory


class Worker:
    """`start` runs a task of the node; `sampling` gives what draws the tokens of a folder's model (True: if its head is here),
    on a device thread.
    """

    def __init__(
        self,
        name: str,
        config: WorkerConfig,
        pool: LinkPool,
        setbacks: Setbacks,
        start: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        sampling: Sampling,
    ) -> None:
        self.config, self.is_off, self.is_leaving = config, False, False
        self.hosts: list[SpanHost] = []
        self.logs, self.caches = LogBudget(config.log_bytes), CacheBudget(config.cache_bytes)
        self._own_caches = CacheBudget(config.cache_bytes)  # of private spans, whose room no other node's sessions take
        self.owners, self.dials = Owners(), Dials(pool, setbacks)
        self._switched_off: list[SpanHost] = []  # and not drained for another reason
        self._serials: dict[Link, Serials] = {}  # of the Opens that came on each link
        self.unopened = Unopened()
        self._name, self._pool, self._start, self._sampling = name, pool, start, sampling
        self._loadable: list[Loadable] = []
        self._running: dict[SpanHost, asyncio.Task[None]] = {}

    # -- what is served -----------------------------------------------------------------------------------------------

    @property
    def spans(self) -> tuple[SpanInfo, ...]:
        """What this node hosts, and then what it would load, as it says to others."""
        shared = [host.info for host in self.hosts if not host.is_private]
        more = [loadable for loadable in self._loadable if not loadable.is_served_by(shared)]
        offered = [loadable.announced(self.caches, self.config.cache_tokens) for loadable in more]
        return () if self.is_off else (*shared, *offered)

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
        is_private: bool = False,
        progress: HashProgress | None = None,
    ) -> SpanHost:
        """Load a span (if lazy: when it is first opened) and serve it until the node stops. Raises ModelError, CutError.

        `progress` is told how far a load is, also of a later one after an eviction.
        A private one serves requests of this node alone; a lazy one of these is dropped from memory after PRIVATE_IDLE_S.
        """
        loading = Loading(progress or Silent(), model_name)
        known = await device.run(lambda: describe_span(folder, span, precision, device, loading, self.config))
        known = replace(known, info=replace(known.info, has_ends=has_ends, is_spare=is_spare))
        config = self.config
        if is_private and is_lazy:
            config = replace(config, evict_after_s=min(config.evict_after_s or PRIVATE_IDLE_S, PRIVATE_IDLE_S))
        host = self._make_host(known, config, is_private=is_private, loading=loading)
        if not is_lazy:
            try:
                await host.engine.ensure_loaded()
            except asyncio.CancelledError:
                host.engine.stop_loading()
                raise
        return self._add(host)

    def _add(self, host: SpanHost, unused_s: float = math.inf) -> SpanHost:
        self.hosts.append(host)
        self._running[host] = self._start(self._run(host, unused_s))
        return host

    async def _run(self, host: SpanHost, unused_s: float) -> None:
        try:
            await host.run(unused_s)
            why = "could not be loaded" if host.engine.has_failed else f"not used for {unused_s:g} s"
            logger.info("layers=%s are not held any more: wanted on demand, and %s", host.info.span, why)
        except DeviceLost as error:
            logger.error("layers=%s are not served any more: %s; start this process anew", host.info.span, error)
            self._loadable = [one for one in self._loadable if one.known.device is not host.engine.device]
        self._forget(host)

    def _make_host(
        self, known: KnownSpan, config: WorkerConfig, *, is_private: bool = False, loading: Loading = UNSEEN
    ) -> SpanHost:
        """A host that is not loaded yet. What it loads, on the device thread, is proven by the manifest."""
        folder, device, info = known.folder, known.device, known.info
        is_edge = info.has_ends and info.span.end == info.num_layers
        samplers = cache(lambda: self._sampling(folder, is_edge))  # reads the tokenizer

        def load() -> SpanModel:
            samplers()
            model = SpanModel(
                folder, info.span, info.precision, info.has_ends, device.num_threads, known.manifest, loading
            )
            leases.tell_room(model.runner.cache_room)
            return model

        def make_sampler(params: SamplingParams) -> Draws:
            return samplers()(params)

        caches = self._own_caches if is_private else self.caches
        leases = known.leases(caches, Parking(self.logs))
        return SpanHost(info, load, device, config, make_sampler, self.logs, self.owners, leases, is_private=is_private)

    async def offer_to_load(
        self,
        folder: Path,
        span: Span,
        precision: Precision,
        device: Device,
        *,
        model_name: str,
        max_layers: int,
        has_ends: bool = False,
    ) -> None:
        """Offer to load any part of `span` when no other node holds it: a session that opens there waits while it is loaded. At
        most `max_layers` in all; what was loaded is a spare until it was not used for UNUSED_S. Raises ModelError, CutError.
        """
        known = await device.run(lambda: describe_span(folder, span, precision, device, UNSEEN, self.config))
        info = replace(known.info, model_name=model_name, has_ends=has_ends, is_spare=True, is_loaded=False)
        self._loadable.append(Loadable(replace(known, info=info), max_layers))

    def loaded_on_demand(self) -> list[SpanHost]:
        """Spans loaded because sessions asked for layers that no other node held."""
        return [host for loadable in self._loadable for host in loadable.hosts]

    def drop(self, host: SpanHost) -> None:
        """Serve a span no more and free its memory, also while sessions use it: drain it before."""
        self._forget(host).cancel()

    def _forget(self, host: SpanHost) -> "asyncio.Task[None]":
        self.hosts.remove(host)
        self.caches.leave(host.leases)
        self._own_caches.leave(host.leases)
        for loadable in self._loadable:
            loadable.hosts = [other for other in loadable.hosts if other is not host]
        return self._running.pop(host)

    def switch(self, *, on: bool) -> None:
        """Off: offer nothing, take no session, hand those here over; what is loaded stays. On: as before that."""
        self.is_off = not on
        meant = self._switched_off if on else [host for host in self.hosts if not host.is_draining]
        self._switched_off = [] if on else self._switched_off + meant
        for host in meant:
            host.resume() if on else host.drain()

    async def drain(self) -> None:
        """Leave politely: accept no session, hand those here over, return when none is left, `drain_s` at most."""
        self.is_leaving = True
        leaving = list(self.hosts)  # some may be gone before the others are empty
        for host in leaving:
            host.drain()
        for host in leaving:
            await host.emptied()

    # -- messages -----------------------------------------------------------------------------------------------------

    def register(self, node: Node) -> None:
        """Take the messages for the spans of this node, and the links that come and go."""
        node.handle(Open, self._on_open)
        node.handle(Feed, self.on_feed)
        node.handle(Step, self._on_step)
        node.handle(Credit, self._on_credit)
        node.handle(Close, self._on_close)
        node.handle(Probe, self._on_asked)
        node.handle(Retract, self._on_asked)
        node.handle(Extend, self._on_asked)
        node.observe_links(linked=self._on_linked, lost=lambda link, reason: self.on_lost(link))
        node.wait_for(self.owners.origins)

    def _on_linked(self, link: Link) -> None:
        for host in self.hosts:
            host.on_linked(link)

    def _on_open(self, message: Open, link: Link) -> bool:
        self.on_open(message, link)
        return True

    def _on_step(self, message: Step, link: Link) -> bool:
        for host in self.hosts:
            if (place := host.find(message.session, message.hop, message.epoch)) is not None:
                host.step(place, message, link)
                return True
        if message.hop == ORIGIN_HOP:
            return False
        return any(host.hold(message, link) for host in self.hosts) or self.unopened.hold(message, link)

    def _on_credit(self, message: Credit, link: Link) -> bool:
        sender = message.hop if message.hop == ORIGIN_HOP else message.hop - 1
        for host in self.hosts:
            place = host.find(message.session, sender, message.epoch)
            if place is not None and place.successor.peer == link.peer:
                host.credit(place, message.steps, message.epoch)
                return True
        return False

    def _on_close(self, message: Close, link: Link) -> bool:
        if is_session_of(message.session, link.peer):
            self.unopened.end(message.session)
        for host in self.hosts:
            host.close(message, link.peer)
        return True

    def _on_asked(self, message: Probe | Retract | Extend, link: Link) -> bool:
        for host in self.hosts:
            host.extend(message, link.peer) if isinstance(message, Extend) else host.follow(message, link.peer)
        return True

    # -- what peers ask -----------------------------------------------------------------------------------------------

    def on_open(self, message: Open, link: Link) -> None:
        """Reserve a place or refuse, at once; open it as soon as its links are there."""
        try:
            check_signed(message, link, self._serials.setdefault(link, Serials()))
            if self.is_off:
                raise Draining(f"{self._name} is switched off: try another node")
            host, loadable = self._find_host(message)
            opening = host.reserve(message, link)
            if loadable is not None:  # only what takes a session counts against its limit
                loadable.hosts.append(self._add(host, UNUSED_S))
        except Exception as error:  # also a folder that is gone: this Open's trouble, not the node's
            refuse(message, link, error)
            return
        opening.early = self.unopened.take(message)
        opening.task = self._start(self._open(host, opening))

    def on_lost(self, link: Link) -> None:
        """A link is gone, and with it what was opened over it."""
        self._serials.pop(link, None)
        self.unopened.drop(link)
        is_gone = link.lane == "control" and self._pool.find(link.peer, "control") is None
        for host in self.hosts:
            host.drop_origin(link, is_gone=is_gone)
            host.drop_successor(link)

    def _find_host(self, message: Open) -> tuple[SpanHost, Loadable | None]:
        """The host of the layers: one that has the session already, or the right weights, or any (which will refuse).

        With a Loadable it is a new one of these layers, to be added once it has taken the session, and loaded then.
        """
        is_own = message.origin == message.to
        holding = [h for h in self.hosts if h.info.span.covers(message.span) and (is_own or not h.is_private)]
        holding.sort(key=lambda host: host.is_private and host.info.span != message.span)  # the whole model goes last
        exact = [h for h in holding if (h.info.model, h.info.precision) == (message.model, message.precision)]
        if not exact and (loadable := find_loadable(self._loadable, message, self._name)) is not None:
            if self.is_leaving:
                raise Draining(f"{self._name} is leaving and loads nothing more: try another node")
            info = replace(loadable.info, span=message.span, is_loaded=True)  # of exactly these
            return self._make_host(replace(loadable.known, info=info), self.config), loadable
        if not holding:
            held = ", ".join(str(info.span) for info in self.spans if info.is_loaded) or "none"
            raise ShardUnavailable(f"{self._name} does not hold layers {message.span} (it holds {held})")
        here = [h for h in holding if h.has_place(message)]
        return (here or exact or holding)[0], None

    async def _open(self, host: SpanHost, opening: Opening) -> None:
        """Connect to the successor, then open. A failure is the session's alone: its origin gets a Fault.

        Deadline: `pool.connect_s` to connect, in a repair RECONNECT_S, then LOAD_S for layers that are not in memory. A
        successor that cannot be reached is blamed; a session that had its place before keeps it.
        """
        message, origin = opening.message, opening.origin
        limit_s = self._pool.connect_s if message.epoch == 1 else min(RECONNECT_S, self._pool.connect_s)
        try:
            async with asyncio.timeout(limit_s):
                if message.successor is not None:
                    successor = await self.dials.reach(message.successor, origin.peer)
                else:
                    successor = await self._pool.await_link(origin.peer, "data")
            await open_within(LOAD_S, host, opening, successor)
        except Exception as error:  # also what a failing load raises: this session's trouble, not the node's
            if isinstance(error, DeviceLost):
                host.engine.lose(error)
            is_cut_off = isinstance(error, LinkClosed | TimeoutError)
            blame = message.hop + 1 if is_cut_off and message.successor is not None else None
            if not host.abandon(opening, keep=blame is not None):
                return
            if isinstance(error, TimeoutError) and message.successor is not None:
                self.dials.gave_up(message.successor)
            refuse(message, origin, cut_off(message, error, blame) if is_cut_off else error, blame)
        finally:
            opening.task = None

    def on_feed(self, message: Feed, link: Link) -> bool:
        """Send a standby what it lacks, on behalf of the session's origin.

        One at a time for each place, and MAX_FEED_ROWS at most: what an origin asks beyond that is ignored.
        """
        for host in self.hosts:
            place = host.meant(message, link.peer)
            if place is not None and not place.is_feeding and message.until - message.start <= MAX_FEED_ROWS:
                place.is_feeding = True
                self._start(feed(place, message, link.peer, self.dials, self._pool.connect_s))
        return True
