"""Which nodes a node shares with: scope, allow list, deny list. Pure predicates, for transports (admission) and routes.

    off       no node
    lan       nodes at addresses of this machine or its local networks, and those on the allow list
    trusted   nodes on the allow list only, wherever they are
    public    every member of the swarm

The deny list beats everything. None of this replaces the swarm secret: only its holders get as far as this.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from manyhands.core import NodeId
from manyhands.errors import BadRequest
from manyhands.swarm.record import SCOPES, Scope


@dataclass(frozen=True, slots=True)
class Members:
    """Raises BadRequest for an unknown scope, or a list entry that is no node id."""

    scope: Scope = "lan"
    allow: frozenset[NodeId] = frozenset()
    deny: frozenset[NodeId] = frozenset()

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise BadRequest(f"scope is {self.scope!r}; it must be one of {', '.join(SCOPES)}")
        for node in self.allow | self.deny:
            if len(node) != 64 or not set(node) <= set("0123456789abcdef"):
                raise BadRequest(f"{node!r:.80} is not a node id (64 hex digits); `manyhands status` shows them")

    def may_speak(self, node: NodeId) -> bool:
        """Whether `node`, which proved its id, may talk to this node about the directory at all."""
        return self.scope != "off" and node not in self.deny

    def admits(self, node: NodeId, hosts: Iterable[str]) -> bool:
        """Whether to share work with `node`, known at `hosts` (none: only through a relay)."""
        scope = self.scope  # asked of every record at every look: no further calls
        if scope == "off" or node in self.deny:
            return False
        if scope == "public" or node in self.allow:
            return True
        return scope == "lan" and any(map(is_local, hosts))


@lru_cache(8192)  # asked of every record at every look
def is_local(host: str) -> bool:
    """Whether `host` is an address of this machine or of a private network. Names, but for localhost and .local, are not."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost" or host.endswith(".local")
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_link_local or any(mapped in network for network in _PRIVATE)


# RFC 1918 and RFC 4193. (`is_private` of the standard library also counts documentation and benchmark ranges.)
_PRIVATE = [ipaddress.ip_network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")]
