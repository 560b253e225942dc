"""The cheapest chain of spans over a run of layers, in numbers only: a shortest path over (layer, span). Pure.

A span may serve any part of what it holds, so a hop may begin and end at any of its layers. One pass over the layers settles,
for every span, the cheapest way to have computed so far with it as the last hop: it goes on, or takes over from the best
sender for it, since what a leg costs depends on both its ends. O(layers * spans^2) in numpy; the number of spans is bounded
before (shortlist.py), layers where hops may begin and end here. Times are whole nanoseconds, so that equal costs are equal and
the order of summing does not matter.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from manyhands.config import MAX_HOPS
from manyhands.core import Span

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NEVER = 1 << 60  # no way; sums of two stay within int64
# What a layer on a spare costs: more than all else together (3 days), so the fewest layers on spares come first. 4,000 of
# them stay below NEVER.
SPARE = 1 << 48
ALL_CUTS = 128  # layers of a run that may all be cut; no published model has more
EXACT = 1 << 20  # steps of a search by the number of hops: 3 ms
TRIES = 4  # searches for the price of a hop, each without a limit
DEAREST = 1 << 51  # a price of a hop above all that a chain costs; 255 of them stay below NEVER
_LONGEST = 1 << 36  # 69 s: longer figures are cut to it. 255 hops and 1,000 layers of it stay below SPARE


def nanoseconds(seconds: npt.ArrayLike) -> Ints:
    """Whole nanoseconds; not a number, endless or too long becomes the longest."""
    times = np.nan_to_num(np.asarray(seconds, dtype=np.float64) * 1e9, nan=_LONGEST, posinf=_LONGEST)
    return np.rint(np.clip(times, 0, _LONGEST)).astype(np.int64)


class RoutePart(NamedTuple):
    """Layers `span` on the span of index `at`."""

    at: int
    span: Span


class Found(NamedTuple):
    """A chain, None if there is none within the limit of hops, and the price of a hop that it was found at (0: none)."""

    chain: list[RoutePart] | None
    price: int


@dataclass(frozen=True, slots=True)
class Spans:
    """N spans and what they cost, in nanoseconds; the earlier in the order, the better among equals."""

    start: Ints  # (N,) first layer held
    end: Ints  # (N,) the layer after the last
    layer: Ints  # (N,) of one layer
    fixed: Ints  # (N,) once a hop: wait and overhead
    entry: Ints  # (N,) the leg to it from where the run begins
    legs: Ints  # (N, N) [sender, receiver]
    closing: Ints  # (N,) the leg from it to where the run ends
    is_spare: npt.NDArray[np.bool_]  # (N,)

    def stretched(self, factors: Floats) -> "Spans":
        """As if every span, and every leg to it, took `factors` (N,) times as long."""
        return replace(
            self,
            layer=_times(self.layer, factors),
            fixed=_times(self.fixed, factors),
            entry=_times(self.entry, factors),
            legs=_times(self.legs, factors),
        )

    def only(self, keep: Sequence[int]) -> "Spans":
        """The spans at the indices `keep`, in this order."""
        k = list(keep)
        table = self.legs[np.ix_(k, k)]
        rows = (self.start, self.end, self.layer, self.fixed, self.entry)
        start, end, layer, fixed, entry = (values[k] for values in rows)
        return Spans(start, end, layer, fixed, entry, table, self.closing[k], self.is_spare[k])

    def cost(self, chain: Sequence[RoutePart]) -> int:
        """Nanoseconds of a chain, SPARE for each layer that a spare computes."""
        total = int(self.entry[chain[0].at] + self.closing[chain[-1].at])
        for a, b in itertools.pairwise(chain):
            total += int(self.legs[a.at, b.at])
        for at, span in chain:
            total += int(self.fixed[at] + len(span) * self.layer[at]) + len(span) * SPARE * bool(self.is_spare[at])
        return total


class Steps(NamedTuple):
    """What is settled at each cut, for each number of hops and each span: whether a hop begins there, and whom it takes over
    from."""

    begins: npt.NDArray[np.bool_]
    sender: npt.NDArray[np.int32]

    @classmethod
    def of(cls, *shape: int) -> "Steps":
        """All go on."""
        return cls(np.zeros(shape, np.bool_), np.zeros(shape, np.int32))


def _times(values: Ints, factors: Floats) -> Ints:
    return np.rint(values * factors).astype(np.int64)


def within(spans: Spans, run: Span, max_hops: int = MAX_HOPS, price: int = 0) -> Found:
    """The cheapest chain for `run` of at most `max_hops` hops.

    Where a search by the number of hops as well would take more than EXACT steps, each hop is charged a price instead: `price`,
    or if that is 0 one that brings the hops down to `max_hops` and costs least (a Lagrangian relaxation). The chain is then the
    cheapest of those with as many hops as it has; one that costs a little less, with others within the limit, may be missed.
    """
    chain = cheapest(spans, run, price)
    if chain is None or len(chain) <= max_hops:
        return Found(chain, price)
    if price:
        return Found(None, price)
    if (len(_cuts(spans, run)) - 1) * len(spans.start) ** 2 * max_hops <= EXACT:
        return Found(_settle(spans, run, max_hops), 0)
    return _by_price(spans, run, max_hops, chain)


def _by_price(spans: Spans, run: Span, max_hops: int, longer: list[RoutePart]) -> Found:
    """The least price of a hop at which the cheapest chain has at most `max_hops` is where a shorter and a longer chain cost
    the same: each search replaces one of the two, until none is cheaper than both. `longer`: the cheapest at no price."""
    shorter = cheapest(spans, run, DEAREST, SPARE >> 10)
    assert shorter is not None, "there is a longer one"
    if len(shorter) > max_hops:
        return Found(None, 0)
    price = 0
    for _ in range(TRIES):
        price = min((spans.cost(shorter) - spans.cost(longer)) // (len(longer) - len(shorter)), DEAREST)
        found = cheapest(spans, run, price)
        assert found is not None
        known = shorter if len(found) <= max_hops else longer
        if spans.cost(found) + price * len(found) >= spans.cost(known) + price * len(known):
            break
        shorter, longer = (found, longer) if known is shorter else (shorter, found)
    return Found(shorter, price + price // 16 + 1)


def cheapest(spans: Spans, run: Span, price: int = 0, spare: int = SPARE) -> list[RoutePart] | None:
    """The chain for `run` of least cost, where each hop costs `price` more, and a layer on a spare `spare`; None if some layer
    is held by none.

    Among equals: fewer hops where the last ones differ, then the spans that come first.
    """
    return _settle(spans, run, 0, price, spare)


def _settle(spans: Spans, run: Span, max_hops: int, price: int = 0, spare: int = SPARE) -> list[RoutePart] | None:
    """As `cheapest`; with `max_hops` above 0, the cost of having computed so far is settled for each number of hops."""
    if (count := len(spans.start)) == 0:
        return None
    rows, shift = max(1, max_hops), int(max_hops > 0)  # a takeover leads from a row of hops to the next
    senders = np.ascontiguousarray(spans.legs.T)
    np.fill_diagonal(senders, NEVER)  # taking over from itself is going on
    cuts = _cuts(spans, run)
    absent = (spans.start > cuts[:-1, None]) | (cuts[1:, None] > spans.end)  # (cuts, N)
    costs = np.diff(cuts)[:, None] * (spans.layer + spare * spans.is_spare)
    steps = Steps.of(len(absent), rows, count)
    done = np.full((rows, count), NEVER)  # [hops, last span]
    done[0] = spans.entry + spans.fixed + price
    fixed, ways = spans.fixed + price, np.empty((rows - shift, count, count), np.int64)
    firsts = np.arange(0, ways.size, count)
    for at in range(len(absent)):
        if at:
            np.add(senders, done[: rows - shift, None, :], out=ways)
            best = ways.argmin(axis=2)
            begun = ways.take(firsts + best.ravel()).reshape(best.shape) + fixed
            going = done[shift:]
            np.less(begun, going, out=steps.begins[at, shift:])
            steps.sender[at, shift:] = best
            np.minimum(begun, going, out=going)
        done += costs[at]
        np.copyto(done, NEVER, where=absent[at])
        np.minimum(done, NEVER, out=done)
    total = done + spans.closing
    hops, last = (int(i) for i in np.unravel_index(int(total.argmin()), total.shape))
    return _walk_back(steps, cuts, hops, last, shift) if total[hops, last] < NEVER else None


def _cuts(spans: Spans, run: Span) -> Ints:
    """Where hops may begin and end: at every layer of a run of up to ALL_CUTS, else only where some span does."""
    if len(run) <= ALL_CUTS:
        return np.arange(run.start, run.end + 1)
    edges = np.unique(np.concatenate((spans.start, spans.end, np.array([run.start, run.end]))))
    return edges[(run.start <= edges) & (edges <= run.end)]


def shortest(held: Sequence[Span], run: Span) -> list[int]:
    """Indices of a chain of the fewest spans for `run`, every layer of which is held."""
    order = sorted(range(len(held)), key=lambda at: held[at].start)
    chain: list[int] = []
    reached, seen, best = run.start, 0, order[0]
    while reached < run.end:
        while seen < len(order) and held[order[seen]].start <= reached:
            best = max(best, order[seen], key=lambda at: held[at].end)
            seen += 1
        assert held[best].end > reached, "every layer is held"
        chain.append(best)
        reached = held[best].end
    return chain


def _walk_back(steps: Steps, cuts: Ints, hops: int, last: int, shift: int) -> list[RoutePart]:
    chain: list[RoutePart] = []
    end = int(cuts[-1])
    for at in range(len(steps.begins) - 1, 0, -1):
        if steps.begins[at, hops, last]:
            chain.append(RoutePart(last, Span(int(cuts[at]), end)))
            hops, last, end = hops - shift, int(steps.sender[at, hops, last]), int(cuts[at])
    chain.append(RoutePart(last, Span(int(cuts[0]), end)))
    return chain[::-1]
