"""Is a route that has the beginning of a prompt cached worth more than a faster one that has not? Pure.

It saves computing those positions once; it costs its longer steps for every token.
"""

from collections.abc import Sequence
from typing import Final

from manyhands.route.chain import SPARE, RoutePart
from manyhands.route.offer import Offer, Terms
from manyhands.route.space import DEFAULT_LAYER_S, Space

# What a row of a prefill is taken to cost where it is not measured, as a share of a decode step: rather too little.
ROW_SHARE: Final = 1 / 16
# Tokens that an answer is taken to have where more are allowed.
USUAL_TOKENS: Final = 256


def gain_s(
    kept: Sequence[Offer], best: Sequence[Offer], offers: Sequence[Offer], terms: Terms, saved: int, max_tokens: int
) -> float:
    """Seconds that a request of up to `max_tokens` wins over `kept`, where `saved` positions are cached, against `best`.

    `offers` are those of today, with their costs. What of `kept` is not among them any more is taken to be as fast as `best`.
    """
    nodes = {o.node for o in (*kept, *best)}
    space = Space.of([*(o for o in offers if o.node in nodes), *best], terms)
    ours, others = space.find(kept), space.find(best)
    slower_s = 0.0
    if ours is not None and others is not None:
        slower_s = _token_s(space, ours) - _token_s(space, others)
    return saved * row_s(best) - max(0.0, slower_s) * min(max_tokens, USUAL_TOKENS)


def row_s(route: Sequence[Offer]) -> float:
    """Seconds of compute of one row of a prompt on all hops."""
    each = [offer.load.row_s or (offer.layer_s or DEFAULT_LAYER_S) * ROW_SHARE for offer in route]
    return sum(len(offer.info.span) * one for offer, one in zip(route, each, strict=True))


def _token_s(space: Space, chain: Sequence[RoutePart]) -> float:
    return (space.spans.cost(chain) % SPARE) / 1e9
