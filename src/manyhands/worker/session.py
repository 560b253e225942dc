"""One session on one hop: what waits, what was sent, what may be sent. Synchronous; links are given to it.

step() ─► waiting ─ take() ─► device ─ deliver() ─► log, outbox ─ credits ─► successor
"""

import logging
import math
from collections import deque
from dataclasses import replace
from typing import NamedTuple

from manyhands.core import ORIGIN_HOP, public_id
from manyhands.engine.span import Cache
from manyhands.errors import AnsweredEarly, BadRequest, Detour, Draining, LinkClosed, ProtocolError
from manyhands.net.transport import Link, betters, try_send
from manyhands.wire.credit import Credits
from manyhands.wire.message import STANDBY, Credit, Extended, Fault, Open, Opened, Progress, Step
from manyhands.worker.bounds import RowBounds
from manyhands.worker.execute import Draws, Result, Work
from manyhands.worker.fit import Fit, check_waiting
from manyhands.worker.leaves import HopLeaves
from manyhands.worker.log import LogBudget, rows_from
from manyhands.worker.opening import rounding_of
from manyhands.worker.order import StepOrder
from manyhands.worker.outbox import Outbox
from manyhands.worker.parking import Parked
from manyhands.worker.turnaround import Turnaround

logger = logging.getLogger(__name__)

# What may wait for a standby, which is fed without credits: one step a row of the largest feed.
MAX_STANDBY_STEPS = 512


class Taken(NamedTuple):
    """Rows taken from a session's oldest step for the device. `uses_up`: no row of that step is left."""

    session: "HopSession"
    step: Step
    work: Work
    uses_up: bool
    arrived_at: float  # when the step came in (time.monotonic)


class HopSession:
    """A session's place on this hop. `place` changes it (a repair); the cache stays."""

    def __init__(
        self,
        opened: Open,
        cache: Cache,
        sampler: Draws | None,
        fit: Fit,
        key: int,
        origin: Link,
        successor: Link,
        logs: LogBudget,
    ) -> None:
        self.cache, self.key = cache, key
        self.capacity = opened.capacity  # positions of the lease
        self._move(opened, origin, successor, sampler)
        self.log = logs.open(opened.session, begins_late=self.is_last)
        # Of what arrives: the layers before this place stay the same, whichever node has them.
        self.bounds, self.leaves = RowBounds(), HopLeaves.new() if opened.attests else None
        self.served = self._firm = 0
        self.is_closed = self.is_feeding = False  # feeding: a standby, from the log
        self.pace = Turnaround()
        self.decoded_at = -math.inf  # when its last decode step was computed (the event loop's clock)
        self.waiting: deque[Step] = deque()
        self.arrived: dict[int, float] = {}  # by first position: when a step that waits came
        self.outbox = Outbox()
        self._fit, self._logs = fit, logs
        self._ids: list[int] = []

    def __repr__(self) -> str:
        return f"<HopSession {self.name} hop={self.opened.hop} epoch={self.opened.epoch} waiting={len(self.waiting)}>"

    @property
    def name(self) -> str:
        """What logs call the session."""
        return public_id(self.opened.session)

    @property
    def _predecessor_hop(self) -> int:
        return self.opened.hop - 1 if self.opened.hop else ORIGIN_HOP

    # -- its place in the route ---------------------------------------------------------------------------------------

    def place(self, opened: Open, origin: Link, successor: Link, sampler: Draws | None) -> bool:
        """Take a new place in the route: forget what waits, keep the cache, send the log. Returns whether it reaches so far."""
        self._move(opened, origin, successor, sampler)
        self.bounds = self.bounds.renewed() if opened.resume_until else RowBounds()
        self.waiting.clear()
        self.outbox.clear()
        return self._replay(opened.replay_until)

    def _move(self, opened: Open, origin: Link, successor: Link, sampler: Draws | None) -> None:
        """An epoch begins, in the place of `opened`: nothing has come or is under way."""
        self.opened, self.origin, self.successor, self.sampler = opened, origin, successor, sampler
        self.capacity = max(self.capacity, opened.capacity)
        self.is_last = opened.hop == opened.num_hops - 1
        self.is_standby = opened.emit_from == STANDBY
        self.rounding = rounding_of(opened, successor)
        # For steps to the successor and from the predecessor.
        self._outgoing = Credits(opened.credits)
        self._incoming = Credits(MAX_STANDBY_STEPS if self.is_standby else opened.credits)
        self._predecessor: Link | None = None
        self.received = self.computed = 0
        self._is_spoiled, self._order = False, StepOrder(may_begin_anew=opened.resume is not None)

    def _replay(self, until: int) -> bool:
        """Send the log, of committed positions, up to `until`; whether it reaches so far."""
        start = self.opened.replay_from
        if self.log.covers(until, start):  # under the first guess of the epoch
            again = (self.addressed(s, s) for s in self.log.replay(until, start))
            self.outbox.send_again(step._replace(guess=0, committed=until) for step in again)
        return self.log.covers(until, start)

    def spoil(self) -> None:
        """A step of this epoch was bad: what comes after it cannot be right either and is dropped, until a new place."""
        self._is_spoiled = True

    def extend(self, capacity: int) -> None:
        """The lease has `capacity` positions now, as the origin is told."""
        self.capacity, self.opened = capacity, replace(self.opened, capacity=capacity)
        try_send(self.origin, Extended(self.opened.session, self.opened.epoch, self.opened.hop, capacity))

    def close(self) -> None:
        self._end()
        self._logs.close(self.log)

    def park(self, positions: int) -> Parked:
        """End as `close` does, but hand on what the first `positions`, all computed, have left here."""
        self._end()
        self.log.cut(positions)
        return self.lend(positions, min(self.capacity, self.cache.positions))

    @property
    def firm(self) -> int:
        """Positions computed here whose tokens its origin had committed: no guess is among them."""
        return min(self._firm, self.cache.length)

    def lend(self, positions: int, capacity: int = 0) -> Parked:
        """What the first `positions`, all computed and none a guess, have left here, in memory for `capacity` (0: of a session
        that goes on, of which a fork is to be made at once)."""
        opened, ids = self.opened, tuple(self._ids[:positions])
        leaves = self.leaves and self.leaves.first(positions)
        kept = positions, capacity, self.cache, self.log, positions, self.bounds, ids, opened.adoption, leaves
        return Parked(self.origin.peer, opened.span, opened.ends, *kept)

    def _end(self) -> None:
        self.is_closed = True
        self.waiting.clear()
        self.outbox.clear()

    def begin_with(self, parked: Parked, cached: int) -> bool:
        """Begin with the first `cached` positions of what was parked, whose cache is copied. Without that (0) a last hop may
        still have the rows that it sent for all that the Open wants. Returns whether the log reaches as far."""
        until, opened = cached or self.opened.resume_until, self.opened
        if cached or (self.is_last and until <= parked.logged):
            self.log.begin_with(parked.log, until)
        if cached:
            self._firm, self.bounds, self._ids = cached, parked.bounds.copy(), list(parked.ids[:cached])
            self.leaves = self.leaves and parked.hashes(self.origin.peer, cached)
        return self._replay(min(opened.replay_until, until))

    def answer_open(self, arithmetic: str, *, has_log: bool, cached: int = 0) -> None:
        """Tell the origin that this place is taken; then send what the log holds for the successor."""
        opened, rounds = self.opened, self.rounding is not None
        try_send(self.origin, Opened(opened.session, opened.epoch, opened.hop, arithmetic, has_log, cached, rounds))
        self.flush()

    def fault(self, code: str, detail: str, blame: int | None) -> None:
        """Tell the origin that something is wrong, or could be better; `blame` None: this hop cannot go on."""
        log = logger.info if code in (Draining.code, Detour.code, LinkClosed.code) else logger.warning  # no fault of it
        of = "" if blame is None else f" of hop {blame}"
        log("session=%s hop=%d fault%s: %s", self.name, self.opened.hop, of, detail)
        try_send(self.origin, Fault(self.opened.session, self.opened.epoch, self.opened.hop, code, detail, blame))

    def on_linked(self, link: Link) -> None:
        """A new link of this node is up. If it would spare steps to the successor a relay, the origin is told."""
        if not self.is_last and betters(link, self.successor):
            self.fault(Detour.code, f"hop {self.opened.hop} has a direct link to the next", self.opened.hop)

    def on_lost(self, link: Link) -> None:
        """A data link is gone: if steps went over it, the origin is told, and may repair the route."""
        if self.successor is link:
            hop, to = self.opened.hop, self.opened.successor
            self.fault(LinkClosed.code, f"hop {hop} lost its link to the next", ORIGIN_HOP if to is None else hop + 1)

    def report(self) -> None:
        """Answer a Probe. What waits may begin before what was computed last: a rollback."""
        opened, computed = self.opened, min([self.computed, *(step.position for step in self.waiting)])
        if computed >= self.received and not self._is_spoiled and (repeated := self._order.repeated()) is not None:
            self._refuse(repeated)
        said = opened.session, opened.epoch, opened.hop, self.received, computed, self._order.guess
        try_send(self.origin, Progress(*said))

    # -- steps in -----------------------------------------------------------------------------------------------------

    def step(self, step: Step, link: Link, now: float) -> None:
        """Queue a step that came at `now`, or drop it if its epoch or guess is not the current one, or if it is a repetition.

        Dropped too if the sender is not the predecessor: another's Open may make an honest node send here. One bad step, one
        more than was granted or a gap costs the predecessor its place, by the origin's judgement; its link serves others.
        """
        if step.epoch != self.opened.epoch or self._is_spoiled:
            return
        if link is not self._predecessor:
            if link.peer != self.opened.predecessor:
                return
            self._predecessor = link
        try:
            self._check_granted(step)
            self._fit.check(step, self.opened)
            is_due = self._is_due(step)
        except (AnsweredEarly, BadRequest, ProtocolError) as error:
            return self._refuse(error)
        if not is_due:
            return self._owe(1)
        self.received = step.position + step.count
        if not self.waiting:
            self.arrived.clear()
        self.arrived[step.position] = now
        self.waiting.append(step)

    def _refuse(self, error: AnsweredEarly | BadRequest | ProtocolError) -> None:
        """Steps cannot be right: those of the predecessor, or the rows that came back before them."""
        self.spoil()
        self.fault(error.code, str(error), None if isinstance(error, AnsweredEarly) else self._predecessor_hop)

    def _is_due(self, step: Step) -> bool:
        """Whether a step is to be computed: not one of an older guess, nor a repetition. Raises as StepOrder."""
        if self.opened.resume is not None and not self.received and step.position > self.cache.length:
            return False  # sent before its origin knew that the cache it was to begin with is not here
        if self._begin_guess(step.guess, step.position):
            if not self.opened.hop:
                self._order.confirm(step.guess, step.position)
            elif step.position > self.computed:
                self.spoil()  # `retract` says whose fault that is
                return False
        return step.guess >= self._order.guess and (self.is_standby or self._order.admit(step.position, step.count))

    def retract(self, guess: int, position: int) -> None:
        """The origin sends from `position` on under `guess` by now, on rows that came back: all that waits here is of older
        guesses and void. A standby computes what logs hold, which is of no guess."""
        self._begin_guess(guess, position)
        try:
            self._order.confirm(guess, position)
        except (AnsweredEarly, ProtocolError) as error:
            self._refuse(error)

    def _begin_guess(self, guess: int, position: int) -> bool:
        if guess <= self._order.guess or self.is_standby:
            return False
        self._order.begin_guess(guess, position, self.computed)
        self._owe(len(self.waiting))
        self.waiting.clear()
        self.outbox.clear()
        self.received = min(self.received, self.computed, position)  # a probe finds nothing left to compute
        return True

    def _check_granted(self, step: Step) -> None:
        """Take a credit for `step`. Raises ProtocolError if more would wait than was granted."""
        check_waiting(self.waiting, step, self.capacity)
        if not self._incoming.take():
            raise ProtocolError(f"a step came without credit: {self._incoming.granted} may be under way")

    def _owe(self, steps: int) -> None:
        """Give `steps` back to the predecessor, in batches. (A standby's are only counted: it is fed without credits.)"""
        if (paid := self._incoming.settle(steps)) and self._predecessor is not None and not self.is_standby:
            try_send(self._predecessor, Credit(self.opened.session, self.opened.epoch, self.opened.hop, paid))

    # -- through the device -------------------------------------------------------------------------------------------

    def take(self, num_rows: int) -> Taken:
        """The first `num_rows` rows of the oldest step, or fewer (Fit.cut), as work for the device."""
        head, rest = self._fit.cut(self.waiting.popleft(), self.opened, num_rows)
        self.computed = min(self.computed, head.position)
        arrived_at = self.arrived[head.position]
        if rest is not None:
            self.arrived[rest.position] = arrived_at
            self.waiting.appendleft(rest)
        draws = self.opened.ends == "edges" and self.is_last
        if draws:
            del self._ids[head.position :]
        opened, what = self.opened, (head.position, head.count, head.reply_from, head.payload, head.ids)
        work = Work(self.cache, opened.span, *what, self.is_last)
        work.bounds = self.bounds if opened.hop else None
        work.rounding, work.leaves = self.rounding, self.leaves
        if draws:
            work.logits, work.sampler, work.prompt_length = self.sampler is None, self.sampler, opened.prompt_length
            work.history = tuple(self._ids) if self.sampler is not None else ()
            self._ids.extend(head.ids or ())
        return Taken(self, head, work, rest is None, arrived_at)

    def deliver(self, taken: Taken, result: Result, timing: bytes) -> bool:
        """A device step's rows: log them, send on what the successor lacks. Ignored if the place has changed since.

        Returns whether they are of no use: a newer guess has come since.
        """
        done = taken.step
        if self.is_closed or done.epoch != self.opened.epoch:
            return False
        if done.guess < self._order.guess:
            self._owe(int(taken.uses_up))
            return True
        self.computed = done.position + done.count
        self._firm = max(self._firm, min(self.computed, done.committed))
        step = self.addressed(done, result, done.timings + timing)
        skipped = self.opened.emit_from - step.position
        if skipped <= 0:
            self._send_on(step)
        elif skipped < step.count:
            self._send_on(rows_from(step, skipped))
        if taken.uses_up:
            self._owe(1)
        may_log = self.opened.adoption is not None and step.content != "logits"  # large as the vocabulary
        if may_log or not self.is_last:
            self.log.append(step)
        if self.is_standby and not self.waiting:
            self.report()
        return False

    # -- steps out ----------------------------------------------------------------------------------------------------

    def addressed(self, step: Step, rows: Step | Result, timings: bytes = b"") -> Step:
        """`step`, of these rows, as it goes to the next receiver of the current route. What a log holds is of no guess: 0."""
        opened, is_last = self.opened, self.is_last
        hop, ids = (ORIGIN_HOP, None) if is_last else (opened.hop + 1, step.ids if opened.ends == "edges" else None)
        guess = 0 if rows is step else step.guess
        where = rows.position, rows.count, step.reply_from, guess
        return Step(opened.session, opened.epoch, hop, *where, rows.content, ids, rows.payload, timings, step.committed)

    def credit(self, steps: int, epoch: int) -> None:
        """The successor has computed `steps` steps of `epoch`: send what waits for it."""
        if epoch == self.opened.epoch:
            self._outgoing.give(steps)
            self.flush()

    def _send_on(self, step: Step) -> None:
        """To the successor, behind what waits for its credits."""
        if self.outbox or not self._outgoing.take():
            self.outbox.append(step)
        else:
            try_send(self.successor, step)

    def flush(self) -> None:
        while self.outbox and self._outgoing.take():
            try_send(self.successor, self.outbox.send_next())
