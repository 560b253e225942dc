"""Waiting for what another task, thread or process does: never for a while that ought to be enough."""

import asyncio
from collections.abc import Callable

GUARD_S = 60.0  # what takes so long hangs, however busy the machine is


async def until(is_so: Callable[[], object], pause_s: float = 0.002) -> None:
    """Return once `is_so`, asked every `pause_s`, gives something true; TimeoutError after GUARD_S of the loop's time."""
    async with asyncio.timeout(GUARD_S):
        while not is_so():  # noqa: ASYNC110 - another's state: nothing tells of it
            await asyncio.sleep(pause_s)
