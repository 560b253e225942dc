"""Dial nodes that no link is open to, all side by side."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from manyhands.origin.node import FullNode
from manyhands.route.offer import Offer

REACH_S: Final = 2.0  # for all of them: TCP and TLS over 300 ms of round trip take 0.9 s


async def reach_any(node: FullNode, offers: Sequence[Offer], is_enough: Callable[[], bool]) -> None:
    """Dial the nodes of `offers` side by side, each address once, until `is_enough`. Deadline: REACH_S for all."""
    homes = {(o.addr.host, o.addr.port): o for o in reversed(offers)}
    dials = [asyncio.ensure_future(node.reach(o.addr, o.node, REACH_S)) for o in homes.values()]
    end = asyncio.get_running_loop().time() + REACH_S
    waiting = set(dials)
    try:
        while waiting and not is_enough() and (left_s := end - asyncio.get_running_loop().time()) > 0:
            _, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for dial in waiting:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
