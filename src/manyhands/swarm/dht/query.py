"""One turn of a node of the DHT for one key, from the lookup to the last record fetched. Pure state; backend.py moves it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from manyhands.core import NodeId
from manyhands.swarm.dht.lookup import Lookup, RecordFetch
from manyhands.swarm.dht.store import DhtStore
from manyhands.swarm.dht.wire import DhtFetch, DhtFind, DhtFound, DhtPong, DhtRecords
from manyhands.swarm.directory import Peer

FETCH_S = 20.0  # a turn ends before the next: holders that dribble are left


@dataclass(frozen=True, slots=True)
class Finished:
    """How a lookup ended, for people and benchmarks. `seconds` counts the lookup, not the fetching after it."""

    asker: NodeId
    target: int
    nearest: tuple[NodeId, ...]
    hops: int
    num_asked: int
    num_fetched: int
    seconds: float


@dataclass(slots=True)
class RecordQuery:
    """A lookup, and if the key `is_wanted` a fetch of what those nearest to it list and we lack."""

    key: int
    is_wanted: bool
    lookup: Lookup
    begun_s: float
    found_s: float = 0.0
    fetch: RecordFetch | None = None
    listed: dict[NodeId, tuple[bytes, ...]] = field(default_factory=dict)
    num_fetched: int = 0

    def questions(self, now: float) -> Iterator[tuple["Question", DhtFind | DhtFetch]]:
        """What can be asked now, with request 0 still to be replaced."""
        if self.fetch is None:
            for contact in self.lookup.to_ask():
                yield Question(contact.peer, now, DhtFound, self), DhtFind(0, self.key, self.is_wanted)
        elif not self._is_late(now):
            for holder, tags in self.fetch.to_ask():
                question = Question(holder, now, DhtRecords, self, frozenset(tags))
                yield question, DhtFetch(0, self.key, tuple(tags))

    def begin_fetch(self, store: DhtStore, now: float) -> None:
        """The lookup is over; see which records those nearest to the key list and `store` lacks."""
        lacking: dict[bytes, list[Peer]] = {}
        for contact in self.lookup.closest():
            for tag in self.listed.get(contact.peer.node, ()):
                if store.lacks(self.key, tag):
                    lacking.setdefault(tag, []).append(contact.peer)
        self.found_s = now
        self.fetch = RecordFetch(lacking)

    def failed(self, node: NodeId, place: int) -> None:
        """`node`, at `place` in the id space, did not answer in time, or with nonsense."""
        if self.fetch is None:
            self.lookup.failed(place)
        else:
            self.fetch.failed(node)

    def is_done(self, now: float) -> bool:
        return self.fetch is not None and (self.fetch.is_done or self._is_late(now))

    def _is_late(self, now: float) -> bool:
        return now > self.found_s + FETCH_S

    def summary(self, asker: NodeId) -> Finished:
        nearest = tuple(contact.peer.node for contact in self.lookup.closest())
        seconds = self.found_s - self.begun_s
        return Finished(asker, self.key, nearest, self.lookup.hops, self.lookup.num_asked, self.num_fetched, seconds)


@dataclass(slots=True)
class Question:
    """An open request, asked at `asked_s`. It is bound to `peer`: no other node can answer it, nor with another kind."""

    peer: Peer
    asked_s: float
    kind: type[DhtFound] | type[DhtRecords] | type[DhtPong]
    errand: RecordQuery | None
    tags: frozenset[bytes] = frozenset()  # of a fetch
    is_slow: bool = False
