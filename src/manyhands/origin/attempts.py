"""What a request's attempts to open a route have shown of the nodes: which are not asked again, and when it is enough. Pure.

Nodes answer as they like. So no answer of one node ends a request that others could serve, none costs another node more than
its place in this request, and each way to refuse is taken a bounded number of times.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from manyhands.core import NodeId
from manyhands.errors import Apart, Busy, ManyhandsError, ShardUnavailable, Unanswered
from manyhands.route.offer import Offer

# Rings of one request that may be refused because a hop cannot reach the next one: each takes up to an opening's deadline.
MAX_RINGS: Final = 2
# Nodes that may blame the request itself: if so many agree it is at fault.
MAX_BLAMING: Final = 4
# Nodes that one node may blame; then it is left out itself, and they are asked again.
MAX_BLAMED: Final = 2


class Attempts:
    """Of one request. `excluded`: nodes that are not asked now. `is_patient`: nodes have all of open_timeout_s to answer, since
    no others are left."""

    def __init__(self) -> None:
        self.excluded: set[NodeId] = set()
        self.is_patient = False
        self._busy: Busy | None = None
        self._rings = 0
        self._silent: set[NodeId] = set()
        self._blaming: set[NodeId] = set()
        self._blamed: defaultdict[NodeId, set[NodeId]] = defaultdict(set)
        self._accusers: set[NodeId] = set()  # left out for what they said of others

    @property
    def is_star(self) -> bool:
        """Whether enough rings were refused: a star needs no hop to reach another."""
        return self._rings >= MAX_RINGS

    def refused(self, route: Sequence[Offer], refusal: ManyhandsError, *, is_ring: bool) -> set[NodeId]:
        """Note that an attempt over `route` failed with `refusal`. Returns the nodes that failed as this origin saw it itself:
        others go before them for a while. Raises `refusal` if no other nodes would help."""
        if isinstance(refusal, Unanswered):
            nodes = {route[index].node for index in refusal.hops}
            self._silent |= nodes
            self.excluded |= nodes
            return nodes
        if refusal.node is None:
            raise refusal
        node = NodeId(refusal.node)
        if isinstance(refusal, Apart) and is_ring:
            self._rings += 1
            return set()
        self.excluded.add(node)
        if refusal.told_by is not None:
            self._blame(NodeId(refusal.told_by), node)
            return set()
        if isinstance(refusal, Busy):
            self._busy = refusal
            return set()
        if isinstance(refusal, ShardUnavailable):
            return {node}
        self._blaming.add(node)
        if len(self._blaming) >= MAX_BLAMING:
            raise refusal
        return set()

    def opened(self) -> set[NodeId]:
        """A route was opened. Returns the nodes that called the request faulty, and so were wrong: others go before them."""
        return self._blaming

    def is_again(self) -> bool:
        """No route is left without the excluded nodes. Whether some of these are let in again, to be asked once more."""
        if self._accusers:  # without them there is none: then without those that they blamed
            self.excluded -= self._accusers
            self.excluded |= set().union(*(self._blamed[node] for node in self._accusers))
            self._accusers.clear()
            return True
        if self._silent and not self.is_patient:
            self.is_patient = True
            self.excluded -= self._silent
            return True
        return False

    def reason(self, refusal: ManyhandsError) -> ManyhandsError:
        """What the client is told: that nodes are full, if one was, since that passes; else what the last one said."""
        return self._busy or refusal

    def _blame(self, accuser: NodeId, node: NodeId) -> None:
        blamed = self._blamed[accuser]
        blamed.add(node)
        if len(blamed) == MAX_BLAMED:
            self.excluded -= blamed
            self.excluded.add(accuser)
            self._accusers.add(accuser)
