"""Who may serve a model, and the best route through them."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Collection, Coroutine, Sequence
from typing import Any

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import ShardUnavailable, WeightsMismatch
from manyhands.generate.hop import Hop, Lease
from manyhands.generate.session import Session
from manyhands.node import Node
from manyhands.origin.model import OriginModel
from manyhands.route.learn import Learned
from manyhands.route.search import Offer, Terms, find_route
from manyhands.swarm.directory import Directory
from manyhands.swarm.members import is_local
from manyhands.swarm.record import Record

# How long a repair that finds nobody waits for nodes to answer a dial: those that are back answer at once.
LOOK_AROUND_S = 2.0


class Routes:
    """What is offered for one model: by the records of `directory`, if there is one, and by the nodes at `addrs`, which are
    asked. Repairs look for replacements here, too (generate/follow.py:Surroundings)."""

    def __init__(
        self, node: Node, model: OriginModel, addrs: Sequence[NodeAddr], directory: Directory | None = None
    ) -> None:
        self._node, self._model = node, model
        self.addrs = list(addrs)
        self._directory = directory
        self.evicted: set[NodeId] = set()  # not used, whatever they offer, until readmitted
        self._learned = Learned()

    async def offers(self, excluded: Collection[NodeId]) -> list[Offer]:
        """Spans that are offered now, by nodes that are not evicted."""
        return self.known_offers(self.evicted.union(excluded))

    def known_offers(self, excluded: Collection[NodeId] = ()) -> list[Offer]:
        """By fresh records of this model's weights, and by nodes of `addrs` that a link is open to. Asks nobody."""
        told = self._node.known_offers(self.addrs, excluded)
        if self._directory is None:
            return told
        recorded = [offer for record in self._directory.records(self._model.id) if (offer := offer_of(record))]
        named = {(offer.node, offer.info.span) for offer in recorded}
        return [offer for offer in recorded if offer.node not in excluded] + [
            offer for offer in told if (offer.node, offer.info.span) not in named
        ]

    async def look_around(self) -> None:
        """Dial the nodes that no link is open to, or wait for news from the directory. Deadline: LOOK_AROUND_S."""
        with contextlib.suppress(ShardUnavailable, TimeoutError):
            async with asyncio.timeout(LOOK_AROUND_S):
                if self.addrs:
                    await self._node.survey(self.addrs)
                elif self._directory is not None:
                    async with self._directory.changed:
                        await self._directory.changed.wait()

    async def connect(self, index: int, offer: Offer, num_hops: int, lease: Lease) -> Hop:
        """Links to a hop. Raises ShardUnavailable."""
        hop = await self._node.connect(index, offer, num_hops, lease)
        if offer.node in self.evicted:  # while we connected
            refusal = ShardUnavailable(f"hop {index} ({offer.name}) was evicted")
            refusal.node = offer.node
            raise refusal
        return hop

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the requests, as a task of the node."""
        self._node.start(work)

    def evict(self, node: NodeId) -> int:
        """Use `node` no more until it is readmitted; sessions that run through it repair to others (L9-W01).

        Returns how many those are. They wait, as after a death, while nobody else covers its layers.
        """
        self.evicted.add(node)
        here = (self._model.id, self._model.precision)
        mine = [s for s in self._node.sessions.values() if (s.route.lease.model, s.route.lease.precision) == here]
        return sum([self.lose_evicted(session) for session in mine])

    def readmit(self, node: NodeId) -> None:
        """Let new sessions and repairs use `node` again."""
        self.evicted.discard(node)

    def lose_evicted(self, session: Session) -> bool:
        """Count hops on evicted nodes as lost; whether there were any."""
        lost = [i for i, h in enumerate(session.route.hops) if h.offer.node in self.evicted and i not in session.losses]
        for index in lost:
            session.lose(index, "was evicted")
        return bool(lost)

    async def find(self, excluded: Collection[NodeId] = (), num_tokens: int = 0) -> tuple[Offer, ...]:
        """A route over spans of this model's weights and precision. Raises ShardUnavailable, WeightsMismatch.

        `num_tokens`: positions to lease. Records tell who has room for them, as of some seconds ago; if by them nobody
        has, the nodes are asked all the same.
        """
        if self._directory is None:
            # Who has just been excluded may be frozen: asking it again would take the deadline.
            offers = await (self.offers(excluded) if excluded else self._node.survey(self.addrs))
            return self.choose([o for o in offers if o.node not in self.evicted])
        try:
            return self._known_route(excluded, num_tokens)
        except ShardUnavailable:
            if not self.addrs:
                raise
            await self.look_around()
            return self._known_route(excluded, num_tokens)

    def _known_route(self, excluded: Collection[NodeId], num_tokens: int) -> tuple[Offer, ...]:
        return self.choose(self.known_offers(self.evicted.union(excluded)), num_tokens)

    def is_covered(self) -> bool:
        """Whether some route is known now. Asks nobody."""
        with contextlib.suppress(ShardUnavailable, WeightsMismatch):
            return bool(self._known_route((), 0))
        return False

    def choose(self, offers: Sequence[Offer], num_tokens: int = 0) -> tuple[Offer, ...]:
        """The best route over `offers`. Raises ShardUnavailable, WeightsMismatch."""
        mine = [o for o in offers if (o.info.model, o.info.precision) == (self._model.id, self._model.precision)]
        now = time.monotonic()
        try:
            route = find_route(
                [self._learned.informed(o, now) for o in mine], self._model.num_layers, terms=self._terms(num_tokens)
            )
        except ShardUnavailable:  # say what there is, if there is something
            route = find_route(offers, self._model.num_layers, (self._model.id, self._model.precision))
        info = route[0].info
        if (info.model, info.precision) != (self._model.id, self._model.precision):
            raise WeightsMismatch(
                f"the swarm holds {info.model_name} {info.model[:12]} in {info.precision}, this origin has "
                f"{self._model.id[:12]} in {self._model.precision}: use the same weights and --dtype"
            )
        if self._model.ends_at == "edges" and not (route[0].info.has_ends and route[-1].info.has_ends):
            raise ShardUnavailable("the first and last hop do not hold the ends: serve them with --ends, or use origin")
        return route

    def _terms(self, num_tokens: int) -> Terms:
        """What this node's own links show, and a key that spreads requests over near-equals."""
        if self._directory is None:
            return Terms()
        me, now = self._node.transport.node, time.monotonic()
        for (peer, lane), health in self._node.pool.health().items():
            if lane == "control" and health.rtt_s is not None:
                self._learned.observe_rtt(me, peer, health.rtt_s, now)
        self._learned.forget(now)
        return Terms(origin=me, rtts=self._learned.rtts(now), num_tokens=num_tokens, key=secrets.token_bytes(8))

    def learn(self, session: Session) -> None:
        """What the hops said of the last step, for the routes of others."""
        for hop, timing in zip(session.route.hops, session.timings, strict=False):
            span = hop.offer.info.span
            self._learned.observe(hop.offer.node, span, timing.compute_us / 1e6 / len(span), time.monotonic())


def offer_of(record: Record) -> Offer | None:
    """What a record offers to routes; None if it is only announced (a node that is still loading takes no session)."""
    if record.info is None or record.info.max_sessions == 0 or not record.addresses:
        return None
    addr = record.addresses[0]
    at = NodeAddr(addr.host, addr.port, record.node)
    is_lan = any(is_local(addr.host) for addr in record.addresses)
    return Offer(at, record.node, record.name, record.info, record.load, is_lan=is_lan)
