"""The directory that nobody owns: one small protocol, its back-ends (gossip, dht, static), and what drives them.

A back-end is sans-I/O: statements, bodies and times go in, bodies to send come out. `DirectoryRunner` is its one driver in a
live node; the same back-ends run in virtual time under `testing.overlay`. Whoever implements `Backend` keeps its
statements on a `shelf.Shelf`, which checks them, so that no back-end has to.
"""

from dataclasses import dataclass
from typing import Protocol

from manyhands.core import ModelId, NodeAddr, NodeId
from manyhands.swarm.record import Record

MAX_BODY_BYTES = 48 << 10


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node and where it can be dialled (perhaps nowhere: then only over a link that it opened)."""

    node: NodeId
    addresses: tuple[NodeAddr, ...] = ()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A body for the same back-end of another node. It may get lost; bodies between two nodes arrive in order."""

    to: Peer
    body: bytes  # 1 to MAX_BODY_BYTES


class Directory(Protocol):
    """The five calls of LP-29: all that the rest of a node knows of the directory. Statements come back as records."""

    @property
    def me(self) -> NodeId: ...

    async def publish(self, data: bytes) -> None:
        """Tell the swarm a statement of this node (`record.sign`); a withdrawal works the same way."""

    def records(self, model: ModelId | None = None) -> list[Record]:
        """What may be offered now: fresh, not withdrawn, this node's own included."""

    def peers(self) -> list[Peer]:
        """The other nodes that have something on offer, each once."""

    async def send(self, peer: Peer, body: bytes) -> None:
        """Send bytes to a node by its id. Raises LinkClosed if it cannot be reached."""


class Backend(Protocol):
    """What a back-end decides. None of the calls raises for what a peer sent; all of them may return nothing."""

    def publish(self, data: bytes, now: float) -> list[Outgoing]:
        """Our own statement: new, the same with a further beat, or a withdrawal."""

    def receive(self, sender: Peer, body: bytes, now: float) -> list[Outgoing]:
        """Hostile bytes from a node whose id the link proved: counted and dropped if they mean nothing."""

    def tick(self, now: float) -> list[Outgoing]:
        """To be called every 0.5 s or so."""

    def joined(self, peer: Peer, now: float) -> list[Outgoing]:
        """A link to `peer` is up: it called us, or a bootstrap address proved to be this node."""

    def lost(self, node: NodeId, now: float) -> list[Outgoing]:
        """The link to `node` broke, or it could not be dialled: its records are suspect at once."""

    def records(self, now: float) -> list[Record]:
        """Fresh records, our own included."""
