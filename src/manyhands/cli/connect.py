"""How commands come to a node and an origin."""

from pathlib import Path
from typing import Any

from manyhands.config import home_from_env
from manyhands.core import EndsAt, NodeAddr, Precision
from manyhands.errors import BadRequest
from manyhands.net.tls import TlsTransport
from manyhands.node import Node
from manyhands.origin import Origin, OriginModel
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.ticket import Ticket
from manyhands.worker.execute import Device


def tls_node(ticket: Ticket, key_file: Path | None, *, is_ephemeral: bool = False, **options: Any) -> Node:
    """A node on TLS with the key in `key_file` (default: $MANYHANDS_HOME/node.key), or with a key of its own."""
    key = NodeKey.generate() if is_ephemeral else NodeKey.load_or_create(key_file or home_from_env() / "node.key")
    return Node(lambda hello: TlsTransport(key.private_key, ticket.secret, hello), **options)


async def load_origin(
    node: Node, folder: Path, precision: Precision, ends: EndsAt, device: Device, addrs: list[NodeAddr]
) -> Origin:
    """An origin of the model in `folder` that asks the nodes at `addrs`. Raises ModelError, BadRequest."""
    if not addrs:
        raise BadRequest("the ticket names no address: add one with `manyhands ticket add TICKET HOST:PORT`")
    model = await device.run(lambda: OriginModel(folder, precision, ends))
    return Origin(node, model, device, addrs)
