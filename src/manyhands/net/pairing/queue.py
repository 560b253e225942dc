"""Which caller of a pairing listener has its exchange next. Pure: time is an argument.

Callers cannot be told apart before they have shown a proof, so their number, pace and share are bounded: so many wait, so
many run, so many begin in a second, of one source no more than its part. At a limit the oldest caller of the source with the
most has to go (admission.py); next is a caller of the source with the fewest under way.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Generic

from manyhands.net.admission import Key, Pending, PendingLimits


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Callers that wait and run, in all and of one source; `patience_s` each waits at most.

    `per_s` begin in a second, after a pause up to `burst` at once.
    """

    waiting: int = 64
    waiting_per_source: int = 16
    patience_s: float = 10.0
    running: int = 8
    running_per_source: int = 2
    per_s: float = 8.0
    burst: int = 8


class PairingQueue(Generic[Key]):
    """Callers from their connection to the end of their exchange."""

    def __init__(self, limits: QueueLimits, now: float) -> None:
        self.limits = limits
        self.waiting = Pending[Key](PendingLimits(limits.waiting, limits.waiting_per_source, limits.patience_s))
        self._source_of: dict[Key, str] = {}  # of those that wait and run
        self._running: set[Key] = set()
        self._has_begun: Counter[str] = Counter()  # exchanges, of sources that wait or run
        self._starts, self._at = float(limits.burst), now

    @property
    def num_running(self) -> int:
        return len(self._running)

    def enter(self, key: Key, source: str, now: float) -> Key | None:
        """A caller comes; returns the one to be dropped for it, if any."""
        self._source_of[key] = source
        evicted = self.waiting.enter(key, source, now)
        if evicted is not None:
            self._forget(evicted)
        return evicted

    def overdue(self, now: float) -> list[Key]:
        """Forget and return callers that have waited for patience_s."""
        late = self.waiting.overdue(now)
        for key in late:
            self._forget(key)
        return late

    def next(self, now: float) -> Key | None:
        """The caller whose exchange begins now; None if none may."""
        if not self._has_room(now) or not (ready := self._ready()):
            return None
        under_way = self._under_way()
        chosen = min(ready, key=lambda key: (under_way[self._source_of[key]], self._has_begun[self._source_of[key]]))
        self.waiting.leave(chosen)
        self._running.add(chosen)
        self._has_begun[self._source_of[chosen]] += 1
        self._starts -= 1
        return chosen

    def _has_room(self, now: float) -> bool:
        """Whether the pace and the number of exchanges allow another one."""
        self._starts = min(float(self.limits.burst), self._starts + (now - self._at) * self.limits.per_s)
        self._at = now
        return self._starts >= 1 and len(self._running) < self.limits.running

    def _under_way(self) -> Counter[str]:
        return Counter(self._source_of[key] for key in self._running)

    def _ready(self) -> list[Key]:
        """Those that wait and whose source has not its share already, in the order of arrival."""
        under_way, most = self._under_way(), self.limits.running_per_source
        return [key for key, source in self._source_of.items() if key in self.waiting and under_way[source] < most]

    def ended(self, key: Key) -> None:
        """An exchange has ended, or its caller went."""
        self.waiting.leave(key)
        self._running.discard(key)
        self._forget(key)

    def _forget(self, key: Key) -> None:
        source = self._source_of.pop(key, None)
        if source is not None and source not in self._source_of.values():
            del self._has_begun[source]
