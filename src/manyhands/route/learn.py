"""What live sessions showed of nodes and links, against what these say of themselves. Pure: the time is an argument.

A figure is a moving average of what was observed. While nothing new is observed it fades to what is advertised, since a node
that was slow may have recovered and would never be asked again; after FORGET_S it is gone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from manyhands.core import NodeId, Span
from manyhands.route.offer import Offer, Pair, pair
from manyhands.route.prefix import ROW_SHARE

WEIGHT = 0.2  # of a new observation: Petals' for round trips (field.md 4(b)); 10 observations make up 90 %
HALF_LIFE_S = 60.0  # a figure this old counts half: twelve heartbeats of a record, which brings fresh advertised ones
# A node that no session has measured yet is taken to be at most so many times as fast as the median of those that were: a false
# record draws requests no more strongly than a fast newcomer does, until the first of them measures it.
BELIEVED = 4.0
FORGET_S = 600.0  # by then a figure counts less than 0.1 %


@dataclass(frozen=True, slots=True)
class _Average:
    """A figure in seconds as of the time `at`."""

    value: float
    at: float

    def weight(self, now: float) -> float:
        """How much it still counts; all, if the clock stands still."""
        return math.exp2(-max(0.0, now - self.at) / HALF_LIFE_S)

    def plus(self, value: float, now: float) -> "_Average":
        """With one more observation, which counts the more the older the rest is."""
        kept = (1 - WEIGHT) * self.weight(now)
        return _Average(kept * self.value + (1 - kept) * value, max(now, self.at))

    def faded(self, advertised: float | None, now: float) -> float:
        if advertised is None:
            return self.value
        weight = self.weight(now)
        return weight * self.value + (1 - weight) * advertised


_Spans = dict[NodeId, dict[Span, _Average]]


class Learned:
    """One origin's experience with spans and round trips. Seconds throughout; `now` is any clock that does not go back.

    Figures that cannot be (not a number, negative, endless) are not taken: some are reported by other nodes.
    """

    def __init__(self) -> None:
        self._layers: _Spans = {}
        self._rows: _Spans = {}
        self._rtts: dict[Pair, _Average] = {}

    def observe(self, node: NodeId, span: Span, layer_s: float, now: float) -> None:
        """A decode step took `layer_s` a layer on `span`, any part of what the node holds; waits not included."""
        _note(self._layers, node, span, layer_s, now)

    def observe_row(self, node: NodeId, span: Span, row_s: float, now: float) -> None:
        """A row of a prompt took `row_s` a layer on `span`."""
        _note(self._rows, node, span, row_s, now)

    def observe_rtt(self, a: NodeId, b: NodeId, rtt_s: float, now: float) -> None:
        if 0 <= rtt_s < math.inf:
            self._rtts[pair(a, b)] = _observed(self._rtts.get(pair(a, b)), rtt_s, now)

    def observe_own_rtts(self, me: NodeId, rtts: Mapping[NodeId, float], now: float) -> None:
        """What the links of `me` show now; what is too old to count goes."""
        for peer, rtt_s in rtts.items():
            self.observe_rtt(me, peer, rtt_s, now)
        self.forget(now)

    def cost(self, node: NodeId, span: Span, advertised: float | None, now: float) -> float | None:
        """Seconds of one layer on a node that holds `span`: by the latest observation of any part of it.

        `advertised` is what the node says, None if nothing. None: not known.
        """
        known = _latest(self._layers, node, span, now)
        return known.faded(advertised, now) if known else advertised

    def least_s(self, now: float) -> float:
        """The least seconds of a layer that an advertisement is believed for; 0 while nothing has been observed."""
        seen = [a.value for known in self._layers.values() for a in known.values() if not _is_old(a, now)]
        return median(seen) / BELIEVED if seen else 0.0

    def informed(self, offer: Offer, now: float, least_s: float = 0.0) -> Offer:
        """The offer with the cost that experience gives it, and that it advertises where that is not below `least_s`."""
        told = None if offer.layer_s is None else max(offer.layer_s, least_s)
        layer_s = self.cost(offer.node, offer.info.span, told, now)
        row = _latest(self._rows, offer.node, offer.info.span, now)
        row_s = _believed_row_s(offer.load.row_s, layer_s or told) if row is None else row.value
        return replace(offer, load=replace(offer.load, layer_s=layer_s or 0.0, row_s=row_s))

    def rtts(self, now: float, advertised: Mapping[Pair, float] | None = None) -> dict[Pair, float]:
        """Round trips by `pair`, for Terms: those advertised, and over them those observed."""
        told = dict(advertised or {})
        seen = {key: a.faded(told.get(key), now) for key, a in self._rtts.items() if not _is_old(a, now)}
        return told | seen

    def forget(self, now: float) -> None:
        """Drop what is too old to count, so that memory follows the nodes in use. Call it once in a while."""
        self._rtts = {key: a for key, a in self._rtts.items() if not _is_old(a, now)}
        self._layers, self._rows = _young(self._layers, now), _young(self._rows, now)

    def __len__(self) -> int:
        """Figures held."""
        return len(self._rtts) + sum(map(len, (*self._layers.values(), *self._rows.values())))


def _believed_row_s(stated_s: float, layer_s: float | None) -> float:
    """What a node states of a row of a prompt, within what its decode steps say: one of many rows takes more than a BELIEVED-th
    of a row's share of it, and no row more than a step. 0: it states none."""
    if not stated_s or not layer_s:
        return stated_s
    return min(max(stated_s, layer_s * ROW_SHARE / BELIEVED), layer_s)


def _note(seen: _Spans, node: NodeId, span: Span, seconds: float, now: float) -> None:
    if 0 < seconds < math.inf:
        known = seen.setdefault(node, {})
        known[span] = _observed(known.get(span), seconds, now)


def _latest(seen: _Spans, node: NodeId, span: Span, now: float) -> _Average | None:
    """What was observed last of any part of `span`."""
    known = [a for part, a in seen.get(node, {}).items() if span.covers(part) and not _is_old(a, now)]
    return max(known, key=lambda a: a.at) if known else None


def _young(seen: _Spans, now: float) -> _Spans:
    kept = {node: {span: a for span, a in known.items() if not _is_old(a, now)} for node, known in seen.items()}
    return {node: known for node, known in kept.items() if known}


def _observed(known: _Average | None, value: float, now: float) -> _Average:
    return known.plus(value, now) if known else _Average(value, now)


def _is_old(average: _Average, now: float) -> bool:
    return now - average.at > FORGET_S
