"""The cheapest chain of spans over a run of layers, in numbers only: a shortest path over (layer, span). Pure.

A span may serve any part of what it holds, so a hop may begin and end at any of its layers. One pass over the layers settles,
for every span, the cheapest way to have computed so far with it as the last hop: it goes on, or takes over from the best
sender for it, since what a leg costs depends on both its ends. O(layers * spans^2) in numpy. Times are whole nanoseconds,
so that equal costs are equal and the order of summing does not matter.
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
_LONGEST = 1 << 36  # 69 s: longer figures are cut to it. 255 hops and 1,000 layers of it stay below SPARE


def nanoseconds(seconds: npt.ArrayLike) -> Ints:
    """Whole nanoseconds; not a number, endless or too long becomes the longest."""
    times = np.nan_to_num(np.asarray(seconds, dtype=np.float64) * 1e9, nan=_LONGEST, posinf=_LONGEST)
    return np.rint(np.clip(times, 0, _LONGEST)).astype(np.int64)


class RoutePart(NamedTuple):
    """Layers `span` on the span of index `at`."""

    at: int
    span: Span


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
        """Those of these indices, in this order."""
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


def _times(values: Ints, factors: Floats) -> Ints:
    return np.rint(values * factors).astype(np.int64)


def cheapest(spans: Spans, run: Span, max_hops: int = MAX_HOPS) -> list[RoutePart] | None:
    """The chain for `run` of least cost; None if some layer is held by none, or all chains have more than `max_hops` hops.

    Among equals: fewer hops where the last ones differ, then the spans that come first.
    """
    chain = _cheapest(spans, run)
    return chain if chain is None or len(chain) <= max_hops else _cheapest_of(spans, run, max_hops)


def _cheapest(spans: Spans, run: Span) -> list[RoutePart] | None:
    num_spans = len(spans.start)
    if num_spans == 0:
        return None
    layer_costs = spans.layer + SPARE * spans.is_spare
    senders = np.ascontiguousarray(spans.legs.T)
    np.fill_diagonal(senders, NEVER)  # taking over from itself is going on
    rows = np.arange(num_spans)
    came_from = np.full(
        (len(run), num_spans), -1
    )  # the sender that a hop beginning at a layer takes over from; -1: goes on
    done = np.full(num_spans, NEVER)
    for at, layer in enumerate(range(run.start, run.end)):
        if at == 0:
            begun = spans.entry + spans.fixed
        else:
            ways = senders + done
            best = ways.argmin(axis=1)
            begun = ways[rows, best] + spans.fixed
            came_from[at] = np.where(begun < done, best, -1)
        holds = (spans.start <= layer) & (layer < spans.end)
        done = np.where(holds, np.minimum(begun, done) + layer_costs, NEVER)
        np.minimum(done, NEVER, out=done)
    total = done + spans.closing
    last = int(total.argmin())
    return _walk_back(came_from, last, run) if total[last] < NEVER else None


def _cheapest_of(spans: Spans, run: Span, max_hops: int) -> list[RoutePart] | None:
    """As `_cheapest`, with the cost of having computed so far settled for each number of hops: max_hops times the work."""
    count, layer_costs = len(spans.start), spans.layer + SPARE * spans.is_spare
    senders = np.ascontiguousarray(spans.legs.T)
    np.fill_diagonal(senders, NEVER)
    came_from = np.full((len(run), max_hops, count), -1)
    done = np.full((max_hops, count), NEVER)  # [hops - 1, last span]
    for at, layer in enumerate(range(run.start, run.end)):
        begun = np.full((max_hops, count), NEVER)
        if at == 0:
            begun[0] = spans.entry + spans.fixed
        else:
            for hops in range(1, max_hops):
                ways = senders + done[hops - 1]
                best = ways.argmin(axis=1)
                begun[hops] = ways[np.arange(count), best] + spans.fixed
                came_from[at, hops] = np.where(begun[hops] < done[hops], best, -1)
        holds = (spans.start <= layer) & (layer < spans.end)
        done = np.where(holds, np.minimum(begun, done) + layer_costs, NEVER)
        np.minimum(done, NEVER, out=done)
    total = done + spans.closing
    hops, last = (int(i) for i in np.unravel_index(int(total.argmin()), total.shape))
    if total[hops, last] >= NEVER:
        return None
    chain: list[RoutePart] = []
    end = run.end
    for at in range(len(run) - 1, 0, -1):
        if (sender := int(came_from[at, hops, last])) >= 0:
            chain.append(RoutePart(last, Span(run.start + at, end)))
            hops, last, end = hops - 1, sender, run.start + at
    return [*reversed([*chain, RoutePart(last, Span(run.start, end))])]


def fewest_hops(held: Sequence[Span], run: Span) -> int:
    """Hops of the shortest chain for `run`, every layer of which is held."""
    reached, hops = run.start, 0
    while reached < run.end:
        reached, hops = max(span.end for span in held if span.start <= reached), hops + 1
    return hops


def _walk_back(came_from: npt.NDArray[np.int_], last: int, run: Span) -> list[RoutePart]:
    chain: list[RoutePart] = []
    end = run.end
    for at in range(len(run) - 1, 0, -1):
        sender = int(came_from[at, last])
        if sender >= 0:
            chain.append(RoutePart(last, Span(run.start + at, end)))
            last, end = sender, run.start + at
    chain.append(RoutePart(last, Span(run.start, end)))
    return chain[::-1]
