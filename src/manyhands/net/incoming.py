"""Links that peers dialled and that are open, by the node that dialled: one identity cannot use up what a node keeps open."""

import logging
from typing import Generic, TypeVar

from manyhands.core import NodeId
from manyhands.errors import LinkClosed
from manyhands.net.arrivals import Arrivals
from manyhands.net.transport import Link

logger = logging.getLogger(__name__)

# Links of one node on one lane. A node dials one, and another where the last is lost or there is a better path.
MAX_PER_LANE = 4

L = TypeVar("L", bound=Link)


class Incoming(Generic[L]):
    """Open links: MAX_PER_LANE of one node on one lane, `total` in all. Beyond the first a node's oldest goes, beyond the
    second the oldest of the node with the most."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._links: dict[NodeId, list[L]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._open().values()))

    def check_room(self, node: NodeId) -> None:
        """Raise LinkClosed unless one more link of `node` would be kept."""
        if not self.has_room_for(node):
            logger.warning("refused a link of peer=%s: %d are open, the limit", node[:8], len(self))
            raise LinkClosed("this node has as many links as it takes")

    def keep(self, link: L, arrivals: Arrivals[L]) -> None:
        """Count `link` and let it be accepted; close the one that has to go for it."""
        surplus = self.add(link)
        if surplus is not None:
            logger.info("peer=%s lane=%s: too many links", surplus.peer[:8], surplus.lane)
            surplus.abort("this node has newer links, or as many as it takes")
        arrivals.put(link)

    def has_room_for(self, node: NodeId) -> bool:
        """Whether `add` would keep one more link of `node`, on some lane."""
        links = self._open()
        num_open, mine = sum(map(len, links.values())), len(links.get(node, ()))
        return num_open < self._total or max(map(len, links.values())) > mine + 1

    def add(self, link: L) -> L | None:
        """Count `link`, which is open; returns the one that has to be closed for it, which may be itself."""
        self._links = links = self._open()
        mine = links.setdefault(link.peer, [])
        mine.append(link)
        same = [each for each in mine if each.lane == link.lane]
        if len(same) > MAX_PER_LANE:
            return self._remove(same[0])
        if sum(map(len, links.values())) <= self._total:
            return None
        greediest = max(links.values(), key=len)
        return self._remove(greediest[0] if len(greediest) > len(mine) else link)

    def _open(self) -> dict[NodeId, list[L]]:
        alive = {node: [link for link in links if not link.is_closed] for node, links in self._links.items()}
        return {node: links for node, links in alive.items() if links}

    def _remove(self, link: L) -> L:
        self._links[link.peer].remove(link)
        return link
