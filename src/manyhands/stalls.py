"""How late this process's event loop runs: the measure of a busy, stopped or suspended machine. Pure but for `tick_forever`.

A timer that should fire every `period_s` is noted by `tick`. What it is late by, the loop did not run: a callback held it, the
process had no CPU, was stopped, or the machine slept. Two figures follow: `worst_s`, the longest such stall of the last
WINDOW_S, and `awake_s`, a clock that stands still during stalls, by which others' silence is judged (net/liveness.py).
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NoReturn

# What a timer is late by on a machine that has nothing else to do, with room: less is no stall.
GRACE_S = 0.010
WINDOW_S = 60.0  # over which the longest stall is remembered


class Stalls:
    """Lateness of one event loop. Times are seconds of a monotonic clock; memory is bounded by WINDOW_S / period_s entries.

    `count` and `total_s` are the stalls of more than GRACE_S since the start, for counters; `worst_s` covers WINDOW_S.
    """

    def __init__(self, now: float, *, period_s: float = 0.25) -> None:
        self.period_s = period_s
        self.count = 0
        self.total_s = 0.0
        self._ticked_at = now
        self._awake_s = 0.0
        self._late: deque[tuple[float, float]] = deque()  # (when, by how much), later ones smaller: a sliding maximum

    def __repr__(self) -> str:
        return f"<Stalls count={self.count} total={self.total_s:.3f} s>"

    def tick(self, now: float) -> float:
        """The timer fired. Returns by how many seconds it was late (0 within GRACE_S)."""
        gap_s = max(0.0, now - self._ticked_at)
        late_s = self._late_by(gap_s)
        self._ticked_at = now
        self._awake_s += min(gap_s, self.period_s + GRACE_S)
        if late_s:
            self.count += 1
            self.total_s += late_s
            self._remember(now, late_s)
        return late_s

    def resume(self, now: float) -> None:
        """Nothing ticked until now, on purpose: that time counts neither as a stall nor as awake."""
        self._ticked_at = now

    def awake_s(self, now: float) -> float:
        """Seconds, since this was made, in which the loop is known to have run: a stall adds one period at most."""
        return self._awake_s + min(max(0.0, now - self._ticked_at), self.period_s + GRACE_S)

    def worst_s(self, now: float) -> float:
        """The longest stall of the last WINDOW_S, the present one included."""
        while self._late and self._late[0][0] < now - WINDOW_S:
            self._late.popleft()
        past_s = self._late[0][1] if self._late else 0.0
        return max(past_s, self._late_by(now - self._ticked_at))

    def _late_by(self, gap_s: float) -> float:
        late_s = gap_s - self.period_s
        return late_s if late_s > GRACE_S else 0.0

    def _remember(self, now: float, late_s: float) -> None:
        while self._late and self._late[-1][1] <= late_s:
            self._late.pop()
        self._late.append((now, late_s))


async def tick_forever(
    stalls: Stalls,
    on_stall: Callable[[float], None] = lambda late_s: None,
    period: Callable[[], float] | None = None,
) -> NoReturn:
    """Tick `stalls` by the running loop's clock until cancelled; `on_stall` gets each lateness above GRACE_S.

    `period`: asked before each tick for its `period_s`; None: that stays as it is.
    """
    loop = asyncio.get_running_loop()
    while True:
        if period is not None:
            stalls.period_s = period()
        await asyncio.sleep(stalls.period_s)
        late_s = stalls.tick(loop.time())
        if late_s:
            on_stall(late_s)
