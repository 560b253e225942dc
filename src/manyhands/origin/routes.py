"""Who may serve a model, and the best route through them."""

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from manyhands.core import NodeAddr, NodeId, Span
from manyhands.errors import ShardUnavailable, WeightsMismatch
from manyhands.origin.apart import ApartPairs
from manyhands.origin.eviction import Evicted, leave
from manyhands.origin.model import OriginModel
from manyhands.origin.node import FullNode
from manyhands.origin.offers import kind_of, offers_of, rtts_of, shared
from manyhands.origin.reaching import reach_any
from manyhands.origin.repair_plan import Slot, plan_repair
from manyhands.origin.request_routes import LastRoutes
from manyhands.origin.route import Hop, Lease
from manyhands.origin.session import Session
from manyhands.origin.trust import admits, trusts
from manyhands.route.classes import unheld
from manyhands.route.learn import Learned
from manyhands.route.permit import admitted, gaps_of, permitted, with_ends_at_edges
from manyhands.route.prefix import gain_s
from manyhands.route.search import Offer, Rules, Terms, find_route
from manyhands.swarm.directory import Directory
from manyhands.swarm.members import Members
from manyhands.swarm.record import Record

# How long a repair that finds no node waits for nodes to answer a dial: those that are back answer at once.
LOOK_AROUND_S = 2.0
FALLBACK = "fallback"  # what the whole model is called that an origin keeps for itself; no route is made of it
MAX_FAR = 64  # offers of nodes that no link is open to
MAX_NEAR = 512  # of linked nodes, which are 256 at most (net/incoming.py)
# Between two looks at nodes that could serve better than those linked, and how many are dialled then.
EXPLORE_S = 2.0
EXPLORED = 4


class Routes:
    """What is offered for one model: by the records of `directory`, if there is one, by the nodes at `addrs`, which are
    asked, and by this node itself. A request looks here by way of its rules (request_routes.py:RequestRoutes).
    `addrs` may shrink: a node that has ended for good is taken out. `members`: who belongs to which scope."""

    def __init__(
        self, node: FullNode, model: OriginModel, addrs: Sequence[NodeAddr], directory: Directory | None = None
    ) -> None:
        self._node, self._model = node, model
        self.addrs = list(addrs)
        self._directory = directory
        self.evicted: set[NodeId] = set()  # not used, whatever they offer, until readmitted
        self.last, self.apart = LastRoutes(), ApartPairs()
        self.members = Members("public")  # where there is no directory, which has its own
        self._learned, self._explored_at = Learned(), -EXPLORE_S
        self._was_covered = False  # there has been a route
        self._missing_since = math.inf  # by the loop's clock; since the first request that found none

    async def offers(self, excluded: Collection[NodeId]) -> list[Offer]:
        """Spans on nodes that can be reached now and are not evicted: a link is open to them.

        Where these do not cover the model, others that the records name are dialled side by side, for at most REACH_S.
        """
        excluded = self.evicted.union(excluded)
        near, doubted = self._linked_offers(excluded)
        missing = gaps_of(near, self._model.num_layers)
        if not missing:
            self._explore(excluded)
            return near
        needed = [o for o in self._far_offers(excluded) if any(gap.overlaps(o.info.span) for gap in missing)]
        await reach_any(
            self._node, needed, lambda: not gaps_of(self._linked_offers(excluded)[0], self._model.num_layers)
        )
        near, doubted = self._linked_offers(excluded)
        return near + doubted

    def known_offers(self, excluded: Collection[NodeId] = ()) -> list[Offer]:
        """By fresh records of this model's weights, and by nodes of `addrs` that a link is open to. Asks no node."""
        near, doubted = self._linked_offers(excluded)
        return near + doubted + self._far_offers(excluded)

    def _linked_offers(self, excluded: Collection[NodeId]) -> tuple[list[Offer], list[Offer]]:
        """What linked nodes offer: those that did not fail lately, and those that did."""
        told = self._node.requests.known_offers(self.addrs, excluded)
        if self._directory is None:
            return self._with_own(told, excluded), []
        linked = offers_of(shared(self._linked_records(self._directory, excluded), MAX_NEAR))
        named = {(offer.node, offer.info.span) for offer in linked}
        linked += [offer for offer in told if (offer.node, offer.info.span) not in named]
        linked = self._with_own(linked, excluded)
        now = asyncio.get_running_loop().time()
        failing = {node for node in {o.node for o in linked} if self._node.setbacks.failing_s(node, now)}
        return [o for o in linked if o.node not in failing], [o for o in linked if o.node in failing]

    def _with_own(self, offers: list[Offer], excluded: Collection[NodeId]) -> list[Offer]:
        """`offers`, and what this node serves although no record or address says so (an origin that only asks)."""
        me, addr = self._node.transport.node, self._node.address
        if addr is None or me in excluded:
            return offers
        named = {offer.info.span for offer in offers if offer.node == me}
        hosts = [h for h in self._node.hosts if h.info.model_name != FALLBACK and h.info.span not in named]
        return offers + [Offer(addr, me, self._node.name, h.info, h.load) for h in hosts if not h.is_draining]

    def _far_offers(self, excluded: Collection[NodeId]) -> list[Offer]:
        """At most MAX_FAR offers of nodes that would have to be dialled, and may be now."""
        if self._directory is None:
            return []
        now = asyncio.get_running_loop().time()
        left_alone = self._node.setbacks.failing(now).union(excluded)
        strange = (r for r in self._directory.in_turn(self._model.id, left_alone) if self._may_dial(r, now))
        return offers_of(islice(strange, MAX_FAR))

    def _linked_records(self, directory: Directory, excluded: Collection[NodeId]) -> list[Record]:
        """Records of linked nodes. This node's own come first (it may be linked to itself)."""
        linked = dict.fromkeys((self._node.transport.node, *self._node.pool.nodes("control")))
        return directory.records_of([node for node in linked if node not in excluded], self._model.id)

    def _may_dial(self, record: Record, now: float) -> bool:
        node, at = record.node, record.addresses
        is_idle = bool(at) and not self._node.setbacks.wait_s(node, at[0], now)
        return is_idle and node != self._node.transport.node and self._node.pool.find(node, "control") is None

    def _explore(self, excluded: Collection[NodeId]) -> None:
        """Dial a few nodes that could serve better than those linked, beside the request: later ones may use them."""
        now = asyncio.get_running_loop().time()
        if self._directory is None or now < self._explored_at + EXPLORE_S:
            return
        self._explored_at = now
        if far := self._far_offers(excluded)[:EXPLORED]:
            self._node.start(reach_any(self._node, far, lambda: False))

    async def meet(self, nodes: Collection[str]) -> None:
        """Dial those whose ids begin so and that are not linked, REACH_S long; a ticket's all. Raises ShardUnavailable."""
        if self._directory is None:
            await self._node.requests.survey(self.addrs)
            return
        now, first = asyncio.get_running_loop().time(), tuple(nodes)
        in_turn = self._directory.in_turn(self._model.id)
        meant = [r for r in in_turn if r.node.startswith(first) and self._may_dial(r, now)]
        await reach_any(self._node, offers_of(meant), lambda: False)

    async def look_around(self) -> bool:
        """Dial the nodes that no link is open to, or wait for news from the directory: LOOK_AROUND_S. False: none can come."""
        with contextlib.suppress(ShardUnavailable, TimeoutError):
            async with asyncio.timeout(LOOK_AROUND_S):
                if self.addrs:
                    await self._node.requests.survey(self.addrs)
                elif self._directory is not None:
                    async with self._directory.changed:
                        await self._directory.changed.wait()
        return bool(self.addrs) or self._directory is not None

    async def connect(self, index: int, offer: Offer, num_hops: int, lease: Lease) -> Hop:
        """Links to a hop. Raises ShardUnavailable."""
        hop = await self._node.requests.connect(index, offer, num_hops, lease)
        if offer.node in self.evicted:  # while we connected
            refusal = ShardUnavailable(f"hop {index} ({offer.name}) was evicted")
            refusal.node = offer.node
            raise refusal
        return hop

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the requests, as a task of the node."""
        self._node.start(work)

    def doubt(self, node: NodeId) -> None:
        """A session could not be opened on `node`: others go first for a while."""
        self._node.setbacks.failed(node, (), asyncio.get_running_loop().time())

    def evict(self, node: NodeId) -> Evicted:
        """Use `node` no more until it is readmitted; sessions that run through it repair to others (L9-W01), or end there if no
        other holds its layers."""
        self.evicted.add(node)
        here = (self._model.id, self._model.precision)
        mine = [s for s in self._node.sessions.values() if (s.route.lease.model, s.route.lease.precision) == here]
        return leave(mine, self.evicted, self._unheld)

    def readmit(self, node: NodeId) -> None:
        """Let new sessions and repairs use `node` again."""
        self.evicted.discard(node)

    def leave_evicted(self, session: Session) -> None:
        """Count hops on evicted nodes as lost where others hold their layers."""
        if self.evicted:
            leave([session], self.evicted, self._unheld)

    def _unheld(self) -> list[Span]:
        """Layers that no node holds that is not evicted, as far as is known."""
        return gaps_of(self.known_offers(self.evicted), self._model.num_layers)

    async def find(
        self,
        excluded: Collection[NodeId] = (),
        num_tokens: int = 0,
        rules: Rules = Rules(),
        current: tuple[Offer, ...] = (),
    ) -> tuple[Offer, ...]:
        """A route over spans of this model's weights and precision. Raises ShardUnavailable, WeightsMismatch.

        `num_tokens`: positions to lease. Records tell who has room for them, as of some seconds ago; if by them no node
        has, the nodes are asked all the same.
        """
        if self._directory is None:
            # Who has just been excluded may be frozen: asking it again would take the deadline.
            offers = await (self.offers(excluded) if excluded else self._node.requests.survey(self.addrs))
            offers = self._with_own([o for o in offers if o.node not in self.evicted], excluded)
            return self.choose(offers, 0, rules, current)
        try:
            return self.choose(await self.offers(excluded), num_tokens, rules, current)
        except ShardUnavailable:
            if not self.addrs:
                raise
            await self.look_around()
            return self.choose(await self.offers(excluded), num_tokens, rules, current)

    def permitted(self, offers: Sequence[Offer], rules: Rules) -> list[Offer]:
        """Those of `offers`, or the parts of them, that `rules` let take part."""
        terms = self.terms(0, rules)
        return permitted(admitted(offers, terms), Span(0, self._model.num_layers), terms)

    def num_refused(self, rules: Rules) -> int:
        """Nodes of this model's weights that are known, and that the scope of `rules` keeps out."""
        may_join = admits(rules, self._members, self._node.transport.node)
        return 0 if may_join is None else len({o.node for o in self.known_offers(self.evicted) if not may_join(o)})

    async def keeps(self, route: Sequence[Offer], saved: int, lease: Lease, rules: Rules = Rules()) -> bool:
        """Whether going on over `route`, where `saved` positions are cached, is no slower than the best route of today."""
        if len(route) > rules.max_hops:
            return False
        if self._directory is None:
            return True  # no times are known
        try:
            offers = await self.offers(())
            best = self.choose(offers, lease.capacity, rules)
        except (ShardUnavailable, WeightsMismatch):
            return True
        max_tokens = lease.capacity - lease.prompt_length
        return gain_s(route, best, self.informed(offers), self.terms(0, rules), saved, max_tokens) >= 0

    def rejoin(
        self,
        route: Sequence[Offer],
        offers: Sequence[Offer],
        excluded: Collection[NodeId],
        positions: int,
        rules: Rules = Rules(),
        cuts: Collection[int] = (),
    ) -> tuple[Slot, ...]:
        """`route`, whose hops have `positions` cached, with those replaced that are not among `offers` any more, and no new hop
        over one of the layers `cuts`. Raises ShardUnavailable.
        """
        offers = [o for o in offers if kind_of(o) == kind_of(route[0])]
        held: dict[NodeId, list[Span]] = {}
        for offer in offers:
            held.setdefault(offer.node, []).append(offer.info.span)
        spans = [hop.info.span for hop in route]
        lost = [i for i, at in enumerate(spans) if unheld(held.get(route[i].node, ()), at.end, at.start)]
        if self._model.ends_at == "edges":
            offers = with_ends_at_edges(offers, self._model.num_layers)
        return plan_repair(route, lost, {}, (), offers, excluded, positions, (), self.terms(0, rules), cuts).slots

    def is_covered(self) -> bool:
        """Whether some route is known now. Asks no node."""
        with contextlib.suppress(ShardUnavailable, WeightsMismatch):
            return bool(self._choose(self.known_offers(self.evicted), 0, Rules(mix_classes=True), ()))
        return False

    def waits_until(self, patience_s: float) -> float:
        """A request finds no route: until when, by the loop's clock, it should look again. -inf: that is no use.

        Layers that were served before come back, or others load them; patience counts from the first request that missed
        them. What is held, and only not for this request, will not change by waiting.
        """
        is_last = self._directory is None and not self.addrs
        if is_last or not self._was_covered or self.is_covered():
            return -math.inf
        self._missing_since = min(self._missing_since, asyncio.get_running_loop().time())
        return self._missing_since + patience_s

    def choose(
        self,
        offers: Sequence[Offer],
        num_tokens: int = 0,
        rules: Rules = Rules(),
        current: tuple[Offer, ...] = (),
    ) -> tuple[Offer, ...]:
        """The best route over `offers`. Raises ShardUnavailable, WeightsMismatch."""
        route = self._choose(offers, num_tokens, rules, current)
        self._was_covered, self._missing_since = True, math.inf
        return route

    def _choose(
        self, offers: Sequence[Offer], num_tokens: int, rules: Rules, current: tuple[Offer, ...]
    ) -> tuple[Offer, ...]:
        own = [o for o in offers if (o.info.model, o.info.precision) == (self._model.id, self._model.precision)]
        mine = with_ends_at_edges(own, self._model.num_layers) if self._model.ends_at == "edges" else own
        terms = replace(self.terms(num_tokens, rules), current=current, num_evicted=len(self.evicted))
        try:
            route = find_route(self.informed(mine), self._model.num_layers, terms=terms)
        except ShardUnavailable:  # say what there is; what nodes say of other weights ends no waiting for these
            there = own if self._was_covered else offers
            route = find_route(there, self._model.num_layers, (self._model.id, self._model.precision), terms)
        info = route[0].info
        if (info.model, info.precision) != (self._model.id, self._model.precision):
            raise WeightsMismatch(
                f"the swarm holds {info.model_name} {info.model[:12]} in {info.precision}, this origin has "
                f"{self._model.id[:12]} in {self._model.precision}: use the same weights, --dtype and --cache-dtype"
            )
        if self._model.ends_at == "edges" and not (route[0].info.has_ends and route[-1].info.has_ends):
            raise ShardUnavailable("the first and last hop do not hold the ends: serve them with --ends, or use origin")
        return route

    def informed(self, offers: Sequence[Offer]) -> list[Offer]:
        """With the costs that experience gives them."""
        now = time.monotonic()
        least_s = self._learned.least_s(now)
        return [self._learned.informed(o, now, least_s) for o in offers]

    @property
    def _members(self) -> Members:
        return self.members if self._directory is None else self._directory.members

    def terms(self, num_tokens: int, rules: Rules) -> Terms:
        """What this node's own links show, and records of those of others, and a key that spreads requests over near-equals."""
        me, now, members = self._node.transport.node, time.monotonic(), self._members
        may_join, is_trusted = admits(rules, members, me), trusts(rules, members, me)
        apart = self.apart.pairs(asyncio.get_running_loop().time())
        if self._directory is None:
            return Terms(rules, me, apart=apart, admits=may_join, trusts=is_trusted)
        health = [(peer, edge.rtt_s) for (peer, lane), edge in self._node.pool.health().items() if lane == "control"]
        own = {peer: rtt_s for peer, rtt_s in health if rtt_s is not None}
        self._learned.observe_own_rtts(me, own, now)
        rtts = self._learned.rtts(now, rtts_of(self._linked_records(self._directory, ()), me, own))
        uplink_Bps, key = self._node.watch.uplink_Bps() or math.inf, secrets.token_bytes(8)
        return Terms(rules, me, uplink_Bps, rtts, may_join, is_trusted, num_tokens, key, apart=apart)

    def learn(self, session: Session) -> None:
        """What the hops said of the last step, and of rows of prompts, for the requests of others."""
        now, hops, returns = time.monotonic(), session.route.hops, session.returns
        for hop, timing in zip(hops, returns.timings, strict=False):
            span = hop.offer.info.span
            self._learned.observe(hop.offer.node, span, timing.compute_us / 1e6 / len(span), now)
        for hop, row_s in zip(hops, returns.row_s, strict=False):
            self._learned.observe_row(hop.offer.node, hop.offer.info.span, row_s / len(hop.offer.info.span), now)
