"""What a session has sent under its present guess, and what came back of it. No links."""

import time
from collections import deque

from manyhands.wire.message import HopTiming, Step


class Returns:
    """The results of one session that wait, and what is known of those on their way.

    `guess` numbers what is sent, anew in each epoch: results of older guesses are of no use. `sent_until` is the end of the
    last step sent: what every hop should come to compute.
    """

    def __init__(self) -> None:
        self.guess = self.sent_until = 0
        self.results: deque[Step] = deque()
        self.timings: tuple[HopTiming, ...] = ()  # of the last step that brought rows, one a hop
        self.turn_s = 0.0  # from its send to its return
        self._sent_at: dict[int, float] = {}  # when each step on its way was sent, by its end

    def renew(self) -> None:
        """A new epoch begins: nothing is on its way."""
        self.guess = self.sent_until = 0
        self.timings = ()
        self.results.clear()
        self._sent_at.clear()

    def retract(self) -> int:
        """What is on its way is guessed wrong: begin the next guess. Returns how many results were dropped."""
        dropped = len(self.results)
        self.guess += 1
        self.results.clear()
        self._sent_at.clear()
        return dropped

    def sent(self, end: int) -> int:
        """A step up to position `end` is sent now. Returns the number of its guess."""
        self.sent_until = end
        self._sent_at[end] = time.monotonic()
        return self.guess

    def came(self, step: Step, num_hops: int) -> None:
        """A result came back over so many hops."""
        sent_at = self._sent_at.pop(step.position + step.count, None)
        if step.count and sent_at is not None and len(step.timings) == num_hops:
            self.timings, self.turn_s = step.timings, time.monotonic() - sent_at
        self.results.append(step)
