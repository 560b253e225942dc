"""What an origin has of a session that another one began: by which secret its hops hand it over, and how far it was."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from manyhands.core import Exactness, NodeId, Span
from manyhands.route.search import Offer
from manyhands.text.received import ReceivedText


class HopMark(NamedTuple):
    """A hop that has a session's cache: the first bytes of its node's key in hex, and its layers."""

    node: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Adoption:
    """`handle`: the stream's secret (wire/handle.py). `tokens` of the answer were drawn, over `route` (empty: none yet), which
    has been `exactness` so far. `received`: what its client says it has of their text, which may be anything."""

    handle: bytes
    route: tuple[HopMark, ...] = ()
    tokens: int = 0
    exactness: Exactness = "E0"
    received: ReceivedText | None = None


def resolve(marks: Sequence[HopMark], offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """The hops of `marks` as `offers` (at least one) have them. What none offers gets a stand-in, to be replaced."""
    return tuple([_resolve(mark, Span(mark.start, mark.end), offers) for mark in marks])


def _resolve(mark: HopMark, span: Span, offers: Sequence[Offer]) -> Offer:
    for offer in offers:
        if offer.node.startswith(mark.node) and offer.info.span.covers(span):
            return replace(offer, info=replace(offer.info, span=span))
    unknown = NodeId(mark.node.ljust(64, "0"))
    return replace(offers[0], node=unknown, name=mark.node, info=replace(offers[0].info, span=span))
