"""The nodes of a swarm file (swarm.nodes): which of them this one is, and whom to stay linked to. Pure."""

from collections.abc import Sequence

from manyhands.config import Listed
from manyhands.core import NodeAddr


def split_nodes(nodes: Sequence[str], here: NodeAddr) -> tuple[Listed | None, list[Listed]]:
    """The entry of the node that others reach at `here`, and the others. One file then serves all machines.

    Port 0: any; the entry with this host is meant if there is only one, and says the port. Raises BadRequest.
    """
    listed = [Listed.parse(text) for text in nodes]
    same = [entry for entry in listed if entry.addr.host == here.host and here.port in (0, entry.addr.port)]
    own = same[0] if len(same) == 1 else None
    return own, [entry for entry in listed if entry is not own]
