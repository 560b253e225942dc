"""Data links to the nodes that Opens and Feeds name: dialled on behalf of an origin, within its share."""

import asyncio
from typing import Final

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import LinkClosed
from manyhands.net.pool import LinkPool
from manyhands.net.setbacks import Setbacks, not_again
from manyhands.net.transport import Link
from manyhands.worker.allotment import Allotment

# Addresses that this node dials at once because Opens and Feeds name them: for one origin, and for all of them. A route's
# hops have one successor each, so an honest origin needs as many as it has routes that begin at the same moment.
MAX_DIALS_PER_PEER: Final = 16
MAX_DIALS: Final = 64


class Dials:
    """`under_way` counts the dials that have not ended yet, by the origin that they are for."""

    def __init__(self, pool: LinkPool, setbacks: Setbacks) -> None:
        self.under_way = Allotment("dials", MAX_DIALS_PER_PEER, MAX_DIALS)
        self._pool, self._setbacks = pool, setbacks

    async def reach(self, addr: NodeAddr, asker: NodeId) -> Link:
        """A data link to `addr`, dialled if there is none on behalf of `asker`. Raises LinkClosed, Busy."""
        link = self._pool.find_at(addr, "data")
        if link is not None:
            return link
        now = asyncio.get_running_loop().time()
        wait_s = self._setbacks.wait_s(addr.node or asker, addr, now)
        if wait_s:
            raise not_again(addr, wait_s)
        with self.under_way.use(asker, addr):
            try:
                link = await self._pool.get(addr, "data")
            except LinkClosed as error:
                self._setbacks.failed(None, [addr], now, error.answered)
                raise
        self._setbacks.answered(addr)
        return link

    def gave_up(self, addr: NodeAddr) -> None:
        """`addr` was not reached within its deadline: it counts as a failed dial."""
        self._setbacks.failed(None, [addr], asyncio.get_running_loop().time())
