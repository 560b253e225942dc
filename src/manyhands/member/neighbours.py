"""Where this node is among the others: its relays, the nodes of the swarm file, which nodes are local."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from manyhands.config import Listed
from manyhands.core import NodeAddr, NodeId
from manyhands.swarm.members import Members, is_local
from manyhands.swarm.record import Record, Scope
from manyhands.swarm.record_store import MAX_NOTES


@dataclass(frozen=True, slots=True)
class Neighbours(Members):
    """Members, and this machine's own address: what runs here is as local as can be, though the address be a public one."""

    here: str = ""

    def admits(self, node: NodeId, hosts: Iterable[str]) -> bool:
        return Members.admits(self, node, ["localhost" if host == self.here else host for host in hosts])


def split_nodes(nodes: Sequence[str], here: NodeAddr) -> tuple[Listed | None, list[Listed]]:
    """The entry of the node that others reach at `here`, and the others. One file then serves all machines.

    Port 0: any; the entry with this host is meant if there is only one, and says the port. Raises BadRequest.
    """
    listed = [Listed.parse(text) for text in nodes]
    same = [entry for entry in listed if entry.addr.host == here.host and here.port in (0, entry.addr.port)]
    own = same[0] if len(same) == 1 else None
    return own, [entry for entry in listed if entry is not own]


def say_not_admitted(records: Iterable[Record], scope: Scope) -> list[str]:
    """Why nodes are not shared with, and what would change that: a line for each, of MAX_NOTES at most."""
    nodes = {record.node: record for record in records}
    return [_say_not_admitted(record, scope) for record in islice(nodes.values(), MAX_NOTES)]


def _say_not_admitted(record: Record, scope: Scope) -> str:
    where = ", ".join(str(addr) for addr in record.addresses) or "an unknown address"
    ways = f"start with --allow {record.node}" + (" or --scope public" if scope == "lan" else "")
    return f"{record.name} at {where} is not used: scope {scope} does not admit it; {ways}"


def relays_among(addresses: Iterable[NodeAddr], me: NodeId) -> tuple[NodeAddr, ...]:
    """Where a node that was told no relay may wait for calls: at members on other networks, each once."""
    found = (NodeAddr(a.host, a.port) for a in addresses if "%" not in a.host and not is_local(a.host) and a.node != me)
    return tuple(dict.fromkeys(found))
