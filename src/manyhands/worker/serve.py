"""A hop: leases and sessions of one span on one node. Links come and go outside (node.py), steps run in engine.py.

Open ─ reserve ─► open ─► session ─► Engine ... ─► close, lost links, drain
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from manyhands.config import WorkerConfig
from manyhands.core import NodeId, SamplingParams, SessionId, SpanInfo, SpanLoad
from manyhands.errors import Draining, LinkClosed, ShardUnavailable
from manyhands.net.transport import Link, try_send
from manyhands.wire.attest_message import Attest
from manyhands.wire.message import Close, Extend, Fault, Feed, Open, Probe, Retract, Step
from manyhands.worker.adopting import held_for, orphaned
from manyhands.worker.beginning import begun
from manyhands.worker.engine import Engine
from manyhands.worker.eviction import Eviction
from manyhands.worker.execute import Device, Draws, SpanModel
from manyhands.worker.leases import Place, SpanLeases
from manyhands.worker.log import LogBudget
from manyhands.worker.opening import Opening, check_again, check_fits, check_lease, check_room, hold, make_room
from manyhands.worker.owners import Owners
from manyhands.worker.places import Places
from manyhands.worker.session import HopSession

logger = logging.getLogger(__name__)


class SpanHost:
    """Serves one span; a private one for requests of its own node alone, and it is in no record.
    `load` makes the model (on the device thread), again after an eviction. `logs` bounds the output logs of all spans of the
    node together, `leases` their caches, `owners` counts each origin's sessions. `run` must be running for steps to be
    computed. Owned by the Node.
    """

    def __init__(
        self,
        info: SpanInfo,
        load: Callable[[], SpanModel],
        device: Device,
        config: WorkerConfig,
        make_sampler: Callable[[SamplingParams], Draws],
        logs: LogBudget,
        owners: Owners,
        leases: SpanLeases,
        *,
        is_private: bool = False,
    ) -> None:
        self._owners, self.is_private = owners, is_private
        self._info, self._config, self._make_sampler = info, config, make_sampler
        self._changed = asyncio.Event()  # places come or go, or the model was loaded
        self.engine = Engine(info.span, load, device, config, logs, self._fail, self._changed.set)
        self._places = Places()
        self._opening: dict[Place, Opening] = {}  # the newest of each place
        self.leases, self.parking = leases, leases.parking
        self._leaves_at: float | None = None  # by the loop's clock, once it drains

    @property
    def info(self) -> SpanInfo:
        """What this span says of itself now."""
        now = asyncio.get_running_loop().time()
        return replace(self._info, free_tokens=self.leases.offered(self.engine.cache_tokens, now))

    @property
    def load(self) -> SpanLoad:
        """How busy this span is now, before whatever is asked of it next (IN-W02)."""
        return self.engine.load(self.num_sessions)

    @property
    def num_sessions(self) -> int:
        return len(self._places)

    @property
    def back_end(self) -> str:
        """What computes the layers ("avx2", "torch"); "" while they are not loaded."""
        return self.engine.model.runner.back_end if self.engine.model is not None else ""

    @property
    def is_loaded(self) -> bool:
        return self.engine.model is not None

    # -- life of a session --------------------------------------------------------------------------------------------

    def reserve(self, message: Open, origin: Link) -> Opening:
        """Take a lease for `origin` or say no, before anything is accepted; for a session that is here, check the epoch.

        `open` or `abandon` follows. A newer Open of a place ends one under way. Raises Busy, ShardUnavailable (it would never
        fit), WeightsMismatch, ContextOverflow, BadRequest.
        """
        check_fits(message, self._info)
        self._owners.check(message.session, origin.peer)
        place = (message.session, message.span)
        here, before = self._places.get(place), self._opening.get(place)
        known = ([here.opened] if here is not None else []) + ([before.message] if before is not None else [])
        check_again(message, known)
        if not known and self.is_draining:
            raise Draining(f"layers {self._info.span} are being drained: try another node")
        if known:
            check_lease(message, self._extended(place, message.capacity))
        else:
            outlived = self._places.outlived(message, origin.peer, self._opening)
            make_room(lambda: self._check_room(message), outlived, self._remove)
        self._owners.hold(message.session, origin.peer, message.epoch, is_new=not known)
        if before is not None:
            before.cancel()
        opening = self._opening[place] = Opening(message, origin, held_for(self.parking, message, origin.peer))
        if not known:
            self.leases.take(place, message.capacity, self.engine.cache_tokens, message.resume)
        self._changed.set()  # no longer idle
        return opening

    def _check_room(self, message: Open) -> None:
        tokens, part, now = self.engine.cache_tokens, message.span, asyncio.get_running_loop().time()
        most, free = self.leases.most(tokens, part), self.leases.offered(tokens, now, part)
        check_room(message, self._info, most, free, len(self._places.keys() | self._opening.keys()))

    async def open(self, opening: Opening, successor: Link) -> None:
        """Turn a reservation into a session, or give a session its new place; tell the origin.

        The caller has connected `successor`. Deadline: the caller's. Raises LinkClosed if that link is gone by now; Busy.
        """
        await self.engine.ensure_loaded()
        message, origin, place = opening.message, opening.origin, opening.place
        cache, cached, parked = await begun(self.engine, opening, self.parking, self._places)
        if self._opening.get(place) is not opening:
            return  # closed, or overtaken, while it was being opened
        opening.check_early()
        if successor.is_closed:
            raise LinkClosed("the link broke while layers were being loaded")
        sampler = self._make_sampler(message.sampling) if message.sampling is not None else None
        session, has_log = self._places.get(place), message.replay_until == 0
        if session is not None:
            has_log = session.place(message, origin, successor, sampler)
            if cached < message.resume_until and not session.is_standby:
                session.spoil()  # its origin makes another plan
        else:
            session = self.engine.add(message, sampler, origin, successor, cache)
            if parked is not None:
                has_log = session.begin_with(parked, cached)
        del self._opening[place]
        self._places.put(place, session)
        session.answer_open(self._info.arithmetic, has_log=has_log, cached=cached)
        for step, link in opening.early.steps:
            self.step(session, step, link)
        if self.is_draining:  # what was said before may have been lost in the change of epochs
            session.fault(Draining.code, "drains", session.opened.hop)
        logger.info("session=%s epoch=%d hop=%d layers=%s", session.name, message.epoch, message.hop, message.span)

    def abandon(self, opening: Opening, *, keep: bool) -> bool:
        """An Open cannot be carried out: free its lease, also of the place it has unless that may be kept (`keep`). Ignored
        (False) if the session was closed or the Open overtaken meanwhile."""
        place = opening.place
        if self._opening.get(place) is not opening:
            return False
        del self._opening[place]
        self._released(place)
        if not keep and place in self._places:
            self._remove(place, self._places[place])
        return True

    def close(self, message: Close, node: NodeId) -> None:
        """Free a session at once, or park it, on behalf of `node`; ignored unless that is its origin, or if it is closed."""
        self.parking.forget(message.session, node)
        self._end(lambda id_, origin: id_ == message.session and origin.peer == node, message)

    def _fail(self, session_id: SessionId) -> None:
        """A step of the session failed, as its origin was told; an Open that asks for it in a later epoch is refused."""
        self._refuse(f"a step of this session failed on layers {self._info.span}", lambda id_: id_ == session_id)
        self._end(lambda id_, _: id_ == session_id)

    def _refuse(self, why: str, is_meant: Callable[[SessionId], bool] = lambda _: True) -> None:
        """Tell origins that their Opens, which end now, were not carried out."""
        for opening in [opening for (id_, _), opening in self._opening.items() if is_meant(id_)]:
            message = opening.message
            try_send(opening.origin, Fault(message.session, message.epoch, message.hop, ShardUnavailable.code, why))

    def _end(self, is_meant: Callable[[SessionId, Link], bool], why: Close | None = None) -> None:
        """Free sessions, also those half open, by their id and their origin's link. `why` may ask to park them."""
        for place in [p for p, opening in self._opening.items() if is_meant(p[0], opening.origin)]:
            self._opening.pop(place).cancel()
            self._released(place)
        for place, session in [(p, s) for p, s in self._places.items() if is_meant(p[0], s.origin)]:
            self._remove(place, session, why)

    def _remove(self, place: Place, session: HopSession, why: Close | None = None) -> None:
        self._places.remove(place)
        # Else a repair has left it behind, with rows of guesses that were wrong.
        may_park = session.opened.epoch == self._owners.epoch_of(place[0]) and not self.is_draining
        self._released(place)
        self.engine.remove(session)
        if why is not None and why.parked_as is not None and may_park and 0 < why.positions <= session.cache.length:
            tokens, now = self.engine.cache_tokens, asyncio.get_running_loop().time()
            self.leases.park(why.parked_as, session.park(why.positions), tokens, now)
        else:
            session.close()
        logger.info("session=%s closed layers=%s", session.name, place[1])

    def _released(self, place: Place) -> None:
        """A place or its opening has gone: if none of the two is left, the lease is free."""
        if place not in self._places and place not in self._opening:
            self._owners.release(place[0])
            self.leases.give_back(place)
        self._changed.set()  # idle time, and so eviction, begins when the last session goes

    def drop_origin(self, link: Link, *, is_gone: bool = False) -> None:
        """A control link of origins, the last if it `is_gone`: free what was opened over it, or park it to be adopted."""
        for place, session in [(p, s) for p, s in self._places.items() if s.origin is link]:
            self._remove(place, session, orphaned(session))
        self._end(lambda _, origin: origin is link)
        if is_gone:
            self.parking.orphan(link.peer, asyncio.get_running_loop().time())
            self._changed.set()

    @property
    def is_draining(self) -> bool:
        return self._leaves_at is not None

    def drain(self, limit_s: float | None = None) -> None:
        """Accept no more sessions, load nothing for others; let the origins of those here look for other nodes, for `limit_s`
        or `drain_s` at most."""
        ends_at = asyncio.get_running_loop().time() + (self._config.drain_s if limit_s is None else limit_s)
        self._leaves_at = min(ends_at, self._leaves_at or math.inf)
        self.parking.clear()
        if not (self.is_loaded or self.is_private):
            self.engine.stop_loading()
            self._leave(f"layers {self._info.span} are not loaded here any more: try another node")
        for session in self._places.values():
            session.fault(Draining.code, "drains", session.opened.hop)

    def resume(self) -> None:
        self._leaves_at = None  # takes sessions again; those that found no other node since `drain` go on

    async def emptied(self) -> None:
        """Wait until no session is left. At the deadline of `drain` those still here are closed, and their origins told."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._leaves_at):
                while not self.is_empty:
                    self._changed.clear()
                    await self._changed.wait()
        self._leave(f"leaves: no node took its place within {self._config.drain_s:g} s")

    def _leave(self, why: str) -> None:
        """End all sessions here, and tell their origins."""
        self._refuse(why)
        for session in self._places.values():
            session.fault(ShardUnavailable.code, why, None)
        self._end(lambda *_: True)

    def on_linked(self, link: Link) -> None:
        """There is a new link of this node."""
        for session in self._places.values():
            session.on_linked(link)

    def drop_successor(self, link: Link) -> None:
        """A data link is gone."""
        for session in self._places.values():
            session.on_lost(link)

    # -- steps --------------------------------------------------------------------------------------------------------

    def find(self, session_id: SessionId, hop: int, epoch: int) -> HopSession | None:
        """The place of hop `hop` in this epoch of the session, if it is here (ORIGIN_HOP: of the last hop)."""
        return self._places.find(session_id, hop, epoch)

    def follow(self, message: Probe | Retract, node: NodeId) -> None:
        """Do what the session's origin asks in this epoch, in each of its places. The route stands: older ones are freed."""
        for place, session in self._places.owned(message.session, node):
            if session.opened.epoch == message.epoch:
                session.report() if isinstance(message, Probe) else session.retract(message.guess, message.position)
            elif session.opened.epoch < message.epoch and place not in self._opening:
                self._remove(place, session)

    def extend(self, message: Extend, node: NodeId) -> None:
        """Let the places that the session of the origin `node` has here in this epoch have a lease of more positions."""
        for place, session in self._places.owned(message.session, node):
            if session.opened.epoch == message.epoch:
                session.extend(self._extended(place, message.capacity))

    def _extended(self, place: Place, capacity: int) -> int:
        """How many positions the lease of `place` has, once it may have `capacity`."""
        asked, now = min(capacity, self._info.context_length), asyncio.get_running_loop().time()
        return self.leases.extend(place, asked, self.engine.cache_tokens, now)

    def meant(self, message: Feed | Attest, node: NodeId) -> HopSession | None:
        """The place that `message` of the session's origin `node` is for, if it is here in that epoch."""
        place = self.find(message.session, message.hop, message.epoch)
        return place if place is not None and place.origin.peer == node else None

    def has_place(self, message: Open) -> bool:
        return any((message.session, message.span) in held for held in (self._places, self._opening))

    def hold(self, step: Step, link: Link) -> bool:
        """Keep a step for the place that is being opened for it; False if there is none."""
        return hold(self._opening.values(), step, link)

    def step(self, session: HopSession, step: Step, link: Link) -> None:
        """Queue a step that came over `link`; dropped unless that leads to the session's predecessor."""
        session.pace.returned(asyncio.get_running_loop().time())
        session.step(step, link, time.monotonic())
        self.engine.advance_soon()

    def credit(self, session: HopSession, steps: int, epoch: int) -> None:
        """The successor has computed steps of `epoch`: send what waits for it."""
        session.credit(steps, epoch)
        self.engine.advance_soon()

    # -- in memory, or not --------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:  # nor is one being opened
        return not self._places and not self._opening

    async def run(self, unused_s: float = math.inf) -> None:
        """Compute steps as they come, until it was empty for `unused_s` (if that is finite: or is, and the last load failed).
        Drops the model when it is not used (eviction.py). Raises DeviceLost, with no session left, once the device is lost.
        """
        now = asyncio.get_running_loop().time
        self.engine.start()
        try:
            while self.engine.lost is None:
                eviction = Eviction(self._config, since := now())
                while self.engine.lost is None and not self._changed.is_set():
                    limit_s = 0.0 if self.engine.has_failed and unused_s < math.inf else unused_s
                    if now() >= (ends_at := since + limit_s if self.is_empty else math.inf):
                        return
                    await self._look(eviction, ends_at)
                self._changed.clear()
            self._leave(f"the device of layers {self._info.span} failed: {self.engine.lost}")
            raise self.engine.lost
        finally:
            self.engine.stop()
            self.parking.clear()

    async def _look(self, eviction: Eviction, ends_at: float) -> None:
        """Wait until something changes or is over: what was parked for too long goes, and the model where it is due."""
        now, is_idle = asyncio.get_running_loop().time, self.is_loaded and self.is_empty
        looks_at = eviction.looks_at(now()) if is_idle else math.inf
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(min(looks_at, ends_at, self.parking.expires_at())):
                await self._changed.wait()
        self.parking.expire(now())
        if is_idle and not self._changed.is_set() and eviction.is_due(now()):
            self.parking.clear()
            self.engine.evict()
