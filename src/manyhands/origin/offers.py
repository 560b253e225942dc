"""From records of the directory to what routes are made of."""

from collections.abc import Iterable

from manyhands.core import ModelId, NodeAddr, Precision
from manyhands.route.offer import Offer
from manyhands.swarm.members import is_local
from manyhands.swarm.record import Record


def offers_of(records: Iterable[Record]) -> list[Offer]:
    """What these records offer, each as `offer_of`."""
    return [offer for record in records if (offer := offer_of(record))]


def offer_of(record: Record) -> Offer | None:
    """What a record offers to routes; None if it is only announced (a node that is still loading takes no session)."""
    if record.info is None or record.info.max_sessions == 0 or not record.addresses:
        return None
    addr = record.addresses[0]
    at = NodeAddr(addr.host, addr.port, record.node)
    is_lan = any(is_local(addr.host) for addr in record.addresses)
    return Offer(at, record.node, record.name, record.info, record.load, is_lan=is_lan)


def kind_of(offer: Offer) -> tuple[ModelId, Precision]:
    """What must be the same on all hops of a route."""
    return offer.info.model, offer.info.precision


def layers_of(offer: Offer) -> range:
    """The layers of its span."""
    return range(offer.info.span.start, offer.info.span.end)
