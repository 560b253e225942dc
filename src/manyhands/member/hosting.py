"""Which layers a member hosts: chosen by what the others hold, claimed before they are loaded, moved when the swarm gains.

A claim is a record of a span that takes no session yet: others count it and choose something else. Of two that claim at the
same moment, the lower id keeps its choice. A move loads and announces the new span before it drains the old one; where
memory does not hold both, the old one is drained first, which is allowed only while others serve its layers.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.checkpoint.manifest import HashProgress
from manyhands.core import Span
from manyhands.errors import DeviceLost
from manyhands.member.backoff import Backoff
from manyhands.member.balancing import Balancer
from manyhands.member.claim import claim
from manyhands.member.loadable import offer_folder
from manyhands.member.member import Member
from manyhands.member.providers import providers_of
from manyhands.member.reassign import ReassignHandler
from manyhands.member.room import beginning_of, bound_for, budget_of, has_room, measured_positions, own_spans, rebound
from manyhands.member.speed import decode_layer_s
from manyhands.member.view import SwarmSnapshot, holdings_of, linked_of, view_of
from manyhands.member.weights import ServedModel, Weights
from manyhands.place.balance import may_leave
from manyhands.place.budget import MemoryBudget
from manyhands.place.strategy import Holding, SpanChoice
from manyhands.refusals import failure
from manyhands.swarm.record import Record
from manyhands.weights.provider import Provider
from manyhands.weights.refetch import use_fetched
from manyhands.worker.execute import Device
from manyhands.worker.runner import back_end
from manyhands.worker.serve import SpanHost

logger = logging.getLogger(__name__)

RETRY_S = 5.0  # after a first load that failed
Say = Callable[[str], None]


class Hosting:
    """The spans of one model on one member. `say` gets lines for people. `with_ends`: this machine is an origin too."""

    def __init__(
        self,
        member: Member,
        weights: Weights,
        device: Device,
        home: Path,
        progress: HashProgress,
        say: Say,
        *,
        with_ends: bool,
    ) -> None:
        self.member, self.weights, self.with_ends = member, weights, with_ends
        self.folder: Path | None = None
        self.choice: SpanChoice | None = None
        self._device, self.home, self._progress, self.say = device, home, progress, say
        self._moving = asyncio.Lock()
        # Longer than what another one with room needs to see the gap without this node's claim.
        self.backoff = Backoff(max(RETRY_S, member.config.gap_s + 2.0))
        self.balancer = Balancer(self)
        self.other_ends: dict[str, int] = {}  # bytes of other models' ends, and own layers, that are held here, by name
        self.dropped: list[Span] = []  # for a move that failed, and not loaded again yet
        self.coming: Span | None = None  # is being loaded: caches leave room for it
        self.is_lost = False  # the device computes no more

    @property
    def kind(self) -> ServedModel:
        assert self.weights.kind is not None, "known once something is hosted"
        return self.weights.kind

    @property
    def hosts(self) -> list[SpanHost]:
        return [host for host in self.member.node.hosts if not (host.is_draining or host.is_private)]

    # -- the first span -----------------------------------------------------------------------------------------------

    async def start(self) -> SpanChoice:
        """Choose, claim, fetch, load, announce. Raises what makes it impossible (BadRequest: no layer fits)."""
        async with self._moving:
            self._device.thread.submit(back_end)  # proves the golden digests while others are waited for
            self.choice = await claim(self)
            await self._load(self.choice.span)
            if self.member.config.can_load:
                await self._offer_to_load()
        self.member.node.orders.decide_by(ReassignHandler(self))
        return self.choice

    def announce(self, span: Span | None) -> None:
        """Say that `span` is being loaded here; None: that nothing is."""
        claim = None if span is None else self.weights.claim(span)
        self.member.claims = [] if claim is None else [replace(claim, is_spare=self.member.config.is_spare)]
        self.member.directory.announce()

    # -- loading ------------------------------------------------------------------------------------------------------

    async def _load(self, span: Span) -> SpanHost:
        """Fetch and load `span`, which is claimed; announce that it serves. On failure the claim is taken back."""
        worker = self.member.node.worker
        try:
            bound_for(worker, self.budget, span, self.in_memory)  # before: it takes minutes, in which sessions come
            self.coming = span
            folder = await self.fetch(span)
            host = await use_fetched(folder, lambda: self.fetch(span), lambda folder: self._host(folder, span))
        finally:
            self.coming = None
            self.announce(None)
            rebound(self)
        self.backoff.succeeded()
        return host

    async def fetch(self, span: Span) -> Path:
        """A folder with the layers of `span`, and the ends if this machine is an origin. Raises as Weights.fetch."""
        self.folder, self.weights = await self.weights.fetch(
            span,
            self.home,
            self.providers(),
            self._progress,
            with_ends=self.with_ends or self.member.config.has_ends,
            on_blame=lambda blame: self.say(f"weights: {blame}"),
        )
        return self.folder

    async def _host(self, folder: Path, span: Span) -> SpanHost:
        node = self.member.node
        host = await node.worker.host(
            folder,
            span,
            self.weights.precision,
            self._device,
            model_name=self.weights.name,
            has_ends=self.member.config.has_ends,
            is_spare=self.member.config.is_spare,
            progress=self._progress,
        )
        try:
            model = await host.engine.ensure_loaded()
            self.member.span_bytes[span] = self.weights.shape.span_bytes(span, self.budget.tokens)
            positions = measured_positions(node.worker, host)
            self.member.layer_s[span] = await self._device.run(lambda: decode_layer_s(model, span, positions))
            await node.seed.add(folder)
        except Exception:  # its member takes it for failed, and loads it again; one that is cancelled is drained
            if host in node.hosts:
                node.worker.drop(host)
            raise
        return host

    async def _offer_to_load(self) -> None:
        """Offer those layers of the folder that are not served here (--can-load)."""
        assert self.folder is not None, "it hosts already"
        config, weights = self.member.config, self.weights
        here = await offer_folder(
            self.member.node,
            self.folder,
            weights.precision,
            self._device,
            model_name=weights.name,
            max_layers=config.can_load,
            has_ends=config.has_ends,
        )
        self.say(
            f"would load up to {config.can_load} more of layers {here}, which lie here, when no other node holds them"
        )
        self.member.directory.announce()

    def providers(self) -> list[Provider]:
        """The nodes that host the model, as sources of its files; the first one of the ticket first."""
        return providers_of(self.member, self.records())

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def budget(self) -> MemoryBudget:
        """Raises BadRequest if the model has fewer layers than --can-load says."""
        shape, others = self.weights.shape, sum(self.other_ends.values())
        own = own_spans(self)
        return budget_of(self.member.config, shape, with_ends=self.with_ends, others=others, own=own)

    def _has_room(self, span: Span) -> bool:
        """For `span` beside what is in memory."""
        return has_room(self.member.node.worker, self.budget, span, self.in_memory)

    @property
    def held(self) -> list[Span]:
        """The spans that are served now."""
        return [host.info.span for host in self.hosts]

    @property
    def in_memory(self) -> list[Span]:
        """Spans served, and drained till their last session has gone. For those loaded on demand `budget` keeps memory."""
        return [host.info.span for host in self._hosts_in_memory]

    @property
    def _hosts_in_memory(self) -> list[SpanHost]:
        node = self.member.node
        return [h for h in node.hosts if not (h.is_private or h in node.worker.loaded_on_demand())]

    # -- moving -------------------------------------------------------------------------------------------------------

    @property
    def is_moving(self) -> bool:
        return self._moving.locked()

    def may_move(self, target: Span) -> bool:
        """Whether others serve all that a move to `target` leaves; meanwhile too, where memory does not hold both."""
        meanwhile = target if self._has_room(target) else None
        return all(self._may_leave(span, meanwhile) for span in self.held)

    async def move(self, target: Span, why: str, *, is_forced: bool = False) -> None:
        """Serve `target` instead of all spans served now; returns when the old ones are drained. Raises what loading does.
        Unless forced, old spans are kept if no other node serves their layers by then."""
        async with self._moving:
            if target in self.held:
                return
            self.say(f"moving to layers {target}: {why}")
            self.announce(target)
            if self._has_room(target):
                old = self.hosts
                await self._load(target)
                self.say(f"serving layers {target}")
                await self._drop([h for h in old if is_forced or self._may_leave(h.info.span, target)])
            elif await self._exchange(target, is_forced=is_forced):
                self.say(f"serving layers {target}")
            else:
                self.announce(None)
                self.say(
                    f"not moving to layers {target} now: others do not serve what would be dropped, or it is in use"
                )

    async def _exchange(self, target: Span, *, is_forced: bool) -> bool:
        """Load `target` after what is served is dropped: memory does not hold both. False if others do not serve that, or it
        does not hold `target` beside what is being drained already.

        It is fetched first, which takes no such memory. If it cannot be loaded then, what was dropped is loaded again.
        """
        drained = [host.info.span for host in self._hosts_in_memory if host.is_draining]
        fits = has_room(self.member.node.worker, self.budget, target, drained, self.hosts)
        if not fits or not (is_forced or self.may_move(target)):
            return False
        await self.fetch(target)
        if not (is_forced or self.may_move(target)):
            return False
        self.dropped = [host.info.span for host in self.hosts if not self.balancer.is_taken(host)]
        await self._drop(self.hosts)
        try:
            await self._load(target)
        except Exception:
            await self._restore()
            raise
        self.dropped = []
        rebound(self)
        return True

    async def restore(self) -> None:
        """Load again what a move dropped before it failed. Raises what loading does."""
        async with self._moving:
            await self._restore()

    async def _restore(self) -> None:
        while self.dropped:
            span = self.dropped[0]
            self.announce(span)
            await self._load(span)
            self.dropped = self.dropped[1:]
            self.say(f"serving layers {span} again")

    def _may_leave(self, span: Span, target: Span | None) -> bool:
        holdings = self.linked_holdings()
        mine = next((h for h in holdings if (h.node, h.span) == (self.member.id, span)), None)
        return mine is None or may_leave(mine, target, holdings)

    async def _drop(self, hosts: list[SpanHost]) -> None:
        """Drain, then free. Sessions that no other node can take keep the old span until they end.

        Hosts that went by themselves meanwhile, unused or with their device, are none of the worker's any more.
        """
        worker = self.member.node.worker
        for host in hosts:
            host.drain()
        self.member.directory.announce()
        for host in hosts:
            await host.emptied()
            if host in worker.hosts:
                worker.drop(host)
        rebound(self)

    async def fill(self, gap: Span) -> SpanHost | None:
        """Serve what fits of layers that no node serves, beside what is served already; None where others are to do that.
        Raises what loading does.
        """
        async with self._moving:
            span = beginning_of(gap, self._has_room)
            if span is None:
                return None
            self.announce(span)
            await asyncio.sleep(self.member.config.settle_s)
            rivals = [h for h in self.holdings() if h.node != self.member.id and h.span.overlaps(span)]
            if any(h.is_ready or h.node < self.member.id for h in rivals):
                self.announce(None)
                return None
            host = await self._load(span)
            self.say(f"also serving layers {span}: no other node does")
            return host

    def note_failure(self, error: Exception) -> None:
        """Layers could not be loaded: withdraw the claim, and leave them to others for a while. Raises a bug."""
        if (why := failure(error)) is None:
            raise error
        self.announce(None)
        self.is_lost = self.is_lost or isinstance(error, DeviceLost)
        self.backoff.failed(asyncio.get_running_loop().time())
        self.say(f"layers could not be moved: {why}")

    # -- what others serve -----------------------------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Those of this model; one that states another number of layers than the model has is false."""
        kind, num_layers = self.weights.kind, self.weights.shape.num_layers
        if kind is None:
            return []
        mine = [record for record in self.member.records() if kind.is_of(record)]
        return [record for record in mine if record.info is not None and record.info.num_layers == num_layers]

    def linked_holdings(self) -> list[Holding]:
        """Those of this node and of nodes that a link is open to: any member can make records of nodes that there are not."""
        return linked_of(self.holdings(), self.member.id, self.member.edges())

    def holdings(self) -> list[Holding]:
        kind = self.weights.kind
        return [] if kind is None else holdings_of(kind, self.records())

    # -- what people ask ----------------------------------------------------------------------------------------------

    def view(self, api: str = "") -> dict[str, Any]:
        """The swarm as this member sees it now; JSON-able (docs/operations.md)."""
        return view_of(self.snapshot(api))

    def snapshot(self, api: str = "") -> SwarmSnapshot:
        """What `view_of` makes the view of."""
        shapes = {} if self.weights.kind is None else {self.kind: self.weights.shape}
        sight = self.member.snapshot(shapes, self.budget.tokens, api)
        off = f"{self.member.config.name} is switched off, so it serves nothing: `manyhands switch on`"
        return replace(sight, notes=(*sight.notes, off)) if self.member.node.worker.is_off else sight
