"""The model of one span on its device: whose rows run together, when, and what becomes of the results. No links, no leases.

sessions ─ batch.choose ─► device ─► sessions ─► successors, and in the next turn of the event loop the statistics
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from manyhands.config import WorkerConfig
from manyhands.core import ORIGIN_HOP, NodeId, SessionId, Span, SpanLoad
from manyhands.engine.span import Cache
from manyhands.errors import Corruption, DeviceLost, ManyhandsError, ProtocolError, StateGone
from manyhands.net.transport import Link
from manyhands.wire.message import Open
from manyhands.wire.timings import written
from manyhands.worker.batch import WINDOW_ROWS, PromptRows, Shortness, StepKind, Waiting, choose, hold_until
from manyhands.worker.callers import Callers
from manyhands.worker.copies import Copies, copied
from manyhands.worker.execute import Device, Draws, Result, SpanModel, Timed, timed
from manyhands.worker.fit import Fit
from manyhands.worker.log import LogBudget
from manyhands.worker.session import HopSession, Taken
from manyhands.worker.thread import attempt

T = TypeVar("T")
logger = logging.getLogger(__name__)

LATENCIES = 256  # decode steps that the p95 is taken of
LATELY_S = 2.0  # a session that had a decode step since then is decoding


class Engine:
    """Computes for its sessions between `start` and `stop`; `advance_soon` is called when there may be work.

    `load` makes the model, on the device thread, before a session is added. `close` ends a session whose step failed,
    `on_change` is called after each load, and when the device is lost.
    """

    def __init__(
        self,
        span: Span,
        load: Callable[[], SpanModel],
        device: Device,
        config: WorkerConfig,
        logs: LogBudget,
        close: Callable[[SessionId], None],
        on_change: Callable[[], None],
    ) -> None:
        self.device = device
        self.model: SpanModel | None = None
        self.cache_tokens = config.cache_tokens  # of all sessions; on a device once loaded what it has room for
        self.usual_s = 0.0  # of a decode step
        self._last_s: deque[float] = deque(maxlen=LATENCIES)  # of decode steps, from arrival to result
        self.steps_run = self.rows_run = 0
        self.callers = Callers()
        self.stale_steps_computed = 0  # steps of a guess that was known to be dead when they had been computed
        self._span, self._load, self._config, self._logs, self._close = span, load, config, logs, close
        self._on_change = on_change
        self.lost: DeviceLost | None = None  # the device computes no more, and why
        self.has_failed = False  # the last load
        self._loading: asyncio.Future[SpanModel] | None = None
        self._sessions: dict[int, HopSession] = {}
        self._runs = self._is_busy = self._is_soon = False
        self._clock = 0  # counts sessions and what is taken from them
        self._held_since: float | None = None  # since when decode steps have waited for others
        self._timer: asyncio.TimerHandle | None = None  # ends that
        self._shortness, self._prompts = Shortness(), PromptRows()
        self._copies = Copies(device.copying, self.advance_soon)
        self._began_at = 0.0  # when the last device step did, by the loop's clock
        self._on_device: Sequence[Taken] = ()  # of the step that runs there

    def load(self, num_sessions: int) -> SpanLoad:
        """How busy and how fast the span is, with so many sessions."""
        p95_s = sorted(self._last_s)[len(self._last_s) * 95 // 100] if self._last_s else 0.0
        return SpanLoad(num_sessions, len(self.waiting()), self.usual_s / len(self._span), p95_s=p95_s)

    async def ensure_loaded(self) -> SpanModel:
        """The model, loaded if it was evicted or never loaded. Deadline: the opener's. Raises ModelError.

        A load goes on when an opener gives up, for those who come after: each would otherwise begin it again.
        """
        if self.model is None:
            if self._loading is None:
                self.has_failed = False
                self._loading = self.device.run(self._load)
                self._loading.add_done_callback(self._loaded)
            await asyncio.shield(self._loading)
            assert self.model is not None, "who opens keeps it from being evicted"
        return self.model

    def stop_loading(self) -> None:
        """Those who waited for a load under way do so no more: it ends (thread.py: check_is_wanted), and counts as failed."""
        if self._loading is not None:
            self._loading.cancel()
            self._loading, self.has_failed = None, True
            self._on_change()

    def _loaded(self, done: "asyncio.Future[SpanModel]") -> None:
        if done is not self._loading:
            return  # it was stopped
        self._loading = None
        self.has_failed = done.cancelled() or done.exception() is not None
        if self.has_failed:
            self._on_change()
            return  # those who wait for it get the error
        self.model = done.result()
        runner, most = self.model.runner, self._config.cache_tokens
        room = runner.cache_room
        self.cache_tokens = most if room is None else min(most, room // max(1, runner.bytes_per_token))
        self._on_change()

    def lose(self, error: DeviceLost) -> None:
        """The device computes no more."""
        self.lost = error
        self._on_change()

    def evict(self) -> None:
        """Free the model's memory. No session may be left."""
        logger.info("layers=%s leave memory: no session, and their idle time is over or it is short", self._span)
        self.model = None

    def start(self) -> None:
        self._runs = True
        self.advance_soon()

    def stop(self) -> None:
        self._runs = False
        self._copies.end()

    async def copy(self, origin: NodeId, prepare: Callable[[], Callable[[], T]]) -> T:
        """Run what `prepare` gives, which copies a cache for `origin`, on the device in its turn. Raises ShardUnavailable."""
        self.advance_soon()
        return await copied(self._copies.add(origin), self.device, prepare, self._copied)

    def _copied(self, done: "asyncio.Future[Any]") -> None:
        _ = done.cancelled() or done.exception()  # seen, so that asyncio does not log it where no one waits
        self._is_busy = False
        self.advance_soon()  # before a copy of another span begins
        self._copies.is_over()

    def add(
        self, message: Open, sampler: Draws | None, origin: Link, successor: Link, cache: Cache | None = None
    ) -> HopSession:
        """A new session, with a cache, to compute for until it is removed. The model is loaded."""
        assert self.model is not None
        self._clock += 1
        fit = Fit(self.model.hidden_size, self.model.wire_dtype, self.model.vocab_size)
        cache = cache or self.model.runner.new_cache(message.capacity, message.span, message.prompt_length)
        session = HopSession(message, cache, sampler, fit, self._clock, origin, successor, self._logs)
        self._sessions[session.key] = session
        self.callers.opened(origin.peer)
        return session

    def remove(self, session: HopSession) -> None:
        del self._sessions[session.key]
        self.advance_soon()

    def waiting(self) -> list[Waiting]:
        """Sessions that wait for the device; standbys only if no other session does. A full successor pauses its upstream."""
        ready: list[Waiting] = []
        standbys: list[Waiting] = []
        for s in self._sessions.values():
            if s.waiting and not s.outbox:
                (standbys if s.is_standby else ready).append(Waiting(s.served, s.key, s.waiting[0].count))
        return ready or standbys

    def computes_from(self, session: HopSession) -> int | None:
        """The first position of `session` that the device computes now; None: of that it computes none."""
        return next((taken.step.position for taken in self._on_device if taken.session is session), None)

    def advance_soon(self) -> None:
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
        waiting = self.waiting()
        if (turn := self._copies.next(steps_wait=bool(waiting))) is not None:
            self._is_busy = True
            return turn.set_result(None)
        if len(self._sessions) > 1:
            loop = asyncio.get_running_loop()
            until = self._hold_until(waiting, loop.time())
            if until is not None:
                self._timer = loop.call_at(until, self._advance)
                return
        self._held_since = None
        if waiting and (batch := self._choose(waiting)):
            self._compute(batch)
        elif waiting:  # none of those chosen can be computed: on with the others
            self.advance_soon()

    def _hold_until(self, waiting: Sequence[Waiting], now: float) -> float | None:
        """Until when what waits is held, so that decode steps due by then share its device step; None: not at all."""
        if not waiting or len(waiting) == len(self._sessions) or any(w.num_rows > WINDOW_ROWS for w in waiting):
            return None
        self._held_since = now if self._held_since is None else self._held_since
        due = (s.pace.expected_at() for s in self._sessions.values() if not s.waiting)
        until = hold_until(self._held_since, self.usual_s, [at for at in due if at is not None and at > now])
        return until if until > now else None

    def _choose(self, waiting: Sequence[Waiting]) -> list[Taken]:
        taken: list[Taken] = []
        for pick in choose(waiting, self._config.prefill_rows, self._config.mixed_rows, self._prompts.limit):
            self._clock += 1
            session = self._sessions[pick.key]
            session.served = self._clock
            try:
                taken.append(session.take(pick.num_rows))
            except Corruption as error:  # coded rows that cannot be decoded, of which a part was to run
                _accuse(session, error)
        return taken

    def _compute(self, batch: list[Taken]) -> None:
        assert self.model is not None, "a span with sessions is loaded"
        for taken in batch:
            if taken.work.count > WINDOW_ROWS:
                taken.work.uplink_Bps = taken.session.successor.line().uplink_Bps
        self._copies.step_runs()
        works = [taken.work for taken in batch]
        kind = self.model.kind(works)
        free_s = batch[0].session.pace.usual_s or 0.0 if len(self._sessions) == 1 else 0.0
        began = time.monotonic()  # uvloop's clock counts milliseconds
        self._began_at = asyncio.get_running_loop().time()
        if kind is not None and self._shortness.is_short(kind, free_s) and self.device.computes_here:
            self._computed(batch, *attempt(timed, self.model, works), began, kind)
        else:
            self._is_busy, self._on_device = True, batch
            done = self.device.run(partial(timed, self.model, works))
            done.add_done_callback(lambda done: self._came_back(batch, done, began, kind))

    def _came_back(
        self, batch: list[Taken], done: "asyncio.Future[Timed]", began: float, kind: StepKind | None
    ) -> None:
        """The device thread is done with it."""
        self._is_busy, self._on_device = False, ()
        if not done.cancelled():
            error = done.exception()
            self._computed(batch, done.result() if error is None else None, error, began, kind)

    def _computed(
        self,
        batch: list[Taken],
        outcome: Timed | None,
        error: BaseException | None,
        began: float,
        kind: StepKind | None,
    ) -> None:
        """Send what came of it. Statistics, and what waits meanwhile, are for the next turn, after the bytes have left."""
        if not self._runs:
            return
        if isinstance(error, Exception):  # out of memory, a kernel's complaint: these sessions' trouble, not the node's
            logger.error("layers=%s: a device step failed", self._span, exc_info=error)
            if isinstance(error, DeviceLost):
                self.lose(error)
            outcome = [error] * len(batch), 0.0
        elif error is not None:
            raise error
        assert outcome is not None, "there is one, or an error"
        results, cpu_s = outcome
        loop, ended = asyncio.get_running_loop(), time.monotonic()
        now = loop.time()
        company = self._company(batch, now)
        for taken, result in zip(batch, results, strict=True):
            try:
                waited_us, took_us = int(1e6 * max(0.0, began - taken.arrived_at)), int(1e6 * (ended - began))
                if isinstance(result, Result):
                    stale = taken.session.deliver(taken, result, written(waited_us, took_us, *company))
                    self.stale_steps_computed += stale
                else:
                    self._end(taken, result)
            except Exception:  # this session's result is lost; the others' are not
                logger.exception("session=%s: a result could not be sent", taken.session.name)
        loop.call_soon(self._keep_books, batch, results, began, ended, cpu_s, kind)

    def _company(self, batch: list[Taken], now: float) -> tuple[int, int, int]:
        """Of a device step, for its origins: rows, windows (0: parts of prompts are among them), sessions that decode now."""
        rows = longest = 0
        for taken in batch:
            rows, longest = rows + taken.work.count, max(longest, taken.work.count)
            if taken.work.count <= WINDOW_ROWS and not taken.session.is_standby:
                taken.session.decoded_at = now
        since = now - LATELY_S
        streams = sum([session.decoded_at > since for session in self._sessions.values()])
        return rows, len(batch) if longest <= WINDOW_ROWS else 0, streams

    def _keep_books(
        self,
        batch: list[Taken],
        results: Sequence[Result | Exception],
        began: float,
        ended: float,
        cpu_s: float,
        kind: StepKind | None,
    ) -> None:
        """A device step is done and took so much CPU; begin the next. One of which not all was computed teaches nothing."""
        self.steps_run += 1
        longest, is_whole, now = 0, True, asyncio.get_running_loop().time()
        for taken, result in zip(batch, results, strict=True):
            count = taken.work.count
            self.rows_run += count
            self.callers.computed(taken.session.origin.peer, count)
            longest, is_whole = max(longest, count), is_whole and isinstance(result, Result)
            if count <= WINDOW_ROWS:
                taken.session.pace.sent(now)
                self._last_s.append(ended - taken.arrived_at)
        took_s = ended - began
        if is_whole:
            if kind is not None:
                self._shortness.learn(kind, took_s, cpu_s)
            if longest <= WINDOW_ROWS:
                self.usual_s = took_s if self.usual_s == 0 else 0.8 * self.usual_s + 0.2 * took_s
            else:
                self._prompts.learn(sum(taken.work.count for taken in batch), now - self._began_at)
        if self._logs.num_bytes > self._logs.limit_bytes:
            self._logs.enforce()
        self._advance()

    def _end(self, taken: Taken, error: Exception) -> None:
        """A step could not be computed: its session ends here, or waits for another predecessor."""
        session = taken.session
        if session.is_closed or taken.step.epoch != session.opened.epoch:
            return
        if isinstance(error, Corruption | ProtocolError | StateGone):
            _accuse(session, error)
        else:
            code = error.code if isinstance(error, ManyhandsError) else ManyhandsError.code
            session.fault(code, str(error) or type(error).__name__, None)
            self._close(session.opened.session)


def _accuse(session: HopSession, error: Corruption | ProtocolError | StateGone) -> None:
    """What the hop before `session` sent cannot be; or there is no going back to where it begins, which is no one's fault."""
    hop = session.opened.hop
    session.spoil()
    session.waiting.clear()
    session.fault(error.code, str(error), hop if isinstance(error, StateGone) else hop - 1 if hop else ORIGIN_HOP)
