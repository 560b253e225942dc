"""The static back-end: a list, and no node speaks for another."""

from hypothesis import given
from hypothesis import strategies as st

from manyhands.swarm.directory import Peer
from manyhands.swarm.record_store import SEEN_S
from manyhands.swarm.statement import sign, with_beat
from manyhands.swarm.static import Static
from tests.swarm.records import NOW, address_of, chain_of, key_of, node_of, record_of


def peer_of(index: int) -> Peer:
    return Peer(node_of(index), (address_of(index),))


def data_of(index: int) -> bytes:
    return sign(record_of(index), key_of(index))


def test_those_that_are_linked_are_told_and_answer_with_their_own() -> None:
    first, second = Static(node_of(1)), Static(node_of(2))
    second.publish(data_of(2), NOW)
    assert first.joined(peer_of(2), NOW) == first.joined(peer_of(3), NOW) == first.joined(peer_of(1), NOW) == []
    told = first.publish(data_of(1), NOW)
    assert [item.to for item in told] == [peer_of(2), peer_of(3)]
    (answer,) = second.receive(peer_of(1), told[0].body, NOW)
    assert first.receive(peer_of(2), answer.body, NOW) == []
    for backend in (first, second):
        assert {record.node for record in backend.records(NOW)} == {node_of(1), node_of(2)}


def test_beats_keep_alive_a_whole_statement_at_a_time() -> None:
    first, second = Static(node_of(1)), Static(node_of(2))
    first.joined(peer_of(2), NOW)
    first.publish(data_of(1), NOW)
    (told,) = first.publish(with_beat(data_of(1), 1, chain_of(1).value(1)), NOW + 5)
    second.receive(peer_of(1), told.body, NOW + 5)
    assert [record.beats for record in second.records(NOW + 17)] == [1]
    assert len(second.records(NOW + 19)) == 1, "it is linked"
    assert second.records(NOW + 126) == []


def test_no_node_speaks_for_others() -> None:
    backend = Static(node_of(1))
    assert backend.receive(peer_of(3), data_of(2), NOW) == []
    assert backend.receive(peer_of(3), data_of(1), NOW) == []
    assert backend.records(NOW) == [] and backend.store.counts["forged"] == 2


def test_a_lost_node_is_hidden_and_told_again_once_it_is_linked() -> None:
    backend = Static(node_of(1))
    for index in (2, 3):
        backend.receive(peer_of(index), data_of(index), NOW)
        backend.lost(node_of(index), NOW)
    assert backend.records(NOW) == [] and backend.publish(data_of(1), NOW) == []
    assert [item.to.node for item in backend.joined(peer_of(3), NOW)] == [node_of(3)]
    assert {record.node for record in backend.records(NOW)} == {node_of(1), node_of(3)}


def test_a_dial_that_failed_loses_only_a_node_that_has_been_silent() -> None:
    backend = Static(node_of(1))
    backend.receive(peer_of(2), data_of(2), NOW)
    backend.unreached(node_of(2), NOW + SEEN_S - 0.1)
    assert len(backend.records(NOW + SEEN_S - 0.1)) == 1
    backend.unreached(node_of(2), NOW + SEEN_S)
    assert backend.records(NOW + SEEN_S) == []


def test_expired_records_are_forgotten_and_not_told_any_more() -> None:
    backend = Static(node_of(1))
    backend.publish(data_of(1), NOW)
    assert len(backend.joined(peer_of(2), NOW)) == 1
    backend.tick(NOW + 200)
    assert backend.joined(peer_of(3), NOW + 200) == [] and len(backend.store) == 0


@given(st.binary(max_size=400))
def test_random_bodies_are_dropped(body: bytes) -> None:
    backend = Static(node_of(1))
    backend.joined(peer_of(2), NOW)
    assert backend.receive(peer_of(2), body, NOW) == []
    assert backend.receive(peer_of(3), body, NOW) == []
    assert backend.records(NOW) == [] and backend.store.counts["malformed"] == 2
