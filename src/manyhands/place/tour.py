"""The shortest closed tour from a depot through places: exact for few, by insertion and 2-opt for many. Pure.

Costs are seconds and may be asymmetric (a hop costs what its sender's uplink takes). Places are indices; the depot is
none of them: `out[i]` leads to the first place, `home[i]` back from the last. (Idea: shard, select_ring; Held and Karp 1962.)
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ways:
    """What each way costs: from the depot, between places, back to the depot."""

    out: Sequence[float]
    between: Sequence[Sequence[float]]
    home: Sequence[float]

    def cost(self, order: Sequence[int]) -> float:
        """The length of the closed tour through `order`, which is not empty."""
        inner = math.fsum(self.between[a][b] for a, b in itertools.pairwise(order))
        return self.out[order[0]] + inner + self.home[order[-1]]


class AllTours:
    """The shortest tour through every subset of n places, a subset being a bit mask: n^2 2^n work, done once."""

    def __init__(self, ways: Ways) -> None:
        self._ways = ways
        self._count = len(ways.out)
        # reach[mask][last]: the cheapest path from the depot through mask that ends in last, and what came before last
        self._reach: list[dict[int, tuple[float, int]]] = [{} for _ in range(1 << self._count)]
        for place in range(self._count):
            self._reach[1 << place][place] = (ways.out[place], -1)
        for mask in range(1, 1 << self._count):
            self._extend(mask)

    def _extend(self, mask: int) -> None:
        for last, (cost, _) in self._reach[mask].items():
            row = self._ways.between[last]
            for place in range(self._count):
                if not mask >> place & 1:
                    there = self._reach[mask | 1 << place]
                    known = there.get(place)
                    if known is None or cost + row[place] < known[0]:
                        there[place] = (cost + row[place], last)

    def cost(self, mask: int) -> float:
        """The length of the shortest closed tour through `mask`, which is not 0."""
        return min(cost + self._ways.home[last] for last, (cost, _) in self._reach[mask].items())

    def order(self, mask: int) -> list[int]:
        """The places of that tour, in order."""
        ends = self._reach[mask]
        last = min(ends, key=lambda place: (ends[place][0] + self._ways.home[place], place))
        order: list[int] = []
        while last >= 0:
            order.append(last)
            mask, last = mask ^ (1 << last), self._reach[mask][last][1]
        return order[::-1]


def insert(ways: Ways, order: tuple[int, ...], place: int) -> tuple[int, ...]:
    """`order` with `place` where it lengthens the tour least."""

    def lengthens(at: int) -> float:
        to = ways.between[order[at - 1]][place] if at else ways.out[place]
        on = ways.between[place][order[at]] if at < len(order) else ways.home[place]
        return to + on - _way(ways, order, at)

    at = min(range(len(order) + 1), key=lengthens)
    return (*order[:at], place, *order[at:])


def _way(ways: Ways, order: tuple[int, ...], at: int) -> float:
    """What leads to the place at index `at` of the tour now; 0 if the tour is empty."""
    if not order:
        return 0.0
    if at == 0:
        return ways.out[order[0]]
    return ways.home[order[-1]] if at == len(order) else ways.between[order[at - 1]][order[at]]


def improve(ways: Ways, order: tuple[int, ...]) -> tuple[int, ...]:
    """2-opt: turn stretches around while that shortens the tour."""
    best, cost = order, ways.cost(order)
    while True:
        turned = [
            (*best[:a], *best[a:b][::-1], *best[b:]) for a in range(len(best) - 1) for b in range(a + 2, len(best) + 1)
        ]
        nearest = min(turned, key=ways.cost, default=best)
        if ways.cost(nearest) >= cost - 1e-12:
            return best
        best, cost = nearest, ways.cost(nearest)
