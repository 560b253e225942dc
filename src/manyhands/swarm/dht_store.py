"""The records that a node of the DHT holds, under the keys of their models. Pure.

A key's value is a set of records, one per node and span, each replaced by newer ones of itself alone: no shared
document, so no lost update and no dead node published again by the living (IN-W03, IN-W04). One shelf per key judges
them; this file adds what many keys need: caps, tags, and which key makes way when room ends.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator

from manyhands.core import ModelId, NodeAddr, NodeId
from manyhands.swarm.dht_wire import MAX_TAGS, tag_of
from manyhands.swarm.directory import Peer
from manyhands.swarm.record import Key, Record, RecordRefused, Verdict, read
from manyhands.swarm.shelf import Entry, Shelf

MAX_PER_KEY = MAX_TAGS  # records of one model: what one listing can name
MAX_PER_PUBLISHER = 32  # spans of one node, over all models
MAX_RECORDS = 16384  # in all; about 30 MB
STALE_S = 75.0  # a record is stored anew every 30 s; one that missed two turns is of a node that died (IN-22)


def model_key(model: ModelId) -> int:
    """Where in the id space the records of a model are held."""
    return int.from_bytes(hashlib.sha256(b"manyhands dht model 1\0" + bytes.fromhex(model)).digest())


class DhtStore:
    """Records of others and our own. `own`: our place in the id space; where room ends, far keys make way for near ones.

    Raises nothing; `counts`, `skews` and `forks` are those of all shelves (shelf.py).
    """

    def __init__(self, own: int) -> None:
        self.counts: Counter[Verdict] = Counter()
        self.skews: dict[NodeId, float] = {}
        self.forks: dict[NodeId, tuple[tuple[NodeAddr, ...], tuple[NodeAddr, ...]]] = {}
        self.wanted: set[int] = set()  # keys that make way for nothing
        self._own = own
        self._shelves: dict[int, Shelf] = {}
        self._tags: dict[int, dict[bytes, Key]] = {}
        self._tag_of: dict[Key, bytes] = {}

    def __len__(self) -> int:
        return len(self._tag_of)

    def put(self, data: bytes, now: float, *, node: NodeId | None = None, key: int | None = None) -> bool:
        """Take a statement, which must be of `node` and belong under `key` where these are given.

        False: it is not to be believed, or not what was to be put. Known, older or unhoused ones are harmless: True.
        """
        try:
            record, _ = read(data)
        except RecordRefused as exc:
            self.counts[exc.verdict] += 1
            return False
        place = 0 if record.info is None else model_key(record.info.model)
        if (node is not None and record.node != node) or (key is not None and place != key):
            self.counts["forged"] += 1
            return False
        if record.key not in self._tag_of and not self._has_room(place, record.node):
            self.counts["full"] += 1
            return True
        return self._put(place, record.key, data, now)

    def tags(self, key: int, now: float) -> list[bytes]:
        """Of what is held under `key` and was renewed lately; withdrawn ones too, so that old copies are no news."""
        shelf = self._shelves.get(key)
        if shelf is None:
            return []
        return [self._tag_of[e.record.key] for e in shelf if _is_current(e, now)]

    def has(self, key: int, tag: bytes) -> bool:
        return tag in self._tags.get(key, ())

    def data(self, key: int, tag: bytes) -> bytes | None:
        name = self._tags.get(key, {}).get(tag)
        entry = None if name is None else self._shelves[key].get(name)
        return None if entry is None else entry.data

    def records(self, now: float) -> Iterator[Record]:
        """What may be offered: neither over, nor stale, nor withdrawn."""
        for shelf in self._shelves.values():
            for entry in shelf:
                if not entry.record.is_withdrawn and _is_current(entry, now):
                    yield entry.record

    def peer(self, node: NodeId) -> Peer | None:
        """`node` and where its newest record says that it can be dialled; None: nothing of it is held."""
        entries = [entry for shelf in self._shelves.values() for entry in shelf.of_node(node)]
        return Peer(node, max(entries, key=lambda e: e.record.version).record.addresses) if entries else None

    def suspect(self, node: NodeId) -> None:
        """`node` cannot be reached: offer nothing of it until it speaks again, or `trust`."""
        for shelf in self._shelves.values():
            shelf.suspect(node)

    def trust(self, node: NodeId) -> None:
        """`node` answers."""
        for shelf in self._shelves.values():
            shelf.trust(node)

    def expire(self, now: float) -> None:
        """Forget what is over."""
        for key, shelf in list(self._shelves.items()):
            for record in shelf.expire(now):
                self._forget(key, record.key)
            if not len(shelf):
                del self._shelves[key]
                self._tags.pop(key, None)

    def _put(self, key: int, name: Key, data: bytes, now: float) -> bool:
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = Shelf()
            shelf.counts, shelf.skews, shelf.forks = self.counts, self.skews, self.forks
        verdict = shelf.put(data, now)
        entry = shelf.get(name)
        if entry is not None:
            self._shelves[key] = shelf
            self._forget(key, name)
            tag = self._tag_of[name] = tag_of(entry.data)
            self._tags.setdefault(key, {})[tag] = name
        return verdict in ("new", "same", "stale", "full", "fork", "expired")

    def _has_room(self, key: int, node: NodeId) -> bool:
        shelf = self._shelves.get(key)
        if shelf is not None and len(shelf) >= MAX_PER_KEY:
            return False
        if sum(len(shelf.of_node(node)) for shelf in self._shelves.values()) >= MAX_PER_PUBLISHER:
            return False
        return len(self) < MAX_RECORDS or self._make_room(key)

    def _make_room(self, key: int) -> bool:
        """Drop the farthest key if it is farther from us than `key`: a flood cannot push out what is ours to hold."""
        farthest = max((k for k in self._shelves if k not in self.wanted), key=lambda k: k ^ self._own, default=key)
        if farthest ^ self._own <= key ^ self._own:
            return False
        for entry in self._shelves.pop(farthest):
            self._forget(farthest, entry.record.key)
        return True

    def _forget(self, key: int, name: Key) -> None:
        tag = self._tag_of.pop(name, None)
        if tag is not None:
            del self._tags[key][tag]


def _is_current(entry: Entry, now: float) -> bool:
    """Whether others should have it: its node spoke lately and is not suspect, or withdrew it."""
    record = entry.record
    is_fresh = record.version >= entry.trusted_from and now - entry.heard_at <= STALE_S
    return now < record.expires_at and (record.is_withdrawn or is_fresh)
