"""The directory for more nodes than can all know each other: Kademlia over our own links (IN-05..08, HN-R04 X05).

Every node is a place in the id space, its public key; a model is one too, the hash of its id. A node keeps some contacts
(table.py), finds the K nodes nearest to a model (lookup.py), and they hold what its hosts say (store.py):

    a host       every REFRESH_S: find the K nodes nearest to its model, STORE its newest records there
    an asker     every REFRESH_S: find them, read off which records each lists, FETCH every one it lacks, once

What a peer cannot do. Ids come from the link, which proves the key: no node can pose as another, answer for another (a
request is bound to its receiver), or stores for another (STORE takes the sender's own records only). DhtRecords are
verified before they are stored, passed on or shown, and only forward: a replayed one is older than what is known.
Contacts that others name are asked first: only nodes that answered enter, and long-lived ones are not pushed out. One named
at a false address fails there only. Floods meet caps per sender and second, per publisher, per key and in all.
What it can do. Members may make any number of keys (the swarm's secret admits them, nothing else does). The owner of
the K nodes nearest to a model can hide it, not forge it; grinding keys for that costs seconds in any Kademlia
without a price on ids. The nodes that come first fill a table, so one whose bootstrap peers are all dishonest is eclipsed.
"""

import random
from collections.abc import Callable, Container, Iterable, Iterator
from typing import ClassVar

from manyhands.core import ModelId, NodeAddr, NodeId
from manyhands.errors import ProtocolError
from manyhands.swarm.dht.intake import Counts, SenderCap
from manyhands.swarm.dht.lookup import FETCH_TAGS, Lookup
from manyhands.swarm.dht.published import Published
from manyhands.swarm.dht.query import Finished, Question, RecordQuery
from manyhands.swarm.dht.store import STALE_S, DhtStore, model_key
from manyhands.swarm.dht.table import ID_BITS, Contact, K, Table, number
from manyhands.swarm.dht.wire import (
    MAX_TAGS,
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
from manyhands.swarm.dht.wire import DhtFetch as FetchMessage
from manyhands.swarm.directory import Outgoing, Peer
from manyhands.swarm.record import Record
from manyhands.swarm.statement import read
from manyhands.swarm.store_report import StoreReport

ANSWER_S = 2.0  # deadline of a question; dialling over 80 ms takes a quarter of it
SLOW_S = 0.5  # until a lookup goes on without an answer, which may still come
REFRESH_S = 30.0  # a quarter of a record's lifetime (HN-18)
RENEW_S = 15.0  # until a new signature is stored: 60 (record.REFRESH_S) + 15 + 36 (an asker's turn) < 120, so no gap
SHUN_S = 60.0  # a node that did not answer is not asked there again on others' word, until it calls
RETRY_S = 2.0  # until an errand that reached no node is tried again
MAINTAIN_S = 120.0  # between lookups that only keep the buckets filled
PROBE_S = 10.0  # between pings of one contact that failed: partitions heal
EXPIRE_S = 0.5  # of MAX_RECORDS keys each is looked at every 16 s


class Dht(StoreReport[DhtStore]):
    """A `Backend`. `interest`: models whose records are kept at hand; more by `watch`.

    `rng` draws request numbers, jitter and refresh targets. `on_finished` is told of every lookup.
    """

    kind: ClassVar[str] = "dht"
    silent_s: ClassVar[float] = STALE_S

    def __init__(
        self,
        me: NodeId,
        rng: random.Random,
        interest: Iterable[ModelId] = (),
        on_finished: Callable[[Finished], None] | None = None,
    ) -> None:
        self.counts = Counts()
        self.table = Table(number(me))
        self.store = DhtStore(me)
        self._me = me
        self._rng = rng
        self._on_finished = on_finished
        self._published = Published()
        self._due: dict[int, float] = {}  # key -> when its next turn comes
        self._errands: dict[int, RecordQuery] = {}
        self._questions: dict[int, Question] = {}  # by request, which is also by deadline
        self._shunned: dict[bytes, float] = {}  # a contact as it was named -> until when
        self._cap = SenderCap(self.counts)
        self._expire_s = self._probe_s = self._maintain_s = 0.0
        for model in interest:
            self.watch(model)

    def watch(self, model: ModelId) -> None:
        """Keep the records of `model` at hand from the next tick on."""
        key = model_key(model)
        self.store.wanted.add(key)
        self._due.setdefault(key, 0.0)

    def unwatch(self, model: ModelId) -> None:
        """Stop fetching records of `model`."""
        self.store.wanted.discard(model_key(model))

    def addresses(self, node: NodeId) -> tuple[NodeAddr, ...]:
        """Where `node` can be dialled, as its newest record says."""
        peer = self.store.peer(node)
        return () if peer is None else peer.addresses

    def held_of(self, node: NodeId) -> list[Record]:
        """What is held of `node`, withdrawn and stale records too."""
        return self.store.held_of(node)

    def publish(self, data: bytes, now: float) -> list[Outgoing]:
        """Store our statement near its key: at once if it is news, soon if signed anew, a beat with the next turn."""
        self.store.put(data, now, self._me, node=self._me)
        record, _ = read(data)
        if record.info is None:
            return []  # a member that hosts nothing: there is no model under which to look for it
        key = model_key(record.info.model)
        change = self._published.put(key, record, data, now)
        if change == "news":
            return self._store_at(self._published.nearest.get(key, ()), [data]) + self._start(key, now)
        if change == "signed":
            self._due[key] = min(self._due.get(key, now), now + RENEW_S)
        return []

    def receive(self, sender: Peer, body: bytes, now: float) -> list[Outgoing]:
        if not self._cap.take(sender.node):
            return []
        try:
            message = decode(body)
        except ProtocolError:
            self.counts.refused += 1
            return []
        return self._seen(sender, now) + self._handle(sender, message, now)

    def tick(self, now: float) -> list[Outgoing]:
        out: list[Outgoing] = []
        self._cap.tick(now)
        if self._questions:
            out += self._overdue(now)
        if now >= self._expire_s:
            self._expire_s = now + EXPIRE_S
            self.store.expire(now)
            self._shunned = {wire: until for wire, until in self._shunned.items() if until > now}
        if not self.table.is_empty:
            out += self._maintain(now)
            for key in [key for key, due in self._due.items() if due <= now]:
                out += self._start(key, now)
        return out

    def joined(self, peer: Peer, now: float) -> list[Outgoing]:
        was_alone = self.table.is_empty
        out = self._seen(peer, now)
        if was_alone and not self.table.is_empty:
            self._maintain_s = now + MAINTAIN_S * self._rng.uniform(0.8, 1.2)
            out += self._look_up(self.table.own, now)
        return out

    def lost(self, node: NodeId, now: float) -> list[Outgoing]:
        """Questions to it have failed. Links also end from idleness, so a host is pinged before it is doubted."""
        open_ = [request for request, q in self._questions.items() if q.peer.node == node]
        if open_:
            return [item for request in open_ for item in self._unanswered(request, now)]
        peer = self.store.peer(node)
        return [] if peer is None else [self._ping(peer, now)]

    def unreached(self, node: NodeId, now: float) -> list[Outgoing]:
        """As `lost`, which pings before it doubts."""
        return self.lost(node, now)

    def records(self, now: float) -> list[Record]:
        """Records of the models of interest, those held for others, and our own."""
        return list(self.store.records(now))

    def records_of(self, nodes: Iterable[NodeId], model: ModelId, now: float) -> list[Record]:
        """Records of one model, of these nodes."""
        return self.store.records_of(nodes, model, now)

    def in_turn(self, model: ModelId | None, without: Container[object], now: float) -> Iterator[Record]:
        """Records of one model, or of all, as RecordStore.in_turn orders them."""
        return self.store.in_turn(model, without, now)

    def _handle(self, sender: Peer, message: Message, now: float) -> list[Outgoing]:
        match message:
            case DhtPing(request):
                return [Outgoing(sender, encode(DhtPong(request)))]
            case DhtFind(request, target, wants_records):
                tags = self.store.tags(target, now)[:MAX_TAGS] if wants_records else []
                near = [c for c in self.table.closest(target, K + 1) if c.peer.node != sender.node][:K]
                return [Outgoing(sender, encode(DhtFound(request, tuple(near), tuple(tags))))]
            case FetchMessage(request, target, tags):
                held = [data for tag in tags if (data := self.store.data(target, tag)) is not None]
                return [Outgoing(sender, encode(DhtRecords(request, tuple(held))))]
            case DhtPut(_, records):
                self._stored(sender, records, now)
                return []
            case _:
                return self._answered(sender, message, now)

    def _stored(self, sender: Peer, records: tuple[bytes, ...], now: float) -> None:
        """Take what a host says of itself; at the first record that it may not say, drop the rest."""
        for data in records:
            if not self._cap.take(sender.node):
                return
            if self.store.put(data, now, sender.node, node=sender.node) is None:
                self.counts.refused += 1
                return

    def _answered(self, sender: Peer, message: DhtFound | DhtRecords | DhtPong, now: float) -> list[Outgoing]:
        question = self._questions.get(message.request)
        if question is None or question.peer.node != sender.node or question.kind is not type(message):
            self.counts.stray += 1
            return []
        del self._questions[message.request]
        errand = question.errand
        if errand is None:
            self.store.trust(sender.node)
            return []
        if isinstance(message, DhtFound):
            if errand.is_wanted:
                errand.listed[sender.node] = message.tags
            told = [self.table.answering(named.id) or named for named in message.contacts]
            errand.lookup.answered(number(sender.node), [each for each in told if each.wire not in self._shunned])
        elif isinstance(message, DhtRecords):
            self._fetched(errand, question, message.records, now)
        return self._advance(errand, now)

    def _fetched(self, errand: RecordQuery, question: Question, records: tuple[bytes, ...], now: float) -> None:
        """Keep what was asked for. A node that sends anything else is asked no more, and leaves the table for any other."""
        assert errand.fetch is not None
        node, delivered = question.peer.node, set[bytes]()
        for data in records:
            tag = self.store.put(data, now, node, key=errand.key)
            answers = {asked for asked in question.tags if asked[:8] == tag}
            if not answers:
                self.counts.refused += 1
                errand.fetch.failed(node)
                self.table.failed(number(node), now)
                return
            delivered |= answers
        errand.num_fetched += len(delivered)
        errand.fetch.answered(node, delivered)

    def _start(self, key: int, now: float) -> list[Outgoing]:
        """A turn for a key of ours or of interest; one at a time."""
        is_wanted = key in self.store.wanted
        if key not in self._published and not is_wanted:
            self._due.pop(key, None)
            return []
        is_busy = key in self._errands
        self._due[key] = now + (RETRY_S if is_busy else REFRESH_S * self._rng.uniform(0.8, 1.2))
        return self._look_up(key, now)

    def _look_up(self, key: int, now: float) -> list[Outgoing]:
        if key in self._errands:
            return []
        start = self.table.closest(key, K)
        errand = RecordQuery(key, key in self.store.wanted, Lookup(key, start, own=self.table.own), now)
        self._errands[key] = errand
        return self._advance(errand, now)

    def _advance(self, errand: RecordQuery, now: float) -> list[Outgoing]:
        """Whatever can be asked now; at the end of the lookup, store and turn to fetching."""
        out = self._put_questions(errand, now)
        if errand.fetch is None and errand.lookup.is_done:
            errand.begin_fetch(self.store, now)
            out += self._found(errand, now) + self._put_questions(errand, now)
        if errand.is_done(now) and self._errands.pop(errand.key, None) is not None and self._on_finished is not None:
            self._on_finished(errand.summary(self._me))
        return out

    def _put_questions(self, errand: RecordQuery, now: float) -> list[Outgoing]:
        return [
            Outgoing(question.peer, encode(message._replace(request=self._open(question))))
            for question, message in errand.questions(now)
        ]

    def _found(self, errand: RecordQuery, now: float) -> list[Outgoing]:
        """Store our records of this key at the nodes that the lookup found."""
        near, is_ours = errand.lookup.closest(), errand.key in self._published
        if not near:
            if errand.key in self._due:
                self._due[errand.key] = now + RETRY_S
        elif is_ours or errand.is_wanted:
            self._published.nearest[errand.key] = near
        return self._store_at(near, self._published.newest(errand.key, now)) if near and is_ours else []

    def _store_at(self, contacts: Iterable[Contact], records: list[bytes]) -> list[Outgoing]:
        parts = [records[begin : begin + FETCH_TAGS] for begin in range(0, len(records), FETCH_TAGS)]
        bodies = [encode(DhtPut(0, tuple(part))) for part in parts]
        return [Outgoing(contact.peer, body) for contact in contacts for body in bodies]

    def _open(self, question: Question) -> int:
        request = self._rng.getrandbits(64)
        self._questions[request] = question
        return request

    def _ping(self, peer: Peer, now: float) -> Outgoing:
        return Outgoing(peer, encode(DhtPing(self._open(Question(peer, now, DhtPong, None)))))

    def _seen(self, peer: Peer, now: float) -> list[Outgoing]:
        """A message of a node came over a link that proves its id. One that cannot be dialled is no contact for others."""
        contact = contact_of(peer)
        if contact is not None:
            self._shunned.pop(contact.wire, None)
        oldest = None if contact is None else self.table.seen(contact, now)
        return [] if oldest is None else [self._ping(oldest.peer, now)]

    def _overdue(self, now: float) -> list[Outgoing]:
        out: list[Outgoing] = []
        for request, question in list(self._questions.items()):
            if now < question.asked_s + SLOW_S:
                break
            if now >= question.asked_s + ANSWER_S:
                out += self._unanswered(request, now)
            elif not question.is_slow and question.errand is not None:
                question.is_slow = True
                question.errand.lookup.slow(number(question.peer.node))
                out += self._advance(question.errand, now)
        return out

    def _unanswered(self, request: int, now: float) -> list[Outgoing]:
        question = self._questions.pop(request, None)
        if question is None:
            return []
        self.counts.unanswered += 1
        node, errand = question.peer.node, question.errand
        known, asked = self.table.find(number(node)), contact_of(question.peer)
        if errand is None or known == asked:  # else only what others said of it has failed
            self.table.failed(number(node), now)
        if asked is not None:
            self._shunned[asked.wire] = now + SHUN_S
        if errand is None:
            self.store.suspect(node)
            return []
        errand.failed(node, number(node))
        return self._advance(errand, now)

    def _maintain(self, now: float) -> list[Outgoing]:
        """Keep the buckets filled, and look after contacts that failed: a partition may have healed."""
        out: list[Outgoing] = []
        if now >= self._probe_s:
            self._probe_s = now + PROBE_S
            if failing := self.table.failing:
                out.append(self._ping(self._rng.choice(failing).peer, now))
        if now >= self._maintain_s:
            self._maintain_s = now + MAINTAIN_S * self._rng.uniform(0.8, 1.2)
            out += self._look_up(self.table.refresh_target(self._rng.getrandbits(ID_BITS + 16)), now)
        return out
