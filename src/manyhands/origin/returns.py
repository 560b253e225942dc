"""What a session has sent under its present guess, and what came back of it. No links."""

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from manyhands.wire.message import Step
from manyhands.wire.timings import HopTiming, read_timings
from manyhands.worker.batch import WINDOW_ROWS

# Clocks of several machines, one of which may count in milliseconds.
CLOCK_SLACK: Final = 1.1
CLOCK_S: Final = 2e-3


class Returns:
    """The results of one session that wait, and what is known of those on their way.

    `guess` numbers what is sent, anew in each epoch: results of older guesses are of no use. `sent_until` is the end of the
    last step sent: what every hop should come to compute; while `more_follows`, the origin has yet to send more of what is
    known. `reached`: the end of the furthest that has come back.
    """

    def __init__(self) -> None:
        self.guess = self.sent_until = self.reached = 0
        self.more_follows = False
        self.results: deque[Step] = deque()
        self.timings: tuple[HopTiming, ...] = ()  # of the last step that brought rows, one a hop
        self.turn_s = 0.0  # from its send to its return
        self.row_s: tuple[float, ...] = ()  # the least that a row of a prompt took, one a hop
        self._came_until: int | None = None  # the end of the last result in this epoch, or where the session began
        self._is_new = True
        self._sent_at: dict[int, float] = {}  # when each step on its way was sent, by its end

    def renew(self) -> None:
        """A new epoch begins: nothing is on its way."""
        self.guess = self.sent_until = 0
        self.timings = self.row_s = ()
        self._came_until, self._is_new = None, False
        self.results.clear()
        self._sent_at.clear()

    def retract(self) -> int:
        """What is on its way is guessed wrong: begin the next guess. Returns how many results were dropped."""
        dropped = len(self.results)
        self.guess += 1
        self.results.clear()
        self._sent_at.clear()
        return dropped

    def sent(self, position: int, count: int, *, is_timed: bool = True) -> int:
        """A step of `count` rows is sent now. Not timed: it may wait for hops to open. Returns the number of its guess."""
        if self._is_new:
            self._came_until, self._is_new = position, False
        self.sent_until = end = position + count
        if is_timed:
            self._sent_at[end] = time.monotonic()
        return self.guess

    def came(self, step: Step, num_hops: int) -> None:
        """A result came back over so many hops."""
        end = step.position + step.count
        sent_at, self.reached = self._sent_at.pop(end, None), max(self.reached, min(end, self.sent_until))
        # Of a step that comes back in parts the last is counted; the others were away no longer than what is on its way.
        began = min(self._sent_at.values(), default=None) if sent_at is None else sent_at
        turn_s = time.monotonic() - began if began is not None else math.inf
        timings = read_timings(step.timings)
        if len(timings) != num_hops or not _can_be(timings, turn_s):
            timings = ()
        if step.count and sent_at is not None and timings:
            self.timings, self.turn_s = timings, turn_s
        self._learn_rows(timings, end)
        self.results.append(step)

    def has_news(self, committed: int) -> bool:
        """Whether a result waits that says more than that positions [0, `committed`) are computed."""
        return any(step.count or step.position > committed for step in self.results)

    def _learn_rows(self, timings: Sequence[HopTiming], end: int) -> None:
        """A result up to position `end` came. Where the first began after a repair is not known: hops replay their logs."""
        rows = 0 if self._came_until is None else end - self._came_until
        self._came_until = end
        if timings and rows > WINDOW_ROWS:
            each = tuple(1e-6 * timing.compute_us / rows for timing in timings)
            self.row_s = tuple(map(min, self.row_s or each, each))


def _can_be(timings: Sequence[HopTiming], turn_s: float) -> bool:
    """Whether a step that was away for `turn_s` can have spent its time so: a hop can state more for itself, or for those
    before it, whose timings it passes on."""
    stated_s = 1e-6 * sum(timing.queue_us + timing.compute_us for timing in timings)
    return stated_s <= CLOCK_SLACK * turn_s + CLOCK_S
