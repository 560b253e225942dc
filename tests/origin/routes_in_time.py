"""A route in virtual time, without bytes or numbers: hops that compute in turn, legs that take time, streams that share them.

What is decided is decided by the code that ships: GuessChain (speculate.py) and a Drafter.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from manyhands.origin.draft import AutoDrafter, Drafter, NoDrafter, Returned
from manyhands.origin.draft_model import TURN_DRAFTS
from manyhands.origin.speculate import GuessChain
from manyhands.origin.step_costs import DeviceStep, Timing
from manyhands.worker.batch import WINDOW_ROWS

LATELY_S = 2.0  # as in worker/engine.py
WINDOWS = 8  # on their way at once, of one stream


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a round's legs in all, of a step of one row on all hops together, and of a further row."""

    trip_s: float
    step_s: float
    row_s: float
    hops: int = 3


@dataclass(eq=False)
class Stream:
    """One request: what it draws at each position is `truth`."""

    truth: Sequence[int]
    drafter: Drafter
    chain: GuessChain = field(default_factory=lambda: GuessChain([0]))
    guess: int = 0
    head: tuple[int, float] | None = None
    done_at: float = 0.0
    is_endless: bool = False


@dataclass(slots=True)
class Window:
    stream: Stream
    guess: int
    position: int
    ids: Sequence[int]
    arrived_at: float = 0.0  # at the hop it is at
    compute_s: tuple[float, ...] = ()
    queue_s: tuple[float, ...] = ()
    company: tuple[DeviceStep, ...] = ()


class Simulation:
    """Run with `play`; `stale` counts the steps that hops computed of dead guesses, `steps` all."""

    def __init__(
        self,
        line: Line,
        streams: Sequence[Stream],
        seed: int = 1,
        says: Callable[[DeviceStep], DeviceStep] = lambda company: company,
    ) -> None:
        self._line, self._streams, self._random = line, streams, random.Random(seed)
        self._queues: list[deque[Window]] = [deque() for _ in range(line.hops)]
        self._says = says  # what hops make of what is so
        self._busy = [False] * line.hops
        self._arrived_at = [0.0] * (line.hops + 1)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = count()
        self._decoded_at: list[dict[Stream, float]] = [{} for _ in range(line.hops)]
        self.steps = self.stale = 0
        self._now = 0.0

    def play(self) -> float:
        """Seconds until every stream has drawn its last token, but for those that are endless."""
        for stream in self._streams:
            self._send(stream, *stream.chain.extend(()), 0.0)
            wake = partial(self._refill_now, stream)
            stream.drafter.begin(stream.chain.ledger, wake)
        ending = [stream for stream in self._streams if not stream.is_endless]
        while not all(stream.done_at for stream in ending):
            self._now, _, act = heapq.heappop(self._events)
            act(self._now)
        return max(stream.done_at for stream in ending)

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Call `act` then."""
        self._at(self._now + delay_s, lambda now: act())

    def _refill_now(self, stream: Stream) -> None:
        self._refill(stream, self._now)

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._number), act))

    def _send(self, stream: Stream, position: int, ids: Sequence[int], now: float) -> None:
        if ids:
            if position == len(stream.chain.ledger) - 1:
                stream.head = len(ids), now
            self._go(Window(stream, stream.guess, position, ids), 0, now)

    def _go(self, window: Window, hop: int, now: float) -> None:
        leg_s = self._line.trip_s / (self._line.hops + 1) * self._random.uniform(0.9, 1.1)
        leg_s = max(leg_s, self._arrived_at[hop] - now)  # a link keeps the order
        self._arrived_at[hop] = now + leg_s
        if hop == self._line.hops:
            self._at(now + leg_s, lambda now: self._back(window, now))
        else:
            self._at(now + leg_s, lambda now: self._arrive(window, hop, now))

    def _arrive(self, window: Window, hop: int, now: float) -> None:
        queue = self._queues[hop]
        window.arrived_at = now
        kept = [w for w in queue if w.stream is not window.stream or w.guess >= window.guess]
        self._queues[hop] = deque([*kept, window])
        self._begin(hop, now)

    def _begin(self, hop: int, now: float) -> None:
        if self._busy[hop] or not self._queues[hop]:
            return
        batch: dict[Stream, Window] = {}
        for window in list(self._queues[hop]):
            if window.stream not in batch:
                batch[window.stream] = window
                self._queues[hop].remove(window)
        rows = sum(len(window.ids) for window in batch.values())
        took_s = (
            (self._line.step_s + self._line.row_s * (rows - 1)) / self._line.hops * self._random.uniform(0.95, 1.05)
        )
        self._decoded_at[hop] |= dict.fromkeys(batch, now)
        streams = sum(at > now - LATELY_S for at in self._decoded_at[hop].values())
        for window in batch.values():
            window.queue_s += (now - window.arrived_at,)
            window.company += (self._says(DeviceStep(rows, len(batch), streams)),)
        self._busy[hop] = True
        self._at(now + took_s, lambda now: self._computed(list(batch.values()), hop, took_s, now))

    def _computed(self, batch: list[Window], hop: int, took_s: float, now: float) -> None:
        self._busy[hop] = False
        for window in batch:
            self.steps += 1
            self.stale += window.guess < window.stream.guess
            window.compute_s += (took_s,)
            if all(w.stream is not window.stream or w.guess <= window.guess for w in self._queues[hop]):
                self._go(window, hop + 1, now)
        self._begin(hop, now)

    def _back(self, window: Window, now: float) -> None:
        stream, chain = window.stream, window.stream.chain
        if window.guess != stream.guess or stream.done_at:
            return
        assert window.position == len(chain.ledger) - 1
        drawn: list[int] = []
        for row in range(len(window.ids)):
            drawn.append(stream.truth[len(chain.ledger) + row])
            if row >= len(chain.guessed) or chain.guessed[row] != drawn[-1]:
                break
        took_s = None if stream.head is None else now - stream.head[1]
        stream.head = None
        timing = Timing(len(window.ids), took_s, window.compute_s, window.queue_s, window.company)
        right, is_dead = chain.commit(drawn)
        stream.drafter.note(Returned(len(drawn), right, is_dead, timing, False, now))
        stream.guess += is_dead
        if len(chain.ledger) + 2 * WINDOW_ROWS >= len(stream.truth):
            stream.done_at = now
            return
        self._refill(stream, now)

    def _refill(self, stream: Stream, now: float) -> None:
        """Send what there is to send, as origin/loop.py does it."""
        chain = stream.chain
        if stream.done_at:
            return
        ids: Sequence[int] = [0] * WINDOW_ROWS
        while len(ids) == WINDOW_ROWS:
            most = min(WINDOW_ROWS - (len(chain) - chain.sent), len(stream.truth) - 1 - len(chain))
            drafts: Sequence[int] = ()
            if most > 0 and chain.windows < WINDOWS:
                drafts = stream.drafter.propose(chain.ledger, chain.guessed, most)
            position, ids = chain.extend(drafts)
            self._send(stream, position, ids, now)


class ReadyModel:
    """A ModelSource that is right with `chance` each, and always ready. A wrong guess is followed by wrong ones."""

    trouble = ""
    draft_s = 0.0

    def __init__(self, truth: Sequence[int], chance: float, seed: int = 2) -> None:
        self._truth, self._chance, self._random = truth, chance, random.Random(seed)
        self._wrong_from = 1 << 60

    def begin(self, wake: Callable[[], None]) -> None:
        return

    def close(self) -> None:
        return

    def restart(self, ids: Sequence[int]) -> None:
        self._wrong_from = 1 << 60

    def take(self, start: int, most: int, wanted: int) -> Sequence[int]:
        drafts = []
        for position in range(start, min(start + most, len(self._truth))):
            if self._random.random() >= self._chance:
                self._wrong_from = min(self._wrong_from, position)
            drafts.append(self._truth[position] if position < self._wrong_from else -1)
        return drafts


class LateModel(ReadyModel):
    """A ReadyModel whose drafts take `late_s` each, and so does what it reads: in turns, as origin/draft_model.py makes them.

    `after` is to be set to that of the simulation.
    """

    def __init__(self, truth: Sequence[int], chance: float, late_s: float, seed: int = 2) -> None:
        super().__init__(truth, chance, seed)
        self.draft_s = late_s
        self.after: Callable[[float, Callable[[], None]], None] = lambda delay_s, act: None
        self._wake: Callable[[], None] = lambda: None
        self._start = self._until = self._round = 0  # the chain begins at _start
        self._ready: list[int] = []
        self._is_busy = False

    def begin(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def restart(self, ids: Sequence[int]) -> None:
        super().restart(ids)
        self._start, self._until, self._ready, self._round = len(ids), 0, [], self._round + 1

    def take(self, start: int, most: int, wanted: int) -> Sequence[int]:
        self._until = start + wanted
        self._turn()
        return self._ready[start - self._start : start - self._start + most]

    def _turn(self) -> None:
        count = min(TURN_DRAFTS, min(self._until, len(self._truth)) - self._start - len(self._ready))
        if self._is_busy or count < 1:
            return
        self._is_busy, number = True, self._round

        def done() -> None:
            self._is_busy = False
            if number == self._round:
                self._ready += super(LateModel, self).take(self._start + len(self._ready), count, count)
                self._wake()
            self._turn()

        self.after((count + (not self._ready)) * self.draft_s, done)


class Fixed(NoDrafter):
    """Always as many drafts in a window, of a model."""

    def __init__(self, model: ReadyModel, depth: int) -> None:
        super().__init__()
        self._model, self._depth = model, depth

    def propose(self, ids: Sequence[int], guessed: Sequence[int], most: int) -> Sequence[int]:
        if guessed or not self._depth:
            return ()
        self._model.restart(ids)
        return self._model.take(len(ids), min(most, self._depth), self._depth)


def rate(line: Line, drafter: Callable[[Sequence[int]], Drafter], *, tokens: int) -> float:
    """Tokens per second of one answer that has the line to itself."""
    return rates(line, drafter, tokens=tokens)[0]


def rates(
    line: Line,
    drafter: Callable[[Sequence[int]], Drafter],
    *,
    tokens: int,
    streams: int = 1,
    others: int = 0,
    seed: int = 1,
    says: Callable[[DeviceStep], DeviceStep] = lambda company: company,
) -> tuple[float, float]:
    """Tokens per second of `streams` answers at once, in sum, and of `others` of another origin on the same line, undrafted."""
    truth = range(tokens + 2 * WINDOW_ROWS)
    answers = [Stream(truth, drafter(truth)) for _ in range(streams)]
    company = [Stream(range(1 << 30), NoDrafter(), is_endless=True) for _ in range(others)]
    took_s = Simulation(line, answers + company, seed, says).play()
    return sum(tokens / answer.done_at for answer in answers), sum(len(o.chain.ledger) for o in company) / took_s


__all__ = ["AutoDrafter", "Fixed", "LateModel", "Line", "ReadyModel", "Simulation", "Stream", "rate", "rates"]
