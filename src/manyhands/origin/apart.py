"""Pairs of nodes that could not reach each other, as an origin's own requests have found: rings avoid them for a while."""

import itertools
from collections.abc import Sequence
from typing import Final

from manyhands.core import NodeId
from manyhands.route.offer import Offer, Pair, pair

APART_S: Final = 600.0  # for which such a pair is not asked to form a ring again
MAX_PAIRS: Final = 1024


class ApartPairs:
    """Times are an event loop's. A hop that states falsely that it cannot reach the next one makes its own edge longer."""

    def __init__(self) -> None:
        self._until: dict[Pair, float] = {}

    def note(self, route: Sequence[Offer], node: NodeId, now: float) -> None:
        """The hop of `route` before `node` could not reach it."""
        live = {edge: until for edge, until in self._until.items() if until > now}
        live |= {pair(a.node, b.node): now + APART_S for a, b in itertools.pairwise(route) if b.node == node}
        self._until = dict(list(live.items())[-MAX_PAIRS:])

    def are_in(self, route: Sequence[Offer], now: float) -> bool:
        """Whether hops of `route` that follow each other are such a pair."""
        return any(self._until.get(pair(a.node, b.node), now) > now for a, b in itertools.pairwise(route))

    def pairs(self, now: float) -> frozenset[Pair]:
        """Those that routes avoid now."""
        return frozenset(edge for edge, until in self._until.items() if until > now)
