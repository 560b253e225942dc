"""A hop: leases, sessions and the device loop of one span on one node. Links come and go outside (node.py).

Open ─ reserve ─► open ─► sessions ─ batch.choose ─► device ─► sessions ─► successors
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from manyhands.config import WorkerConfig
from manyhands.core import ORIGIN_HOP, NodeId, SamplingParams, SessionId, Span, SpanInfo, SpanLoad
from manyhands.errors import (
    BadRequest,
    Busy,
    ContextOverflow,
    Corruption,
    Detour,
    Draining,
    LinkClosed,
    ManyhandsError,
    ShardUnavailable,
    WeightsMismatch,
)
from manyhands.net.transport import Link, betters
from manyhands.wire.message import Fault, Feed, HopTiming, Open, Probe, Step
from manyhands.worker.batch import WINDOW_ROWS, Kind, Shortness, Waiting, choose, hold_until
from manyhands.worker.execute import Device, Draws, Result, SpanModel
from manyhands.worker.log import LogBudget
from manyhands.worker.session import Fit, HopSession, Taken, send

logger = logging.getLogger(__name__)

Place = tuple[SessionId, Span]


class SpanHost:
    """Serves one span. `load` makes the model (on the device thread); it is called again after an eviction. `logs` bounds the
    output logs of all spans of the node together.

    `run` must be running for steps to be computed; cancelling it stops the host. Owned by the Node.
    """

    def __init__(
        self,
        info: SpanInfo,
        load: Callable[[], SpanModel],
        device: Device,
        config: WorkerConfig,
        make_sampler: Callable[[SamplingParams], Draws],
        logs: LogBudget,
    ) -> None:
        self._info, self._load, self._device, self._config = info, load, device, config
        self._make_sampler, self._logs = make_sampler, logs
        self._model: SpanModel | None = None
        self._cache_tokens = config.cache_tokens
        self._loading = asyncio.Lock()
        # A session may have several places here: adjacent or not, after a repair that this node took part in twice.
        self._places: dict[Place, HopSession] = {}
        self._by_hop: dict[tuple[SessionId, int], HopSession] = {}
        self._by_key: dict[int, HopSession] = {}
        self._opening: dict[Place, tuple[Open, Link]] = {}  # the newest Open of each place that is being opened
        self._used = asyncio.Event()
        self._freed = asyncio.Event()
        self._clock = 0
        self._leaves_at: float | None = None  # by the loop's clock, once it drains
        self._runs = self._is_busy = self._is_soon = False
        self._held_since: float | None = None  # since when decode steps have waited for others
        self._timer: asyncio.TimerHandle | None = None  # ends that
        self._step_s = 0.0  # usual duration of a decode step
        self._shortness = Shortness()
        self.steps_run = 0
        self.rows_run = 0

    def __repr__(self) -> str:
        state = "loaded" if self._model else "not loaded"
        return f"<SpanHost {self._info.model_name} {self._info.span} {state}, {self.num_sessions} sessions>"

    @property
    def info(self) -> SpanInfo:
        """What this span says of itself now."""
        return replace(self._info, free_tokens=self._cache_tokens - self._leased())

    @property
    def load(self) -> SpanLoad:
        """How busy this span is now, before whatever is asked of it next (IN-W02)."""
        return SpanLoad(self.num_sessions, len(self._waiting()), self._step_s / len(self._info.span))

    @property
    def num_sessions(self) -> int:
        return len(self._places)

    @property
    def is_loaded(self) -> bool:
        return self._model is not None

    def _leased(self) -> int:
        new = [message.capacity for place, (message, _) in self._opening.items() if place not in self._places]
        return sum(s.capacity for s in self._places.values()) + sum(new)

    # -- life of a session --------------------------------------------------------------------------------------------

    async def ensure_loaded(self) -> SpanModel:
        """The model, loaded if it was evicted or never loaded. Deadline: the opener's. Raises ModelError."""
        async with self._loading:
            if self._model is None:
                self._model = await self._device.run(self._load)
                fits = self._config.cache_bytes // max(1, self._model.shard.bytes_per_token())
                self._cache_tokens = min(self._config.cache_tokens, fits)
            return self._model

    def reserve(self, message: Open, origin: Link) -> None:
        """Take a lease for `origin` or say no, before anything is accepted; for a session that is here, check the epoch.

        To be followed by `open` or `abandon`. A newer Open of a place overtakes one that is still being carried out.
        Raises Busy, WeightsMismatch, ContextOverflow, BadRequest.
        """
        info = self._info
        if message.model != info.model or message.precision != info.precision:
            raise WeightsMismatch(
                f"hop {message.hop} holds {info.model_name} {info.model[:12]} in {info.precision}, "
                f"the request is for {message.model[:12]} in {message.precision}: serve the same weights and precision"
            )
        if not info.span.covers(message.span):
            raise BadRequest(f"hop {message.hop} holds layers {info.span}, not {message.span}")
        place = (message.session, message.span)
        here = self._places.get(place)
        known = [(here.opened, here.origin)] if here is not None else []
        if place in self._opening:
            known.append(self._opening[place])
        if any(message.epoch <= opened.epoch or link.peer != origin.peer for opened, link in known):
            raise BadRequest(f"session {message.session.hex()} is already open on layers {info.span}")
        if not known:
            self._lease(message)
        elif here is None and message.capacity != known[0][0].capacity:
            raise BadRequest(f"session {message.session.hex()} has a lease of {known[0][0].capacity} positions")
        self._opening[place] = (message, origin)
        self._used.set()  # no longer idle

    def _lease(self, message: Open) -> None:
        info = self._info
        if self.is_draining:
            raise Draining(f"layers {info.span} are being drained: try another node")
        if message.capacity > info.context_length:
            raise ContextOverflow(f"{message.capacity} positions exceed the model's context of {info.context_length}")
        sessions = len({*self._places, *self._opening})
        if sessions >= self._config.max_sessions:
            raise Busy(f"layers {info.span} already serve {sessions} sessions, the limit; try another node or later")
        free = self._cache_tokens - self._leased()
        if message.capacity > free:
            raise Busy(f"layers {info.span} have cache for {free} more positions, {message.capacity} are asked for")

    async def open(self, message: Open, origin: Link, successor: Link) -> None:
        """Turn a reservation into a session, or give a session its new place; tell the origin.

        The caller has connected `successor`. Deadline: the caller's. Raises LinkClosed if that link is gone by now.
        """
        model = await self.ensure_loaded()
        place = (message.session, message.span)
        if not self._is_newest(message):
            return  # closed, or overtaken, while it was being opened
        if successor.is_closed:
            raise LinkClosed("the link broke while layers were being loaded")
        sampler = self._make_sampler(message.sampling) if message.sampling is not None else None
        session = self._places.get(place)
        has_log = True
        if session is not None:
            self._forget_hop(session)
            has_log = session.place(message, origin, successor, sampler)
        else:
            session = self._add(message, model, sampler, origin, successor)
        del self._opening[place]
        self._by_hop[message.session, message.hop] = session
        if session.is_last:
            self._by_hop[message.session, ORIGIN_HOP] = session
        session.answer_open(self._info.arithmetic, has_log=has_log)
        if self.is_draining:  # what was said before may have been lost in the change of epochs
            session.fault(Draining.code, "drains", session.opened.hop)
        logger.info("session=%s epoch=%d hop=%d layers=%s", session.name, message.epoch, message.hop, message.span)

    def _is_newest(self, message: Open) -> bool:
        newest, _ = self._opening.get((message.session, message.span), (None, None))
        return newest is message

    def abandon(self, message: Open, *, keep: bool) -> bool:
        """An Open cannot be carried out: free its lease, or its session unless that may `keep` the place it has.

        Ignored (False) if the session was closed or the Open overtaken meanwhile.
        """
        if not self._is_newest(message):
            return False
        self._forget_opening((message.session, message.span))
        if not keep:
            self.close(message.session)
        return True

    def _add(self, message: Open, model: SpanModel, sampler: Draws | None, origin: Link, successor: Link) -> HopSession:
        self._clock += 1
        fit = Fit(model.shard.hidden_size, model.wire_dtype, model.vocab_size)
        cache = model.shard.new_cache(message.capacity, message.span)
        session = HopSession(message, cache, sampler, fit, self._clock, origin, successor, self._logs)
        self._places[message.session, message.span] = self._by_key[session.key] = session
        return session

    def _forget_hop(self, session: HopSession) -> None:
        for key in [k for k, s in self._by_hop.items() if s is session]:
            del self._by_hop[key]

    def close(self, session_id: SessionId, node: NodeId | None = None) -> None:
        """Free a session at once, on behalf of `node` (ignored unless that is its origin).

        Unknown ids are ignored: a session may be closed from two sides.
        """
        for place, (_, origin) in list(self._opening.items()):
            if place[0] == session_id and node in (None, origin.peer):
                self._forget_opening(place)
        for place, session in [(p, s) for p, s in self._places.items() if p[0] == session_id]:
            if node is None or session.origin.peer == node:
                self._free(place, session)

    def _free(self, place: Place, session: HopSession) -> None:
        session.close()
        del self._places[place], self._by_key[session.key]
        self._forget_hop(session)
        self._used.set()  # idle time, and so eviction, begins when the last session goes
        self._advance_soon()
        self._freed.set()
        logger.info("session=%s closed layers=%s", session.name, place[1])

    def _forget_opening(self, place: Place) -> None:
        del self._opening[place]
        self._used.set()
        self._freed.set()

    def drop_origin(self, link: Link) -> None:
        """The control link of origins is gone: free the sessions that were opened over it, also those half open."""
        for place in [p for p, (_, origin) in self._opening.items() if origin is link]:
            self._forget_opening(place)
        for place, session in [(p, s) for p, s in self._places.items() if s.origin is link]:
            self._free(place, session)

    @property
    def is_draining(self) -> bool:
        return self._leaves_at is not None

    def drain(self) -> None:
        """Accept no more sessions; let the origins of those here look for other nodes, for `drain_s` from the first call on."""
        self._leaves_at = self._leaves_at or asyncio.get_running_loop().time() + self._config.drain_s
        for session in self._places.values():
            session.fault(Draining.code, "drains", session.opened.hop)

    async def emptied(self) -> None:
        """Wait until no session is left. At the deadline of `drain` those still here are closed, and their origins told."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._leaves_at):
                while self._places or self._opening:
                    self._freed.clear()
                    await self._freed.wait()
        self._turn_out(f"leaves: nobody took its place within {self._config.drain_s:g} s")

    def _turn_out(self, why: str) -> None:
        for place, (message, origin) in list(self._opening.items()):
            send(origin, Fault(message.session, message.epoch, message.hop, ShardUnavailable.code, why))
            self._forget_opening(place)
        for place, session in list(self._places.items()):
            session.fault(ShardUnavailable.code, why, None)
            self._free(place, session)

    def on_linked(self, link: Link) -> None:
        """There is a new link of this node: origins of sessions that send through a relay instead may give them new places."""
        for session in self._places.values():
            if not session.is_last and betters(link, session.successor):
                detail = f"hop {session.opened.hop} has a direct link to the next"
                session.fault(Detour.code, detail, session.opened.hop)

    def drop_successor(self, link: Link) -> None:
        """A data link is gone: the origins of sessions that send over it are told, and may repair their routes."""
        for session in self._places.values():
            if session.successor is link:
                blame = ORIGIN_HOP if session.is_last else session.opened.hop + 1
                session.fault(LinkClosed.code, f"hop {session.opened.hop} lost its link to the next", blame)

    # -- steps --------------------------------------------------------------------------------------------------------

    def find(self, session_id: SessionId, hop: int) -> HopSession | None:
        """The place of hop `hop` of the session, if it is here (ORIGIN_HOP: of the last hop)."""
        return self._by_hop.get((session_id, hop))

    def report(self, message: Probe, node: NodeId) -> None:
        """Answer a Probe of the session's origin for every place the session has here."""
        for (session_id, _), session in self._places.items():
            if session_id == message.session and (session.opened.epoch, session.origin.peer) == (message.epoch, node):
                session.report()

    def feeder(self, message: Feed, node: NodeId) -> HopSession | None:
        """The place that `message` of the session's origin `node` speaks to, if it is here in that epoch."""
        place = self._by_hop.get((message.session, message.hop))
        is_asked = place is not None and (place.opened.epoch, place.origin.peer) == (message.epoch, node)
        return place if is_asked else None

    def has_place(self, message: Open) -> bool:
        place = (message.session, message.span)
        return place in self._places or place in self._opening

    def step(self, session: HopSession, step: Step, link: Link) -> None:
        """Queue a step. Raises ProtocolError (close the link) if the sender is not the session's predecessor."""
        session.pace.returned(asyncio.get_running_loop().time())
        session.step(step, link, time.monotonic())
        self._advance_soon()

    def credit(self, session: HopSession, steps: int) -> None:
        """The successor has computed steps: send what waits for it."""
        session.credit(steps)
        self._advance_soon()

    # -- the device loop ----------------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        return self._model is not None and not self._places and not self._opening

    async def run(self) -> None:
        """Compute steps as they come, for ever. Evicts the model when nobody has used it for `evict_after_s`."""
        self._runs = True
        self._advance_soon()
        try:
            while True:
                idle_s = self._config.evict_after_s if self._is_idle else 0
                try:
                    async with asyncio.timeout(idle_s or None):
                        await self._used.wait()
                    self._used.clear()
                except TimeoutError:
                    if self._is_idle:
                        self._evict()
        finally:
            self._runs = False

    def _waiting(self) -> list[Waiting]:
        """The sessions that wait for the device; shadows only if nobody else does."""
        ready = [s for s in self._places.values() if s.waiting and not s.outbox]  # a full successor pauses its upstream
        ready = [s for s in ready if not s.is_shadow] or ready
        return [Waiting(s.key, s.waiting[0].count, s.served) for s in ready]

    def _advance_soon(self) -> None:
        """Advance in the next loop turn, with all that came in this one. (A task that waits would add 30 us to a hop.)"""
        if not self._is_busy and not self._is_soon:
            self._is_soon = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """Begin a device step with what waits, unless the device is busy or decode steps are due that are worth waiting for."""
        self._is_soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_busy or not self._runs:
            return
        loop, waiting = asyncio.get_running_loop(), self._waiting()
        until = self._hold_until(waiting, loop.time())
        if until is not None:
            self._timer = loop.call_at(until, self._advance)
            return
        self._held_since = None
        if batch := self._choose(waiting):
            self._compute(batch)

    def _hold_until(self, waiting: Sequence[Waiting], now: float) -> float | None:
        """Until when what waits is held, so that decode steps due by then share its device step; None: not at all."""
        if not waiting or len(waiting) == len(self._places) or any(w.num_rows > WINDOW_ROWS for w in waiting):
            return None
        self._held_since = now if self._held_since is None else self._held_since
        due = (s.pace.expected_at() for s in self._places.values() if not s.waiting)
        until = hold_until(self._held_since, self._step_s, [at for at in due if at is not None and at > now])
        return until if until > now else None

    def _choose(self, waiting: Sequence[Waiting]) -> list[Taken]:
        taken: list[Taken] = []
        for pick in choose(waiting, self._config.prefill_rows, self._config.mixed_rows):
            self._clock += 1
            session = self._by_key[pick.key]
            session.served = self._clock
            taken.append(session.take(pick.num_rows))
        return taken

    def _compute(self, batch: list[Taken]) -> None:
        assert self._model is not None, "a span with sessions is loaded"
        works = [taken.work for taken in batch]
        kind = self._model.kind(works)
        is_short = kind is not None and self._shortness.is_short(kind)
        began = time.monotonic()  # uvloop's clock counts milliseconds
        done = self._device.run(partial(self._model.run, works), is_short=is_short)
        self._is_busy = True
        if done.done():
            self._computed(batch, done, began, kind)
        else:
            done.add_done_callback(lambda done: self._computed(batch, done, began, kind))

    def _computed(
        self, batch: list[Taken], done: "asyncio.Future[list[Result | Exception]]", began: float, kind: Kind | None
    ) -> None:
        """Send what came of it. The books, and what waits meanwhile, are for the next turn, after the bytes have left."""
        self._is_busy = False
        if done.cancelled() or not self._runs:
            return
        error = done.exception()
        if isinstance(error, Exception):  # out of memory, a kernel's complaint: these sessions' trouble, not the node's
            logger.error("layers=%s: a device step failed", self._info.span, exc_info=error)
        results = [error] * len(batch) if isinstance(error, Exception) else done.result()
        now, ended = asyncio.get_running_loop().time(), time.monotonic()
        for taken, result in zip(batch, results, strict=True):
            try:
                self._settle(taken, result, _timing(taken, began, ended))
            except Exception:  # this session's result is lost; the others' are not
                logger.exception("session=%s: a result could not be sent", taken.session.name)
            if taken.work.count <= WINDOW_ROWS:
                taken.session.pace.sent(now)
        took_s = ended - began if all(isinstance(result, Result) for result in results) else None
        asyncio.get_running_loop().call_soon(self._keep_books, [taken.work.count for taken in batch], took_s, kind)

    def _keep_books(self, counts: list[int], took_s: float | None, kind: Kind | None) -> None:
        """A device step of segments of so many rows took so long (None: not all were computed); begin the next."""
        self.steps_run += 1
        self.rows_run += sum(counts)
        if took_s is not None and kind is not None:
            self._shortness.learn(kind, took_s)
        if took_s is not None and max(counts) <= WINDOW_ROWS:
            self._step_s = took_s if self._step_s == 0 else 0.8 * self._step_s + 0.2 * took_s
        self._logs.enforce()
        self._advance()

    def _settle(self, taken: Taken, result: Result | Exception, timing: HopTiming) -> None:
        session = taken.session
        if isinstance(result, Result):
            session.deliver(taken, result, timing)
        elif session.is_closed or taken.step.epoch != session.opened.epoch:
            return
        elif isinstance(result, Corruption):
            session.spoil()
            session.waiting.clear()
            session.fault(result.code, str(result), session.opened.hop - 1 if session.opened.hop else ORIGIN_HOP)
        else:
            code = result.code if isinstance(result, ManyhandsError) else ManyhandsError.code
            session.fault(code, str(result) or type(result).__name__, None)
            self.close(session.opened.session)

    def _evict(self) -> None:
        logger.info("layers=%s evicted after %g s idle", self._info.span, self._config.evict_after_s)
        self._model = None


def _timing(taken: Taken, began: float, ended: float) -> HopTiming:
    """What this hop says of a step: how long it waited until the device step began, and how long that took."""
    return HopTiming(int(1e6 * max(0.0, began - taken.arrived_at)), int(1e6 * (ended - began)))
