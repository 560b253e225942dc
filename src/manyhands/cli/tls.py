"""The transport of a command's node: by its key, for the swarm of a ticket, to and from the nodes that are admitted."""

from collections.abc import Callable
from pathlib import Path

from manyhands.config import SwarmConfig, home_from_env
from manyhands.core import NodeId
from manyhands.errors import BadRequest
from manyhands.net.reach import ReachTransport, reach_transport
from manyhands.net.tls import TlsPolicy
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.ticket import Ticket
from manyhands.wire.message import Hello, Lane


def own_key_file(key_file: Path | None) -> Path:
    """`key_file`, or this machine's: $MANYHANDS_HOME/node.key."""
    return key_file or home_from_env() / "node.key"


def own_key(key_file: Path | None) -> NodeKey:
    """The key in `own_key_file`, made if there is none."""
    return NodeKey.load_or_create(own_key_file(key_file))


def tls_transport(
    ticket: Ticket, key: NodeKey, swarm: SwarmConfig | None
) -> Callable[[Callable[[Lane], Hello]], ReachTransport]:
    """Makes a transport to and from the nodes that `swarm` admits; None: every member. Raises BadRequest if it admits none."""
    policy = None if swarm is None else policy_of(swarm)
    return lambda hello: reach_transport(key.private_key, ticket.secret, hello, members=policy)


def policy_of(swarm: SwarmConfig) -> TlsPolicy:
    """Whom to dial and to let in, where addresses are given by hand. Raises BadRequest for scope off."""
    if swarm.scope == "off":
        raise BadRequest(
            "scope is off: this machine shares with no other; set [swarm] scope, or MANYHANDS_SWARM_SCOPE=lan"
        )
    allow = frozenset(NodeId(node) for node in swarm.allow) if swarm.scope == "trusted" else None
    return TlsPolicy(allow=allow, deny=frozenset(NodeId(node) for node in swarm.deny))
