"""Round trips between hops, from what nodes state of their own links. Pure.

A statement bears on the edges of the node that makes it and on no others. Where both ends of an edge state it, the longer
counts: no node makes an edge look shorter than the other end has measured. Where one end alone does, the edge is at least as
long as the difference of the origin's own round trips to the two, which neither can shorten (triangle inequality). An edge that
is said to be longer than it is costs the node that says so its place in routes.
"""

from collections.abc import Mapping

from manyhands.core import NodeId
from manyhands.route.offer import Pair, pair

Statements = Mapping[NodeId, Mapping[str, float]]  # of each node: seconds by the first digits of a neighbour's NodeId


def stated_rtts(statements: Statements, digits: int, origin: NodeId, own: Mapping[NodeId, float]) -> dict[Pair, float]:
    """Seconds by `pair`, without the edges of `origin`, which measures these itself: `own` has its round trips.

    `digits`: how many digits of a NodeId name a neighbour.
    """
    full = {node[:digits]: node for node in statements}
    found: dict[Pair, float] = {}
    for node, near in statements.items():
        for name, rtt_s in near.items():
            other = full.get(name)
            if other is None or other == node or origin in (node, other):
                continue
            theirs = statements[other].get(node[:digits])
            least_s = abs(own[node] - own[other]) if theirs is None and node in own and other in own else theirs or 0.0
            found[pair(node, other)] = max(rtt_s, least_s)
    return found
