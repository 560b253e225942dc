"""Rows of a log for a standby, which its origin has ordered (Feed)."""

import asyncio
import logging
from typing import Final

from manyhands.core import NodeId
from manyhands.net.transport import Link, try_send
from manyhands.wire.message import Feed
from manyhands.worker.dials import Dials
from manyhands.worker.session import HopSession

logger = logging.getLogger(__name__)

# Rows that a Feed may ask for at once: four prefill-sized steps of the log.
MAX_FEED_ROWS: Final = 512


async def feed(place: HopSession, message: Feed, asker: NodeId, dials: Dials, connect_s: float) -> None:
    """Do what `message` of the origin `asker` orders of `place`, which `is_feeding` until then.

    Deadline: `connect_s` to reach the standby and for what was sent to it before to leave.
    In a star it goes by way of the origin, as all steps do. A failure leaves the standby behind, nothing else.
    """
    try:
        async with asyncio.timeout(connect_s):
            is_star = place.opened.path == "star"
            standby = place.successor if is_star else await dials.reach(message.to, asker)
            await standby.drain()
        if place.opened.epoch == message.epoch:
            _send_log(place, standby, message.start, message.until)
    except Exception as error:  # also what an address of the origin's choice makes of a dial: not the node's trouble
        logger.info("session=%s: its standby cannot be fed: %s", place.name, error)
    finally:
        place.is_feeding = False


def _send_log(place: HopSession, standby: Link, start: int, until: int) -> None:
    """Send positions [start, until) of the log to the standby of the next hop; their results are not wanted.

    Not paid with credits: the origin asks for more when the standby has computed what it got.
    """
    if not place.log.covers(until):
        logger.info("session=%s: its standby gets no rows: the output log was dropped (log_bytes)", place.name)
        return
    for step in place.log.replay(until, start):
        try_send(standby, place.addressed(step, step)._replace(reply_from=until, committed=until))
