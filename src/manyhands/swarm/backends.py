"""The table of back-ends."""

from random import Random

from manyhands.core import NodeId
from manyhands.swarm.dht.backend import Dht
from manyhands.swarm.directory import Backend
from manyhands.swarm.gossip import Gossip
from manyhands.swarm.static import Static


def backend_of(kind: str, me: NodeId, rng: Random) -> Backend:
    """The back-end of a swarm whose ticket says `kind` (config.DIRECTORIES)."""
    if kind == Dht.kind:
        return Dht(me, rng)
    return Static(me) if kind == Static.kind else Gossip(me, rng)
