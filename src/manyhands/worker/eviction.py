"""When a span without sessions leaves memory: after a time, or as soon as the machine runs short (HN-13)."""

import math
from typing import Final

from manyhands.config import WorkerConfig
from manyhands.resources import available_memory

LOOK_S: Final = 5.0  # between two looks at the machine's memory


class Eviction:
    """When a span that is idle since `since` is dropped (seconds of any monotonic clock)."""

    def __init__(self, config: WorkerConfig, since: float) -> None:
        self._config = config
        self._due_at = since + (config.evict_after_s or math.inf)

    def looks_at(self, now: float) -> float:
        """When to ask `is_due` next."""
        return min(self._due_at, now + LOOK_S) if self._config.evict_below_bytes else self._due_at

    def is_due(self, now: float) -> bool:
        """Whether it is to leave now."""
        least = self._config.evict_below_bytes
        return now >= self._due_at or (least > 0 and available_memory() < least)
