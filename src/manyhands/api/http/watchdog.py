"""How long anything held the gateway's event loop: measured all the time, shown in /metrics (manyhands_loop_stall_seconds)."""

import asyncio
import itertools
from bisect import bisect_left
from collections.abc import Callable
from typing import NoReturn

from manyhands.stalls import Stalls, tick_forever

# A stall shows with its length less up to one period. 50 timers a second cost 0.7 % of a core: while a client is connected.
PERIOD_S = 0.02
IDLE_PERIOD_S = 0.25
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Watchdog:
    """Counts stalls of more than 10 ms (stalls.GRACE_S) of the loop that runs it."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self.total_s = 0.0
        self.worst_s = 0.0

    def note(self, late_s: float) -> None:
        """The loop was late by so much."""
        self._counts[bisect_left(SECONDS, late_s)] += 1
        self.total_s += late_s
        self.worst_s = max(self.worst_s, late_s)

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds, and how many stalls were at most that long."""
        bounds = [*map(str, SECONDS), "+Inf"]
        return list(zip(bounds, itertools.accumulate(map(float, self._counts)), strict=True))

    async def run(self, has_clients: Callable[[], bool]) -> NoReturn:
        """Watch the running loop until cancelled: each PERIOD_S while there are clients, else each IDLE_PERIOD_S."""
        stalls = Stalls(asyncio.get_running_loop().time())
        await tick_forever(stalls, self.note, lambda: PERIOD_S if has_clients() else IDLE_PERIOD_S)
