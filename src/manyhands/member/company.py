"""The members of a swarm as machines to plan with: what their records state, and what this member's own links show."""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from manyhands.core import NodeId
from manyhands.place.joining import Company
from manyhands.place.machines import Machine
from manyhands.place.strategy import Holding
from manyhands.route.edges import stated_rtts
from manyhands.swarm.record import NEAR_DIGITS, Record

if TYPE_CHECKING:
    from manyhands.member.hosting import Hosting

UNKNOWN_RTT_S: Final = 0.05  # between two nodes of which neither has measured it


def company_of(hosting: "Hosting", others: Sequence[Holding], layer_s: float) -> Company:
    """This member, which computes a layer in `layer_s`, and those that hold `others`.

    Requests begin at the first node of its ticket.
    """
    member = hosting.member
    names = {h.node for h in others}
    records = {record.node: record for record in member.records() if record.node in names}
    usual_s = statistics.median([h.load.layer_s for h in others if h.load.layer_s] or [layer_s])
    speeds = {h.node: h.load.layer_s or usual_s for h in others}
    first = next((addr.node for addr in member.ticket.addresses if addr.node in records), None)
    origin = first or member.id
    rtts = _rtts(member.id, records, {node: edge.rtt_s for node, edge in member.edges().items()})
    own_bytes = member.config.memory_bytes - hosting.budget.kept_bytes - hosting.budget.ends_bytes

    def far_s(node: NodeId) -> float:
        return 0.0 if node == origin else rtts.get(frozenset((node, origin)), UNKNOWN_RTT_S)

    here = Machine(member.id, max(1, own_bytes), layer_s, rtt_s=far_s(member.id), cores=member.config.cores)
    machines = {member.id: here}
    for node, record in records.items():
        uplink_Bps = record.uplink_Bps or math.inf
        machines[node] = Machine(
            node,
            max(1, record.memory_bytes),
            speeds[node],
            rtt_s=far_s(node),
            uplink_Bps=uplink_Bps,
            cores=max(1, record.cores),
        )
    return Company(member.id, origin, machines, rtts)


def _rtts(me: NodeId, records: dict[NodeId, Record], own: dict[NodeId, float | None]) -> dict[frozenset[str], float]:
    """Seconds between members, by the names of both."""
    known = {node: rtt_s for node, rtt_s in own.items() if rtt_s is not None and node in records}
    said = {node: {near.node: near.rtt_s for near in record.near} for node, record in records.items()}
    found = {frozenset[str](pair): rtt_s for pair, rtt_s in stated_rtts(said, NEAR_DIGITS, me, known).items()}
    found.update({frozenset[str]((me, node)): rtt_s for node, rtt_s in known.items()})
    return found
