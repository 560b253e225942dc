"""Which of very many offers a route is looked for among, so that the search takes bounded time. Pure.

What makes an offer one of many is a peer's records, and the search takes their number squared. So of more than MOST_OFFERS
those are compared that promise most on each layer, with a chain of the fewest hops among them: what could be covered, in as few
hops, still can be.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from manyhands.core import NodeId, Span
from manyhands.route.chain import shortest
from manyhands.route.cost import HOP_OVERHEAD_S, queue_s
from manyhands.route.offer import Offer, Terms
from manyhands.route.permit import has_room
from manyhands.route.space import DEFAULT_LAYER_S, rtt_between

MOST_OFFERS: Final = 64
LEAST_PICKED: Final = 32  # beside the chain of the fewest hops, however long that is
MOST_OF_NODE: Final = 8  # spans that one node has among the picked ones


def shortlist(offers: Sequence[Offer], run: Span, terms: Terms) -> list[Offer]:
    """All of up to MOST_OFFERS; of more the most promising of each layer, a shortest chain and the hops of the present route:
    at most MOST_OFFERS, or LEAST_PICKED beside a longer chain and route. They cover `run` together."""
    if len(offers) <= MOST_OFFERS:
        return list(offers)
    fastest = min((o.layer_s for o in offers if o.layer_s), default=DEFAULT_LAYER_S)
    ranked = sorted(offers, key=lambda o: (*_rank(o, terms, fastest), o.node, o.info.span, o.addr.host, o.addr.port))
    spans = [o.info.span for o in ranked]
    needed = {*shortest(spans, run), *_present(ranked, terms.current)}
    most = max(LEAST_PICKED, MOST_OFFERS - len(needed))
    picked = set(islice(_picks(ranked, run), most))
    return [ranked[at] for at in sorted(needed | picked)]


def _rank(offer: Offer, terms: Terms, fastest: float) -> tuple[bool, bool, bool, float]:
    """What loads, is full or a spare comes last; then by the policy: seconds of a layer if all of the span is used, or the
    queue and how far it reaches."""
    info, load = offer.info, offer.load
    bars = not info.is_loaded, not has_room(offer, terms), info.is_spare
    if terms.rules.policy == "greedy":
        return *bars, max(0, load.queue) - len(info.span) / (info.num_layers + 1)
    layer_s = offer.layer_s or fastest
    once_s = queue_s(load, layer_s, len(info.span)) + HOP_OVERHEAD_S + rtt_between(terms.origin, offer, terms)
    return *bars, layer_s + once_s / len(info.span)


def _present(ranked: Sequence[Offer], current: Sequence[Offer]) -> Iterator[int]:
    """The first that holds each hop of the route so far."""
    parts: dict[NodeId, list[Span]] = {}
    for hop in current:
        parts.setdefault(hop.node, []).append(hop.info.span)
    for at, offer in enumerate(ranked):
        left = parts.get(offer.node, [])
        if held := [span for span in left if offer.info.span.covers(span)]:
            parts[offer.node] = [span for span in left if span not in held]
            yield at


def _picks(ranked: Sequence[Offer], run: Span) -> Iterator[int]:
    """In turn: those that bring some layer its first holder, its first two, its first four and so on."""
    masks = [_layers(offer.info.span, run) for offer in ranked]
    levels: list[int] = []  # layers that more than so many picked ones hold
    of_node: Counter[NodeId] = Counter()
    left: Sequence[int] = range(len(ranked))
    depth = 1
    while left:
        later: list[int] = []
        for at in left:
            node = ranked[at].node
            if len(levels) >= depth and not masks[at] & ~levels[depth - 1]:
                later.append(at)
            elif of_node[node] < MOST_OF_NODE:
                of_node[node] += 1
                _add(levels, masks[at])
                yield at
        left, depth = later, 2 * depth


def _add(levels: list[int], layers: int) -> None:
    for index, level in enumerate(levels):
        levels[index], layers = level | layers, level & layers
        if not layers:
            return
    levels.append(layers)


def _layers(span: Span, run: Span) -> int:
    """A bit for each layer of `run` that `span` holds."""
    start, end = max(span.start, run.start), min(span.end, run.end)
    return (1 << end) - (1 << start) if start < end else 0
