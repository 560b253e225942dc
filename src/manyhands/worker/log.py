"""The output log of one session on one hop: what it sent, so that a lost successor can be rebuilt from it. Pure.

All logs of a node share one LogBudget, whichever spans they belong to.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from manyhands.core import SessionId
from manyhands.wire.codec import plain
from manyhands.wire.message import Payload, Step

# Rows of one replayed step, and their bytes: prefill-sized, so that the replacement computes at prefill speed, and joined
# in about a millisecond.
REPLAY_ROWS, REPLAY_BYTES = 128, 1 << 20
# Shorter steps that stay as they came, at the end of a log, where guesses are taken back. Of twice as many the older half is
# joined: replaying, copying or cutting a log takes time for each step, however few rows it has.
LOOSE_STEPS = 128


class HeldBytes:
    """What some logs hold together. Each counts itself here as it grows and shrinks: a step asks, and is not to add up."""

    def __init__(self) -> None:
        self.num_bytes = 0


class OutputLog:
    """Steps with positions [0, end), each position once, as encoded when they were sent. In memory only.

    One that `begins_late`, of a last hop, has positions [start, end): those whose rows the origin wanted.
    A step that starts before `end` is a rollback: what it overwrites is forgotten. Dropped logs stay dropped.
    """

    __slots__ = ("_begins_late", "_held", "_is_dropped", "_num_loose", "_steps", "end", "num_bytes")

    def __init__(self, held: HeldBytes | None = None, *, begins_late: bool = False) -> None:
        self._held = held or HeldBytes()
        self._begins_late = begins_late
        self._steps: deque[Step] = deque()
        self._num_loose = 0  # of the last steps, those that were not looked at to be joined
        self._is_dropped = False
        self.end = 0  # positions held: [0, end)
        self.num_bytes = 0

    def append(self, step: Step) -> None:
        """Take note of a step with at least one row. A gap before it drops the log: it could not be replayed."""
        if self._is_dropped or step.count == 0:
            return
        if step.position != self.end and not self._makes_room(step.position):
            self.drop()
            return
        self._steps.append(step)
        self.end = step.position + step.count
        size = _size(step)
        self.num_bytes += size
        self._held.num_bytes += size
        self._num_loose += 1
        if self._num_loose == 2 * LOOSE_STEPS:
            self._gather()

    def _makes_room(self, position: int) -> bool:
        """Forget what is at `position` and beyond; whether a step there follows then."""
        self._cut(position)
        return position == self.end or (self._begins_late and not self._steps)

    def _gather(self) -> None:
        """Join the older half of the loose steps."""
        loose = [self._steps.pop() for _ in range(self._num_loose)][::-1]
        older = loose[:LOOSE_STEPS]
        joined = list(_joined(older))
        self._steps.extend(joined)
        self._steps.extend(loose[LOOSE_STEPS:])
        self._num_loose -= LOOSE_STEPS
        self._grow(sum(map(_size, joined)) - sum(map(_size, older)))  # they have no timings by now

    def _grow(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._held.num_bytes += num_bytes

    def drop(self) -> None:
        """Forget everything, for good."""
        self._steps.clear()
        self._grow(-self.num_bytes)
        self.end = self._num_loose = 0
        self._is_dropped = True

    def begin_with(self, other: "OutputLog", until: int) -> None:
        """Take positions [0, until) of another log, which this empty one shares; no bytes are copied. Dropped, if that lacks
        some of them."""
        self._begins_late = other._begins_late
        if other.covers(until, other.start):
            self._steps.extend(step for step in other._steps if step.position < until)
            self._grow(sum(map(_size, self._steps)))
            self._cut(until)
        if self.end < until and not self._begins_late:
            self.drop()

    def cut(self, position: int) -> None:
        """Forget positions from `position` on."""
        self._cut(position)

    def covers(self, until: int, start: int = 0) -> bool:
        """Whether positions [start, until) are here."""
        return until == 0 or (self.end >= until and self.start <= start)

    @property
    def is_of_rows_sent(self) -> bool:
        """Whether a last hop's rows are here, from which tokens can be drawn again."""
        return self._begins_late and bool(self._steps)

    @property
    def start(self) -> int:
        """The first position held."""
        return self._steps[0].position if self._steps else 0

    def replay(self, until: int, start: int = 0) -> Iterator[Step]:
        """Positions [start, until) as they are now, in steps of at most REPLAY_ROWS rows (longer ones, and those coded, as they
        were), each made as it is taken."""
        return _joined(_within(list(self._steps), until, start))

    def _cut(self, position: int) -> None:
        while self._steps and (step := self._steps[-1]).position + step.count > position:
            self._steps.pop()
            self._num_loose -= self._num_loose > 0
            self._grow(-_size(step))
            if step.position < position:
                kept = _beginning(step, position - step.position)
                self._steps.append(kept)
                self._grow(_size(kept))
        self.end = self._steps[-1].position + self._steps[-1].count if self._steps else 0


class LogBudget(HeldBytes):
    """What the output logs of a node may hold together, in bytes (0: nothing).

    Logs of parked sessions go first, the oldest before the others. The rest is shared fairly: with n sessions on the node, one
    that holds at most an n-th loses nothing. When the bound is passed, the session that holds most (so more than that) loses
    its largest log, whole: half a log rebuilds no hop.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes  # may be changed; in force at the next note
        self._logs: dict[OutputLog, SessionId] = {}
        self._parked: dict[OutputLog, None] = {}  # the oldest first

    def __repr__(self) -> str:
        return f"<LogBudget {self.num_bytes} of {self.limit_bytes} bytes, {len(self._logs)} logs + {len(self._parked)} parked>"

    def open(self, session: SessionId, *, begins_late: bool = False) -> OutputLog:
        """A new log of `session`; it counts until it is closed."""
        log = OutputLog(self, begins_late=begins_late)
        self._logs[log] = session
        return log

    def close(self, log: OutputLog) -> None:
        """Drop a log and give its bytes back. Harmless when repeated."""
        log.drop()
        self._logs.pop(log, None)
        self._parked.pop(log, None)

    def park(self, log: OutputLog) -> None:
        """The session of `log` has ended, and the log is kept (parking.py) until it is closed: it goes before all others."""
        self._logs.pop(log, None)
        self._parked[log] = None

    def enforce(self) -> None:
        """Drop logs until the rest is within the bound."""
        for log in self._parked:
            if self.num_bytes <= self.limit_bytes:
                return
            log.drop()
        while self.num_bytes > self.limit_bytes:
            self._greediest().drop()

    def _greediest(self) -> OutputLog:
        """The largest log of the session that holds most on this node, over all its places."""
        held: Counter[SessionId] = Counter()
        for log, session in self._logs.items():
            held[session] += log.num_bytes
        (most, _) = held.most_common(1)[0]
        return max((log for log, session in self._logs.items() if session == most), key=lambda log: log.num_bytes)


def split_step(step: Step, num_rows: int) -> tuple[Step, Step | None]:
    """The first `num_rows` rows of a step and the rest (None if it is used up). No bytes are copied, unless they are coded.

    Raises Corruption for coded rows that cannot be decoded.
    """
    if num_rows >= step.count:
        return step, None
    head_payload, rest_payload = _split_payload(step, num_rows)
    ids = step.ids
    head = step._replace(count=num_rows, ids=ids and ids[:num_rows], payload=head_payload)
    position, count = step.position + num_rows, step.count - num_rows
    return head, step._replace(position=position, count=count, ids=ids and ids[num_rows:], payload=rest_payload)


def _split_payload(step: Step, num_rows: int) -> tuple[Payload | None, Payload | None]:
    if step.payload is None:
        return None, None
    payload = plain(step.payload, step.count)
    data = memoryview(payload.data)
    edge = len(data) // step.count * num_rows
    return payload._replace(data=data[:edge]), payload._replace(data=data[edge:])


def pieces(step: Step, num_rows: int) -> Iterator[Step]:
    """`step` in steps of at most `num_rows` rows."""
    rest: Step | None = step
    while rest is not None:
        piece, rest = split_step(rest, num_rows)
        yield piece


def first_rows(step: Step, num_rows: int) -> Step:
    return split_step(step, num_rows)[0]


def _beginning(step: Step, num_rows: int) -> Step:
    """As `first_rows`, in memory of its own: a row of a long step that a rollback leaves would keep all of that step alive."""
    kept = first_rows(step, num_rows)
    if kept is step or kept.payload is None:
        return kept
    return kept._replace(payload=kept.payload._replace(data=bytes(kept.payload.data)))


def rows_from(step: Step, skipped: int) -> Step:
    """`step` without its first `skipped` rows (fewer than it has; negative: all of it)."""
    rest = split_step(step, skipped)[1] if skipped > 0 else step
    assert rest is not None
    return rest


def _within(steps: list[Step], until: int, start: int) -> Iterator[Step]:
    """Positions [start, until) of consecutive steps; none if they end before they begin: who asks for them is not trusted."""
    for step in steps:
        if step.position >= until or start >= until:
            return
        if step.position >= start and step.position + step.count <= until:
            yield step
        elif step.position + step.count > start:
            yield rows_from(first_rows(step, until - step.position), start - step.position)


def _may_join(step: Step) -> bool:
    """Whether it may become a part of a step of REPLAY_ROWS: neither long nor coded."""
    return step.count < REPLAY_ROWS and (step.payload is None or step.payload.codec == "plain")


def _joined(steps: Iterable[Step]) -> Iterator[Step]:
    """Consecutive steps as steps of at most REPLAY_ROWS rows and REPLAY_BYTES; longer ones, and those coded, as they were."""
    group, num_rows, num_bytes = list[Step](), 0, 0
    for step in steps:
        may_join, size = _may_join(step), _size(step)
        has_room = num_rows + step.count <= REPLAY_ROWS and num_bytes + size <= REPLAY_BYTES
        if group and not (may_join and has_room and _is_like(group[0], step)):
            yield join(group)
            group, num_rows, num_bytes = [], 0, 0
        if may_join:
            group.append(step)
            num_rows, num_bytes = num_rows + step.count, num_bytes + size
        else:
            yield _untimed(step)
    if group:
        yield join(group)


def _untimed(step: Step) -> Step:
    """`step` without what hops said of it when they computed it."""
    return step._replace(timings=b"") if step.timings else step


def _is_like(one: Step, other: Step) -> bool:
    """Whether both have rows of one kind."""
    mine, theirs = one.payload, other.payload
    if mine is None or theirs is None:
        return mine is theirs and (one.ids is None) == (other.ids is None)
    return (mine.dtype, mine.width, one.ids is None) == (theirs.dtype, theirs.width, other.ids is None)


def join(steps: list[Step]) -> Step:
    """One step of consecutive steps, without timings; their bytes are copied if there are several."""
    first = steps[0]
    if len(steps) == 1:
        return _untimed(first)
    payload = first.payload
    if payload is not None:
        data = b"".join(s.payload.data for s in steps if s.payload is not None)
        payload = Payload(payload.dtype, payload.width, data)
    ids = None if first.ids is None else tuple(i for s in steps if s.ids is not None for i in s.ids)
    return first._replace(count=sum(s.count for s in steps), ids=ids, payload=payload, timings=b"")


def _size(step: Step) -> int:
    """Bytes of the rows or ids of a step, and of its timings, which it has until it is joined."""
    _, _, _, _, _, _, _, _, ids, payload, timings, _ = step
    return len(timings) + (len(payload.data) if payload is not None else 4 * len(ids or ()))
