"""How a request gets its first route: the best whose nodes all have room, in a star if hops cannot meet, at last alone."""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from manyhands.core import NodeId
from manyhands.errors import Apart, Busy, ManyhandsError, ShardUnavailable
from manyhands.origin.alone import pause_s
from manyhands.origin.attempts import Attempts
from manyhands.origin.node import FullNode
from manyhands.origin.queue import RoomQueue
from manyhands.origin.repair_plan import Event
from manyhands.origin.request_routes import RequestRoutes
from manyhands.origin.route import Lease
from manyhands.origin.routes import Routes
from manyhands.origin.session import First, Session
from manyhands.route.offer import Offer

logger = logging.getLogger(__name__)

# To answer Open, while others hold the layers: a hop that cannot reach the next one says so after 10 s (net/pool.py).
QUICK_S: Final = 12.0

Opened = tuple[tuple[Offer, ...], Session]


class RouteOpener:
    """Of the requests of one origin. `waiting`: those for which no node has room. `last_resort`: the fallback, if any."""

    def __init__(self, node: FullNode, routes: Routes, waiting: RoomQueue) -> None:
        self._node, self._routes, self._waiting = node, routes, waiting
        self.last_resort: Offer | None = None

    async def open(
        self, route: Sequence[Offer] | None, lease: Lease, around: RequestRoutes, first: First | None = None
    ) -> Opened:
        """Open a session on `route`, or on the best one whose nodes all have room: a full node is passed over (HN-32).

        Where all are full the request waits for request.patience_s in `waiting`. Where no node holds some layers, or none any
        more of those whose records say so, it waits until that has lasted for patience_s; then it goes to the fallback, if
        there is one. Raises what the last node to refuse said (Busy, if one was full), once no other route is left.
        """
        if route is not None:
            return tuple(route), await self._node.requests.open(route, lease, None, first)
        patience_s, loop, looks = self._node.request.patience_s, asyncio.get_running_loop(), 0
        began = loop.time()

        async def attempt() -> Opened:
            nonlocal first  # which leave once: with the next route they wait until it stands
            now, first = first, None
            return await self._open_best(lease, around, now)

        while True:
            try:
                return await self._waiting.run(attempt, patience_s)
            except Busy:
                raise
            except ShardUnavailable as refusal:
                if loop.time() >= (began + patience_s if refusal.may_pass else self._routes.waits_until(patience_s)):
                    return await self._open_alone(lease, around, refusal)
            looks += 1
            await asyncio.sleep(pause_s(looks))
            await self._routes.look_around()

    async def _open_alone(self, lease: Lease, around: RequestRoutes, refusal: ShardUnavailable) -> Opened:
        """A session on the fallback. Raises `refusal` if there is none, or the request does not want it."""
        if (alone := around.alone(self.last_resort)) is None:
            raise refusal
        around.note_fallback()
        around.events.append(Event("reshard", (alone.name,), 0, f"{refusal}; this machine goes on alone"))
        return (alone,), await self._node.requests.open((alone,), lease)

    async def _open_best(self, lease: Lease, around: RequestRoutes, first: First | None) -> Opened:
        """The best route, in a ring. Where that is one whose hops cannot reach each other, a star over it: rows go by way of
        this node, which reaches all of them (C-10). Nodes that refuse, or do not answer, are passed over while others hold
        their layers: nodes have QUICK_S to answer, and where there are no others open_timeout_s."""
        attempts = Attempts()
        found = await around.find(num_tokens=lease.capacity)
        while True:
            is_star = attempts.is_star or self._routes.apart.are_in(found, asyncio.get_running_loop().time())
            if lease.path == "ring" and is_star:
                lease = replace(lease, path="star")
                around.note_star()
            try:
                limit_s = math.inf if attempts.is_patient else QUICK_S
                session = await self._node.requests.open(found, lease, None, first, open_s=limit_s)
            except ManyhandsError as refusal:
                self._note(attempts, found, refusal, lease)
                first = None  # what was computed for it was in vain: the next route computes nothing before it stands
                found = await self._another(attempts, refusal, lease, around)
            else:
                for node in attempts.opened():
                    self._routes.doubt(node)
                return found, session

    def _note(self, attempts: Attempts, found: Sequence[Offer], refusal: ManyhandsError, lease: Lease) -> None:
        is_ring = lease.path == "ring"
        refusal.may_pass = any(_should_serve(offer, lease) for offer in found if offer.node == refusal.node)
        for node in attempts.refused(found, refusal, is_ring=is_ring):
            self._routes.doubt(node)
        if isinstance(refusal, Apart) and is_ring and refusal.node is not None:
            logger.info("another ring, or a star: %s", refusal)
            self._routes.apart.note(found, NodeId(refusal.node), asyncio.get_running_loop().time())

    async def _another(
        self, attempts: Attempts, refusal: ManyhandsError, lease: Lease, around: RequestRoutes
    ) -> tuple[Offer, ...]:
        """A route without the excluded nodes, or with those that may be asked once more."""
        while True:
            try:
                return await around.find(attempts.excluded, lease.capacity)
            except ShardUnavailable:
                if not attempts.is_again():
                    raise attempts.reason(refusal) from None


def _should_serve(offer: Offer, lease: Lease) -> bool:
    """Whether its node could take the session by its record. If it will not, it has been restarted, moves, or is gone."""
    return offer.info.is_loaded and offer.info.free_tokens >= lease.capacity
