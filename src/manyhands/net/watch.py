"""An open link under watch: read until it ends and, on the control lane, tried by a heartbeat. Not what messages mean."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from manyhands.errors import LinkClosed, ProtocolError
from manyhands.net.transport import Link
from manyhands.wire.message import Message

logger = logging.getLogger(__name__)

# Heartbeat on every control link, and how long one may go unanswered before the peer counts as gone.
HEARTBEAT_S = 1.0
SUSPECT_S = 3.0


async def read(link: Link, take: Callable[[Message], None]) -> str:
    """Hand what arrives to `take` until the link ends; returns why it did. A ProtocolError of `take` ends it."""
    try:
        await link.deliver(take)
    except LinkClosed as error:
        return str(error)
    except ProtocolError as error:
        logger.warning("peer=%s sent nonsense: %s", link.peer[:8], error)
        link.abort(str(error))
        return str(error)


async def beat(link: Link) -> None:
    """Heartbeats, both ways, while it is open: a peer that is frozen or cut off is told from one that is merely slow."""
    with suppress(LinkClosed):
        while not link.is_closed:
            try:
                async with asyncio.timeout(SUSPECT_S):
                    await link.ping()
            except TimeoutError:
                link.abort(f"no heartbeat for {SUSPECT_S:g} s")
                return
            await asyncio.sleep(HEARTBEAT_S)
