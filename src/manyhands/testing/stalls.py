"""Watch the running event loop in a test: what held it, and for how long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from manyhands.stalls import Stalls, tick_forever

PERIOD_S = 0.002


@dataclass(slots=True)
class Seen:
    """The stalls of more than 10 ms while the block ran, in seconds."""

    stalls: list[float] = field(default_factory=list)

    @property
    def worst_s(self) -> float:
        return max(self.stalls, default=0.0)


@asynccontextmanager
async def watched_loop() -> AsyncIterator[Seen]:
    """Measure this loop's lateness while the block runs. On a busy machine others' work counts as well."""
    seen = Seen()
    loop = asyncio.get_running_loop()
    task = loop.create_task(tick_forever(Stalls(loop.time(), period_s=PERIOD_S), seen.stalls.append))
    try:
        yield seen
    finally:
        await asyncio.sleep(2 * PERIOD_S)
        task.cancel()
        await asyncio.wait((task,))
