"""The time that handshakes may take, on a loop that may be held up in the middle of one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class TimedHandshake:
    """A handshake that began then; `look` is when it is seen whether its time is over."""

    timeout: asyncio.Timeout
    began: float
    look: asyncio.TimerHandle | None = None


class HandshakesUnderWay:
    """Ends each whose time is over. `limit_s`: how long one may take, by what is known when it is asked: again whenever the
    time seems to be over, for it is longer where this node's loop was held up meanwhile."""

    def __init__(self, limit_s: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._all: set[TimedHandshake] = set()

    def __len__(self) -> int:
        return len(self._all)

    def look(self) -> None:
        """The limit may be a shorter one now."""
        for handshake in self._all:
            self._look_at(handshake)

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """For the block, which is one handshake. Raises TimeoutError."""
        async with asyncio.timeout(None) as timeout:
            handshake = TimedHandshake(timeout, asyncio.get_running_loop().time())
            self._all.add(handshake)
            self._look_at(handshake)
            try:
                yield
            finally:
                self._all.discard(handshake)
                if handshake.look is not None:
                    handshake.look.cancel()

    def _look_at(self, handshake: TimedHandshake) -> None:
        if handshake.timeout.expired():
            return
        if handshake.look is not None:
            handshake.look.cancel()
        loop, ends = asyncio.get_running_loop(), handshake.began + self._limit_s()
        if ends <= loop.time():
            handshake.timeout.reschedule(ends)
        else:
            handshake.look = loop.call_at(ends, self._look_at, handshake)
