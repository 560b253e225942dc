"""Offers as numbers: what each span, and each leg between two, would cost on given terms. Pure; decides nothing."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from manyhands.core import NodeId, Span
from manyhands.route.chain import Floats, Part, Spans, cheapest, nanoseconds
from manyhands.route.cost import HOP_OVERHEAD_S, queue_s
from manyhands.route.offer import Offer, Pair, Terms, pair

# What a layer is taken to cost while no offer of the kind has been measured, and a round trip while none is known. They
# only have to be above 0 then: all routes are compared with the same figures, so fewer hops win.
DEFAULT_LAYER_S = 0.005
DEFAULT_RTT_S = 0.05
LAN_RTT_S = 0.001  # between nodes found on the origin's own network (HN-23's lower hop weight)


@dataclass(frozen=True, slots=True)
class Space:
    """Offers of one kind, those with most free cache first, and their costs: the earlier wins among equals."""

    offers: tuple[Offer, ...]
    spans: Spans

    @classmethod
    def of(cls, offers: Sequence[Offer], terms: Terms, between: Pair | None = None) -> "Space":
        """`between`: who sends to the first hop and whom the last sends to; the origin if None."""
        order = sorted(offers, key=lambda o: (-o.info.free_tokens, o.node, o.info.span, str(o.addr)))
        return cls(tuple(order), _spans(order, terms, between or (terms.origin, terms.origin)))

    def only(self, arithmetic: str) -> "Space":
        """Those of one arithmetic class."""
        keep = [i for i, o in enumerate(self.offers) if o.info.arithmetic == arithmetic]
        return Space(tuple(self.offers[i] for i in keep), self.spans.only(keep))

    def stretched(self, factors: Sequence[float]) -> "Space":
        """As if every offer, and every leg to it, took `factors` times as long."""
        return Space(self.offers, self.spans.stretched(np.array(factors)))

    def cheapest(self, run: Span) -> list[Part] | None:
        return cheapest(self.spans, run)

    def find(self, route: Sequence[Offer]) -> list[Part] | None:
        """An earlier route among the offers of today; None if one of its hops is not there any more."""
        parts = []
        for hop in route:
            same = (i for i, o in enumerate(self.offers) if o.node == hop.node and o.info.span.covers(hop.info.span))
            at = next(same, None)
            if at is None:
                return None
            parts.append(Part(at, hop.info.span))
        return parts

    def route(self, chain: Sequence[Part]) -> tuple[Offer, ...]:
        return tuple(self.offers[at].part(span) for at, span in chain)


def rtt_between(sender: NodeId, offer: Offer, terms: Terms) -> float:
    """As far as known without looking at others."""
    return terms.rtts.get(pair(sender, offer.node), LAN_RTT_S if offer.is_lan else DEFAULT_RTT_S)


def _spans(offers: Sequence[Offer], terms: Terms, between: Pair) -> Spans:
    fastest = min((o.layer_s for o in offers if o.layer_s), default=DEFAULT_LAYER_S)
    layer_s = [o.layer_s or fastest for o in offers]
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
    known = [
        (index[a], index[b], s) for (a, b), s in terms.rtts.items() if a in index and b in index and 0 <= s < math.inf
    ]
    table = np.full((len(index), len(index)), statistics.median(s for *_, s in known) if known else DEFAULT_RTT_S)
    near = [index[node] for node in {terms.origin, *(o.node for o in offers if o.is_lan)}]
    table[np.ix_(near, near)] = LAN_RTT_S
    away = {a + b - index[terms.origin]: s for a, b, s in known if index[terms.origin] in (a, b)}
    seen, far = list(away), np.array(list(away.values()))
    if away:
        table[np.ix_(seen, seen)] = np.maximum.outer(far, far)
    for a, b, s in known:
        table[a, b] = table[b, a] = s
    np.fill_diagonal(table, 0)
    return table
