"""Waiting for what another task, thread or process does: never for a while that ought to be enough."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from manyhands.errors import ModelError
from manyhands.worker.thread import Unwanted, check_is_wanted

GUARD_S = 60.0  # what takes so long hangs, however busy the machine is


async def until(is_so: Callable[[], object], pause_s: float = 0.002) -> None:
    """Return once `is_so`, asked every `pause_s`, gives something true; TimeoutError after GUARD_S of the loop's time."""
    async with asyncio.timeout(GUARD_S):
        while not is_so():  # noqa: ASYNC110 - another's state: nothing tells of it
            await asyncio.sleep(pause_s)


class EndlessLoad:
    """In place of SpanModel, made on the loop that waits: a load that has `begun` and goes on until no one wants it; then it
    has `ended`."""

    def __init__(self) -> None:
        self.begun, self.ended, self._loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def __call__(self, *_: Any) -> NoReturn:
        self._loop.call_soon_threadsafe(self.begun.set)
        for _turn in range(int(100 * GUARD_S)):
            time.sleep(0.01)
            try:
                check_is_wanted()
            except Unwanted:
                self.ended.set()
                raise
        raise ModelError("nothing ended it")
