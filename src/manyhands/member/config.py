"""What a member is told at its start, beside its key and its ticket."""

from dataclasses import dataclass, field

from manyhands.config import BalanceConfig
from manyhands.core import NodeAddr, NodeId, Span
from manyhands.place.joining import JoinStrategy
from manyhands.swarm.record import Scope


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """What a member is, beside its key and ticket. `span`: layers it was told to host; its own gateway alone then moves it.

    `relays`: members that others can dial, where this node waits for calls, at all or (`is_one_relay_enough`) at the first
    that answers. `memory_bytes`: for the model, all told.
    `nodes`: others to stay linked to. `is_visitor`: it only looks and asks: it does not listen and announces nothing.
    `is_spare`: it serves only where no other node does, and never moves. `can_load`: layers that it would load beside its
    own, at most, while no other node holds them. `has_ends`: it holds embedding and head for others, where it serves the
    first or the last layers.
    """

    name: str
    listen: NodeAddr
    memory_bytes: int
    advertise: NodeAddr | None = None
    relays: tuple[NodeAddr, ...] = ()
    is_one_relay_enough: bool = False
    iroh_url: str | None = None
    scope: Scope = "lan"
    allow: frozenset[NodeId] = frozenset()
    deny: frozenset[NodeId] = frozenset()
    nodes: tuple[NodeAddr, ...] = ()
    is_visitor: bool = False
    span: Span | None = None
    tokens: int = 4096  # positions of cache to find room for on every layer
    max_pipes: int = 2  # complete copies of the model to aim at
    strategy: JoinStrategy = "cover"  # how the first span is chosen (place/joining.py)
    cores: int = 1
    device: str = "cpu"
    settle_s: float = 0.3  # how long a claim waits for the claims of others
    gap_s: float = 3.0  # how long layers may be missing before those with room take them
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    is_spare: bool = False
    can_load: int = 0
    has_ends: bool = False
