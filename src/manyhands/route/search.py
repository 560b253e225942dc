"""Which hops: from the spans that nodes offer to a chain that covers the model. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyhands.core import NodeAddr, NodeId, Span, SpanInfo
from manyhands.errors import ShardUnavailable, WeightsMismatch


@dataclass(frozen=True, slots=True)
class Offer:
    """A span that a node offers, and where to dial it."""

    addr: NodeAddr
    node: NodeId
    name: str
    info: SpanInfo

    def part(self, span: Span) -> "Offer":
        """The same node with `span`, which lies within what it holds."""
        return replace(self, info=replace(self.info, span=span))


def find_route(offers: Sequence[Offer], num_layers: int) -> tuple[Offer, ...]:
    """The chain of spans for [0, num_layers) with the fewest hops; among equals the one with the most free cache.

    Raises WeightsMismatch if the offers disagree on weights or precision and no one kind covers the model,
    ShardUnavailable naming the layers that nobody holds.
    """
    kinds = sorted({(o.info.model, o.info.precision) for o in offers})
    for kind in kinds:
        route = cover([o for o in offers if (o.info.model, o.info.precision) == kind], Span(0, num_layers))
        if route:
            return route
    if len(kinds) > 1:
        held = "; ".join(f"{o.name} {o.info.span}: {o.info.model[:12]} {o.info.precision}" for o in offers)
        raise WeightsMismatch(f"the nodes hold different weights or precision ({held}): serve the same on all of them")
    raise ShardUnavailable(f"nobody holds layers {_missing(offers, num_layers)} of {num_layers}: serve them on a node")


def cover(offers: Sequence[Offer], span: Span) -> tuple[Offer, ...]:
    """The chain of (parts of) offers for `span` with the fewest hops, then with the most free cache; () if there is none.

    A node may serve any part of what it holds, so each hop goes as far as its offer reaches (fewest hops: the greedy
    cover is optimal for intervals; here a pass over the borders, so that ties can be broken).
    """
    # Best chain that ends right before each layer reached so far. Layers only grow, so one pass in order settles them.
    best: dict[int, tuple[tuple[int, int], tuple[Offer, ...]]] = {span.start: ((0, 0), ())}
    for layer in range(span.start, span.end):
        if layer not in best:
            continue
        (hops, free), chain = best[layer]
        for offer in offers:
            if not offer.info.span.start <= layer < offer.info.span.end:
                continue
            end = min(offer.info.span.end, span.end)
            cost = (hops + 1, free - offer.info.free_tokens)
            if end not in best or cost < best[end][0]:
                best[end] = (cost, (*chain, offer.part(Span(layer, end))))
    return best.get(span.end, ((0, 0), ()))[1]


def _missing(offers: Sequence[Offer], num_layers: int) -> str:
    """Layers that no offer holds."""
    held = {layer for o in offers for layer in range(o.info.span.start, o.info.span.end)}
    gaps: list[Span] = []
    for layer in range(num_layers):
        if layer not in held:
            start = gaps.pop().start if gaps and gaps[-1].end == layer else layer
            gaps.append(Span(start, layer + 1))
    return ", ".join(map(str, gaps))
