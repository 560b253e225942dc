"""The store keeps the newest word of every node, and nothing that was forged, replayed or is over."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import ModelId, NodeId
from manyhands.swarm.complaints import complaints, skews_of
from manyhands.swarm.dht.backend import Dht
from manyhands.swarm.gossip import Gossip
from manyhands.swarm.record_store import FRESH_S, MAX_NOTES, MAX_RECORDS_PER_NODE, RecordStore
from manyhands.swarm.statement import sign, with_beat
from manyhands.swarm.static import Static
from tests.swarm.records import NOW, address_of, chain_of, info_of, key_of, node_of, record_of

DATA = sign(record_of(), key_of(0))
ME = node_of(99)
TAG = record_of().key.tag


def beat(number: int) -> bytes:
    return chain_of().value(number)


def test_verdicts_are_counted() -> None:
    store = RecordStore(ME)
    newer = sign(record_of(sequence=20), key_of(0))
    assert store.put(DATA, NOW) == "new"
    assert store.put(DATA, NOW) == "same"
    assert store.put(newer, NOW) == "new"
    assert store.put(DATA, NOW) == "stale"
    assert store.put(newer[:-1] + bytes([newer[-1] ^ 1]), NOW) == "forged"
    assert store.put(newer[:50], NOW) == "malformed"
    assert store.put(bytes(5000), NOW) == "oversized"
    assert store.counts == {**{"new": 2, "same": 1, "stale": 1, "forged": 1, "malformed": 1, "oversized": 1}}
    assert [record.sequence for record in store.records(NOW)] == [20]


def test_a_record_is_fresh_by_our_clock_and_only_by_news() -> None:
    store = RecordStore(ME)
    late = NOW + 50  # the signer's clock is 50 s behind: no matter
    store.put(DATA, late)
    assert len(store.records(late + FRESH_S)) == 1
    store.put(DATA, late + 10)
    assert store.records(late + FRESH_S + 0.1) == [], "hearing the same again is no sign of life"
    assert store.put_beat(TAG, 8, beat(1), late + 20) == "new"
    assert len(store.records(late + 20 + FRESH_S)) == 1
    assert store.put_beat(TAG, 8, beat(1), late + 30) == "same"
    assert store.records(late + 21 + FRESH_S) == []


def test_beats_prolong_freshness_but_not_the_lifetime() -> None:
    store = RecordStore(ME)
    store.put(DATA, NOW)
    assert store.put_beat(TAG, 7 + 23, beat(23), NOW + 119) == "new"
    assert store.records(NOW + 119) and not store.records(NOW + 120)
    assert store.put_beat(TAG, 7 + 24, beat(24), NOW + 120) == "expired"


@pytest.mark.parametrize(
    ("version", "value", "verdict"),
    [
        (9, beat(1), "forged"),
        (9, bytes(8), "forged"),
        (7, beat(0), "stale"),
        (6, beat(1), "stale"),
        (900, beat(1), "unknown"),
    ],
)
def test_wrong_beats(version: int, value: bytes, verdict: str) -> None:
    store = RecordStore(ME)
    store.put(with_beat(DATA, 1, beat(1)), NOW)
    assert store.put_beat(TAG, version, value, NOW) == verdict
    assert store.put_beat(b"whatever", 8, beat(1), NOW) == "unknown"
    assert [record.beats for record in store.records(NOW)] == [1]


def test_a_bad_beat_takes_nothing_from_a_good_record() -> None:
    store = RecordStore(ME)
    assert store.put(with_beat(DATA, 1, bytes(8)), NOW) == "new"
    assert [record.beats for record in store.records(NOW)] == [0]


def test_a_withdrawn_record_goes_at_once_and_cannot_be_replayed() -> None:
    store = RecordStore(ME)
    store.put(DATA, NOW)
    withdrawal = sign(record_of(sequence=9, is_withdrawn=True, lifetime_s=1), key_of(0))
    assert store.put(withdrawal, NOW) == "new" and store.records(NOW) == []
    for later in (0.0, 60.0, 119.0):
        store.expire(NOW + later)
        assert store.put(DATA, NOW + later) == "stale"
        assert store.put_beat(TAG, 8, beat(1), NOW + later) != "new"
    store.expire(NOW + 181)
    assert len(store) == 0 and store.put(DATA, NOW + 181) == "new", (
        "its memory ends: a replay is fresh for FRESH_S at most"
    )


def test_a_lost_link_hides_a_node_until_it_spoke_twice_or_is_linked_again() -> None:
    store = RecordStore(ME)
    store.put(DATA, NOW)
    store.suspect(node_of(0))
    assert store.records(NOW) == []
    store.put_beat(TAG, 8, beat(1), NOW)
    assert store.records(NOW) == [], "this beat may have been on its way already"
    store.put_beat(TAG, 9, beat(2), NOW)
    assert len(store.records(NOW)) == 1
    store.suspect(node_of(0))
    store.trust(node_of(0))
    assert len(store.records(NOW)) == 1


def test_two_nodes_with_one_key_are_reported_and_all_views_agree() -> None:
    here, there = (sign(record_of(addresses=(address_of(0, host),)), key_of(0)) for host in ("10.0.0.1", "10.0.0.2"))
    views = []
    for order in ((here, there), (there, here)):
        store = RecordStore(ME)
        assert [store.put(data, NOW) for data in order] == ["new", "fork"]
        assert set(store.forks) == {node_of(0)}
        (line,) = complaints({}, store.forks)
        assert "10.0.0.1:4000" in line and "10.0.0.2:4000" in line and "move node.key away" in line
        views.append(store.records(NOW))
    assert views[0] == views[1]


def test_a_fork_must_be_signed() -> None:
    store = RecordStore(ME)
    store.put(DATA, NOW)
    other = sign(record_of(name="evil"), key_of(0))
    assert store.put(other[:-64] + DATA[-64:], NOW) == "forged" and not store.forks


def test_a_wrong_clock_is_named_and_excludes_no_member() -> None:
    store = RecordStore(ME)
    assert store.put(sign(record_of(1, issued_at=NOW + 7200), key_of(1)), NOW) == "new"
    assert complaints(skews_of(store.records(NOW), NOW), {}) == [
        f"the clock of node node-1 ({node_of(1)[:16]}) is hours ahead of this machine's: set one of them by NTP"
    ]
    store.put(sign(record_of(2, issued_at=NOW + 7190), key_of(2)), NOW)
    (line,) = complaints(skews_of(store.records(NOW), NOW), {})
    assert line.startswith("this machine's clock is hours behind that of 2 nodes")
    lines = {tuple(complaints({"node-1": off}, {})) for off in (-179.0, -181.0)}
    assert lines == {("the clock of node node-1 is minutes behind this machine's: set one of them by NTP",)}
    for index in range(MAX_NOTES + 5):
        store.put(sign(record_of(index, issued_at=NOW - 999), key_of(index)), NOW)
    assert len(skews_of(store.records(NOW), NOW)) == MAX_NOTES


def test_floods_are_bounded() -> None:
    store = RecordStore(ME)
    spans = [(a, b) for a in range(20) for b in range(a + 1, 24)][: MAX_RECORDS_PER_NODE + 1]
    flood = [sign(record_of(info=info_of(*span)), key_of(0)) for span in spans]
    assert [store.put(data, NOW) for data in flood] == ["new"] * MAX_RECORDS_PER_NODE + ["full"]
    small = RecordStore(ME, max_records=1)
    assert [small.put(data, NOW) for data in flood[:2]] == ["new", "full"]
    assert small.put(sign(record_of(0, sequence=8, info=info_of(*spans[0])), key_of(0)), NOW) == "new", (
        "who is in may go on speaking"
    )


def test_expiry_forgets_everything() -> None:
    store = RecordStore(ME)
    store.put(DATA, NOW)
    assert store.expire(NOW + 119) == []
    assert store.expire(NOW + 120) == [record_of()]
    assert len(store) == 0 and store.by_tag(TAG) is None and store.of_node(node_of(0)) == []


@pytest.mark.parametrize("make", [Static, lambda me: Gossip(me, Random(1)), lambda me: Dht(me, Random(1))])
def test_what_some_nodes_say_of_a_model(make: Callable[[NodeId], Static | Gossip | Dht]) -> None:
    """Of these nodes, of that model, and fresh: by a back-end of each kind."""
    backend, model, other = make(ME), ModelId("ab" * 32), ModelId("cd" * 32)
    said = [record_of(0), record_of(1), record_of(1, info=info_of(model=other)), record_of(2, info=None), record_of(3)]
    for number, record in enumerate(said):
        data = sign(record, key_of([0, 1, 1, 2, 3][number]))
        if isinstance(backend, Dht):
            backend.store.put(data, NOW, record.node)
        else:
            backend.store.put(data, NOW)
    nodes = [node_of(index) for index in (1, 2, 9)]
    assert backend.records_of(nodes, model, NOW) == [said[1]]
    assert backend.records_of(nodes, other, NOW) == [said[2]]
    assert backend.records_of(nodes, ModelId("ef" * 32), NOW) == []
    assert backend.records_of(nodes, model, NOW + 119) == []
    assert [record.node for record in backend.in_turn(model, (), NOW)] == [node_of(0), node_of(1), node_of(3)]


def test_what_one_peer_introduced_stands_behind_all_others() -> None:
    """Known nodes first, whichever node introduced them; then one of each introducer."""
    store = RecordStore(ME)
    for index in range(10, 15):
        store.take(sign(record_of(index), key_of(index)), NOW, sender=node_of(1))
    for index in range(20, 22):
        store.take(sign(record_of(index), key_of(index)), NOW, sender=node_of(2))
    store.trust(node_of(14))
    order = [int(entry.record.name.removeprefix("node-")) for entry in store.in_turn()]
    assert order == [14, 10, 20, 11, 21, 12, 13]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 200)), max_size=30))
def test_what_is_held_stays_in_order(steps: list[tuple[int, int]]) -> None:
    """Records come, are replaced and end; every view of them has the same ones."""
    store, now = RecordStore(ME, max_records=6), NOW
    for index, wait in steps:
        store.take(sign(record_of(index), key_of(index)), now, sender=node_of(index % 2))
        now += wait
        store.expire(now)
        in_order = list(store.in_order())
        assert [entry.tag for entry in in_order] == sorted(entry.tag for entry in store)
        assert {id(entry) for entry in in_order} == {id(entry) for entry in store} == {id(e) for e in store.in_turn()}
        assert all(store.by_tag(entry.tag) is entry for entry in in_order)


@given(st.permutations([(7, 0), (7, 2), (7, 5), (20, 0), (20, 1), (30, 0)]))
def test_any_order_ends_with_the_newest(order: list[tuple[int, int]]) -> None:
    store = RecordStore(ME)
    for sequence, beats in order:
        data = sign(record_of(sequence=sequence), key_of(0))
        store.put(with_beat(data, beats, chain_of(0, sequence).value(beats)) if beats else data, NOW)
    assert store.records(NOW) == [replace(record_of(sequence=30))]


@given(st.binary(max_size=500), st.binary(min_size=8, max_size=8))
def test_random_bytes_change_nothing(data: bytes, value: bytes) -> None:
    store = RecordStore(ME)
    store.put(DATA, NOW)
    assert store.put(data, NOW) == "malformed"
    assert store.put_beat(TAG, 8, value, NOW) == "forged"
    assert store.records(NOW) == [record_of()]


def test_a_linked_node_is_judged_by_its_link_not_by_late_beats() -> None:
    """A starved machine's beats come late; its link's heartbeats tell that it is there, until the link is lost."""
    store = RecordStore(key_of(9).node_id)
    store.put(sign(record_of(), key_of(0)), NOW)
    store.trust(key_of(0).node_id, is_linked=True)
    assert len(store.records(NOW + FRESH_S + 40)) == 1
    assert not [entry for entry in store if entry.is_current(NOW + FRESH_S + 40)], "others are told nothing stale"
    assert store.records(NOW + 120) == [], "a record's lifetime ends all the same"
    store.suspect(key_of(0).node_id)
    assert store.records(NOW + 1) == []


def test_an_answer_is_no_link() -> None:
    store = RecordStore(key_of(9).node_id)
    store.put(sign(record_of(), key_of(0)), NOW)
    store.trust(key_of(0).node_id)
    assert store.records(NOW + FRESH_S + 1) == []
