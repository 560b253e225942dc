"""Which hops: from the spans that nodes offer to a chain that covers the model. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.core import NodeAddr, NodeId, Span, SpanInfo
from manyhands.errors import ShardUnavailable, WeightsMismatch


@dataclass(frozen=True, slots=True)
class Offer:
    """A span that a node offers, and where to dial it."""

    addr: NodeAddr
    node: NodeId
    name: str
    info: SpanInfo


def find_route(offers: Sequence[Offer], num_layers: int) -> tuple[Offer, ...]:
    """The chain of spans [0, num_layers) with the fewest hops; among equals the one with the most free cache.

    Raises WeightsMismatch if the offers disagree on weights or precision and no one kind covers the model,
    ShardUnavailable naming the layers that nobody holds.
    """
    kinds = sorted({(o.info.model, o.info.precision) for o in offers})
    for kind in kinds:
        route = _shortest([o for o in offers if (o.info.model, o.info.precision) == kind], num_layers)
        if route:
            return route
    if len(kinds) > 1:
        held = "; ".join(f"{o.name} {o.info.span}: {o.info.model[:12]} {o.info.precision}" for o in offers)
        raise WeightsMismatch(f"the nodes hold different weights or precision ({held}): serve the same on all of them")
    raise ShardUnavailable(f"nobody holds layers {_missing(offers, num_layers)} of {num_layers}: serve them on a node")


def _shortest(offers: Sequence[Offer], num_layers: int) -> tuple[Offer, ...]:
    # Layers only grow along a chain, so one pass over the spans by their start settles every layer.
    best: dict[int, tuple[tuple[int, int], tuple[Offer, ...]]] = {0: ((0, 0), ())}
    for offer in sorted(offers, key=lambda o: o.info.span):
        at = best.get(offer.info.span.start)
        if at is None:
            continue
        (hops, free), chain = at
        cost = (hops + 1, free - offer.info.free_tokens)
        end = offer.info.span.end
        if end not in best or cost < best[end][0]:
            best[end] = (cost, (*chain, offer))
    return best.get(num_layers, ((0, 0), ()))[1]


def _missing(offers: Sequence[Offer], num_layers: int) -> str:
    """Layers that no offer holds; where all are held but not by spans that fit together, that is said."""
    held = {layer for o in offers for layer in range(o.info.span.start, o.info.span.end)}
    gaps: list[Span] = []
    for layer in range(num_layers):
        if layer not in held:
            start = gaps.pop().start if gaps and gaps[-1].end == layer else layer
            gaps.append(Span(start, layer + 1))
    return ", ".join(map(str, gaps)) or "in spans that fit end to end: all"
