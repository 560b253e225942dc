"""Gossip: all views become and stay equal, at the promised cost; hostile bodies change nothing.

The loop below is the smallest that runs back-ends against each other in virtual time; overlay.py does the large runs.
"""

import heapq
import itertools
import struct
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core import NodeId
from manyhands.swarm.announce import NUMBERS_PER_S, Announcer
from manyhands.swarm.directory import Outgoing, Peer
from manyhands.swarm.gossip import DENSE, MAX_LOST, NEIGHBOURS, NEWS, RUMOUR, SPARSE, Gossip
from manyhands.swarm.news import BEHIND, NEWS_BYTES, News, expand, is_newer
from manyhands.swarm.record import BEAT_S
from manyhands.swarm.record_store import SEEN_S, SILENT_S, TOMBSTONE_S
from manyhands.swarm.statement import sign, with_beat
from tests.swarm.records import NOW, address_of, announcer_of, chain_of, hosted, key_of, node_of, record_of

OVERHEAD_BYTES = 90  # below a body: frame header 16, TLS 22, TCP and IP 52
DELAY_S = 0.04
Event = tuple[float, int, str, "Member", "Outgoing | None"]


def peer_of(index: int) -> Peer:
    return Peer(node_of(index), (address_of(index),))


class Member:
    def __init__(self, index: int, now: float) -> None:
        self.peer = peer_of(index)
        self.backend = Gossip(self.peer.node, Random(index))
        self.announcer: Announcer = announcer_of(index, now)
        self.hosted = hosted(index % 3 * 8)
        self.is_alive = True
        self.side = 0
        self.linked: set[NodeId] = set()


class Loop:
    """`num_nodes` members, each told of one other."""

    def __init__(self, num_nodes: int) -> None:
        self.now = NOW
        self.bytes_sent = 0
        self._random = Random(1)
        self._events: list[Event] = []
        self._order = itertools.count()
        self.members: dict[NodeId, Member] = {}
        for index in range(num_nodes):
            self.add(index)

    def add(self, index: int, knows: Sequence[int] | None = None) -> Member:
        """A node starts (perhaps again, having forgotten everything) and knows one that is alive, or those it is told."""
        member = Member(index, self.now)
        others = [other for other in self.alive() if other.peer.node != member.peer.node]
        self.members[member.peer.node] = member
        self._at(self._random.uniform(0, 0.5), "tick", member)
        self._at(self._random.uniform(0, BEAT_S), "speak", member)
        told = (
            [self._random.choice(others).peer]
            if others and knows is None
            else [peer_of(other) for other in knows or ()]
        )
        for peer in told:
            member.linked.add(peer.node)
            self._post(member, member.backend.joined(peer, self.now))
        return member

    def alive(self) -> list[Member]:
        return [member for member in self.members.values() if member.is_alive]

    def views(self) -> list[set[NodeId]]:
        return [{record.node for record in member.backend.records(self.now)} for member in self.alive()]

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, kind, member, item = heapq.heappop(self._events)
            if item is not None:
                self._deliver(member, item)
            elif member.is_alive:
                self._act(kind, member)
        self.now = end

    def run_until_equal(self, expected: set[NodeId], limit_s: float) -> float:
        """Seconds until all views are `expected`."""
        start = self.now
        while any(view != expected for view in self.views()):
            assert self.now - start < limit_s, f"views differ after {limit_s} s"
            self.run(0.5)
        return self.now - start

    def leave(self, member: Member) -> None:
        for data in member.announcer.withdraw(self.now):
            self._post(member, member.backend.publish(data, self.now))
        member.is_alive = False

    def crash(self, member: Member) -> None:
        """A node dies, and the links to it break."""
        member.is_alive = False
        for other in self.alive():
            if member.peer.node in other.linked:
                self._post(other, other.backend.lost(member.peer.node, self.now))

    def _act(self, kind: str, member: Member) -> None:
        if kind == "tick":
            self._post(member, member.backend.tick(self.now))
            statements = member.announcer.answer(member.backend.held_of(member.peer.node), self.now, self.now, SILENT_S)
        else:
            statements = member.announcer.announce(member.hosted, self.now)
        for data in statements:
            self._post(member, member.backend.publish(data, self.now))
        self._at(0.5 if kind == "tick" else BEAT_S, kind, member)

    def _deliver(self, sender: Member, item: Outgoing) -> None:
        to = self.members[item.to.node]
        if to.is_alive and to.side == sender.side:
            self._post(to, to.backend.receive(sender.peer, item.body, self.now))
        elif sender.is_alive:
            self._post(sender, sender.backend.lost(to.peer.node, self.now))

    def _post(self, member: Member, outgoing: list[Outgoing]) -> None:
        for item in outgoing:
            self.bytes_sent += len(item.body) + OVERHEAD_BYTES
            self._at(DELAY_S, "message", member, item)

    def _at(self, delay_s: float, kind: str, member: Member, item: Outgoing | None = None) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), kind, member, item))


def test_thirty_nodes_learn_of_each_other_and_stay_cheap() -> None:
    loop = Loop(30)
    members = set(loop.members)
    assert loop.run_until_equal(members, 15) <= 10
    loop.run(20)
    loop.bytes_sent = 0
    for _ in range(70):  # longer than the interval between signatures
        loop.run(1)
        assert all(view == members for view in loop.views()), "an idle swarm never doubts a member"
    assert loop.bytes_sent / 70 / 30 < 1000


def test_crashed_nodes_are_gone_everywhere_within_20_s() -> None:
    loop = Loop(30)
    loop.run(20)
    for member in loop.alive()[:10]:
        loop.crash(member)
    assert loop.run_until_equal({member.peer.node for member in loop.alive()}, 20) > 0
    loop.run(30)
    assert all(len(view) == 20 for view in loop.views()), "and do not come back as ghosts"


def test_leaving_is_known_at_once() -> None:
    loop = Loop(30)
    loop.run(20)
    loop.leave(loop.alive()[3])
    assert loop.run_until_equal({member.peer.node for member in loop.alive()}, 6) <= 5


@pytest.mark.parametrize("ran_s", [60, 6_000, 15_000, 86_400])
def test_a_node_that_is_started_again_is_seen_by_all_however_long_it_ran(ran_s: int) -> None:
    """Numbers of a run fall behind the clock, at which those of the next one begin: half of all were older by 16 bits."""
    loop = Loop(30)
    again = loop.members[node_of(3)]
    again.announcer._floor = int((NOW - ran_s) * NUMBERS_PER_S) + ran_s // 5
    loop.run(20)
    loop.leave(again)
    loop.run(5)
    loop.add(3)
    assert loop.run_until_equal(set(loop.members), 15) <= 10


def test_a_withdrawn_record_is_forgotten_although_nodes_join() -> None:
    loop = Loop(6)
    loop.run(10)
    gone = loop.members[node_of(0)]
    loop.leave(gone)
    loop.run(100)  # others pass it on for 120 s and hold it for 180 s
    joined = loop.add(50)
    loop.run_until_equal({member.peer.node for member in loop.alive()}, 10)
    assert not joined.backend.held_of(gone.peer.node)
    loop.run(TOMBSTONE_S)
    assert [member.backend.held_of(gone.peer.node) for member in loop.alive()] == [[]] * 6


def test_a_partition_that_heals() -> None:
    loop = Loop(30)
    loop.run(20)
    for member in loop.alive()[:12]:
        member.side = 1
    loop.run(150)  # longer than any record lives
    assert sorted(len(view) for view in loop.views()) == [12] * 12 + [18] * 18
    for member in loop.alive():
        member.side = 0
    assert loop.run_until_equal(set(loop.members), 60) <= 30
    loop.run(20)
    assert all(view == set(loop.members) for view in loop.views())


def ignores(index: int, other: int) -> bool:
    """Whether node `index` would not draw `other` as a neighbour if it knew its group of ten and `other`."""
    rank = Gossip(node_of(index), Random(index))._rank
    group = [peer for peer in range(20) if peer // 10 == index // 10 and peer != index]
    return sum(rank(node_of(peer)) < rank(node_of(other)) for peer in group) >= NEIGHBOURS


def test_groups_that_know_each_other_well_stay_no_islands() -> None:
    """One link joins two groups, from before any node had something to tell, and neither end draws the other."""
    first, second = next((a, b) for a in range(10) for b in range(10, 20) if ignores(a, b) and ignores(b, a))
    loop = Loop(0)
    for index in range(20):
        group = [other for other in range(20) if other // 10 == index // 10 and other != index]
        loop.add(index, group + [other for other in (first, second) if index in (first, second) and other != index])
    loop.run_until_equal(set(loop.members), 90)


def test_a_node_that_crashed_and_hosts_something_else_leaves_no_ghost() -> None:
    loop = Loop(10)
    loop.run(12)
    loop.members[node_of(4)].is_alive = False
    loop.run(1)
    loop.add(4).hosted = hosted(16)
    loop.run(10)
    for member in loop.alive():
        mine = [record for record in member.backend.records(loop.now) if record.node == node_of(4)]
        assert [record.info.span.start for record in mine if record.info] == [16]


def test_two_nodes_with_one_key_find_out_and_no_other_node_is_affected() -> None:
    loop = Loop(8)
    loop.run(10)
    twin = Member(2, loop.now)
    twin.hosted = hosted(16)
    twin.peer = Peer(twin.peer.node, (address_of(2, "10.9.9.9"),))
    victim = loop.members[node_of(2)]
    statements = twin.announcer.announce(twin.hosted, loop.now)
    for data in statements:
        other = loop.members[node_of(5)].backend
        loop._post(loop.members[node_of(5)], other.publish(data, loop.now))
    loop.run(10)
    assert victim.announcer.twin is not None
    assert all(len(view) == 8 for view in loop.views())


# One back-end


def gossip_with(*indices: int) -> Gossip:
    gossip = Gossip(node_of(99), Random(0))
    for index in indices:
        gossip.publish(sign(record_of(index), key_of(index)), NOW)
    return gossip


def test_dense_digests_bring_beats_and_sparse_ones_bring_records() -> None:
    ahead, behind = gossip_with(1, 2), gossip_with(1, 2)
    ahead.publish(with_beat(sign(record_of(1), key_of(1)), 3, chain_of(1).value(3)), NOW)
    (call,) = behind.joined(peer_of(5), NOW)
    (answer,) = ahead.receive(peer_of(5), call.body, NOW)
    news = News.decode(answer.body[1:])
    assert (len(news.wants), len(news.beats), len(news.statements)) == (0, 1, 0)
    behind.receive(peer_of(5), answer.body, NOW)
    assert max(record.beats for record in behind.records(NOW)) == 3
    call = behind.tick(NOW)[0]
    assert call.body[0] == DENSE and ahead.receive(peer_of(5), call.body, NOW) == [], "all is equal now"
    (call,) = gossip_with().joined(peer_of(5), NOW)
    (answer,) = ahead.receive(peer_of(5), call.body, NOW)
    assert len(News.decode(answer.body[1:]).statements) == 2
    (call,) = gossip_with(1, 2, 3).joined(peer_of(5), NOW)
    (answer,) = ahead.receive(peer_of(5), call.body, NOW)
    assert News.decode(answer.body[1:]).wants == [(record_of(3).key.tag, 0)]


def test_versions_are_compared_as_serial_numbers() -> None:
    assert is_newer(5, 4) and not is_newer(4, 5) and not is_newer(4, 4)
    assert is_newer(0x10003, 0xFFFE) and not is_newer(0xFFFE, 0x10003)
    assert not is_newer(5, 5 + BEHIND) and is_newer(5, 6 + BEHIND) and is_newer(6 + BEHIND, 5), (
        "of another run, perhaps"
    )
    assert expand(3, 0x1FFFE) == 0x20003 and expand(0xFFFE, 0x20003) == 0x1FFFE
    assert expand(5, 5 + BEHIND) == 5 and expand(5, 6 + BEHIND) == 0x10005
    assert expand(NOW_VERSION & 0xFFFF, NOW_VERSION + 9) == NOW_VERSION


NOW_VERSION = 1_800_000_123


def test_news_round_trips_and_is_bounded() -> None:
    news = News([(b"tagtagta", 7)], [(b"tagtagta", 8, b"12345678")], [b"one", b"two" * 100])
    body = news.encode(NEWS)
    again = News.decode(body[1:])
    assert (again.wants, again.beats, again.statements) == (news.wants, news.beats, news.statements)
    for size in range(len(body) - 1):
        if size not in (4 + 10 + 18, 4 + 10 + 18 + 5):  # where a statement ends, news may end
            with pytest.raises((ValueError, struct.error)):
                News.decode(body[1 : 1 + size])
    with pytest.raises(ValueError, match="limit"):
        News.decode(bytes(NEWS_BYTES + 1))


@settings(max_examples=300)
@given(st.sampled_from([DENSE, SPARSE, NEWS, RUMOUR, 0, 9]), st.binary(max_size=400))
def test_random_bodies_change_nothing(kind: int, content: bytes) -> None:
    gossip = gossip_with(1, 2)
    before = gossip.records(NOW)
    out = gossip.receive(peer_of(5), bytes([kind]) + content, NOW)
    gossip.receive(peer_of(5), content, NOW)
    assert gossip.records(NOW) == before
    assert sum(len(item.body) for item in out) <= NEWS_BYTES + 1000, "a body is answered by little more than one"


@given(st.data())
def test_mangled_bodies_never_raise(data: st.DataObject) -> None:
    source = gossip_with(1, 2, 3)
    (call,) = source.joined(peer_of(5), NOW)
    (answer,) = source.receive(peer_of(5), Gossip(node_of(5), Random(0)).joined(peer_of(6), NOW)[0].body, NOW)
    body = bytearray(data.draw(st.sampled_from([call.body, answer.body])))
    for _ in range(data.draw(st.integers(1, 5))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    target = gossip_with(1)
    target.receive(peer_of(5), bytes(body[: data.draw(st.integers(0, len(body)))]), NOW)
    assert {record.node for record in target.records(NOW)} <= {node_of(index) for index in (1, 2, 3)}


def test_an_empty_body_is_malformed() -> None:
    gossip = gossip_with()
    assert gossip.receive(peer_of(5), b"", NOW) == [] and gossip.store.counts["malformed"] == 1


def test_forged_records_are_dropped_and_counted() -> None:
    gossip = gossip_with(1)
    forged = sign(record_of(2), key_of(2))[:-1] + b"x"
    body = News(statements=[forged, sign(record_of(3), key_of(3))]).encode(RUMOUR)
    gossip.receive(peer_of(5), body, NOW)
    assert gossip.store.counts["forged"] == 1
    assert {record.node for record in gossip.records(NOW)} == {node_of(1), node_of(3)}, "what was true in it counts"


def test_a_flood_is_dropped_and_others_are_heard() -> None:
    gossip = gossip_with()
    body = News(statements=[sign(record_of(1), key_of(1))] * 50).encode(RUMOUR)
    for _ in range(100):
        gossip.receive(peer_of(5), body, NOW)
    assert gossip.store.counts["flood"] > 50
    gossip.receive(peer_of(6), News(statements=[sign(record_of(2), key_of(2))]).encode(RUMOUR), NOW)
    assert node_of(2) in {record.node for record in gossip.records(NOW)}
    gossip.receive(peer_of(5), News(statements=[sign(record_of(3), key_of(3))]).encode(RUMOUR), NOW + 10)
    assert node_of(3) in {record.node for record in gossip.records(NOW)}, "a budget fills again"


def test_a_lost_node_is_tried_again_until_it_answers() -> None:
    gossip = gossip_with(1)
    gossip.lost(node_of(1), NOW)
    assert gossip.records(NOW) == []
    assert [item.to.node for item in gossip.tick(NOW)] == [node_of(1)]
    assert gossip.tick(NOW + 1) == [], "not every second"
    assert len(gossip.tick(NOW + 6)) == 1
    gossip.joined(peer_of(1), NOW + 7)
    assert len(gossip.records(NOW + 7)) == 1


def calls(gossip: Gossip, rounds: int, answers: Callable[[NodeId], bool]) -> list[list[NodeId]]:
    """Whom `gossip` calls in each round; `answers`: whether that one says anything then."""
    found: list[list[NodeId]] = []
    for second in range(rounds):
        found.append([item.to.node for item in gossip.tick(NOW + second)])
        for node in filter(answers, found[-1]):
            gossip.receive(Peer(node), News().encode(NEWS), NOW + second)
    return found


def test_neighbours_are_called_in_turn_and_a_call_that_is_not_answered_is_made_up_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chance left a neighbour out for many rounds; and of calls in a swarm of which a third died a third was lost."""
    monkeypatch.setattr("manyhands.swarm.gossip.RETRY_S", 1e9)  # which calls further ones, at first
    alive = calls(gossip_with(*range(1, NEIGHBOURS + 1)), 2 * NEIGHBOURS, lambda node: True)
    assert all(len(called) == 1 for called in alive)
    assert alive[:NEIGHBOURS] == alive[NEIGHBOURS:] and len({node for (node,) in alive}) == NEIGHBOURS
    dead = node_of(1)
    mixed = calls(gossip_with(*range(1, NEIGHBOURS + 1)), 12, lambda node: node != dead)
    lost = next(second for second, called in enumerate(mixed) if dead in called)
    assert [len(called) for called in mixed[lost : lost + 4]] == [1, 1, 2, 1]
    assert max(map(len, calls(gossip_with(*range(1, NEIGHBOURS + 1)), 12, lambda node: False))) == 2


def test_a_dial_that_failed_loses_only_a_node_that_has_been_silent() -> None:
    gossip = gossip_with(1)
    gossip.unreached(node_of(1), NOW + SEEN_S - 0.1)
    assert len(gossip.records(NOW + SEEN_S - 0.1)) == 1
    gossip.unreached(node_of(1), NOW + SEEN_S)
    assert gossip.records(NOW + SEEN_S) == []


def test_what_is_remembered_is_bounded() -> None:
    gossip = gossip_with()
    for index in range(MAX_LOST + 10):
        gossip.lost(NodeId(f"{index:064x}"), NOW)
    assert len(gossip._lost) == MAX_LOST


def test_a_node_does_not_talk_to_itself() -> None:
    gossip = gossip_with(1)
    me = Peer(gossip.me)
    assert gossip.joined(me, NOW) == [] and gossip.receive(me, b"\x01", NOW) == []
    assert not gossip.store.counts["malformed"]
