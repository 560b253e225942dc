"""How benchmarks wait for what a link delivers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from manyhands.net.transport import Link


@asynccontextmanager
async def arrivals(link: Link) -> AsyncIterator[asyncio.Event]:
    """Set by every message that arrives on `link`, which stays the caller's."""
    arrived = asyncio.Event()
    delivering = asyncio.create_task(link.deliver(lambda message: arrived.set()))
    try:
        yield arrived
    finally:
        delivering.cancel()
        await asyncio.gather(delivering, return_exceptions=True)
