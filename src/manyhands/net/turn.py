"""How long the messages of a node's links may hold a turn of the event loop; what is left over waits for the next ones."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

# Of CPU time, for all links together: some fifteen Opens with their signatures, or a hundred Steps ...
TURN_S: Final = 0.004
# ... and for one link while others may wait behind it.
SLICE_S: Final = 0.001

HandOn = Callable[[Callable[[], bool]], bool]


class Turn:
    """Shared by the links of one transport. `clock` gives seconds of this thread's own CPU time."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._spent_s = 0.0
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_counting = False

    def __repr__(self) -> str:
        return f"<Turn spent={1e3 * self._spent_s:.1f} ms waiting={len(self._waiting)}>"

    def run(self, hand_on: HandOn) -> bool:
        """Let `hand_on` take messages until what it is given says that its time is over; whether it has to come again.

        If this turn has no time left, it is not called at all.
        """
        if self._spent_s >= TURN_S:
            return True
        began = self._clock()
        try:
            return hand_on(lambda: self._clock() - began > SLICE_S)
        finally:
            self._spent_s += self._clock() - began
            if self._spent_s > SLICE_S:  # less is left to count with the next turns
                self._count()

    def later(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` in a later turn, after those that wait already."""
        self._waiting.append(go_on)
        self._count()

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        """A new turn of the event loop: those that wait go on, in order, as far as its time goes."""
        self._is_counting = False
        self._spent_s = 0.0
        for _ in range(len(self._waiting)):
            self._waiting.popleft()()
            if self._spent_s >= TURN_S:
                break
        if self._waiting:
            self._count()
