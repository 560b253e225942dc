"""Offers as numbers: what each span, and each leg between two, would cost on given terms. Pure; decides nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from manyhands.core import NodeId, Span
from manyhands.route.chain import Floats, RoutePart, Spans, nanoseconds, within
from manyhands.route.cost import HOP_OVERHEAD_S, queue_s
from manyhands.route.offer import Offer, Pair, Terms, pair

# What a layer is taken to cost while no offer of the kind has been measured, and a round trip while none is known. They
# only have to be above 0 then: all routes are compared with the same figures, so fewer hops win.
DEFAULT_LAYER_S = 0.005
DEFAULT_RTT_S = 0.05
APART_RTT_S = (
    2.0  # added for two that could not reach each other: a ring that takes a second more is better than a star
)
LAN_RTT_S = 0.001  # between nodes found on the origin's own network (HN-23's lower hop weight)


@dataclass(frozen=True, slots=True)
class Space:
    """Offers of one kind, those with most free cache first, and their costs: the earlier wins among equals. Chains have at most
    `max_hops` hops, and are looked for at `price` a hop (chain.py:within)."""

    offers: tuple[Offer, ...]
    spans: Spans
    max_hops: int
    price: int = 0
    _found: dict[Span, list[RoutePart] | None] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, offers: Sequence[Offer], terms: Terms, between: Pair | None = None) -> "Space":
        """`between`: the nodes before the first hop and after the last; the origin if None."""
        order = sorted(offers, key=lambda o: (-o.info.free_tokens, o.node, o.info.span, o.addr.host, o.addr.port))
        return cls(tuple(order), _spans(order, terms, between or (terms.origin, terms.origin)), terms.rules.max_hops)

    def only(self, arithmetic: str) -> "Space":
        """The offers of one arithmetic class."""
        keep = [i for i, o in enumerate(self.offers) if o.info.arithmetic == arithmetic]
        return Space(tuple(self.offers[i] for i in keep), self.spans.only(keep), self.max_hops, self.price)

    def stretched(self, factors: Sequence[float]) -> "Space":
        """As if every offer, and every leg to it, took `factors` times as long."""
        return Space(self.offers, self.spans.stretched(np.array(factors)), self.max_hops, self.price)

    def priced(self, run: Span) -> "Space":
        """At the price of a hop that the limit of hops asks for, which then holds for parts of this space as well."""
        if run in self._found:
            return self
        chain, price = within(self.spans, run, self.max_hops)
        return replace(self, price=price, _found={run: chain})

    def cheapest(self, run: Span) -> list[RoutePart] | None:
        """Looked for once."""
        if run not in self._found:
            self._found[run] = within(self.spans, run, self.max_hops, self.price).chain
        return self._found[run]

    def find(self, route: Sequence[Offer]) -> list[RoutePart] | None:
        """An earlier route among the offers of today; None if one of its hops is not there any more, or it has too many."""
        parts: list[RoutePart] = []
        if len(route) > self.max_hops:
            return None
        for hop in route:
            same = (i for i, o in enumerate(self.offers) if o.node == hop.node and o.info.span.covers(hop.info.span))
            at = next(same, None)
            if at is None:
                return None
            parts.append(RoutePart(at, hop.info.span))
        return parts

    def route(self, chain: Sequence[RoutePart]) -> tuple[Offer, ...]:
        return tuple(self.offers[at].part(span) for at, span in chain)


def rtt_between(sender: NodeId, offer: Offer, terms: Terms) -> float:
    """As far as known without looking at others."""
    rtt_s = terms.rtts.get(pair(sender, offer.node), -1.0)
    guess = LAN_RTT_S if offer.is_lan else DEFAULT_RTT_S
    return (rtt_s if 0 <= rtt_s < math.inf else guess) + APART_RTT_S * (pair(sender, offer.node) in terms.apart)


def _spans(offers: Sequence[Offer], terms: Terms, between: Pair) -> Spans:
    measured = [o.layer_s for o in offers]
    fastest = min(filter(None, measured), default=DEFAULT_LAYER_S)
    layer_s = [s or fastest for s in measured]
    waits = [queue_s(o.load, s, len(o.info.span)) for o, s in zip(offers, layer_s, strict=True)]
    nodes = list(dict.fromkeys((terms.origin, *between, *(o.node for o in offers))))
    index = {node: i for i, node in enumerate(nodes)}
    uplinks = {o.node: o.uplink_Bps for o in offers} | {terms.origin: terms.uplink_Bps}
    sending = [_sending_s(offers, uplinks.get(node, math.inf)) for node in nodes]
    legs = nanoseconds(_rtts(index, offers, terms) / 2 + np.array(sending)[:, None])
    at = [index[o.node] for o in offers]
    return Spans(
        start=np.array([o.info.span.start for o in offers], dtype=np.int64),
        end=np.array([o.info.span.end for o in offers], dtype=np.int64),
        layer=nanoseconds(layer_s),
        fixed=nanoseconds(np.array(waits) + HOP_OVERHEAD_S),
        entry=legs[index[between[0]], at],
        legs=legs[np.ix_(at, at)],
        closing=legs[at, index[between[1]]],
        is_spare=np.array([o.info.is_spare for o in offers], dtype=np.bool_),
    )


def _sending_s(offers: Sequence[Offer], uplink_Bps: float) -> float:
    """Seconds for which a position as sent, in the dtype it was computed in (C-17), keeps the uplink busy."""
    info = offers[0].info
    return info.hidden_size * (4 if info.precision == "fp32" else 2) / uplink_Bps if uplink_Bps > 0 else 0.0


def _rtts(index: Mapping[NodeId, int], offers: Sequence[Offer], terms: Terms) -> Floats:
    """Round trips between all nodes of `index`, in seconds.

    Measured ones first. Else, as far apart as the farther of the two is from the origin; else that of a LAN if both are on
    the origin's; else the median of what is known.
    """
    at, seconds = _known(index, terms)
    table = np.full((len(index), len(index)), np.median(seconds) if len(seconds) else DEFAULT_RTT_S)
    origin = index[terms.origin]
    near = [index[node] for node in {terms.origin, *(o.node for o in offers if o.is_lan)}]
    table[np.ix_(near, near)] = LAN_RTT_S
    to_origin = (at == origin).any(axis=1)
    seen, far = at[to_origin].sum(axis=1) - origin, seconds[to_origin]
    table[np.ix_(seen, seen)] = np.maximum.outer(far, far)
    table[at[:, 0], at[:, 1]] = table[at[:, 1], at[:, 0]] = seconds
    for a, b in terms.apart:
        if a in index and b in index:
            table[[index[a], index[b]], [index[b], index[a]]] += APART_RTT_S
    np.fill_diagonal(table, 0)
    return table


def _known(index: Mapping[NodeId, int], terms: Terms) -> tuple[npt.NDArray[np.intp], Floats]:
    """Measured round trips between nodes of `index`: their indices (N, 2) and the seconds (N,)."""
    named = [(index.get(a, -1), index.get(b, -1), s) for (a, b), s in terms.rtts.items()]
    rows = np.array(named, dtype=np.float64).reshape(-1, 3)
    at, seconds = rows[:, :2].astype(np.intp), rows[:, 2]
    usable = (at >= 0).all(axis=1) & (seconds >= 0) & (seconds < math.inf)
    return at[usable], seconds[usable]
