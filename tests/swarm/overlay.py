"""Many directory back-ends in one thread and in virtual time: which gets which record, when, and at what cost in bytes.

A discrete-event simulator: a heap of events, no sockets, no tasks, no clock. It plays the driver of every back-end: it
dials peers that are not linked, reports `joined` and `lost`, and calls `tick`. It does not read what the bodies
mean. Everything follows from the seed, so a run can be repeated exactly. 10,000 nodes fit: an event costs microseconds.
"""

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from manyhands.core import NodeId
from manyhands.swarm.directory import Exchange, Outgoing, Peer

START_S = 1_800_000_000.0  # virtual time begins here: records carry wall-clock times


@dataclass(frozen=True, slots=True)
class Network:
    """How the simulated network behaves. Seconds, bytes; `delay_s` is the range of one-way delays, fixed per pair."""

    delay_s: tuple[float, float] = (0.005, 0.08)
    loss: float = 0.0  # chance that a message vanishes although its link lives
    tick_s: float = 1.0
    silence_s: float = 10.0  # until a link without any answer is given up (a machine lost its power, a cable was cut)
    dial_timeout_s: float = 3.0
    dial_delays: int = 3  # TCP and TLS before the first message: one and a half round trips
    overhead_bytes: int = 90  # per message: frame header 16, TLS record 22, TCP and IP 52


@dataclass(slots=True)
class Traffic:
    """What one node sent and received, with the overhead below the body."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0


@dataclass(slots=True)
class _Node:
    peer: Peer
    backend: Exchange
    index: int
    is_alive: bool = True
    is_silent: bool = False  # dead without a word: dialling it takes the whole timeout
    life: int = 0  # counts restarts; ticks of an earlier life are stale
    side: int = 0  # of a partition
    links: dict[int, float] = field(default_factory=dict)  # index of the peer -> when the link can carry messages
    traffic: Traffic = field(default_factory=Traffic)


class Overlay:
    """A world of back-ends. `rng` decides everything that is left to chance."""

    def __init__(self, rng: random.Random, network: Network | None = None) -> None:
        self.now = START_S
        self.network = network or Network()
        self.num_events = 0
        self._rng = rng
        self._salt = rng.getrandbits(32)
        self._nodes: list[_Node] = []
        self._index: dict[NodeId, int] = {}
        self._events: list[tuple[float, int, Callable[[int, int, bytes], None], int, int, bytes]] = []
        self._actions: dict[int, Callable[[], None]] = {}

    def add(self, peer: Peer, backend: Exchange) -> None:
        """A node starts, or one that died starts again with an empty back-end. It has no links."""
        index = self._index.get(peer.node)
        if index is None:
            index = self._index[peer.node] = len(self._nodes)
            self._nodes.append(_Node(peer, backend, index))
        else:
            node = self._nodes[index]
            assert not node.is_alive, f"{peer.node[:8]} is alive; kill it first"
            node.peer, node.backend, node.is_alive, node.life = peer, backend, True, node.life + 1
        first = self._rng.uniform(0, self.network.tick_s)
        self._push(first, self._tick, index, self._nodes[index].life)

    def link(self, a: NodeId, b: NodeId) -> None:
        """`a` dials `b`; both get `joined` once the link stands (or `a` gets `lost`)."""
        self._dial(self._nodes[self._index[a]], self._nodes[self._index[b]])

    def publish(self, node: NodeId, data: bytes) -> None:
        """`node` publishes its signed record."""
        publisher = self._nodes[self._index[node]]
        self._send(publisher, publisher.backend.publish(data, self.now))

    def send(self, node: NodeId, outgoing: Iterable[Outgoing]) -> None:
        """What a test made `node` say, or an attacker says."""
        self._send(self._nodes[self._index[node]], outgoing)

    def kill(self, node: NodeId, *, silent: bool = False) -> None:
        """`node` dies. Its links break at once, or, if silent (no power), after the peers' patience."""
        dead = self._nodes[self._index[node]]
        dead.is_alive, dead.is_silent = False, silent
        for index in dead.links:
            wait_s = self.network.silence_s if silent else self._delay(dead.index, index)
            self._push(wait_s, self._lost, index, dead.index)
        dead.links.clear()

    def partition(self, *groups: Iterable[NodeId]) -> None:
        """Only nodes of one group reach each other; nodes of no group are one more. Links across die of silence."""
        for node in self._nodes:
            node.side = 0
        for side, group in enumerate(groups, start=1):
            for name in group:
                self._nodes[self._index[name]].side = side
        for node in self._nodes:
            for index in [i for i in node.links if self._nodes[i].side != node.side]:
                self._push(self.network.silence_s, self._lost, node.index, index)

    def heal(self) -> None:
        """The partition ends; links that died must be dialled anew."""
        for node in self._nodes:
            node.side = 0

    def at(self, after_s: float, action: Callable[[], None]) -> None:
        """Call `action` `after_s` from now."""
        self._actions[self.num_events] = action
        self._push(after_s, self._act, self.num_events, 0)

    def run(self, seconds: float) -> None:
        """Let `seconds` of virtual time pass."""
        end = self.now + seconds
        events = self._events
        while events and events[0][0] <= end:
            self.now, _, happen, a, b, body = heapq.heappop(events)
            happen(a, b, body)
        self.now = end

    def backend(self, node: NodeId) -> Exchange:
        return self._nodes[self._index[node]].backend

    def traffic(self, node: NodeId) -> Traffic:
        return self._nodes[self._index[node]].traffic

    def linked(self, node: NodeId) -> list[NodeId]:
        """Peers that `node` holds a link to."""
        return [self._nodes[i].peer.node for i in self._nodes[self._index[node]].links]

    @property
    def alive(self) -> list[NodeId]:
        return [n.peer.node for n in self._nodes if n.is_alive]

    def totals(self) -> Traffic:
        """Sum over all nodes, dead ones too."""
        rows = [n.traffic for n in self._nodes]
        return Traffic(
            sum(r.messages_sent for r in rows),
            sum(r.bytes_sent for r in rows),
            sum(r.messages_received for r in rows),
            sum(r.bytes_received for r in rows),
        )

    def _push(
        self, after_s: float, happen: Callable[[int, int, bytes], None], a: int, b: int, body: bytes = b""
    ) -> None:
        self.num_events += 1  # also breaks ties: first come, first served
        heapq.heappush(self._events, (self.now + after_s, self.num_events, happen, a, b, body))

    def _delay(self, a: int, b: int) -> float:
        """One-way delay between two nodes, the same both ways and for the whole run."""
        low, high = (a, b) if a < b else (b, a)
        mixed = (low * 0x9E3779B1 + high * 0x85EBCA77 + self._salt) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
        least, most = self.network.delay_s
        return least + (most - least) * (mixed >> 8) / (1 << 24)

    def _send(self, sender: _Node, outgoing: Iterable[Outgoing]) -> None:
        for item in outgoing:
            index = self._index.get(item.to.node)
            if index is None:  # a record of a node that never was
                self._push(self.network.dial_timeout_s, self._lost_unknown(item.to.node), sender.index, 0)
            elif index != sender.index and self._dial(sender, self._nodes[index]):
                self._carry(sender, index, item.body)

    def _carry(self, sender: _Node, index: int, body: bytes) -> None:
        size = len(body) + self.network.overhead_bytes
        sender.traffic.messages_sent += 1
        sender.traffic.bytes_sent += size
        if self.network.loss and self._rng.random() < self.network.loss:
            return
        wait_s = max(0.0, sender.links[index] - self.now) + self._delay(sender.index, index)
        self._push(wait_s, self._deliver, sender.index, index, body)

    def _dial(self, sender: _Node, target: _Node) -> bool:
        """See to a link; False if there can be none (`sender` then gets `lost`)."""
        if target.index in sender.links:
            return True
        delay_s = self._delay(sender.index, target.index)
        if sender.side != target.side or not target.is_alive:
            is_refused = sender.side == target.side and not target.is_silent
            wait_s = 2 * delay_s if is_refused else self.network.dial_timeout_s
            self._push(wait_s, self._lost, sender.index, target.index)
            return False
        ready_s = delay_s * self.network.dial_delays
        sender.links[target.index] = target.links[sender.index] = self.now + ready_s
        self._push(ready_s, self._joined, sender.index, target.index)
        self._push(ready_s, self._joined, target.index, sender.index)
        return True

    def _deliver(self, a: int, b: int, body: bytes) -> None:
        sender, receiver = self._nodes[a], self._nodes[b]
        if not receiver.is_alive or a not in receiver.links or sender.side != receiver.side:
            return
        receiver.traffic.messages_received += 1
        receiver.traffic.bytes_received += len(body) + self.network.overhead_bytes
        self._send(receiver, receiver.backend.receive(sender.peer, body, self.now))

    def _tick(self, a: int, life: int, _: bytes) -> None:
        node = self._nodes[a]
        if node.is_alive and node.life == life:
            self._push(self.network.tick_s, self._tick, a, life)
            self._send(node, node.backend.tick(self.now))

    def _joined(self, a: int, b: int, _: bytes) -> None:
        node = self._nodes[a]
        if node.is_alive and b in node.links:
            self._send(node, node.backend.joined(self._nodes[b].peer, self.now))

    def _lost(self, a: int, b: int, _: bytes) -> None:
        node, other = self._nodes[a], self._nodes[b]
        if other.is_alive and other.side == node.side and a in other.links:
            return  # the link stands again
        node.links.pop(b, None)
        if node.is_alive:
            self._send(node, node.backend.lost(other.peer.node, self.now))

    def _lost_unknown(self, name: NodeId) -> Callable[[int, int, bytes], None]:
        def lost(a: int, _b: int, _body: bytes) -> None:
            if self._nodes[a].is_alive:
                self._send(self._nodes[a], self._nodes[a].backend.lost(name, self.now))

        return lost

    def _act(self, key: int, _b: int, _body: bytes) -> None:
        self._actions.pop(key)()
