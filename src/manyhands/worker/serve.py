"""A hop: Open, Step and Close of sessions on one span of one node.

Sessions hold leases of cache; their steps wait in order, run in batches on the span's device and go on to the successor
the origin named. Time never decides here except for eviction; links come and go outside (node.py).

    Open ─ lease ─► waiting steps ─ batch.choose ─► device ─► outbox ─ credit ─► successor
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from manyhands.config import WorkerConfig
from manyhands.core import ORIGIN_HOP, NodeId, SamplingParams, SessionId, SpanInfo
from manyhands.errors import (
    BadRequest,
    Busy,
    ContextOverflow,
    Corruption,
    LinkClosed,
    ManyhandsError,
    ProtocolError,
    WeightsMismatch,
)
from manyhands.model.cache import SessionCache
from manyhands.net.transport import Link
from manyhands.wire.message import Credit, Fault, Open, Opened, Step
from manyhands.worker.batch import Waiting, choose
from manyhands.worker.execute import Device, Draws, Result, SpanModel, Work

logger = logging.getLogger(__name__)

# Steps computed before their credits go back together: at most half the window, so that the sender never waits for them.
CREDIT_BATCH = 8


@dataclass(slots=True)
class HopSession:
    """One session on this span. `peers`: links to the origin (control) and to whoever gets our steps (data)."""

    opened: Open
    cache: SessionCache
    origin: Link
    successor: Link
    sampler: Draws | None
    capacity: int
    window_left: int
    key: int
    served: int = 0
    newest_window: int = 0
    owed: int = 0
    predecessor: Link | None = None
    ids: list[int] = field(default_factory=list)
    waiting: deque[Step] = field(default_factory=deque)
    outbox: deque[Step] = field(default_factory=deque)
    is_closed: bool = False

    @property
    def is_last(self) -> bool:
        return self.opened.hop == self.opened.num_hops - 1

    @property
    def hop_before(self) -> int:
        return self.opened.hop - 1 if self.opened.hop else ORIGIN_HOP


class SpanHost:
    """Serves one span. `load` makes the model (on the device thread); it is called again after an eviction.

    `run` must be running for steps to be computed; cancelling it stops the host. Owned by the Node.
    """

    def __init__(
        self,
        info: SpanInfo,
        load: Callable[[], SpanModel],
        device: Device,
        config: WorkerConfig,
        make_sampler: Callable[[SamplingParams], Draws],
    ) -> None:
        self._info, self._load, self._device, self._config = info, load, device, config
        self._make_sampler = make_sampler
        self._model: SpanModel | None = None
        self._loading = asyncio.Lock()
        self._sessions: dict[SessionId, HopSession] = {}
        self._by_key: dict[int, HopSession] = {}
        self._pending: dict[SessionId, int] = {}  # leases of sessions that are being opened
        self._wake = asyncio.Event()
        self._clock = 0
        self.steps_run = 0
        self.rows_run = 0

    def __repr__(self) -> str:
        state = "loaded" if self._model else "not loaded"
        return f"<SpanHost {self._info.model_name} {self._info.span} {state}, {len(self._sessions)} sessions>"

    @property
    def info(self) -> SpanInfo:
        """What this span says of itself now."""
        return replace(self._info, free_tokens=self._config.cache_tokens - self._leased())

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def is_loaded(self) -> bool:
        return self._model is not None

    def _leased(self) -> int:
        return sum(s.capacity for s in self._sessions.values()) + sum(self._pending.values())

    # -- life of a session --------------------------------------------------------------------------------------------

    async def ensure_loaded(self) -> SpanModel:
        """The model, loaded if it was evicted or never loaded. Deadline: the opener's. Raises ModelError."""
        async with self._loading:
            if self._model is None:
                self._model = await self._device.run(self._load)
            return self._model

    def reserve(self, message: Open) -> None:
        """Take a lease or say no, before anything is accepted. Raises Busy, WeightsMismatch, ContextOverflow, BadRequest."""
        info = self._info
        if message.model != info.model or message.precision != info.precision:
            raise WeightsMismatch(
                f"hop {message.hop} holds {info.model_name} {info.model[:12]} in {info.precision}, "
                f"the request is for {message.model[:12]} in {message.precision}: serve the same weights and precision"
            )
        if message.span != info.span:
            raise BadRequest(f"hop {message.hop} holds layers {info.span}, not {message.span}")
        if message.capacity > info.context_length:
            raise ContextOverflow(f"{message.capacity} positions exceed the model's context of {info.context_length}")
        if message.session in self._sessions or message.session in self._pending:
            raise BadRequest(f"session {message.session.hex()} is already open on layers {info.span}")
        sessions = len(self._sessions) + len(self._pending)
        if sessions >= self._config.max_sessions:
            raise Busy(f"layers {info.span} already serve {sessions} sessions, the limit; try another node or later")
        free = self._config.cache_tokens - self._leased()
        if message.capacity > free:
            raise Busy(f"layers {info.span} have cache for {free} more positions, {message.capacity} are asked for")
        self._pending[message.session] = message.capacity
        self._wake.set()  # no longer idle

    async def open(self, message: Open, origin: Link, successor: Link) -> None:
        """Turn the reservation into a session and tell the origin. The caller has connected `successor`."""
        try:
            model = await self.ensure_loaded()
        finally:
            capacity = self._pending.pop(message.session, None)
        if capacity is None:  # closed while it was being opened
            return
        self._clock += 1
        session = HopSession(
            opened=message,
            cache=model.shard.new_cache(capacity),
            origin=origin,
            successor=successor,
            sampler=self._make_sampler(message.sampling) if message.sampling is not None else None,
            capacity=capacity,
            window_left=message.window,
            key=self._clock,
        )
        self._sessions[message.session] = self._by_key[session.key] = session
        origin.send(Opened(message.session, message.epoch, message.hop, self._info.arithmetic))
        logger.info("session=%s opened hop=%d layers=%s", message.session.hex()[:8], message.hop, self._info.span)

    def close_for(self, session_id: SessionId, node: NodeId) -> None:
        """Close a session on behalf of `node`; ignored unless that is its origin."""
        session = self._sessions.get(session_id)
        if session is None or session.origin.peer == node:
            self.close(session_id)

    def close(self, session_id: SessionId) -> None:
        """Free a session at once; unknown ids are ignored (it may have been closed from two sides)."""
        self._pending.pop(session_id, None)
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        session.is_closed = True
        session.waiting.clear()
        session.outbox.clear()
        del self._by_key[session.key]
        self._wake.set()  # perhaps idle from now on
        logger.info("session=%s closed layers=%s", session_id.hex()[:8], self._info.span)

    def drop_origin(self, node: NodeId) -> None:
        """The control link to an origin is gone: free its sessions."""
        for session_id in [i for i, s in self._sessions.items() if s.origin.peer == node]:
            self.close(session_id)

    def drop_successor(self, link: Link) -> None:
        """A data link is gone: sessions that send over it cannot go on; their origins are told."""
        for session in [s for s in self._sessions.values() if s.successor is link]:
            self._fault(session, LinkClosed(f"hop {session.opened.hop} lost its successor"), session.opened.hop + 1)

    # -- steps --------------------------------------------------------------------------------------------------------

    def serves(self, session_id: SessionId, hop: int) -> bool:
        """Whether this span is hop `hop` of the session (ORIGIN_HOP: the last one)."""
        session = self._sessions.get(session_id)
        return session is not None and (hop == session.opened.hop or (hop == ORIGIN_HOP and session.is_last))

    def step(self, step: Step, link: Link) -> None:
        """Queue a step, or drop it if its session is gone or its epoch or window is old.

        Raises ProtocolError (the link is to be closed) if the sender is not the session's predecessor. Steps that do
        not fit the session fault the session alone.
        """
        session = self._sessions.get(step.session)
        if session is None or step.epoch < session.opened.epoch:
            return
        if link.peer != session.opened.predecessor:
            raise ProtocolError("a step came from a node that the origin did not name as predecessor")
        try:
            self._check(step, session)
        except ManyhandsError as error:
            self._fault(session, error, session.hop_before)
            return
        session.predecessor = link
        if step.window > session.newest_window:
            session.newest_window = step.window
            self._owe(session, sum(s.window < step.window for s in session.waiting))
            session.waiting = deque(s for s in session.waiting if s.window >= step.window)
        if step.window < session.newest_window:
            self._owe(session, 1)
            return
        session.waiting.append(step)
        self._wake.set()

    def _check(self, step: Step, session: HopSession) -> None:
        embeds = session.opened.ends == "edges" and session.opened.hop == 0
        if step.count < 1 or step.position + step.count > session.capacity:
            end = step.position + step.count
            raise ContextOverflow(f"positions up to {end} exceed the lease of {session.capacity}")
        if (step.payload is None) != embeds or (session.opened.ends == "edges" and step.ids is None):
            raise ProtocolError("a step lacks the tensor or the ids that its route calls for")
        if step.payload is not None:
            model = self._model
            if model is None or step.payload.width != model.shard.hidden_size or step.content != "hidden":
                raise ProtocolError(f"a step of width {step.payload.width} does not fit this model")
            if step.payload.dtype != model.wire_dtype:
                raise ProtocolError(f"a step in {step.payload.dtype} does not fit a span in {model.wire_dtype}")
        if step.ids is not None and self._model is not None and max(step.ids) >= self._model.vocab_size:
            raise BadRequest(f"token id {max(step.ids)} is outside the vocabulary of {self._model.vocab_size}")

    def credit(self, message: Credit) -> None:
        """The successor has computed steps: send what waits for it."""
        session = self._sessions.get(message.session)
        if session is None:
            return
        session.window_left += message.steps
        self._flush(session)
        self._wake.set()

    def _owe(self, session: HopSession, steps: int) -> None:
        session.owed += steps
        batch = min(CREDIT_BATCH, max(1, session.opened.window // 2))
        if session.owed >= batch and session.predecessor is not None:
            _send(session.predecessor, Credit(session.opened.session, session.opened.hop, session.owed))
            session.owed = 0

    def _flush(self, session: HopSession) -> None:
        while session.outbox and session.window_left > 0:
            session.window_left -= 1
            _send(session.successor, session.outbox.popleft())

    def _fault(self, session: HopSession, error: Exception, blame: int | None) -> None:
        code = error.code if isinstance(error, ManyhandsError) else "internal"
        logger.warning("session=%s fault: %s", session.opened.session.hex()[:8], error)
        self.close(session.opened.session)
        _send(session.origin, Fault(session.opened.session, session.opened.hop, code, str(error), blame))

    # -- the device loop ----------------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        return self._model is not None and not self._sessions and not self._pending

    async def run(self) -> None:
        """Compute waiting steps for ever. Evicts the model when nobody has used it for `evict_after_s`."""
        while True:
            idle_s = self._config.evict_after_s if self._is_idle else 0
            try:
                async with asyncio.timeout(idle_s or None):
                    await self._wake.wait()
            except TimeoutError:
                if self._is_idle:
                    await self._evict()
                continue
            self._wake.clear()
            while works := self._choose():
                await self._run_batch(works)

    def _choose(self) -> list[tuple[HopSession, Step, Work]]:
        waiting = [
            Waiting(s.key, s.waiting[0].count, s.served)
            for s in self._sessions.values()
            if s.waiting and not s.outbox  # a full successor pauses its upstream
        ]
        picks = choose(waiting, self._config.prefill_rows, self._config.mixed_rows)
        return [self._take(self._by_key[pick.key], pick.num_rows) for pick in picks]

    def _take(self, session: HopSession, num_rows: int) -> tuple[HopSession, Step, Work]:
        """The first `num_rows` rows of the session's oldest step, which leaves the queue when it is used up."""
        step = session.waiting.popleft()
        head, rest = split_step(step, num_rows)
        if rest is not None:
            session.waiting.appendleft(rest)
        self._clock += 1
        session.served = self._clock
        opened = session.opened
        edges = opened.ends == "edges" and session.is_last
        if edges and head.ids is not None:
            del session.ids[head.position :]
        work = Work(
            cache=session.cache,
            position=head.position,
            count=head.count,
            reply_from=head.reply_from,
            payload=head.payload,
            ids=head.ids,
            is_last=session.is_last,
            logits=edges and session.sampler is None,
            sampler=session.sampler,
            history=tuple(session.ids) if session.sampler is not None else (),
            prompt_length=opened.prompt_length,
        )
        if edges and head.ids is not None:
            session.ids.extend(head.ids)
        return session, head, work

    async def _run_batch(self, taken: list[tuple[HopSession, Step, Work]]) -> None:
        model = await self.ensure_loaded()
        try:
            results = await self._device.run(lambda: model.run([work for _, _, work in taken]))
        except Exception as error:  # out of memory, say: these sessions end, the node goes on
            logger.exception("layers=%s a step of %d sessions failed", self._info.span, len(taken))
            results = [error] * len(taken)
        self.steps_run += 1
        self.rows_run += sum(work.count for _, _, work in taken)
        for (session, step, _), result in zip(taken, results, strict=True):
            if session.is_closed:
                continue
            if isinstance(result, Exception):
                self._fault(session, result, session.hop_before if isinstance(result, Corruption) else None)
                continue
            self._owe(session, 1)
            session.outbox.append(_onward(session, step, result))
            self._flush(session)

    async def _evict(self) -> None:
        logger.info("layers=%s evicted after %g s idle", self._info.span, self._config.evict_after_s)
        model, self._model = self._model, None
        del model
        await asyncio.sleep(0)


def split_step(step: Step, num_rows: int) -> tuple[Step, Step | None]:
    """The first `num_rows` rows of a step and the rest (None if it is used up). No bytes are copied."""
    if num_rows >= step.count:
        return step, None
    head_payload = rest_payload = step.payload
    if step.payload is not None:
        data = memoryview(step.payload.data)
        edge = len(data) // step.count * num_rows
        head_payload = replace(step.payload, data=data[:edge])
        rest_payload = replace(step.payload, data=data[edge:])
    ids = step.ids
    head = replace(step, count=num_rows, ids=ids and ids[:num_rows], payload=head_payload)
    position, count = step.position + num_rows, step.count - num_rows
    return head, replace(step, position=position, count=count, ids=ids and ids[num_rows:], payload=rest_payload)


def _onward(session: HopSession, step: Step, result: Result) -> Step:
    """The step that carries a result to the next hop, or to the origin."""
    opened = session.opened
    return Step(
        session=step.session,
        epoch=opened.epoch,
        hop=ORIGIN_HOP if session.is_last else opened.hop + 1,
        position=result.position,
        count=result.count,
        reply_from=step.reply_from,
        window=step.window,
        content=result.content,
        ids=step.ids if opened.ends == "edges" and not session.is_last else None,
        payload=result.payload,
    )


def _send(link: Link, message: Step | Credit | Fault) -> None:
    """Send unless the link is gone; its loss is handled where links are watched."""
    try:
        link.send(message)
    except LinkClosed:
        logger.debug("link to %s is gone", link.peer[:8])
