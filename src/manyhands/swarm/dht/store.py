"""The records that a node of the DHT holds, under the keys of their models. Pure.

A key's value is a set of records, one per node and span, each replaced by newer ones of itself alone: no shared
document, so no lost update and no dead node published again by the living (IN-W03, IN-W04). One store per key judges
them; this file adds what many keys need: caps, tags, and which key makes way when room ends.
"""

import hashlib
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from itertools import chain

from manyhands.core import ModelId, NodeId
from manyhands.swarm.dht.wire import MAX_TAGS
from manyhands.swarm.directory import Peer
from manyhands.swarm.news import is_newer
from manyhands.swarm.record import Record, RecordKey
from manyhands.swarm.record_store import Forks, HeldRecord, RecordStore
from manyhands.swarm.statement import RecordRefused, Verdict, read

MAX_PER_KEY = MAX_TAGS  # records of one model: what one listing can name
MAX_PER_PUBLISHER = 32  # spans of one node, over all models
MAX_RECORDS = 16384  # in all; about 30 MB
LOOKED_AT = 512  # keys at a call of `expire`: a millisecond
HARMLESS: tuple[Verdict, ...] = ("new", "same", "stale", "full", "fork", "expired")  # an honest peer may send such
STALE_S = 75.0  # a record is stored anew every 30 s; one that missed two turns is of a node that died (IN-22)


def model_key(model: ModelId) -> int:
    """Where in the id space the records of a model are held."""
    return int.from_bytes(hashlib.sha256(b"manyhands dht model 1\0" + bytes.fromhex(model)).digest())


class DhtStore:
    """Records of others and our own, which always have room. Where it ends, far keys make way for near ones.

    Raises nothing; `counts` and `forks` are those of all stores (record_store.py).
    """

    def __init__(self, me: NodeId) -> None:
        self.counts: Counter[Verdict] = Counter()
        self.forks: Forks = {}
        self.wanted: set[int] = set()  # keys that make way for nothing
        self._me = me
        self._own = int(me, 16)
        self._stores: dict[int, RecordStore] = {}
        self._near: list[int] = []  # how far the keys of `_stores` are from us, in order
        self._keys_of: dict[NodeId, set[int]] = {}  # under which records of a node are held, or lately were
        self._count = 0  # records of all stores
        self._due: list[tuple[list[int], list[NodeId]]] = []  # keys and nodes that `expire` has still to look at

    def __len__(self) -> int:
        return self._count

    def put(
        self, data: bytes, now: float, sender: NodeId, *, node: NodeId | None = None, key: int | None = None
    ) -> bytes | None:
        """Take a statement from `sender`, which must be of `node` and belong under `key` where these are given.

        Returns the tag of its record. None: it fails a check, or is not what was to be put. What is known, older, or
        more than there is room for is harmless and not taken.
        """
        try:
            record, _ = read(data)
        except RecordRefused as exc:
            self.counts[exc.verdict] += 1
            return None
        place = 0 if record.info is None else model_key(record.info.model)
        if (node is not None and record.node != node) or (key is not None and place != key):
            self.counts["forged"] += 1
            return None
        return record.key.tag if self._put(place, record.key, data, now, sender) in HARMLESS else None

    def tags(self, key: int, now: float) -> list[bytes]:
        """Of what is held under `key` and was renewed lately; withdrawn ones too, so that old copies are no news.

        Only what its own node said here: were what others passed on listed too, a dead node's record could go round for ever.
        """
        store = self._stores.get(key)
        if store is None:
            return []
        return [_tag(e) for e in store if e.teller == e.record.node and _is_current(e, now)]

    def lacks(self, key: int, tag: bytes) -> bool:
        """Whether `tag` may stand for news: a record that is not held, or a later version of it."""
        entry = self._find(key, tag)
        return entry is None or is_newer(int.from_bytes(tag[-2:]), entry.record.version)

    def data(self, key: int, tag: bytes) -> bytes | None:
        """The newest statement of the record of `tag`, whatever version was listed."""
        entry = self._find(key, tag)
        return None if entry is None else entry.data

    def records(self, now: float) -> Iterator[Record]:
        """What may be offered: neither over, nor stale, nor withdrawn."""
        for store in self._stores.values():
            yield from _offered(store, now)

    def records_of(self, nodes: Iterable[NodeId], model: ModelId, now: float) -> list[Record]:
        """As `records`, of one model and these nodes."""
        store = self._stores.get(model_key(model))
        return [] if store is None else list(_offered((e for node in nodes for e in store.of_node(node)), now))

    def in_turn(self, model: ModelId | None, without: Container[object], now: float) -> Iterator[Record]:
        """As `records`, of one model or all, in the order of RecordStore.in_turn for each of them."""
        found = self._stores.values() if model is None else filter(None, [self._stores.get(model_key(model))])
        return _offered(chain.from_iterable(store.in_turn(without) for store in found), now)

    def peer(self, node: NodeId) -> Peer | None:
        """`node` and where its newest record says that it can be dialled; None: nothing of it is held."""
        return Peer(node, max(held, key=lambda r: r.version).addresses) if (held := self.held_of(node)) else None

    def held_of(self, node: NodeId) -> list[Record]:
        """What is held of `node`, withdrawn and stale records too."""
        return [entry.record for store in self._stores_of(node) for entry in store.of_node(node)]

    def left(self) -> set[NodeId]:
        """Nodes that have withdrawn all their records: they left, and were not lost."""
        stores = {node: self._stores_of(node) for node in list(self._keys_of)}
        return {node for node, found in stores.items() if found and all(store.has_left(node) for store in found)}

    def suspect(self, node: NodeId) -> None:
        """`node` cannot be reached: offer nothing of it until its next beat, or `trust`."""
        for store in self._stores_of(node):
            store.suspect(node)

    def trust(self, node: NodeId) -> None:
        """`node` answers."""
        for store in self._stores_of(node):
            store.trust(node)

    def expire(self, now: float) -> None:
        """Forget what is over, of LOOKED_AT keys and as many nodes, in turn."""
        if not self._due:
            keys, nodes = list(self._stores), list(self._keys_of)
            starts = range(0, max(len(keys), len(nodes)), LOOKED_AT)
            self._due = [(keys[i : i + LOOKED_AT], nodes[i : i + LOOKED_AT]) for i in starts]
        keys, nodes = self._due.pop() if self._due else ([], [])
        for key in keys:
            if (store := self._stores.get(key)) is not None:
                self._count -= len(store.expire(now))
                if not len(store):
                    self._drop(key)
        for node in nodes:
            self._stores_of(node)

    def _find(self, key: int, tag: bytes) -> HeldRecord | None:
        store = self._stores.get(key)
        return None if store is None else store.by_tag(tag[:8])

    def _put(self, key: int, name: RecordKey, data: bytes, now: float, sender: NodeId) -> Verdict:
        store = self._stores.get(key)
        if (store is None or store.get(name) is None) and not self._has_room(key, name.node):
            self.counts["full"] += 1
            return "full"
        if store is None:
            store = RecordStore(self._me, MAX_PER_KEY)
            store.counts, store.forks = self.counts, self.forks
        before = len(store)
        verdict = store.take(data, now, sender).verdict
        self._count += len(store) - before
        if len(store) and key not in self._stores:
            self._stores[key] = store
            insort(self._near, key ^ self._own)
        if store.get(name) is not None:
            self._keys_of.setdefault(name.node, set()).add(key)
        return verdict

    def _has_room(self, key: int, node: NodeId) -> bool:
        """Over all keys; within one, its store decides."""
        if node == self._me:
            return True
        if sum(len(store.of_node(node)) for store in self._stores_of(node)) >= MAX_PER_PUBLISHER:
            return False
        return self._count < MAX_RECORDS or self._make_room(key)

    def _make_room(self, key: int) -> bool:
        """Drop the farthest key if it is farther from us than `key`: a flood cannot push out what is ours to hold."""
        others = (far ^ self._own for far in reversed(self._near))
        farthest = next((k for k in others if k not in self.wanted), key)
        if farthest ^ self._own <= key ^ self._own:
            return False
        self._drop(farthest)
        return True

    def _drop(self, key: int) -> None:
        """Forget all that is held under `key`."""
        self._count -= len(self._stores.pop(key))
        del self._near[bisect_left(self._near, key ^ self._own)]

    def _stores_of(self, node: NodeId) -> list[RecordStore]:
        """The stores that hold records of `node`. Its keys without any are forgotten."""
        keys = self._keys_of.get(node, set())
        found = {key: store for key in keys if (store := self._stores.get(key)) is not None and store.of_node(node)}
        keys &= found.keys()
        if not keys:
            self._keys_of.pop(node, None)
        return list(found.values())


def _tag(entry: HeldRecord) -> bytes:
    """What a listing says of an entry: the tag of its key, and the end of its version."""
    return entry.tag + (entry.record.version & 0xFFFF).to_bytes(2)


def _offered(entries: Iterable[HeldRecord], now: float) -> Iterator[Record]:
    return (entry.record for entry in entries if not entry.record.is_withdrawn and _is_current(entry, now))


def _is_current(entry: HeldRecord, now: float) -> bool:
    """Whether others should have it: its node was seen lately and is not suspect, or withdrew it."""
    record = entry.record
    is_fresh = record.version >= entry.trusted_from and now - entry.seen_at <= STALE_S
    return not entry.has_ended(now) and (record.is_withdrawn or is_fresh)
