"""Which offers may be hops of a request: by trust and scope, by its rules for the first and last layers, by room. Pure."""

from collections.abc import Sequence

from manyhands.core import Span
from manyhands.route.classes import unheld
from manyhands.route.offer import Offer, Terms


def admitted(offers: Sequence[Offer], terms: Terms) -> list[Offer]:
    """The offers that trust and scope let take part."""
    return [o for o in offers if terms.admits is None or terms.admits(o)]


def with_ends_at_edges(offers: Sequence[Offer], num_layers: int) -> list[Offer]:
    """`offers` for an origin that holds no ends: the first and the last layer only of nodes that hold embedding and head."""
    inner = Span(1, num_layers - 1) if num_layers > 2 else None
    found = [o if o.info.has_ends else _within(o, inner) for o in offers]
    return [o for o in found if o is not None]


def _within(offer: Offer, run: Span | None) -> Offer | None:
    """The part of an offer that lies in `run`; None if there is none."""
    if run is None or not offer.info.span.overlaps(run):
        return None
    return offer.part(Span(max(offer.info.span.start, run.start), min(offer.info.span.end, run.end)))


def permitted(offers: Sequence[Offer], run: Span, terms: Terms) -> list[Offer]:
    """`offers` of one kind as the rules of the request leave them: others only for layers that the origin does not keep for
    itself, those it does not trust only for layers that are not kept to trusted nodes, the origin's own only for layers that
    no other may compute, unless it may be a hop everywhere."""
    rules, own = terms.rules, [o for o in offers if o.node == terms.origin]
    trusted = rules.own_first, rules.own_last
    rest = max(rules.own_first, rules.trusted_first), max(rules.own_last, rules.trusted_last)
    if rules.allow_self and not any(rest):
        return list(offers)
    others = []
    for offer in offers:
        if offer.node != terms.origin:
            first, last = trusted if terms.trusts is None or terms.trusts(offer) else rest
            start, end = max(offer.info.span.start, first), min(offer.info.span.end, run.end - last)
            others += [offer.part(Span(start, end))] if start < end else []
    return [*others, *own] if rules.allow_self else filled(others, own, run)


def has_room(offer: Offer, terms: Terms) -> bool:
    """Whether it can take the session, or has it already."""
    if any(offer.node == o.node for o in terms.current):
        return True
    return offer.info.free_tokens >= terms.num_tokens and offer.load.sessions < offer.info.max_sessions


def filled(offers: list[Offer], others: Sequence[Offer], run: Span) -> list[Offer]:
    """`offers`, and of `others` the parts of `run` that no offer holds."""
    if not others:
        return offers
    gaps = [gap for gap in gaps_of(offers, run.end) if gap.end > run.start]
    return offers + [
        o.part(Span(max(gap.start, o.info.span.start, run.start), min(gap.end, o.info.span.end)))
        for o in others
        for gap in gaps
        if max(gap.start, o.info.span.start, run.start) < min(gap.end, o.info.span.end)
    ]


def gaps_of(offers: Sequence[Offer], num_layers: int) -> list[Span]:
    """Runs of layers that no offer holds."""
    return unheld((o.info.span for o in offers), num_layers)
