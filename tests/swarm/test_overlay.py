"""The simulator itself: delays, links, deaths, partitions, counts, and the same run from the same seed."""

from dataclasses import dataclass, field
from random import Random

from manyhands.core import NodeAddr, NodeId
from manyhands.swarm.directory import Outgoing, Peer
from manyhands.swarm.record import Record
from tests.swarm.overlay import START_S, Network, Overlay


@dataclass
class Echo:
    """Answers every body but an answer, and writes down what happens and when."""

    log: list[tuple[str, str, float]] = field(default_factory=list)
    num_ticks: int = 0

    def publish(self, data: bytes, now: float) -> list[Outgoing]:
        return []

    def receive(self, sender: Peer, body: bytes, now: float) -> list[Outgoing]:
        self.log.append((body.decode(), sender.node[:2], now - START_S))
        return [] if body.startswith(b"re:") else [Outgoing(sender, b"re:" + body)]

    def tick(self, now: float) -> list[Outgoing]:
        self.num_ticks += 1
        return []

    def joined(self, peer: Peer, now: float) -> list[Outgoing]:
        self.log.append(("joined", peer.node[:2], now - START_S))
        return []

    def lost(self, node: NodeId, now: float) -> list[Outgoing]:
        self.log.append(("lost", node[:2], now - START_S))
        return []

    def unreached(self, node: NodeId, now: float) -> list[Outgoing]:
        return self.lost(node, now)

    def records(self, now: float) -> list[Record]:
        return []

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(what, who) for what, who, _ in self.log]


def peer_of(index: int) -> Peer:
    node = NodeId(f"{index:02x}" * 32)
    return Peer(node, (NodeAddr("10.0.0.1", 4000 + index, node),))


def world(count: int, network: Network | None = None, seed: int = 1) -> tuple[Overlay, list[Peer], list[Echo]]:
    overlay = Overlay(Random(seed), network or Network(delay_s=(0.01, 0.01), dial_timeout_s=3.0, silence_s=10.0))
    peers, echoes = [peer_of(i) for i in range(count)], [Echo() for _ in range(count)]
    for peer, echo in zip(peers, echoes, strict=True):
        overlay.add(peer, echo)
    return overlay, peers, echoes


def test_dialling_a_message_and_its_answer_take_their_time() -> None:
    """One and a half round trips to dial, then half a round trip each way; `joined` comes before the first body."""
    overlay, peers, echoes = world(2)
    overlay.send(peers[0].node, [Outgoing(peers[1], b"hi")])
    overlay.run(1)
    assert [(what, who, round(t, 3)) for what, who, t in echoes[1].log] == [("joined", "00", 0.03), ("hi", "00", 0.04)]
    assert [(what, who, round(t, 3)) for what, who, t in echoes[0].log] == [
        ("joined", "01", 0.03),
        ("re:hi", "01", 0.05),
    ]


def test_bodies_between_two_nodes_arrive_in_order() -> None:
    """Also those sent while the link is still being dialled."""
    overlay, peers, echoes = world(2, Network())
    for text in (b"a", b"b"):
        overlay.send(peers[0].node, [Outgoing(peers[1], text)])
    overlay.at(0.001, lambda: overlay.send(peers[0].node, [Outgoing(peers[1], b"c")]))
    overlay.run(1)
    assert [what for what, _ in echoes[1].events] == ["joined", "a", "b", "c"]


def test_traffic_counts_bodies_and_what_carries_them() -> None:
    overlay, peers, _ = world(2)
    overlay.send(peers[0].node, [Outgoing(peers[1], b"hi")])
    overlay.run(1)
    first, second = overlay.traffic(peers[0].node), overlay.traffic(peers[1].node)
    assert (first.messages_sent, first.bytes_sent) == (1, 2 + 90) == (second.messages_received, second.bytes_received)
    assert (second.messages_sent, second.bytes_sent) == (1, 5 + 90) == (first.messages_received, first.bytes_received)
    assert overlay.totals().bytes_sent == 2 + 5 + 180


def test_a_crash_is_heard_at_once_and_a_silent_death_after_the_patience() -> None:
    overlay, peers, echoes = world(3)
    overlay.link(peers[0].node, peers[1].node)
    overlay.link(peers[0].node, peers[2].node)
    overlay.run(1)
    overlay.kill(peers[1].node)
    overlay.kill(peers[2].node, silent=True)
    overlay.run(20)
    lost = [(who, round(t, 2)) for what, who, t in echoes[0].log if what == "lost"]
    assert lost == [("01", 1.01), ("02", 11.0)]
    assert overlay.alive == [peers[0].node] and overlay.linked(peers[0].node) == []


def test_dialling_the_dead_fails() -> None:
    """Refused at once by a machine that lives, after a timeout where there is none, or none of that name."""
    overlay, peers, echoes = world(3)
    overlay.kill(peers[1].node)
    overlay.kill(peers[2].node, silent=True)
    overlay.send(peers[0].node, [Outgoing(peer, b"hi") for peer in (peers[1], peers[2], peer_of(9))])
    overlay.run(10)
    assert [(what, who, round(t, 2)) for what, who, t in echoes[0].log] == [
        ("lost", "01", 0.02),
        ("lost", "02", 3.0),
        ("lost", "09", 3.0),
    ]


def test_a_partition_cuts_links_and_heals() -> None:
    overlay, peers, echoes = world(2)
    overlay.link(peers[0].node, peers[1].node)
    overlay.run(1)
    overlay.partition([peers[0].node])
    overlay.send(peers[0].node, [Outgoing(peers[1], b"into the void")])
    overlay.run(11)
    overlay.send(peers[0].node, [Outgoing(peers[1], b"unreachable")])
    overlay.run(5)
    assert echoes[0].events == [("joined", "01"), ("lost", "01"), ("lost", "01")]
    assert echoes[1].events == [("joined", "00"), ("lost", "00")]
    overlay.heal()
    overlay.send(peers[0].node, [Outgoing(peers[1], b"hi")])
    overlay.run(1)
    assert echoes[1].events[-2:] == [("joined", "00"), ("hi", "00")]


def test_a_short_partition_breaks_no_link() -> None:
    """What was said meanwhile is lost, as with a driver that gave up on it."""
    overlay, peers, echoes = world(2)
    overlay.link(peers[0].node, peers[1].node)
    overlay.run(1)
    overlay.partition([peers[0].node])
    overlay.run(5)
    overlay.heal()
    overlay.run(20)
    assert ("lost", "01") not in echoes[0].events and overlay.linked(peers[0].node) == [peers[1].node]


def test_loss_loses_messages() -> None:
    overlay, peers, echoes = world(2, Network(loss=0.5))
    overlay.link(peers[0].node, peers[1].node)
    for _ in range(200):
        overlay.send(peers[0].node, [Outgoing(peers[1], b"re:")])
    overlay.run(1)
    assert 60 < sum(what == "re:" for what, _ in echoes[1].events) < 140


def test_a_node_that_died_can_start_again() -> None:
    """With an empty back-end and no links; its old ticks have stopped."""
    overlay, peers, echoes = world(2)
    overlay.link(peers[0].node, peers[1].node)
    overlay.run(1.5)
    overlay.kill(peers[1].node)
    overlay.run(1)
    reborn = Echo()
    overlay.add(peers[1], reborn)
    overlay.run(10)
    assert reborn.num_ticks == 10 and echoes[1].num_ticks <= 2 and reborn.events == []


def test_ticks_go_to_the_living_only() -> None:
    overlay, peers, echoes = world(2)
    overlay.kill(peers[1].node)
    overlay.run(10)
    assert (echoes[0].num_ticks, echoes[1].num_ticks) == (10, 0)


def test_the_same_seed_gives_the_same_run() -> None:
    def run(seed: int) -> list[tuple[str, str, float]]:
        overlay, peers, echoes = world(8, Network(loss=0.1), seed)
        for a in peers:
            overlay.send(a.node, [Outgoing(b, b"hi") for b in peers])
        overlay.run(5)
        return [event for echo in echoes for event in echo.log]

    assert run(1) == run(1) != run(2)
