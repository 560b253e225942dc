"""How commands come to a node and an origin."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.cli.drafters import load_drafter
from manyhands.cli.progress import doing
from manyhands.cli.tls import policy_of, tls_transport
from manyhands.config import RequestConfig, SwarmConfig
from manyhands.core import EndsAt, NodeAddr, NodeId, Precision
from manyhands.errors import BadRequest
from manyhands.net.reach import Book, ReachTransport, reach_transport
from manyhands.net.relay.relay import RelayLimits
from manyhands.net.tls import TlsPolicy
from manyhands.origin import Origin, OriginModel
from manyhands.origin.node import FullNode
from manyhands.swarm.directory import Directory
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.ticket import Ticket
from manyhands.wire.message import Hello, Lane
from manyhands.worker.execute import Device
from manyhands.worker.loading import Loading

if TYPE_CHECKING:
    from manyhands.member.config import MemberConfig
    from manyhands.member.member import Member


def tls_node(ticket: Ticket, key: NodeKey | None, *, swarm: SwarmConfig | None = None, **options: Any) -> FullNode:
    """A node with every role and the key given; None: one that lasts as long as it does.

    It dials the nodes that `swarm` admits; None: every member. Raises BadRequest if it admits none.
    """
    key = key or NodeKey.generate()
    return FullNode(tls_transport(ticket, key, swarm), key.private_key, **options)


def visitor(ticket: Ticket, swarm: SwarmConfig, request: RequestConfig) -> "Member":
    """A member that only asks: with a key of its own, unheard of by the others. Raises BadRequest for scope off."""
    from manyhands.member.config import MemberConfig
    from manyhands.member.member import Member

    key, policy = NodeKey.generate(), policy_of(swarm)
    config = MemberConfig(
        name="origin",
        listen=NodeAddr("0.0.0.0", 0),
        memory_bytes=0,
        scope=swarm.scope,  # type: ignore[arg-type]  # it was checked
        allow=frozenset(NodeId(node) for node in swarm.allow),
        deny=policy.deny,
        is_visitor=True,
    )
    return Member(key, ticket, config, member_transport(key, ticket, config), request=request)


def member_transport(
    key: NodeKey, ticket: Ticket, config: "MemberConfig"
) -> Callable[[Callable[[Lane], Hello], Book], ReachTransport]:
    """Makes a member's way in and out: every way there is, its allow and deny lists, and a relay for the others."""
    policy = TlsPolicy(allow=config.allow if config.scope == "trusted" else None, deny=config.deny)
    iroh = None if config.iroh_url is None else [config.iroh_url]

    def make(hello: Callable[[Lane], Hello], book: Book) -> ReachTransport:
        return reach_transport(
            key.private_key, ticket.secret, hello, book=book, limits=RelayLimits(), iroh_urls=iroh, members=policy
        )

    return make


async def load_origin(
    node: FullNode,
    folder: Path,
    precision: Precision,
    ends: EndsAt,
    device: Device,
    addrs: list[NodeAddr],
    directory: Directory | None = None,
    *,
    called: str,
) -> Origin:
    """An origin of the model in `folder`, `called` so by people, that asks the nodes at `addrs`, and `directory`.

    Raises ModelError, BadRequest.
    """
    if not addrs:
        raise BadRequest("the ticket names no address: add one with `manyhands ticket add TICKET HOST:PORT`")
    with doing(f"reading the tokenizer of {called}") as bar:
        loading = Loading(bar, called)
        model = await device.run(lambda: OriginModel(folder, precision, ends, device.num_threads, loading))
    return Origin(node, model, device, addrs, directory, await load_drafter(model, node.request.draft))
