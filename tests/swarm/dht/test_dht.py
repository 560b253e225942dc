"""The DHT: buckets, lookups, bytes, the store, and whole overlays with deaths, partitions and false answers in virtual time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import ModelId, NodeAddr, NodeId, SpanLoad
from manyhands.errors import ProtocolError
from manyhands.swarm.dht import store as dht_store
from manyhands.swarm.dht import wire
from manyhands.swarm.dht.backend import Dht
from manyhands.swarm.dht.intake import MAX_PER_SECOND
from manyhands.swarm.dht.lookup import (
    ALPHA,
    FETCH_TAGS,
    MAX_ALPHA,
    MAX_ASKS,
    MAX_CANDIDATES,
    MAX_WAYS,
    Lookup,
    RecordFetch,
)
from manyhands.swarm.dht.query import Finished
from manyhands.swarm.dht.store import STALE_S, DhtStore, model_key
from manyhands.swarm.dht.table import CHECK_S, FORGET_S, Contact, K, Table, number
from manyhands.swarm.dht.wire import (
    DhtFind,
    DhtFound,
    DhtPing,
    DhtPong,
    DhtPut,
    DhtRecords,
    Message,
    contact_of,
    decode,
    encode,
)
from manyhands.swarm.directory import MAX_BODY_BYTES, Outgoing, Peer
from manyhands.swarm.record import BEAT_S, Record
from manyhands.swarm.statement import MAX_BYTES, read, sign, with_beat
from tests.swarm.overlay import START_S, Network, Overlay
from tests.swarm.records import announcer_of, chain_of, info_of, key_of, node_of, record_of

MODEL = ModelId("ab" * 32)


def peer_at(place: int) -> Peer:
    node = NodeId(f"{place:064x}")
    return Peer(node, (NodeAddr("10.0.0.1", 4000, node),))


def contact_at(place: int) -> Contact:
    contact = contact_of(peer_at(place))
    assert contact is not None
    return contact


def places(count: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.getrandbits(256) for _ in range(count)]


def statement(index: int, sequence: int = 7, now: float = START_S, **changes: object) -> bytes:
    return sign(record_of(index, sequence, issued_at=now, **changes), key_of(index))


# The table


@given(st.integers(0, 2**256 - 1), st.integers(0, 300), st.integers(1, 20))
def test_the_closest_are_those_of_brute_force(target: int, count: int, wanted: int) -> None:
    table = Table(places(1, seed=9)[0])
    for place in places(count):
        table.seen(contact_at(place), 0.0)
    known = [contact.id for contact in table]
    assert [c.id for c in table.closest(target, wanted)] == sorted(known, key=lambda p: p ^ target)[:wanted]


def full_bucket() -> tuple[Table, list[Contact]]:
    table = Table(0)
    far = [contact_at((1 << 255) + i) for i in range(K)]
    for contact in far:
        assert table.seen(contact, 0.0) is None
    return table, far


def test_a_newcomer_does_not_push_out_a_contact_that_answers() -> None:
    """Least recently seen is checked; it stays if it speaks (Kademlia 2.2)."""
    table, far = full_bucket()
    newcomer = contact_at((1 << 255) + 99)
    assert table.seen(newcomer, 1.0) == far[0]
    table.seen(far[0], 2.0)
    assert newcomer.id not in table and far[0].id in table
    assert table.seen(newcomer, 2.0 + CHECK_S) == far[1]


def test_a_newcomer_takes_the_place_of_a_contact_that_fails() -> None:
    table, far = full_bucket()
    newcomer = contact_at((1 << 255) + 99)
    table.seen(newcomer, 1.0)
    table.failed(far[0].id, 2.0)
    assert newcomer.id in table and far[0].id not in table


def test_newcomers_without_end_cost_one_ping_per_while() -> None:
    table, far = full_bucket()
    pinged = [table.seen(contact_at((1 << 255) + 100 + i), 1.0) for i in range(1000)]
    assert [p for p in pinged if p] == [far[0]] and len(table) == K


def test_a_contact_that_fails_is_kept_but_not_named_until_its_place_is_wanted() -> None:
    """A partition must not empty the table: whom else could one ask when it heals?"""
    table, far = full_bucket()
    table.failed(far[0].id, 1.0)
    assert far[0] in table.failing and far[0] not in table.closest(far[0].id, K)
    table.seen(far[0], 2.0)
    assert not table.failing and far[0] in table.closest(far[0].id, K)
    table.failed(far[0].id, 3.0)
    table.failed(far[0].id, 3.0 + FORGET_S + 1)
    assert far[0].id not in table


@given(st.integers(0, 2**272 - 1))
def test_refresh_targets_are_ids(draw: int) -> None:
    table = Table(5)
    assert table.refresh_target(draw) < 1 << 256
    table.seen(contact_at(4), 0.0)
    assert table.refresh_target(draw) < 1 << 256


# Bytes


MESSAGES: list[Message] = [
    DhtPing(1),
    DhtPong(2**64 - 1),
    DhtFind(3, 2**256 - 1, True),
    DhtFound(4, tuple(contact_at(p) for p in places(K)), tuple(bytes([i]) * 10 for i in range(200))),
    DhtFound(5, (), ()),
    wire.DhtFetch(6, 7, (b"1234567890",)),
    DhtRecords(8, (b"a", b"")),
    DhtPut(0, (b"b" * 4096,)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_cut_short_or_too_long_is_refused(message: Message) -> None:
    body = encode(message)
    for cut in [*range(min(len(body), 60)), len(body) - 1]:
        with pytest.raises(ProtocolError):
            decode(body[:cut])
    with pytest.raises(ProtocolError):
        decode(body + b"\0")


@given(st.binary(max_size=200), st.integers(0, 7))
def test_hostile_bytes_are_refused_or_mean_one_thing(body: bytes, kind: int) -> None:
    try:
        message = decode(bytes([kind]) + body)
    except ProtocolError:
        return
    assert encode(message) == bytes([kind]) + body


@given(st.lists(st.tuples(st.text(max_size=300), st.integers(0, 65535)), max_size=6))
def test_addresses_that_cannot_be_dialled_are_not_passed_on(addresses: list[tuple[str, int]]) -> None:
    node = key_of(1).node_id
    contact = contact_of(Peer(node, tuple(NodeAddr(host, port, node) for host, port in addresses)))
    if contact is not None:
        assert decode(encode(DhtFound(1, (contact,), ()))) == DhtFound(1, (contact,), ())
        assert {(a.host, a.port) for a in contact.peer.addresses} <= set(addresses)


def test_the_largest_messages_fit_into_a_body() -> None:
    node = key_of(1).node_id
    wordy = contact_of(Peer(node, (NodeAddr("h" * 255, 1, node),) * 9))
    assert wordy is not None
    found = DhtFound(1, (wordy,) * K, (b"1234567890",) * wire.MAX_TAGS)
    assert len(encode(found)) <= MAX_BODY_BYTES
    assert len(encode(DhtRecords(1, (bytes(MAX_BYTES),) * FETCH_TAGS))) <= MAX_BODY_BYTES


# Lookups


def run_lookup(lookup: Lookup, tables: Mapping[int, Sequence[int]]) -> list[int]:
    """Play a network in which `tables` says whom every live node names. Returns whom the lookup found."""
    while asks := lookup.to_ask():
        assert len(asks) <= MAX_ALPHA
        for contact in asks:
            if contact.id in tables:
                lookup.answered(contact.id, [contact_at(p) for p in tables[contact.id]])
            else:
                lookup.failed(contact.id)
    assert lookup.is_done
    return [contact.id for contact in lookup.closest()]


def network_of(dead: int = 0) -> tuple[list[int], dict[int, Table], Random]:
    """300 ids, the first `dead` of them dead, and the tables of the living, who noticed half of the deaths."""
    rng, ids = Random(0), places(300, 0)
    tables = {place: Table(place) for place in ids[dead:]}
    for table in tables.values():
        for place in rng.sample(ids, len(ids)):
            table.seen(contact_at(place), 0.0)
        for place in ids[:dead]:
            if rng.random() < 0.5:
                table.failed(place, 0.0)
    return ids, tables, rng


def answers_of(tables: Mapping[int, Table], target: int) -> dict[int, list[int]]:
    return {place: [c.id for c in table.closest(target, K)] for place, table in tables.items()}


@pytest.mark.parametrize("dead", [0, 90])
def test_a_lookup_finds_the_closest_of_the_living(dead: int) -> None:
    """Against brute force; with 30 % dead, of whom half are not known to be, the nearest 8 and at most two of 16 short."""
    ids, tables, rng = network_of(dead)
    for _ in range(10):
        target = rng.getrandbits(256)
        start = [contact_at(p) for p in rng.sample(ids[dead:], 3)]
        found = run_lookup(Lookup(target, start), answers_of(tables, target))
        wanted = sorted(tables, key=lambda p: p ^ target)[:K]
        assert found[:8] == wanted[:8] and len({*found} & {*wanted}) >= K - 2 * (dead > 0)


def test_a_peer_that_names_nodes_that_do_not_exist_is_not_followed() -> None:
    """It knows the target and invents ids next to it; the lookup ends with the true ones and few questions lost."""
    ids, tables, rng = network_of()
    target = rng.getrandbits(256)
    answering = answers_of(tables, target)
    faulty = min(ids, key=lambda p: p ^ target)
    answering[faulty] = [target ^ i for i in range(1, K + 1)]
    lookup = Lookup(target, [contact_at(faulty), contact_at(ids[0]), contact_at(ids[1])])
    assert run_lookup(lookup, answering) == sorted(ids, key=lambda p: p ^ target)[:K]
    assert lookup.num_asked < 60


def elsewhere(peer: Peer) -> Contact:
    """A contact of that node at an address that is not its own."""
    contact = contact_of(Peer(peer.node, (NodeAddr("10.9.9.9", 9, peer.node),)))
    assert contact is not None
    return contact


def test_a_peer_that_names_nodes_where_they_are_not_hides_none_of_them() -> None:
    """It is asked first; the others name the same nodes where they are."""
    ids, tables, rng = network_of()
    target = rng.getrandbits(256)
    answering = answers_of(tables, target)
    faulty = min(ids, key=lambda p: p ^ target)
    lookup = Lookup(target, [contact_at(place) for place in (faulty, *ids[:2])])
    while asks := lookup.to_ask():
        for contact in asks:
            if contact != contact_at(contact.id):
                lookup.failed(contact.id)
            elif contact.id == faulty:
                lookup.answered(contact.id, [elsewhere(peer_at(place)) for place in answering[faulty]])
            else:
                lookup.answered(contact.id, [contact_at(place) for place in answering[contact.id]])
    assert lookup.is_done and lookup.num_asked < 60
    assert [contact.id for contact in lookup.closest()] == sorted(ids, key=lambda p: p ^ target)[:K]


def test_one_node_is_asked_at_few_places() -> None:
    tellers = [contact_at((1 << 200) + index) for index in range(8)]
    lookup, asked = Lookup(0, tellers), list[Contact]()
    while asks := lookup.to_ask():
        for contact in asks:
            if contact.id == 1:
                asked.append(contact)
                lookup.failed(1)
            else:
                node = peer_at(1).node
                named = contact_of(Peer(node, (NodeAddr("10.9.9.9", contact.id & 255 | 1 << 8, node),)))
                assert named is not None
                lookup.answered(contact.id, [named])
    assert len(asked) == len(set(asked)) == MAX_WAYS and lookup.is_done
    assert [contact.id for contact in lookup.closest()] == [teller.id for teller in tellers]


def test_an_endless_chain_of_nearer_nodes_ends() -> None:
    """Sybils that answer, each naming nearer ones: the lookup stops at its budget and keeps its size."""
    target = 0
    lookup = Lookup(target, [contact_at(1 << 255)])
    num_asked = 0
    while asks := lookup.to_ask():
        for contact in asks:
            num_asked += 1
            nearer = [contact_at(max(1, contact.id - i * (contact.id >> 9) - i)) for i in range(1, 200)]
            lookup.answered(contact.id, nearer)
    assert lookup.is_done and num_asked <= MAX_ASKS
    assert len(lookup._order) <= MAX_CANDIDATES + MAX_ASKS


def test_answers_without_a_question_change_nothing() -> None:
    lookup = Lookup(0, [contact_at(8)])
    lookup.answered(8, [contact_at(1)])
    lookup.failed(8)
    assert [c.id for c in lookup.to_ask()] == [8]
    lookup.answered(8, [])
    lookup.answered(8, [contact_at(1)])
    assert lookup.is_done and [c.id for c in lookup.closest()] == [8]


def test_a_slow_node_delays_no_other_and_still_counts() -> None:
    lookup = Lookup(0, [contact_at(i) for i in range(1, 6)])
    assert [c.id for c in lookup.to_ask()] == [1, 2, 3] and not lookup.to_ask()
    lookup.slow(1)
    lookup.slow(1)
    assert [c.id for c in lookup.to_ask()] == [4]
    for node in (2, 3, 4, 5):
        lookup.answered(node, [])
        lookup.to_ask()
    assert not lookup.is_done
    lookup.answered(1, [])
    assert lookup.is_done and [c.id for c in lookup.closest()] == [1, 2, 3, 4, 5]


def test_the_dead_are_not_waited_for_one_by_one() -> None:
    """A slow node's neighbour beyond the k nearest is asked before its deadline; it counts once the slow one failed."""
    lookup = Lookup(0, [contact_at(i) for i in range(1, 5)], k=2)
    assert [c.id for c in lookup.to_ask()] == [1, 2]
    lookup.slow(1)
    assert [c.id for c in lookup.to_ask()] == [3]
    lookup.answered(2, [])
    lookup.answered(3, [])
    assert not lookup.to_ask() and not lookup.is_done
    lookup.failed(1)
    assert lookup.is_done and [c.id for c in lookup.closest()] == [2, 3]


def test_every_record_is_fetched_once_and_again_from_another_where_one_fails() -> None:
    holders = [peer_at(i) for i in range(5)]
    tags = [bytes([i]) * 8 for i in range(100)]
    fetch = RecordFetch({tag: list(holders) for tag in tags})
    got: list[bytes] = []
    while asks := fetch.to_ask():
        assert len(asks) <= ALPHA and len({holder.node for holder, _ in asks}) == len(asks)
        for holder, wanted in asks:
            assert len(wanted) <= FETCH_TAGS
            if holder == holders[0]:
                fetch.failed(holder.node)
            elif holder == holders[1]:
                got += wanted[:1]
                fetch.answered(holder.node, set(wanted[:1]))
            else:
                got += wanted
                fetch.answered(holder.node, set(wanted))
    assert fetch.is_done and sorted(got) == tags


def test_tags_that_are_not_delivered_are_given_up() -> None:
    fetch = RecordFetch({bytes([i]) * 8: [peer_at(1), peer_at(2)] for i in range(30)})
    num_asks = 0
    while asks := fetch.to_ask():
        num_asks += len(asks)
        for holder, _ in asks:
            fetch.answered(holder.node, set())
    assert fetch.is_done and num_asks <= 12


# The store


def store_of(*statements: bytes) -> DhtStore:
    store = DhtStore(NodeId("0" * 64))
    for data in statements:
        assert store.put(data, START_S, read(data)[0].node) is not None
    return store


def test_a_key_holds_one_record_per_node_and_span() -> None:
    """IN-W03/W04: no node writes a shared document."""
    store = store_of(statement(1), statement(2), statement(1, info=info_of(8, 16)), statement(1, sequence=8))
    assert sorted((r.name, r.sequence) for r in store.records(START_S)) == [("node-1", 7), ("node-1", 8), ("node-2", 7)]
    assert len(store.tags(model_key(MODEL), START_S)) == len(store) == 3


def test_a_replayed_record_changes_nothing() -> None:
    old = statement(1)
    store = store_of(old, statement(1, sequence=9, is_withdrawn=True), old)
    assert list(store.records(START_S)) == [] and store.counts["stale"] == 1
    assert [store.data(model_key(MODEL), tag) == old for tag in store.tags(model_key(MODEL), START_S)] == [False]


def test_only_news_is_lacking() -> None:
    """Also where the last 16 bits of a version begin anew; what is far away may be of a later run."""
    key, tag = model_key(MODEL), record_of(1).key.tag
    store = store_of(statement(1, sequence=0x1FFFF))
    assert store.lacks(key, tag + (0).to_bytes(2)) and store.lacks(key, bytes(10)) and store.lacks(5, tag + bytes(2))
    assert not store.lacks(key, tag + (0xFFFF).to_bytes(2)) and not store.lacks(key, tag + (0xFFF0).to_bytes(2))
    assert store.lacks(key, tag + (0x7000).to_bytes(2)) and store.lacks(key, tag + (0xC000).to_bytes(2))
    assert store.tags(key, START_S) == [tag + b"\xff\xff"]


def test_records_under_the_wrong_key_or_of_another_node_are_refused() -> None:
    store = store_of()
    assert store.put(statement(1), START_S, node_of(1), key=5) is None
    assert store.put(statement(1), START_S, node_of(2), node=node_of(2)) is None
    assert store.put(statement(1)[:-1] + b"\0", START_S, node_of(1)) is None
    assert store.put(b"garbage", START_S, node_of(1)) is None
    assert len(store) == 0 and store.tags(model_key(MODEL), START_S) == []


def test_a_record_that_is_not_renewed_is_gone() -> None:
    """IN-22: after two missed turns from every view, after its lifetime from memory."""
    store = store_of(statement(1))
    assert len(list(store.records(START_S + STALE_S))) == 1
    assert list(store.records(START_S + STALE_S + 1)) == [] == store.tags(model_key(MODEL), START_S + STALE_S + 1)
    store.expire(START_S + 121)
    assert len(store) == 0 and not store._stores


def test_a_publisher_and_a_key_have_their_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [statement(1, info=info_of(i, i + 1, num_layers=99)) for i in range(dht_store.MAX_PER_PUBLISHER + 5)]
    monkeypatch.setattr(dht_store, "MAX_PER_KEY", dht_store.MAX_PER_PUBLISHER + 1)
    store = store_of(*spans)
    assert len(store) == dht_store.MAX_PER_PUBLISHER and store.counts["full"] == 5
    for index in range(2, 9):
        store.put(statement(index), START_S, node_of(index))
    assert len(store) == dht_store.MAX_PER_PUBLISHER + 1
    names = {r.name for r in store.records(START_S)}
    assert names == {f"node-{i}" for i in range(1, 9)}, "small accounts push out of a large one"
    assert store.put(statement(1, sequence=9, info=info_of(0, 1, num_layers=99)), START_S, node_of(1))
    assert max(r.sequence for r in store.records(START_S)) == 9, "what is held can be renewed at the cap"


def test_where_room_ends_far_keys_make_way_for_near_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of records under any keys does not push out what is near us, nor what we want."""
    monkeypatch.setattr(dht_store, "MAX_RECORDS", 4)
    models = sorted((ModelId(f"{i:064x}") for i in range(12)), key=model_key)
    store = store_of(*(statement(i, info=info_of(model=models[i])) for i in (6, 7, 8, 9)))
    store.put(statement(11, info=info_of(model=models[11])), START_S, node_of(11))
    assert {r.info.model for r in store.records(START_S) if r.info} == {models[i] for i in (6, 7, 8, 9)}
    store.wanted.add(model_key(models[9]))
    store.put(statement(1, info=info_of(model=models[1])), START_S, node_of(1))
    assert {r.info.model for r in store.records(START_S) if r.info} == {models[i] for i in (1, 6, 7, 9)}


# Whole overlays


class World:
    """`count` nodes with real keys that join one after the other; the first `hosts` host a span of MODEL."""

    def __init__(self, count: int, hosts: int = 0, seed: int = 1, network: Network | None = None) -> None:
        self.rng = Random(seed)
        self.overlay = Overlay(self.rng, network or Network())
        self.finished: list[Finished] = []
        self.peers = [Peer(key_of(i).node_id, record_of(i).addresses) for i in range(count)]
        self.hosts = range(hosts)
        for index in range(count):
            self.join(index, self.peers[self.rng.randrange(index)] if index else None)
            self.overlay.run(0.2)
        self.overlay.at(0.0, self._speak)

    def join(self, index: int, through: Peer | None, **arguments: Sequence[ModelId]) -> Dht:
        peer = self.peers[index]
        dht = Dht(peer.node, self.rng, on_finished=self.finished.append, **arguments)
        self.overlay.add(peer, dht)
        if through is not None:
            self.overlay.link(peer.node, through.node)
        return dht

    def dht(self, index: int) -> Dht:
        backend = self.overlay.backend(self.peers[index].node)
        assert isinstance(backend, Dht)
        return backend

    def kill(self, *indexes: int, silent: bool = True) -> None:
        for index in indexes:
            self.overlay.kill(self.peers[index].node, silent=silent)

    def view(self, index: int) -> set[str]:
        return {r.name for r in self.dht(index).records(self.overlay.now) if r.info and r.info.model == MODEL}

    def publish(self, index: int, **changes: object) -> None:
        now = self.overlay.now
        data = statement(index, int(now), now, info=info_of(), anchor=bytes(8), **changes)
        self.overlay.publish(self.peers[index].node, data)

    def _speak(self) -> None:
        for index in self.hosts:
            if self.peers[index].node in self.overlay.alive:
                self.publish(index)
        self.overlay.at(10.0, self._speak)


def names(indexes: Sequence[int]) -> set[str]:
    return {f"node-{i}" for i in indexes}


def test_who_asks_sees_every_host() -> None:
    """IN-05..08: hosts announce, a node that asks gets the list, from whichever nodes hold it."""
    world = World(60, hosts=25)
    world.dht(59).watch(MODEL)
    world.overlay.run(10)
    assert world.view(59) == names(range(25))


def test_records_lie_at_the_nodes_nearest_to_their_key() -> None:
    world = World(80, hosts=1)
    world.overlay.run(10)
    key = model_key(MODEL)
    near = sorted(range(1, 80), key=lambda i: number(world.peers[i].node) ^ key)[:K]
    assert [len(world.view(i)) for i in near] == [1] * K
    assert sum(len(world.view(i)) for i in range(1, 80)) == K


def test_lookups_find_the_living_while_a_third_is_dead() -> None:
    """And the hosts that died are gone from every view within the lifetime of a record."""
    world = World(60, hosts=20)
    for index in range(50, 60):
        world.dht(index).watch(MODEL)
    world.overlay.run(60)
    dead = world.rng.sample(range(60), 20)
    world.kill(*dead)
    world.overlay.run(130)
    living = [i for i in range(60) if i not in dead]
    for index in (i for i in living if i >= 50):
        assert world.view(index) == names([i for i in living if i < 20])


def test_a_partition_heals() -> None:
    """Each side goes on with its own; afterwards both see all again."""
    world = World(14, hosts=14)
    for index in range(14):
        world.dht(index).watch(MODEL)
    world.overlay.run(60)
    left, right = range(0, 14, 2), range(1, 14, 2)
    world.overlay.partition([world.peers[i].node for i in left])
    world.overlay.run(150)
    assert world.view(0) == names(left) and world.view(1) == names(right)
    world.overlay.heal()
    world.overlay.run(200)
    assert all(world.view(i) == names(range(14)) for i in range(14))


def test_a_withdrawal_is_known_with_the_next_question() -> None:
    world = World(40, hosts=10)
    world.dht(30).watch(MODEL)
    world.overlay.run(15)
    assert world.view(30) == names(range(10))
    world.hosts = range(9)
    world.publish(9, is_withdrawn=True)
    world.overlay.run(0.3)
    world.kill(9)
    world.overlay.run(40)
    assert world.view(30) == names(range(9))


def test_a_host_whose_link_broke_is_gone_once_it_cannot_be_dialled() -> None:
    world = World(30, hosts=1)
    world.overlay.run(10)
    holder = next(
        i for i in range(1, 30) if world.view(i) and world.peers[0].node in world.overlay.linked(world.peers[i].node)
    )
    world.kill(0, silent=False)
    world.overlay.run(1)
    assert world.view(holder) == set()


def test_a_host_whose_link_was_idle_stays() -> None:
    """A driver that closes idle links must not empty the directory."""
    world = World(30, hosts=1)
    world.overlay.run(10)
    host = world.peers[0].node
    holder = next(i for i in range(1, 30) if world.view(i))
    for item in world.dht(holder).lost(host, world.overlay.now):
        world.overlay.send(world.peers[holder].node, [item])
    world.overlay.run(1)
    assert world.view(holder) == names([0])


def test_a_publisher_alone_publishes_when_a_node_comes() -> None:
    world = World(1, hosts=1)
    world.overlay.run(30)
    world.peers.append(Peer(key_of(1).node_id, record_of(1).addresses))
    world.join(1, world.peers[0], interest=[MODEL])
    world.overlay.run(40)
    assert world.view(1) == names([0])


def test_a_span_taken_up_again_is_published_at_once() -> None:
    """Its withdrawal is still held; it must not wait for the next turn."""
    world = World(30, hosts=0)
    for change in (False, True, False):
        world.publish(0, is_withdrawn=change)
        world.overlay.run(3)
    assert sum(bool(world.view(i)) for i in range(1, 30)) >= K - 1


def test_a_host_that_lives_is_never_out_of_sight() -> None:
    """A statement is replaced everywhere before it ends, whenever in its life it was stored."""
    world = World(30)
    announcers = {i: announcer_of(i, world.overlay.now) for i in range(10)}

    def announce() -> None:
        for index, announcer in announcers.items():
            for data in announcer.announce([(info_of(), SpanLoad())], world.overlay.now):
                world.overlay.publish(world.peers[index].node, data)
        world.overlay.at(BEAT_S, announce)

    announce()
    for index in range(20, 30):
        world.dht(index).watch(MODEL)
    world.overlay.run(60)
    for _ in range(100):
        world.overlay.run(2)
        assert [world.view(i) for i in range(20, 30)] == [names(range(10))] * 10


def test_a_span_that_changed_is_stored_at_once_and_a_busier_one_soon() -> None:
    """What was claimed and is loaded now is news; by 30 s later a second machine might have loaded it too."""
    dht, peer = node_and_peer()
    (question,) = [decode(o.body) for o in dht.joined(peer, START_S) + dht.tick(START_S) if o.to == peer][1:]
    assert isinstance(question, DhtFind) and question.target == model_key(MODEL)
    dht.receive(peer, encode(DhtFound(question.request, (), ())), START_S)

    def stored(record: Record, now: float) -> list[Outgoing]:
        data = sign(record, key_of(0))
        return [o for o in dht.publish(data, now) if o == Outgoing(peer, encode(DhtPut(0, (data,))))]

    claim = record_of(0, info=replace(info_of(), model=MODEL, max_sessions=0))
    ready = replace(claim, info=replace(info_of(), model=MODEL), sequence=claim.sequence + 1)
    busy = replace(ready, info=replace(info_of(), model=MODEL, free_tokens=1), sequence=claim.sequence + 2)
    gone = replace(busy, is_withdrawn=True, sequence=claim.sequence + 3)
    told = [len(stored(record, START_S + at)) for at, record in enumerate((claim, ready, busy, gone), 1)]
    assert told == [1, 1, 0, 1]


def test_a_model_that_is_not_asked_for_any_more_is_not_looked_up() -> None:
    dht, peer = node_and_peer()
    dht.joined(peer, START_S)
    dht.unwatch(MODEL)
    assert [
        o for o in dht.tick(START_S) if isinstance(question := decode(o.body), DhtFind) and question.wants_records
    ] == []
    dht.watch(MODEL)
    assert [
        o for o in dht.tick(START_S + 1) if isinstance(question := decode(o.body), DhtFind) and question.wants_records
    ]


# Hostile peers


def node_and_peer() -> tuple[Dht, Peer]:
    return Dht(key_of(0).node_id, Random(1), [MODEL]), Peer(key_of(1).node_id, record_of(1).addresses)


def test_a_node_stores_only_what_the_sender_says_of_itself() -> None:
    """The id is the link's, so a record of a third node is a lie or a replay, however well signed."""
    dht, peer = node_and_peer()
    dht.receive(peer, encode(DhtPut(0, (statement(2), statement(1)))), START_S)
    assert dht.records(START_S) == [] and dht.counts.refused == 1
    dht.receive(peer, encode(DhtPut(0, (statement(1),))), START_S)
    assert [r.node for r in dht.records(START_S)] == [peer.node]


def test_an_answer_from_another_node_is_ignored() -> None:
    """A peer that guessed the request number cannot answer for whom was asked, nor with another kind."""
    dht, peer = node_and_peer()
    asked = dht.joined(peer, START_S)
    question = decode(asked[0].body)
    assert asked[0].to == peer and isinstance(question, DhtFind)
    other = Peer(key_of(2).node_id, record_of(2).addresses)
    lie = (contact_at(5),)
    assert not [
        o for o in dht.receive(other, encode(DhtFound(question.request, lie, ())), START_S) if o.to == lie[0].peer
    ]
    dht.receive(peer, encode(DhtPong(question.request)), START_S)
    assert dht.counts.stray == 2
    out = dht.receive(peer, encode(DhtFound(question.request, lie, ())), START_S)
    assert [o.to for o in out] == [lie[0].peer]


def test_what_others_say_of_a_node_is_no_reason_to_shun_it() -> None:
    """One names a contact of this node, and a node that it does not know, at a false address; another where it is."""
    dht, faulty = node_and_peer()
    other, third = (Peer(key_of(index).node_id, record_of(index).addresses) for index in (2, 3))
    question = decode(dht.joined(faulty, START_S)[0].body)
    dht.joined(other, START_S)
    told = (elsewhere(other), elsewhere(third))
    asked = dht.receive(faulty, encode(DhtFound(question.request, told, ())), START_S)
    assert {out.to for out in asked} == {other, elsewhere(third).peer}
    assert not [out for out in dht.lost(third.node, START_S + 1) if out.to.node == third.node]
    question = decode(next(out.body for out in asked if out.to == other))
    at_last = contact_of(third)
    assert at_last is not None
    answer = encode(DhtFound(question.request, (elsewhere(third), at_last), ()))
    asked = dht.receive(other, answer, START_S + 1)
    assert [out.to for out in asked] == [third]
    dht.joined(third, START_S + 1)
    assert not dht.lost(third.node, START_S + 1) and dht.table.failing == [at_last]


def test_hearsay_enters_no_table() -> None:
    dht, peer = node_and_peer()
    question = decode(dht.joined(peer, START_S)[0].body)
    dht.receive(peer, encode(DhtFound(question.request, tuple(contact_at(i) for i in range(1, K)), ())), START_S)
    assert [contact.peer for contact in dht.table] == [peer]


def test_a_flood_is_cut_and_counted() -> None:
    dht, peer = node_and_peer()
    dht.tick(START_S)
    answers = [len(dht.receive(peer, encode(DhtPing(i)), START_S)) for i in range(3 * MAX_PER_SECOND)]
    assert sum(answers) == MAX_PER_SECOND and dht.counts.flooded == 2 * MAX_PER_SECOND
    store = encode(DhtPut(0, (statement(1),) * FETCH_TAGS))
    dht.tick(START_S + 1)
    for _ in range(MAX_PER_SECOND):
        dht.receive(peer, store, START_S + 1)
    assert sum(dht.store.counts.values()) <= MAX_PER_SECOND
    dht.tick(START_S + 2)
    assert dht.receive(peer, encode(DhtPing(1)), START_S + 2)


@given(st.lists(st.one_of(st.binary(max_size=80), st.sampled_from([encode(m) for m in MESSAGES])), max_size=8))
def test_no_bytes_raise_or_enter_the_store(bodies: list[bytes]) -> None:
    dht, peer = node_and_peer()
    dht.joined(peer, START_S)
    for body in bodies:
        for item in dht.receive(peer, body, START_S):
            assert 0 < len(item.body) <= MAX_BODY_BYTES
    assert dht.records(START_S) == []


class FaultyPeer:
    """Answers every question at once, as `lie` likes; joins like anyone else."""

    def __init__(self, dht: Dht) -> None:
        self.dht = dht

    def lie(self, sender: Peer, message: Message, now: float) -> Message | None:
        raise NotImplementedError

    def publish(self, data: bytes, now: float) -> list[Outgoing]:
        return self.dht.publish(data, now)

    def receive(self, sender: Peer, body: bytes, now: float) -> list[Outgoing]:
        message = decode(body)
        answer = self.lie(sender, message, now)
        return self.dht.receive(sender, body, now) if answer is None else [Outgoing(sender, encode(answer))]

    def tick(self, now: float) -> list[Outgoing]:
        return self.dht.tick(now)

    def joined(self, peer: Peer, now: float) -> list[Outgoing]:
        return self.dht.joined(peer, now)

    def lost(self, node: NodeId, now: float) -> list[Outgoing]:
        return self.dht.lost(node, now)

    def unreached(self, node: NodeId, now: float) -> list[Outgoing]:
        return self.dht.unreached(node, now)

    def records(self, now: float) -> list[Record]:
        return []


class Inventor(FaultyPeer):
    """Names nodes next to the target that do not exist, and lists records that it never delivers."""

    def lie(self, sender: Peer, message: Message, now: float) -> Message | None:
        match message:
            case DhtFind(request, target, _):
                invented = tuple(contact_at(target ^ i) for i in range(1, K + 1))
                return DhtFound(request, invented, tuple(i.to_bytes(10) for i in range(1000)))
            case wire.DhtFetch(request, _, tags):
                return DhtRecords(request, tuple(b"garbage" + tag for tag in tags))
            case _:
                return None


class Rewinder(FaultyPeer):
    """Lists and delivers an old record of a host that has withdrawn it."""

    old = b""

    def lie(self, sender: Peer, message: Message, now: float) -> Message | None:
        match message:
            case DhtFind(request, target, _):
                near = tuple(self.dht.table.closest(target, K))
                return DhtFound(request, near, (record_of(0).key.tag + bytes(2), record_of(0).key.tag + b"\x80\0"))
            case wire.DhtFetch(request, _, _):
                return DhtRecords(request, (self.old,))
            case _:
                return None


def world_with(kind: type[FaultyPeer], count: int, hosts: int) -> tuple[World, list[FaultyPeer]]:
    """A world whose last `count` nodes lie."""
    world = World(60, hosts=hosts)
    faulty: list[FaultyPeer] = []
    for index in range(60, 60 + count):
        peer = Peer(key_of(index).node_id, record_of(index).addresses)
        world.peers.append(peer)
        faulty.append(kind(Dht(peer.node, world.rng)))
        world.overlay.add(peer, faulty[-1])
        world.overlay.link(peer.node, world.peers[world.rng.randrange(60)].node)
        world.overlay.run(0.2)
    return world, faulty


def test_inventors_delay_lookups_but_hide_nothing() -> None:
    """One node in seven answers garbage to everything; every honest host is still seen."""
    world, _ = world_with(Inventor, 10, hosts=20)
    for index in range(50, 60):
        world.dht(index).watch(MODEL)
    world.overlay.run(60)
    assert [world.view(i) for i in range(50, 60)] == [names(range(20))] * 10


def test_a_replayed_record_does_not_bring_back_a_withdrawn_one() -> None:
    world, _ = world_with(Rewinder, 5, hosts=0)
    Rewinder.old = statement(0, int(world.overlay.now), world.overlay.now, anchor=bytes(8))
    world.overlay.publish(world.peers[0].node, Rewinder.old)
    world.dht(50).watch(MODEL)
    world.overlay.run(20)
    assert world.view(50) == names([0])
    world.publish(0, is_withdrawn=True)
    world.overlay.run(60)
    assert world.view(50) == set()


def test_chain_values_travel_with_the_record() -> None:
    """A statement with a beat is stored and shown with it."""
    dht, peer = node_and_peer()
    data = with_beat(statement(1), 3, chain_of(1).value(3))
    dht.receive(peer, encode(DhtPut(0, (data,))), START_S)
    assert [r.beats for r in dht.records(START_S)] == [3]
