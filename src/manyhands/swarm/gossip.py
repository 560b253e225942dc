"""The default back-end: every node holds the whole directory, kept equal by comparing digests (anti-entropy). Sans-I/O.

    tick      A ── dense digest ──► B      A names no keys, only a hash of its list and the version of each key, in order
              A ◄─ news: what A lacks, what B wants ── B        A ── news: what B wants ──► B
              A ◄─ sparse digest (keys and versions) ── B       instead, where the lists differ: a node came or left
    publish   A ── rumour ──► FAN_OUT neighbours, which pass it on once; all pass on a new key or a withdrawal

    body      kind u8 · content                                                                       big endian
    dense     hash of the tags 8 · versions u16 ...     sparse   (tag 8 · version u16) ...     news, rumour   see news.py

Neighbours: each node compares with NEIGHBOURS others that it draws by a salted hash, and with those that drew it. A
random graph of out-degree 6 is connected and spreads as fast as random calls do, but needs 12 links of a node instead of all.
That holds once all know all; nodes that start together, and know few, could draw only each other and stay a swarm of their
own. So every node also calls any node it is linked to, now and then. Nodes that were lost are remembered and tried in turn:
a swarm that was cut in two grows together again.

Neighbours are called in turn: each after so many rounds, where chance would leave some out for long (quasirandom rumour
spreading: Doerr, Friedrich, Sauerwald, 2008). A dead one is called until its link is given up, after up to 10 s; from one that
says nothing for ANSWER_S after a call the round that was lost is made up for by another call in the next round.

A withdrawn record is told only to nodes that list its key, and by rumour when it is new. One that came again to those that
forgot it would be theirs to pass on for as long again, and so go round for ever.

Bytes sent per node and second in an idle swarm of N = 100 nodes with one record of 270 bytes each:

    dense digests       1 a second x (9 + 2 N)                            209
    beats               N / 5 s x 18, each told to a node once            360      whole records would be 5400
    records signed anew N / 60 s x 280, each told to a node once          467
    wants, rumours, answers by two neighbours at once (measured)          about 190
    together            1.2 KB in 6 bodies, 1.8 KB with 90 bytes below each: frame, TLS, TCP, IP

Defence: a sender has a budget of bytes, for what it sends and for what it is answered, and all have one together
(allowance.py); a digest, however short, counts as one of all keys held here, which is what it takes to compare it. News is
answered by at most NEWS_BYTES. The store judges all statements.
"""

import hashlib
import struct
from collections.abc import Iterable
from heapq import nsmallest
from random import Random
from typing import ClassVar

from manyhands.core import NodeId
from manyhands.swarm.allowance import Allowance
from manyhands.swarm.directory import Outgoing, Peer
from manyhands.swarm.news import VERSION, News, expand, is_newer
from manyhands.swarm.record import TAG_BYTES
from manyhands.swarm.record_store import SILENT_S, HeldRecord, RecordStore
from manyhands.swarm.store_report import StoreBacked

ROUND_S = 0.9  # that is 1 s for a node that ticks twice a second
RETRY_S = 5.0  # how often one lost node is tried again, and one that is linked but perhaps no neighbour is called
ANSWER_S = 1.9  # more than a round trip: at the second round after a call that is not answered
NEIGHBOURS = 6
LINKED = 4  # of them that a link has proven, where there are so many: records may name nodes that do not exist
FAN_OUT = 3
MAX_RECORDS = 4096  # a sparse digest of so many fits into one body
MAX_LOST = 256
DENSE, SPARSE, NEWS, RUMOUR = 1, 2, 3, 4


class Gossip(StoreBacked):
    """A `Backend`. `rng` is where all its randomness comes from."""

    kind: ClassVar[str] = "gossip"
    silent_s: ClassVar[float] = SILENT_S

    def __init__(self, me: NodeId, rng: Random) -> None:
        self.me = me
        self.store = RecordStore(me, MAX_RECORDS)
        self._rng = rng
        self._salt = rng.randbytes(16)
        self._ranks: dict[NodeId, bytes] = {}
        self._linked: dict[NodeId, Peer] = {}
        self._lost: dict[NodeId, Peer] = {}  # unreachable, and to be tried again
        self._allowance = Allowance()
        self._round_at = self._retry_at = 0.0
        self._near: list[Peer] = []  # neighbours as of `_near_until` - ROUND_S
        self._near_until = 0.0
        self._called: dict[NodeId, float] = {}  # neighbours -> when they were last called
        self._unanswered: dict[NodeId, float] = {}  # those that said nothing since -> when they were called

    def publish(self, data: bytes, now: float) -> list[Outgoing]:
        entry = self.store.take(data, now).entry
        return [] if entry is None else self._spread([entry], now, self.me)

    def receive(self, sender: Peer, body: bytes, now: float) -> list[Outgoing]:
        if sender.node == self.me:
            return []
        self._meet(sender)
        self._unanswered.pop(sender.node, None)
        is_digest = body[:1] in (bytes([DENSE]), bytes([SPARSE]))
        if not self._allowance.take(sender.node, max(len(body), VERSION.size * len(self.store) * is_digest), now):
            self.store.counts["flood"] += 1
            return []
        try:
            outgoing = self._handle(sender, body, now)
        except (ValueError, IndexError, struct.error):
            self.store.counts["malformed"] += 1
            return []
        if not is_digest:
            self._allowance.charge(sender.node, sum(len(out.body) for out in outgoing if out.to.node == sender.node))
        return outgoing

    def tick(self, now: float) -> list[Outgoing]:
        for record in self.store.expire(now):
            if not record.is_withdrawn:
                self._remember(Peer(record.node, record.addresses))
        called = []
        if now >= self._round_at:
            self._round_at = now + ROUND_S
            called += self._call_next(now)
        if now >= self._retry_at:
            self._retry_at = now + RETRY_S
            called += self._choose(list(self._lost.values()), 1) + self._choose(list(self._linked.values()), 1)
        digest = self._dense(now) if called else b""
        return [Outgoing(peer, digest) for peer in called]

    def joined(self, peer: Peer, now: float) -> list[Outgoing]:
        if peer.node == self.me:
            return []
        self._meet(peer)
        self.store.trust(peer.node, is_linked=True)
        return [Outgoing(peer, _sparse(self._list(now)))]

    def unreached(self, node: NodeId, now: float) -> list[Outgoing]:
        return [] if self.store.was_seen_lately(node, now) else self.lost(node, now)

    def lost(self, node: NodeId, now: float) -> list[Outgoing]:
        self._round_at = now  # a call that failed is made up for with the next tick
        peer = self._linked.pop(node, Peer(node))
        self._unanswered.pop(node, None)
        self._allowance.forget(node)
        self._near_until = now
        self.store.suspect(node)
        entries = self.store.of_node(node)
        if not entries or not all(entry.record.is_withdrawn for entry in entries):
            stated = next((entry.record.addresses for entry in entries if entry.record.addresses), ())
            self._remember(Peer(node, stated or peer.addresses))
        return []

    # Comparing

    def _list(self, now: float) -> list[tuple[bytes, HeldRecord]]:
        """Keys that all nodes should hold, in the order of their tags."""
        return [(entry.tag, entry) for entry in self.store.in_order() if entry.is_current(now)]

    def _dense(self, now: float) -> bytes:
        listed = self._list(now)
        versions = [entry.record.version & 0xFFFF for _, entry in listed]
        return bytes([DENSE]) + _hash_of(tag for tag, _ in listed) + struct.pack(f">{len(versions)}H", *versions)

    def _handle(self, sender: Peer, body: bytes, now: float) -> list[Outgoing]:
        kind, content = body[0], body[1:]
        if kind == DENSE:
            return self._compare_dense(sender, content, now)
        if kind == SPARSE:
            return _news_to(sender, self._compare(dict(VERSION.iter_unpack(content)), self._list(now), now))
        if kind in (NEWS, RUMOUR):
            return self._take(sender, News.decode(content), kind == RUMOUR, now)
        raise ValueError(f"kind {kind}")

    def _compare_dense(self, sender: Peer, content: bytes, now: float) -> list[Outgoing]:
        listed = self._list(now)
        tags = [tag for tag, _ in listed]
        if content[:TAG_BYTES] != _hash_of(tags) or len(content) != TAG_BYTES + 2 * len(tags):
            return [Outgoing(sender, _sparse(listed))]
        versions = struct.unpack_from(f">{len(tags)}H", content, TAG_BYTES)
        return _news_to(sender, self._compare(dict(zip(tags, versions, strict=True)), listed, now))

    def _compare(self, theirs: dict[bytes, int], listed: list[tuple[bytes, HeldRecord]], now: float) -> News:
        """What to tell a node whose list is `theirs`, and what to ask of it."""
        news, same = News(), {tag: entry.record.version & 0xFFFF for tag, entry in listed}
        for tag, version in theirs.items():
            if same.get(tag) == version:
                continue
            ours = self.store.by_tag(tag)
            if ours is None:
                news.want(tag, 0)
            else:
                if is_newer(version, ours.record.version):
                    news.want(tag, ours.record.version & 0xFFFF)
                if is_newer(ours.record.version, version) and ours.is_current(now):
                    news.tell(ours, version)
            if news.is_full:
                return news
        for tag, entry in listed:
            if tag not in theirs and not entry.record.is_withdrawn:
                news.tell(entry, 0)
                if news.is_full:
                    break
        return news

    def _take(self, sender: Peer, news: News, is_rumour: bool, now: float) -> list[Outgoing]:
        answer, hot = News(), []
        for tag, version, value in news.beats:
            entry = self.store.by_tag(tag)
            near = 0 if entry is None else entry.record.version
            verdict = self.store.put_beat(tag, expand(version, near), value, now)
            if verdict == "unknown":
                answer.want(tag, 0)
            elif verdict == "new" and entry is not None and entry.record.node == sender.node:
                hot.append(entry)
        for data in news.statements:
            _, entry, is_arrival = self.store.take(data, now, sender.node)
            if entry is not None and (is_arrival or entry.record.is_withdrawn or entry.record.node == sender.node):
                hot.append(entry)
        for tag, version in news.wants:
            entry = self.store.by_tag(tag)
            lacks = version == 0 and entry is not None and not entry.record.is_withdrawn
            if entry is not None and (lacks or (version and is_newer(entry.record.version, version))):
                answer.tell(entry, version)
        return _news_to(sender, answer) + (self._spread(hot, now, sender.node) if is_rumour else [])

    # Spreading

    def _spread(self, entries: list[HeldRecord], now: float, origin: NodeId) -> list[Outgoing]:
        """A rumour of `entries` for some neighbours, but not for `origin`, which sent them."""
        news = News()
        for entry in entries:
            news.tell(entry, (entry.record.version - 1) & 0xFFFF or 1)
        if not news:
            return []
        body = news.encode(RUMOUR)
        neighbours = [peer for peer in self._neighbours(now) if peer.node != origin]
        return [Outgoing(peer, body) for peer in self._choose(neighbours, FAN_OUT)]

    def _neighbours(self, now: float) -> list[Peer]:
        """NEIGHBOURS reachable nodes with the lowest salted hash, LINKED of them linked: nearly the same from call to call.

        Looked for once a round, and after a link has come or gone.
        """
        if now < self._near_until:
            return self._near
        stated = {record.node: record.addresses for record in self.records(now) if record.addresses}
        reachable = [node for node in stated.keys() | self._linked if node != self.me and node not in self._lost]
        near = nsmallest(LINKED, self._linked, self._rank)
        near += nsmallest(NEIGHBOURS - len(near), (node for node in reachable if node not in near), self._rank)
        self._near = [self._linked.get(node) or Peer(node, stated[node]) for node in near]
        self._near_until = now + ROUND_S
        return self._near

    def _call_next(self, now: float) -> list[Peer]:
        """The neighbour that was called longest ago; two where a call was not answered."""
        late = [node for node, called_at in self._unanswered.items() if now - called_at >= ANSWER_S]
        for node in late:
            del self._unanswered[node]
        near = self._neighbours(now)
        drawn_at = now - NEIGHBOURS * ROUND_S  # a new one is due, but goes before none that waits for longer
        self._called = {peer.node: self._called.get(peer.node, drawn_at) for peer in near}
        chosen = nsmallest(1 + bool(late), near, key=lambda peer: self._called[peer.node])
        for peer in chosen:
            self._called[peer.node] = now
            self._unanswered.setdefault(peer.node, now)
        return chosen

    def _rank(self, node: NodeId) -> bytes:
        rank = self._ranks.get(node)
        if rank is None:
            if len(self._ranks) > 2 * MAX_RECORDS:
                self._ranks.clear()
            rank = self._ranks[node] = hashlib.sha256(self._salt + bytes.fromhex(node)).digest()
        return rank

    def _choose(self, peers: list[Peer], number: int) -> list[Peer]:
        return self._rng.sample(peers, min(number, len(peers)))

    # Peers

    def _meet(self, peer: Peer) -> None:
        """`peer` can be reached: a message of it came."""
        known = self._linked.get(peer.node)
        if known is None:
            self._near_until = 0.0
        self._linked[peer.node] = peer if peer.addresses or known is None else known
        self._lost.pop(peer.node, None)

    def _remember(self, peer: Peer) -> None:
        """Try to reach `peer` again, in turn with others."""
        if peer.node != self.me and peer.node not in self._linked:
            self._lost[peer.node] = peer
            if len(self._lost) > MAX_LOST:
                del self._lost[next(iter(self._lost))]


def _news_to(peer: Peer, news: News) -> list[Outgoing]:
    return [Outgoing(peer, news.encode(NEWS))] if news else []


def _sparse(listed: Iterable[tuple[bytes, HeldRecord]]) -> bytes:
    packed = (VERSION.pack(tag, entry.record.version & 0xFFFF) for tag, entry in listed)
    return bytes([SPARSE]) + b"".join(packed)


def _hash_of(tags: Iterable[bytes]) -> bytes:
    return hashlib.sha256(b"".join(tags)).digest()[:TAG_BYTES]
