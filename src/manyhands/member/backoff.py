"""When a member tries again to load layers after that has failed: others get the time to take them."""

import math
from typing import Final

MOST_S: Final = 300.0


class Backoff:
    """After a failure it is `first_s` until the next attempt, after each further one twice as long, MOST_S at most."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._pause_s = 0.0
        self._ends_at = -math.inf

    def failed(self, now: float) -> None:
        """An attempt failed."""
        self._pause_s = min(max(self._first_s, 2 * self._pause_s), MOST_S)
        self._ends_at = now + self._pause_s

    def succeeded(self) -> None:
        """An attempt succeeded: the next failure is a first one again."""
        self._pause_s, self._ends_at = 0.0, -math.inf

    def is_over(self, now: float) -> bool:
        """Whether it may be tried now."""
        return now >= self._ends_at
