"""When a step is overdue, and whether replacing the hop that holds it up is worth a replay. Pure; times are arguments.

A dead hop is replaced at once. A hop that is merely slow is replaced if that wins more than it costs: its replacement has to
compute everything again, on machines that may be short of time already, which delays other sessions and makes the next hop
look slow. So the wait must have reached the price of the replay, more where event loops are late, and twice as much after
each replacement that won nothing.
"""

import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from manyhands.config import RequestConfig
from manyhands.net.liveness import STRETCH, patience_s
from manyhands.wire.message import Progress

# Where event loops are late by so much, a hop that does not answer a probe may only lack CPU time: net/watch.py decides then.
LATE_S = 0.1
# The usual step may take so many times what records and experience say of the hops, which know nothing of batches and drafts.
SLACK = 3.0
# A step of the 128 rows that a replay sends costs about ten steps of one row, so a row of it a twelfth.
ROWS_PER_STEP = 12
# A replacement has paid if no step was overdue afterwards for this many times what it cost.
PAYS = 10
# A hop that holds a step up for so long is replaced if another can take its place, whatever earlier replacements won.
MAX_WAIT_S = 30.0


class Pace:
    """Learns how long a step usually takes, and says when one is overdue.

    `stated_s`: what a step over the present route takes by what is known of its hops, None if nothing. So a hop that is slow
    from its first step is not taken as usual: it is compared with its own record (HN-48).
    """

    def __init__(self, config: RequestConfig, stated_s: Callable[[], float | None] = lambda: None) -> None:
        self._config, self._stated_s = config, stated_s
        self._recent_s: deque[float] = deque(maxlen=32)

    def note(self, seconds: float) -> None:
        self._recent_s.append(seconds)

    @property
    def usual_s(self) -> float:
        """The median of the last steps, SLACK times what is stated at most; that, if there was none; 0 if nothing is known."""
        return self._usual() or 0.0

    def _usual(self) -> float | None:
        stated_s = self._stated_s()
        known = [statistics.median(self._recent_s)] if self._recent_s else []
        return min([*known, *([] if stated_s is None else [SLACK * stated_s])], default=None)

    @property
    def row_s(self) -> float:
        """What a row of a prompt may take: as long as a step of one row before it is overdue."""
        return max(self._config.step_floor_s, self._config.overdue_factor * self.usual_s)

    def deadline_s(self, *, is_prefill: bool) -> float:
        """Seconds after which the next step is overdue."""
        overdue_s = self._config.prefill_overdue_s
        return overdue_s if is_prefill or self._usual() is None else min(overdue_s, self.row_s)


@dataclass(frozen=True, slots=True)
class HeldStep:
    """The hop that holds a route up, as a probe found it; `is_silent`: it did not answer; `is_idle`: it did, and has nothing
    to compute. `computed`: positions of each hop that did. `is_done`: every hop has computed all that was sent."""

    hop: int
    is_silent: bool
    computed: Mapping[int, int] = field(default_factory=dict)
    is_done: bool = False
    is_idle: bool = False

    def with_news(self, committed: int, known: int, rebuilding: Collection[int]) -> "HeldStep":
        """The same, without what brings no row that is due: the first `committed` positions, but of hops that compute them
        again, and guesses, which are beyond the `known` positions."""
        least = {hop: 0 if hop in rebuilding else committed for hop in self.computed}
        return replace(self, computed={hop: max(least[hop], min(n, known)) for hop, n in self.computed.items()})

    def has_got_on(self, since: "HeldStep") -> bool:
        """Whether any hop has computed more than at the probe `since`."""
        return any(computed > since.computed.get(hop, computed) for hop, computed in self.computed.items())


def held_step(progress: Mapping[int, Progress], num_hops: int, sent_until: int, left_until: int) -> HeldStep:
    """Which of `num_hops` hops holds up what was sent, up to `sent_until`, by the answers of those that gave one. Beyond
    `left_until` it waits for the credits of hop 0, which has none of it whatever it says.

    The last that has rows to compute: those before it may wait for its credits, and have rows to compute for that reason, as it
    has itself if the next one is silent: then that one. If none has, the first that is not known to have computed all: it is
    cut off from the hop before it, or frozen. If all have, the last hop's answer got lost.
    """
    most = {0: left_until}  # that they can have
    computed = {hop: min(said.computed, most.get(hop, sent_until)) for hop, said in progress.items()}
    busy = [hop for hop, said in progress.items() if said.received > said.computed]
    behind = [i for i in range(num_hops) if computed.get(i, -1) < sent_until]
    index = max(busy) if busy else min(behind, default=num_hops - 1)
    if busy and index + 1 < num_hops and index + 1 not in progress:
        index += 1
    is_done, is_idle = not busy and not behind, index in progress and index not in busy
    return HeldStep(index, index not in progress, computed, is_done=is_done, is_idle=is_idle)


class Thrift:
    """Decides on replacing hops that hold steps up, for one session. After `limit_s` it takes no hop's word for getting on."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._num_wasted = 0  # replacements in a row that won nothing
        self._pays_at: float | None = None  # when the last one will have paid
        self._last: HeldStep | None = None
        self._epoch, self._furthest = 0, dict[int, int]()  # what hops have said that they have computed, at most
        self._replaced_at: int | None = None  # the committed position of the last one

    def gained(self, holdup: HeldStep, epoch: int, committed: int, rebuilding: Collection[int]) -> int:
        """How many positions a hop says it has computed beyond what it said at any probe before in this epoch: of the hop that
        holds a step up, and of those behind it, the most. What is `committed` counts only of hops that compute it again."""
        if epoch != self._epoch:
            self._epoch, self._furthest = epoch, {}
        before, said = self._furthest, {hop: number for hop, number in holdup.computed.items() if hop >= holdup.hop}
        known = {hop: max(before.get(hop, n), 0 if hop in rebuilding else committed) for hop, n in said.items()}
        self._furthest = before | {hop: max(number, before.get(hop, number)) for hop, number in said.items()}
        return max((number - known[hop] for hop, number in said.items() if number > known[hop]), default=0)

    @staticmethod
    def probe_s(shortest_s: float, late_s: float) -> float:
        """How long the answers to a probe may take."""
        return shortest_s + STRETCH * min(late_s, LATE_S)

    def is_worth(
        self, holdup: HeldStep, committed: int, now: float, *, waited_s: float, replay_s: float, late_s: float
    ) -> bool:
        """Whether to replace the hop of `holdup` now, after `waited_s` without a step beyond position `committed`.

        `replay_s` is what that will cost, `late_s` how late event loops have run lately, here and on the route. A second slow
        hop at one position has MAX_WAIT_S: it is computing the replay of the first.
        """
        last, self._last = self._last, holdup
        if holdup.is_silent:
            return late_s < LATE_S or waited_s >= patience_s(late_s)
        if waited_s < self._limit_s and last is not None and holdup.has_got_on(last):
            return False
        if self._pays_at is not None and now >= self._pays_at:
            self._num_wasted = 0
        if committed == self._replaced_at:
            return waited_s >= MAX_WAIT_S
        return waited_s >= min(MAX_WAIT_S, replay_s + STRETCH * late_s + (1 << self._num_wasted) - 1)

    def replaced(self, committed: int, now: float, cost_s: float) -> None:
        """A hop that only held steps up is replaced now, at this position; wait and replay cost so much."""
        self._num_wasted = min(self._num_wasted + 1, 10)  # until it has paid
        self._pays_at, self._last, self._replaced_at = now + PAYS * cost_s, None, committed


def replay_s(committed: int, usual_s: float) -> float:
    """What computing `committed` positions again will cost, by the usual step of one row."""
    return committed * usual_s / ROWS_PER_STEP
