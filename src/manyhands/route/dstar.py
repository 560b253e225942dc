"""D* Lite: the cheapest path in a graph whose costs change, repaired rather than searched anew. Pure; knows no nodes.

S. Koenig and M. Likhachev, D* Lite, AAAI 2002, the optimized version (figure 4): searches from the goal, so that the start
may move along. With no estimate of what is left (h = 0), since measured costs allow none, a key is one number and the key
modifier stays 0.
"""

import heapq
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from manyhands.errors import BadRequest

V = TypeVar("V", bound=Hashable)


class DStarLite(Generic[V]):
    """The cheapest path from `start` to `goal`. Costs are 0 or more, a loop's above 0; inf: no way, which may open later.

    Whole numbers as costs make paths of equal cost compare equal. Raises BadRequest for a cost below 0 or not a number.
    """

    def __init__(self, edges: Mapping[V, Mapping[V, float]], start: V, goal: V) -> None:
        self._succ: dict[V, dict[V, float]] = {u: dict(costs) for u, costs in edges.items()}
        self._pred: dict[V, set[V]] = {}
        for u, costs in self._succ.items():
            for v, cost in costs.items():
                self._pred.setdefault(v, set()).add(u)
                _check(u, v, cost)
        self._start, self._goal = start, goal
        self._g: dict[V, float] = {}  # absent: inf
        self._rhs: dict[V, float] = {goal: 0}
        self._heap: list[tuple[float, int, V]] = []
        self._queued: dict[V, float] = {}  # the key a vertex is queued with; other entries of the heap are dead
        self._count = itertools.count()
        self.expanded = 0  # vertices taken off the queue, in all
        self._queue(goal)

    def cost(self, u: V, v: V) -> float:
        """Of an edge; inf if there is none."""
        return self._succ.get(u, {}).get(v, math.inf)

    def change(self, edges: Iterable[tuple[V, V, float]]) -> None:
        """Give edges (from, to, cost) new costs, also such as were not there. The next `path` knows of them."""
        for u, v, cost in edges:
            _check(u, v, cost)
            old = self.cost(u, v)
            self._succ.setdefault(u, {})[v] = cost
            self._pred.setdefault(v, set()).add(u)
            if u == self._goal or cost == old:
                continue
            through = self._g.get(v, math.inf)
            if cost < old:
                self._rhs[u] = min(self._rhs.get(u, math.inf), cost + through)
            elif self._rhs.get(u, math.inf) == old + through:
                self._rhs[u] = self._best(u)
            self._queue(u)

    def move(self, start: V) -> None:
        """From here on the path begins at `start`."""
        self._start = start

    def path(self) -> list[V]:
        """From start to goal, both included; [] if there is no way. Among equals, the edge that was named first."""
        self._settle()
        if self._rhs.get(self._start, math.inf) == math.inf:
            return []
        path = [self._start]
        while path[-1] != self._goal:
            costs = self._succ[path[-1]]
            path.append(min(costs, key=lambda v: costs[v] + self._g.get(v, math.inf)))
        return path

    def _best(self, u: V) -> float:
        g = self._g
        return min((cost + g.get(v, math.inf) for v, cost in self._succ.get(u, {}).items()), default=math.inf)

    def _key(self, u: V) -> float:
        return min(self._g.get(u, math.inf), self._rhs.get(u, math.inf))

    def _queue(self, u: V) -> None:
        """In the queue, with the right key, iff its two estimates differ."""
        if self._g.get(u, math.inf) == self._rhs.get(u, math.inf):
            self._queued.pop(u, None)
        elif self._queued.get(u) != (key := self._key(u)):
            self._queued[u] = key
            heapq.heappush(self._heap, (key, next(self._count), u))

    def _first(self) -> V | None:
        while self._heap and self._queued.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def _settle(self) -> None:
        """Until the start's distance is exact."""
        start = self._start
        while (u := self._first()) is not None:
            # Ties are settled too: where edges cost 0 an outdated vertex could lie on the path.
            if self._queued[u] > self._key(start) and self._rhs.get(start, math.inf) <= self._g.get(start, math.inf):
                return
            self.expanded += 1
            del self._queued[u]
            if self._g.get(u, math.inf) > self._rhs.get(u, math.inf):
                self._lower(u)
            else:
                self._raise(u)

    def _lower(self, u: V) -> None:
        """A shorter way has been found from u: tell those before it."""
        self._g[u] = g = self._rhs[u]
        for s in self._pred.get(u, ()):
            if s != self._goal and (through := self._succ[s][u] + g) < self._rhs.get(s, math.inf):
                self._rhs[s] = through
                self._queue(s)

    def _raise(self, u: V) -> None:
        """The way from u has become longer: those before it that relied on it look for another."""
        old = self._g.pop(u)
        for s in (*self._pred.get(u, ()), u):
            relied = 0 if s == u else self._succ[s][u]
            if s != self._goal and self._rhs.get(s, math.inf) == relied + old:
                self._rhs[s] = self._best(s)
            self._queue(s)


def _check(u: object, v: object, cost: float) -> None:
    if not cost >= 0:
        raise BadRequest(f"the cost from {u} to {v} is {cost}; it must be 0 or more")
