"""The back-end for a fixed list of nodes: each sends its own records to those it is linked to; none are passed on. Sans-I/O.

For small swarms whose machines are known by address, where nothing should depend on rumours: a member keeps links to the
nodes of its list (swarm.nodes, and the ticket's). A body is one statement. What a node says is accepted only from the
node itself, whose id the link proved. Bytes per node and second: (N - 1) / 5 s x 280; 20 nodes make 1 KB/s, which is why
`gossip` is the default.
"""

from typing import ClassVar

from manyhands.core import NodeId
from manyhands.swarm.directory import Outgoing, Peer
from manyhands.swarm.record import RecordKey
from manyhands.swarm.record_store import SILENT_S, RecordStore
from manyhands.swarm.statement import RecordRefused, read
from manyhands.swarm.store_report import StoreBacked


class Static(StoreBacked):
    """A `Backend`."""

    kind: ClassVar[str] = "static"
    silent_s: ClassVar[float] = SILENT_S

    def __init__(self, me: NodeId) -> None:
        self.me = me
        self.store = RecordStore(me)
        self._linked: dict[NodeId, Peer] = {}
        self._own: dict[RecordKey, bytes] = {}

    def publish(self, data: bytes, now: float) -> list[Outgoing]:
        entry = self.store.take(data, now).entry
        if entry is None:
            return []
        self._own[entry.record.key] = data
        return [Outgoing(peer, data) for peer in self._linked.values()]

    def receive(self, sender: Peer, body: bytes, now: float) -> list[Outgoing]:
        try:
            node = read(body)[0].node
        except RecordRefused as exc:
            self.store.counts[exc.verdict] += 1
            return []
        if node != sender.node or node == self.me:
            self.store.counts["forged"] += 1
            return []
        self.store.take(body, now, node)
        return [] if node in self._linked else self.joined(sender, now)

    def tick(self, now: float) -> list[Outgoing]:
        for record in self.store.expire(now):
            self._own.pop(record.key, None)
        return []

    def joined(self, peer: Peer, now: float) -> list[Outgoing]:
        if peer.node == self.me:
            return []
        self._linked[peer.node] = peer
        self.store.trust(peer.node, is_linked=True)
        return [Outgoing(peer, data) for data in self._own.values()]

    def unreached(self, node: NodeId, now: float) -> list[Outgoing]:
        return [] if self.store.was_seen_lately(node, now) else self.lost(node, now)

    def lost(self, node: NodeId, now: float) -> list[Outgoing]:
        self.store.suspect(node)
        self._linked.pop(node, None)
        return []
