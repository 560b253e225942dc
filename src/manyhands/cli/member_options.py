"""The options of `up` and `join`, and the member that they describe."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli import options
from manyhands.cli.gateway import refused_at
from manyhands.core import NodeAddr, NodeId, Span
from manyhands.errors import BadRequest

if TYPE_CHECKING:
    from manyhands.config_file import Settings
    from manyhands.member.config import MemberConfig
    from manyhands.swarm.identity import NodeKey
    from manyhands.swarm.ticket import Ticket

Layers = Annotated[str, typer.Option("--layers", help='Layers to host, for example "0-7"; default: what helps most.')]
Memory = Annotated[str, typer.Option("--memory", help="What this machine may give, as in 6GB; default: what is free.")]
Listen = Annotated[
    str, typer.Option("--listen", help="Address to accept peers at; default: every interface, any port.")
]
Advertise = Annotated[str, typer.Option("--advertise", help="Address for others, if it is not the one listened at.")]
Name = Annotated[str, typer.Option("--name", help="What to call this node; default: the host's name.")]
Key = Annotated[Path | None, typer.Option("--key", help="This node's key file; default: $MANYHANDS_HOME/node.key.")]
Scope = Annotated[str, typer.Option("--scope", help="With whom to share: off, lan, trusted or public.")]
Relay = Annotated[
    list[str] | None,
    typer.Option("--relay", help="HOST:PORT of a member that forwards, or the URL of an iroh relay; may be repeated."),
]
Allow = Annotated[list[str] | None, typer.Option("--allow", help="Node id to share with; may be repeated.")]
MaxPipes = Annotated[
    int, typer.Option("--max-pipes", min=1, help="Copies of the model to aim at, before the weakest layers get help.")
]
Strategy = Annotated[
    str,
    typer.Option("--strategy", help="How to choose layers: cover, measured, uniform or capacity (docs/placement.md)."),
]
Ends = Annotated[
    bool, typer.Option("--ends", help="Hold embedding or head too, where the first or last layers are served here.")
]
Deny = Annotated[list[str] | None, typer.Option("--deny", help="Node id to refuse; may be repeated.")]


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """What a member gives, where it listens, and with whom it shares."""

    layers: Layers = ""
    memory: Memory = ""
    spare: options.Spare = False
    can_load: options.CanLoad = 0
    listen: Listen = ""
    advertise: Advertise = ""
    name: Name = ""
    key: Key = None
    scope: Scope = "lan"
    relay: Relay = None
    allow: Allow = None
    deny: Deny = None
    threads: options.Threads = None
    device: options.Device = "cpu"
    max_pipes: MaxPipes = 2
    strategy: Strategy = "cover"
    ends: Ends = False

    @property
    def node_name(self) -> str:
        """What the node is called. Raises BadRequest for what can be no name."""
        from manyhands.member.home import check_name

        return check_name(self.name or socket.gethostname())

    def check(self) -> None:
        """Raise BadRequest for what is not written as it should be: before a code is asked for or anything is loaded."""
        from manyhands.place.machines import parse_bytes

        if self.memory:
            parse_bytes(self.memory)
        if self.layers:
            Span.parse(self.layers)
        for name, text in (("--listen", self.listen), ("--advertise", self.advertise)):
            if text:
                options.address(name, text)


def config_of(wish: MemberOptions, name: str, key: "NodeKey", ticket: "Ticket", found: "Settings") -> "MemberConfig":
    """What the options and the configuration say. Raises BadRequest."""
    from manyhands.member.config import MemberConfig
    from manyhands.member.neighbours import relays_among, split_nodes
    from manyhands.net.own_address import reachable
    from manyhands.place.joining import strategy_of
    from manyhands.place.machines import parse_bytes
    from manyhands.resources import num_cores
    from manyhands.swarm.members import Members
    from manyhands.swarm.record import MAX_ADDRESSES
    from manyhands.worker.runner import device_name

    urls = [relay for relay in wish.relay or () if "://" in relay]
    named = [options.address("--relay", relay) for relay in wish.relay or () if "://" not in relay]
    if len(urls) > 1:
        raise BadRequest(f"--relay names {len(urls)} iroh relays; a node listens at one: give one URL")
    if len(named) > (most := MAX_ADDRESSES - 1 - len(urls)):
        raise BadRequest(f"--relay names {len(named)} members; others are told of {most} at most: name fewer")
    members = Members(
        wish.scope,  # type: ignore[arg-type]  # it checks
        frozenset(NodeId(node) for node in wish.allow or ()),
        frozenset(NodeId(node) for node in wish.deny or ()),
    )
    shown = options.address("--advertise", wish.advertise) if wish.advertise else None
    here, others = split_nodes(
        found.swarm.nodes, shown or reachable(options.address("--listen", wish.listen or "0.0.0.0:0"))
    )
    listed = f"0.0.0.0:{here.addr.port}" if here else ""
    return MemberConfig(
        name=name,
        listen=_listen_at(wish.listen or listed, key, ticket),
        memory_bytes=parse_bytes(wish.memory) if wish.memory else _free_memory(),
        advertise=shown,
        relays=tuple(named) or relays_among(ticket.addresses, key.node_id),
        is_one_relay_enough=not named,
        iroh_url=urls[0] if urls else None,
        scope=members.scope,
        allow=members.allow,
        deny=members.deny,
        nodes=tuple(other.addr for other in others),
        span=Span.parse(wish.layers) if wish.layers else here.span if here else None,
        cores=num_cores(),
        device=device_name(),
        balance=found.balance,
        is_spare=wish.spare,
        can_load=wish.can_load,
        max_pipes=wish.max_pipes,
        strategy=strategy_of(wish.strategy),
        has_ends=wish.ends,
    )


def _free_memory() -> int:
    """Bytes that are free where layers are computed. Raises BadRequest where torch does not tell them of its device."""
    from manyhands.engine.devices import gpu, torch_device
    from manyhands.resources import available_memory

    if (number := gpu()) is not None:
        from manyhands.worker.gpu import open_gpu

        return int(open_gpu(number).free_bytes())
    device = torch_device()
    if device in (None, "torch-cpu"):
        return available_memory()
    from manyhands.worker.choice import device_part

    free: int | None = device_part(device).free_memory(device)
    if free is None:
        raise BadRequest(f"torch does not tell how much memory {device} has free: give --memory, as in --memory 8GB")
    return free


def _listen_at(listen: str, key: "NodeKey", ticket: "Ticket") -> NodeAddr:
    """Where told; else on every interface, at the port that the ticket names for this node if it is still free."""
    if listen:
        return NodeAddr.parse(listen)
    for addr in ticket.addresses:
        if addr.node == key.node_id and "%" not in addr.host and refused_at(addr.port) is None:
            return NodeAddr("0.0.0.0", addr.port)
    return NodeAddr("0.0.0.0", 0)
