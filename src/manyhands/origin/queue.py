"""Requests that found every node full: they wait in the order in which they came, and ask again one at a time.

A session of this origin that ends wakes the first one that waits; each that gets a place wakes the next, since there may be
more. What other origins free is not announced here: the first in the queue also asks after RETRY_S, then after twice as long,
at most MAX_RETRY_S. So the queue as a whole, however long, asks at most once per RETRY_S and once per session that ended.
"""

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from manyhands.errors import Busy

RETRY_S = 0.25
MAX_RETRY_S = 2.0
T = TypeVar("T")


@dataclass(order=True, slots=True)
class _Waiting:
    number: int  # in order of arrival
    turn: asyncio.Event = field(default_factory=asyncio.Event, compare=False)


class RoomQueue:
    """The queue of one origin. Not shared between event loops."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._arrived = 0
        self._releases = 0

    def __len__(self) -> int:
        return len(self._waiting)

    async def run(self, attempt: Callable[[], Awaitable[T]], patience_s: float) -> T:
        """What `attempt` returns, as soon as it does not raise Busy. A request that is cancelled leaves the queue.

        Raises the last Busy after `patience_s`, and at once whatever else `attempt` raises.
        """
        self._arrived += 1
        place = _Waiting(self._arrived)
        end = asyncio.get_running_loop().time() + patience_s
        if self._waiting:
            refusal = Busy(f"{len(self._waiting)} requests wait for room before this one: try again later")
        else:
            seen = self._releases
            try:
                return await attempt()
            except Busy as busy:
                refusal = busy
            if seen != self._releases:
                place.turn.set()
        insort(self._waiting, place)
        try:
            return await self._wait(place, attempt, end, refusal)
        finally:
            self._waiting.remove(place)
            self._wake()  # there may be more room than was taken; one that leaves unasked passes its turn on

    def released(self) -> None:
        """A session has ended: the first one that waits, and does not ask already, may ask."""
        self._releases += 1
        self._wake()

    def _wake(self) -> None:
        for place in self._waiting:
            if not place.turn.is_set():
                place.turn.set()
                return

    async def _wait(self, place: _Waiting, attempt: Callable[[], Awaitable[T]], end: float, refusal: Busy) -> T:
        loop = asyncio.get_running_loop()
        pace = RETRY_S
        while loop.time() < end:
            if not await _set_within(place.turn, min(pace, end - loop.time())) and place is not self._waiting[0]:
                continue
            place.turn.set()  # it asks: what is released meanwhile is for the next one
            seen = self._releases
            try:
                return await attempt()
            except Busy as busy:
                refusal, pace = busy, min(2 * pace, MAX_RETRY_S)
            if seen == self._releases:
                place.turn.clear()
        raise refusal


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
