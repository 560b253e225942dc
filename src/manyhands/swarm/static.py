"""The back-end for a fixed list of nodes: each tells all others of the list its own statements, and nobody passes on. Sans-I/O.

For small swarms whose machines are known by address, where nothing should depend on rumours. A body is one
statement. What a node says is accepted only from the node itself, whose id the link proved. Bytes per node and second:
(N - 1) / 5 s x 280; 20 nodes make 1 KB/s, which is why `gossip` is the default.
"""

from collections.abc import Iterable

from manyhands.core import NodeId
from manyhands.swarm.directory import Outgoing, Peer
from manyhands.swarm.record import Key, Record, RecordRefused, read
from manyhands.swarm.shelf import Shelf


class Static:
    """A `Backend`. `peers` are the list, told every beat whether they answer or not; others may join by a link."""

    def __init__(self, me: NodeId, peers: Iterable[Peer] = ()) -> None:
        self.me = me
        self.shelf = Shelf()
        self._peers = {peer.node: peer for peer in peers if peer.node != me}
        self._listed = frozenset(self._peers)
        self._own: dict[Key, bytes] = {}

    def publish(self, data: bytes, now: float) -> list[Outgoing]:
        entry = self.shelf.take(data, now).entry
        if entry is None:
            return []
        self._own[entry.record.key] = data
        return [Outgoing(peer, data) for peer in self._peers.values()]

    def receive(self, sender: Peer, body: bytes, now: float) -> list[Outgoing]:
        try:
            node = read(body)[0].node
        except RecordRefused as exc:
            self.shelf.counts[exc.verdict] += 1
            return []
        if node != sender.node or node == self.me:
            self.shelf.counts["forged"] += 1
            return []
        self.shelf.take(body, now, node)
        return [] if node in self._peers else self.joined(sender, now)

    def tick(self, now: float) -> list[Outgoing]:
        for record in self.shelf.expire(now):
            self._own.pop(record.key, None)
        return []

    def joined(self, peer: Peer, now: float) -> list[Outgoing]:
        if peer.node == self.me:
            return []
        known = self._peers.setdefault(peer.node, peer)
        self.shelf.trust(peer.node)
        return [Outgoing(known, data) for data in self._own.values()]

    def lost(self, node: NodeId, now: float) -> list[Outgoing]:
        self.shelf.suspect(node)
        if node not in self._listed:
            self._peers.pop(node, None)
        return []

    def records(self, now: float) -> list[Record]:
        return self.shelf.records(now)
