"""F6 and F15: thousands of made-up records. Tickets let anybody make keys; each record here is signed by one."""

from dataclasses import replace
from random import Random

import pytest

from manyhands.core import NodeAddr
from manyhands.swarm.dht_store import MAX_PER_KEY, MAX_PER_PUBLISHER, DhtStore
from manyhands.swarm.gossip import MAX_RECORDS, Gossip
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.record import sign
from manyhands.swarm.shelf import MAX_RECORDS_PER_NODE, Shelf
from tests.swarm.records import NOW, info_of, key_of, node_of, record_of

ME, ATTACKER, HONEST = node_of(0), node_of(1), node_of(2)


@pytest.fixture(scope="module")
def made_up() -> list[bytes]:
    """MAX_RECORDS statements of 64 made-up keys."""
    found = []
    for _ in range(MAX_RECORDS // MAX_RECORDS_PER_NODE):
        key = NodeKey.generate()
        for start in range(MAX_RECORDS_PER_NODE):
            addr = NodeAddr("10.66.6.6", 6666, key.node_id)
            record = record_of(info=info_of(start, 99, num_layers=99))
            found.append(sign(replace(record, node=key.node_id, addresses=(addr,)), key))
    return found


def names(shelf: Shelf) -> set[str]:
    return {record.name for record in shelf.records(NOW)}


def test_one_peer_can_introduce_half_of_the_directory_and_no_more(made_up: list[bytes]) -> None:
    shelf = Shelf(ME, MAX_RECORDS)
    for data in made_up:
        shelf.take(data, NOW, sender=ATTACKER)
    assert len(shelf) == MAX_RECORDS // 2 and shelf.counts["full"] == MAX_RECORDS // 2
    for index in range(3, 40):
        assert shelf.take(sign(record_of(index), key_of(index)), NOW, sender=HONEST).verdict == "new"


def test_a_full_directory_takes_newcomers_and_what_this_node_says(made_up: list[bytes]) -> None:
    """Two attackers fill it; who was here stays, who comes gets in, by its own link or through an honest peer."""
    shelf = Shelf(ME, MAX_RECORDS)
    for index in range(3, 20):
        shelf.take(sign(record_of(index), key_of(index)), NOW, sender=HONEST)
    for number, data in enumerate(made_up + made_up):
        shelf.take(data, NOW, sender=ATTACKER if number % 2 else node_of(99))
    assert len(shelf) == MAX_RECORDS
    for start in range(MAX_RECORDS_PER_NODE):
        mine = record_of(0, info=info_of(start, 99, num_layers=99))
        assert shelf.put(sign(mine, key_of(0)), NOW) == "new", "own records always find room"
    for index in range(20, 40):
        shelf.trust(node_of(index))
        assert shelf.take(sign(record_of(index), key_of(index)), NOW, sender=node_of(index)).verdict == "new"
    for index in range(40, 60):
        assert shelf.take(sign(record_of(index), key_of(index)), NOW, sender=HONEST).verdict == "new"
    assert len(shelf) == MAX_RECORDS
    assert {f"node-{i}" for i in range(3, 60)} <= names(shelf)
    assert sum(map(len, shelf._accounts.values())) == len(shelf._entries) == len(shelf._by_tag)


def test_keys_that_are_linked_for_the_purpose_do_not_fill_it_either(made_up: list[bytes]) -> None:
    """64 links of an attacker, 64 records each: each of its accounts is larger than a newcomer's."""
    shelf = Shelf(ME, MAX_RECORDS)
    for data in made_up:
        (record,) = [e.record for e in [shelf.take(data, NOW).entry] if e is not None]
        shelf.trust(record.node)
    assert len(shelf) == MAX_RECORDS
    for index in range(3, 30):
        assert shelf.take(sign(record_of(index), key_of(index)), NOW, sender=node_of(index)).verdict == "new"
    assert len(shelf) == MAX_RECORDS and {f"node-{i}" for i in range(3, 30)} <= names(shelf)


def test_a_key_of_the_dht_takes_newcomers_although_it_is_full(made_up: list[bytes]) -> None:
    store = DhtStore(ME)
    for data in made_up:
        store.put(data, NOW, ATTACKER)
    for number in range(MAX_PER_KEY // MAX_PER_PUBLISHER + 1):
        key = key_of(100 + number)
        for start in range(MAX_PER_PUBLISHER):
            record = record_of(100 + number, info=info_of(start, 99, num_layers=99))
            store.put(sign(record, key), NOW, key.node_id, node=key.node_id)
    assert len(store) == MAX_PER_KEY
    for index in range(3, 10):
        assert store.put(sign(record_of(index), key_of(index)), NOW, node_of(index), node=node_of(index))
    assert store.put(sign(record_of(0), key_of(0)), NOW, ME, node=ME)
    assert {f"node-{i}" for i in (0, *range(3, 10))} <= {r.name for r in store.records(NOW)}


def test_gossip_takes_its_own_words_while_it_is_flooded(made_up: list[bytes]) -> None:
    gossip = Gossip(ME, Random(1))
    for number, data in enumerate(made_up + made_up):
        gossip.shelf.take(data, NOW, sender=node_of(50 + number % 3))
    gossip.publish(sign(record_of(0), key_of(0)), NOW)
    assert "node-0" in names(gossip.shelf)
