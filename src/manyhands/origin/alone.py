"""What one repair spends on the last resort (the local fallback), and how often a repair asks again."""

import asyncio
import math
from collections.abc import Awaitable
from typing import Final

from manyhands.errors import ShardUnavailable

ASK_AGAIN_S: Final = 0.25  # after which a repair that finds no node looks again
MAX_PAUSE_S: Final = 2.0  # after an attempt that failed: each sends messages to all hops


def pause_s(attempts: int, left_s: float = math.inf) -> float:
    """How long to wait once so many attempts, one or more, have failed in a row, and `left_s` are left for others."""
    return min(MAX_PAUSE_S, ASK_AGAIN_S * 2.0 ** min(attempts - 1, 10), max(ASK_AGAIN_S, left_s))


class Alone:
    """Bounds what one repair spends on the last resort: `limit_s` from the first attempt on, with growing pauses between
    them (each may read a whole model). Until the first `take_turn` it bounds nothing."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until: float | None = None
        self._pause_s = ASK_AGAIN_S

    async def take_turn(self, reason: str) -> None:
        """Wait until the next attempt may begin. Raises ShardUnavailable if it would begin after the deadline."""
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + self._limit_s
        elif now + self._pause_s >= self._until:
            raise self._failure(reason)
        else:
            await asyncio.sleep(self._pause_s)
            self._pause_s *= 2

    async def bound(self, attempt: Awaitable[str], reason: str) -> str:
        """The result of `attempt`. Raises ShardUnavailable at the deadline, and then it is cancelled."""
        try:
            async with asyncio.timeout_at(self._until):
                return await attempt
        except TimeoutError:
            raise self._failure(reason) from None

    def _failure(self, reason: str) -> ShardUnavailable:
        return ShardUnavailable(f"the local fallback did not open within {self._limit_s:g} s: {reason}")
