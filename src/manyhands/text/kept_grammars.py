"""Compiled grammars that are kept for requests that ask for the same again, within bounds of number, length, bytes and time."""

import threading
import time
from collections.abc import Callable, Hashable

from llguidance import LLMatcher

# What is kept compiled: so many grammars, of so many letters and bytes together, unused for so long at most. To drop them takes
# 5 ms.
MAX_KEPT = 32
MAX_KEPT_LETTERS = 1 << 16
MAX_KEPT_BYTES = 32 << 20
KEPT_S = 120.0


class KeptGrammars:
    """Matchers at their beginning, to be copied: a program that asks again with the same tools compiles nothing.

    `maker`: what compiled one, for each model compiles its own. From any thread. The least recently used goes first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Each with its bytes, and when it was last used.
        self._kept: dict[tuple[Hashable, str], tuple[LLMatcher, int, float]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_letters(self) -> int:
        return sum(len(grammar) for _, grammar in self._kept)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size, _ in self._kept.values())

    def size(self, maker: Hashable, grammar: str) -> int | None:
        """Bytes of one that is kept."""
        kept = self._kept.get((maker, grammar))
        return None if kept is None else kept[1]

    def find(self, maker: Hashable, grammar: str) -> LLMatcher | None:
        """It counts as used now."""
        with self._lock:
            matcher, size, _ = self._kept.pop((maker, grammar), (None, 0, 0.0))
            if matcher is not None:
                self._kept[maker, grammar] = matcher, size, self._clock()
            return matcher

    def add(self, maker: Hashable, grammar: str, matcher: LLMatcher, size: int = 0) -> None:
        """Keep it, which takes `size` bytes, unless it is larger than all may be together."""
        if len(grammar) > MAX_KEPT_LETTERS or size > MAX_KEPT_BYTES:
            return
        with self._lock:
            self._kept.pop((maker, grammar), None)
            self._kept[maker, grammar] = matcher, size, self._clock()
            while len(self._kept) > MAX_KEPT or self.num_letters > MAX_KEPT_LETTERS or self.num_bytes > MAX_KEPT_BYTES:
                del self._kept[next(iter(self._kept))]

    def expire(self) -> float | None:
        """Drop what was not used for KEPT_S. Seconds until the next is due; None if nothing is left."""
        with self._lock:
            now = self._clock()
            for key in [key for key, (*_, used_at) in self._kept.items() if used_at + KEPT_S <= now]:
                del self._kept[key]
            return next((used_at + KEPT_S - now for *_, used_at in self._kept.values()), None)
