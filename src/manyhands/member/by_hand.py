"""The swarm of a gateway without a directory (`local --api`, `serve --api`), in the form that `manyhands status` shows."""

import time
from dataclasses import replace
from typing import Any

from manyhands.core import NodeAddr
from manyhands.member.view import SwarmSnapshot, view_of
from manyhands.origin import Origin
from manyhands.route.offer import Offer
from manyhands.swarm.record import MAX_LIFETIME_S, Record


def view_of_origin(origin: Origin, swarm: str, model: str, api: str) -> dict[str, Any]:
    """The nodes that an origin knows, as a member's view has them. `model`: what the gateway calls it."""
    me, now = origin.node.transport.node, time.time()
    records = [_record(offer, model, now) for offer in origin.routes.known_offers()]
    edges = {node: health for (node, lane), health in origin.node.pool.health().items() if lane == "control"}
    sessions = len(origin.node.sessions)
    return view_of(SwarmSnapshot(swarm, me, now, records, edges, {}, sessions, api=api, directory="static"))


def _record(offer: Offer, model: str, now: float) -> Record:
    """What the node would say of itself if there were a directory."""
    info, addr = replace(offer.info, model_name=model), NodeAddr(offer.addr.host, offer.addr.port, offer.node)
    return Record(offer.node, offer.name, 1, now, MAX_LIFETIME_S, (addr,), None, "lan", info, offer.load, 0, 0, "")
