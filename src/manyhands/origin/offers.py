"""From records of the directory to what routes are made of."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from manyhands.core import ModelId, NodeAddr, NodeId, Precision
from manyhands.route.edges import stated_rtts
from manyhands.route.offer import Offer, Pair
from manyhands.swarm.members import is_local
from manyhands.swarm.record import NEAR_DIGITS, Record


def offers_of(records: Iterable[Record]) -> list[Offer]:
    """What these records offer, each as `offer_of`."""
    return [offer for record in records if (offer := offer_of(record))]


def shared(records: Sequence[Record], most: int) -> list[Record]:
    """At most `most` of them, of each node one in turn: records of few nodes leave those of others their place."""
    if len(records) <= most:
        return list(records)
    turns: Counter[NodeId] = Counter()
    ranked: list[tuple[int, int]] = []
    for number, record in enumerate(records):
        ranked.append((turns[record.node], number))
        turns[record.node] += 1
    return [records[number] for _, number in sorted(ranked)[:most]]


def offer_of(record: Record) -> Offer | None:
    """What a record offers to routes; None if it is only announced (a node that is still loading takes no session)."""
    if record.info is None or record.info.max_sessions == 0 or not record.addresses:
        return None
    addr = record.addresses[0]
    at = NodeAddr(addr.host, addr.port, record.node)
    is_lan = any(is_local(addr.host) for addr in record.addresses)
    return Offer(at, record.node, record.name, record.info, record.load, record.uplink_Bps or math.inf, is_lan)


def rtts_of(records: Iterable[Record], origin: NodeId, own: Mapping[NodeId, float]) -> dict[Pair, float]:
    """Round trips between other nodes, as these records state them (route/edges.py). `own`: those of the origin."""
    said = {record.node: {near.node: near.rtt_s for near in record.near} for record in records}
    return stated_rtts(said, NEAR_DIGITS, origin, own)


def kind_of(offer: Offer) -> tuple[ModelId, Precision]:
    """What must be the same on all hops of a route."""
    return offer.info.model, offer.info.precision
