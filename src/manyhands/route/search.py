"""Which hops: from the spans that nodes offer to a chain that covers the model. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from manyhands.core import ModelId, NodeAddr, NodeId, Precision, Span, SpanInfo
from manyhands.errors import ShardUnavailable, WeightsMismatch

Kind = tuple[ModelId, Precision]


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


def find_route(offers: Sequence[Offer], num_layers: int, wanted: Kind | None = None) -> tuple[Offer, ...]:
    """The chain of spans for [0, num_layers) with the fewest spares and hops; among equals that with most free cache.

    `wanted`: weights and precision to prefer, if they cover the model. Raises WeightsMismatch if the offers disagree on
    weights or precision and no one kind covers the model, ShardUnavailable naming the layers that nobody holds.
    """
    kinds = sorted({(o.info.model, o.info.precision) for o in offers}, key=lambda kind: (kind != wanted, kind))
    for kind in kinds:
        route = cover([o for o in offers if (o.info.model, o.info.precision) == kind], Span(0, num_layers))
        if route:
            return route
    if len(kinds) > 1:
        held = "; ".join(f"{o.name} {o.info.span}: {o.info.model[:12]} {o.info.precision}" for o in offers)
        raise WeightsMismatch(f"the nodes hold different weights or precision ({held}): serve the same on all of them")
    raise ShardUnavailable(f"nobody holds layers {_missing(offers, num_layers)} of {num_layers}: serve them on a node")


class _Cost(NamedTuple):
    """Of a chain, compared in this order: spares used, hops, minus the free cache."""

    spares: int
    hops: int
    free: int

    def plus(self, offer: Offer) -> "_Cost":
        return _Cost(self.spares + offer.info.is_spare, self.hops + 1, self.free - offer.info.free_tokens)


def cover(offers: Sequence[Offer], span: Span) -> tuple[Offer, ...]:
    """The cheapest chain of (parts of) offers for `span`: fewest spares, then fewest hops, then most free cache.

    () if there is none. A node may serve any part of what it holds; each hop goes as far as its offer reaches or to where
    another begins, so a pass over the layers settles the best chain to each.
    """
    best: dict[int, tuple[_Cost, tuple[Offer, ...]]] = {span.start: (_Cost(0, 0, 0), ())}
    borders = {o.info.span.start for o in offers} | {span.end}
    for layer in range(span.start, span.end):
        if layer not in best:
            continue
        so_far, chain = best[layer]
        for offer in offers:
            if not offer.info.span.start <= layer < offer.info.span.end:
                continue
            reach = min(offer.info.span.end, span.end)
            cost = so_far.plus(offer)
            for end in {reach} | {b for b in borders if layer < b < reach}:
                if end not in best or cost < best[end][0]:
                    best[end] = (cost, (*chain, offer.part(Span(layer, end))))
    return best[span.end][1] if span.end in best else ()


def _missing(offers: Sequence[Offer], num_layers: int) -> str:
    """Layers that no offer holds."""
    held = {layer for o in offers for layer in range(o.info.span.start, o.info.span.end)}
    gaps: list[Span] = []
    for layer in range(num_layers):
        if layer not in held:
            start = gaps.pop().start if gaps and gaps[-1].end == layer else layer
            gaps.append(Span(start, layer + 1))
    return ", ".join(map(str, gaps))
