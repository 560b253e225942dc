"""What a member states of the network around it: the round trips to the nodes that it is linked to. Pure.

A figure that trembles is no news: one that was stated stays until it is off by CHANGE, so that a record is signed anew for what
bears on routes only.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from manyhands.core import NodeId
from manyhands.swarm.record import MAX_NEIGHBOURS, NearNode

CHANGE: Final = 0.25
LEAST_UNITS: Final = 5  # of the difference: half a millisecond


def stated(before: Sequence[NearNode], rtts: Mapping[NodeId, float | None]) -> tuple[NearNode, ...]:
    """The nearest MAX_NEIGHBOURS of `rtts` (seconds; None: not measured yet), as stated `before` where they hardly changed."""
    said = dict(before)
    found: dict[str, int] = {}
    for node, rtt_s in rtts.items():
        if rtt_s is None or not 0 <= rtt_s < math.inf:
            continue
        name, units = NearNode.of(node, rtt_s)
        found[name] = said[name] if name in said and not _is_news(said[name], units) else units
    nearest = sorted(found, key=lambda name: (found[name], name))[:MAX_NEIGHBOURS]
    return tuple(NearNode(name, found[name]) for name in sorted(nearest))


def _is_news(before: int, now: int) -> bool:
    return abs(now - before) > max(LEAST_UNITS, CHANGE * before)
