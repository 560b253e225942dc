"""What a node holds of the directory: the newest statement of every key, and why others were refused. Pure.

Time is this node's monotonic clock alone: a record is fresh for FRESH_S after it, or a beat of it, came as news, and over
lifetime_s after it came. What its signer's clock shows plays no part, so a clock that is a day off locks no member out, and one
that jumps changes nothing.

    FRESH_S = 13 s: beats are sent every 5 s and come at most 9 s apart (gossip of 300 nodes), which leaves 4 s for a node
    that is held up. The last beat of a node that crashed takes up to 7 s to get to all 300, also where a third of them died
    with it, so it is gone from every view after at most 7 + 13 = 20 s. A lost link (`suspect`) takes it out at once, until
    the link is back or two beats came: the first beat to come may have been on its way already. A dial that failed does so
    too if no beat of the node came for SEEN_S; busy machines answer dials late. A node that is linked is judged by its
    link's heartbeats alone (net/liveness.py), which tell a starved machine from a dead one: late beats do not take it out.

A withdrawn record stays as a tombstone until everything it replaced has ended, so that it cannot be replayed. So does a record
that is no longer fresh: it comes back only by a later word of its node.

Room is shared out by accounts. What a node says is on its own account once a link proved its key here (now or earlier);
before that it is on the account of the peer that passed it on. Where room has ended, a statement of a small account takes the
place of the newest one of the largest; own statements always do. An introducer's account ends at half of the store.

Of two keys with one tag the first stays: a member finds such a pair of its own in 2^32 hashes.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from manyhands.core import NodeAddr, NodeId
from manyhands.swarm.record import MAX_BEATS, MAX_LIFETIME_S, Record, RecordKey
from manyhands.swarm.statement import RecordRefused, Verdict, check_beat, check_signature, read, read_beat, with_beat

FRESH_S = 13.0
SILENT_S = 20.0  # it does not live, however late its beats are
SEEN_S = 10.0  # since a node's last beat: a dial of it that fails does not mean that it is gone, as it may be busy
MAX_RECORDS_PER_NODE = 64
MAX_RECORDS = 20_000
MAX_NOTES = 64  # nodes whose key or clock is told of as odd
MAX_KNOWN = 1024  # nodes whose key a link has proven, remembered after it ended
TOMBSTONE_S = MAX_LIFETIME_S + 60.0  # longer than any record that it replaces
V = TypeVar("V")
Forks = dict[NodeId, tuple[tuple[NodeAddr, ...], tuple[NodeAddr, ...]]]


@dataclass(slots=True)
class HeldRecord:
    """The newest statement of a key. `signed` is its part without the beat; `value` proves `record.beats`."""

    record: Record
    signed: bytes
    value: bytes
    arrived_at: float  # when this signature came
    seen_at: float  # when it last became newer here
    tag: bytes  # of the record's key
    account: NodeId  # that its room is on
    teller: NodeId  # that passed it on
    trusted_from: int = 0  # the version from which the node is no longer suspect
    is_linked: bool = False  # a link to its node is up

    @property
    def data(self) -> bytes:
        """The whole statement, for nodes that do not have the record."""
        return with_beat(self.signed, self.record.beats, self.value) if self.record.beats else self.signed

    def is_fresh(self, now: float) -> bool:
        """Whether the record may be offered: its node was seen lately and it is neither withdrawn nor over."""
        record = self.record
        if record.is_withdrawn or record.version < self.trusted_from or now >= self.arrived_at + record.lifetime_s:
            return False
        return self.is_linked or now - self.seen_at <= FRESH_S

    def is_current(self, now: float) -> bool:
        """Whether others should have it too: its node was seen lately, or withdrew it."""
        is_said = now - self.seen_at <= FRESH_S or self.record.is_withdrawn
        return is_said and now < self.arrived_at + self.record.lifetime_s

    def has_ended(self, now: float) -> bool:
        """Whether its lifetime, counted from its arrival, is over."""
        return now >= self.arrived_at + self.record.lifetime_s

    def is_over(self, now: float) -> bool:
        """Whether it may be forgotten. A tombstone outlives every older record of its key."""
        return now > self.arrived_at + TOMBSTONE_S if self.record.is_withdrawn else self.has_ended(now)


class RecordChange(NamedTuple):
    """What a statement did to the store. `entry`: where it stands now, if it was news; `is_arrival`: its key was not known."""

    verdict: Verdict
    entry: HeldRecord | None
    is_arrival: bool


class RecordStore:
    """Raises nothing: hostile statements are counted by verdict in `counts` and dropped. `me`: always has room.

    `forks`: node -> the two lists of addresses under which its key said different things with one number.
    """

    def __init__(self, me: NodeId, max_records: int = MAX_RECORDS) -> None:
        self._me = me
        self._max_records = max_records
        self.counts: Counter[Verdict] = Counter()
        self.forks: Forks = {}
        self._entries: dict[RecordKey, HeldRecord] = {}
        self._tags: list[bytes] = []  # of the keys held, in order
        self._by_tag: dict[bytes, HeldRecord] = {}
        self._of_node: dict[NodeId, dict[RecordKey, HeldRecord]] = {}
        self._accounts: dict[NodeId, dict[RecordKey, None]] = {}  # in order of arrival
        self._linked = {me}
        self._known: dict[NodeId, None] = {}  # those that a link has proven, the latest last

    def put(self, data: bytes, now: float) -> Verdict:
        """Take a statement. "new": it, or its beat, was news. Everything else left the store as it was, or ("fork") nearly."""
        return self.take(data, now).verdict

    def take(self, data: bytes, now: float, sender: NodeId | None = None) -> RecordChange:
        """As `put`, and says what changed. `sender`: the node that passed it on, where that is known."""
        try:
            change = self._take(data, now, sender)
        except RecordRefused as exc:
            change = RecordChange(exc.verdict, None, False)
        self.counts[change.verdict] += 1
        return change

    def put_beat(self, tag: bytes, version: int, value: bytes, now: float) -> Verdict:
        """Take the beat that brings the record of key `tag` to `version`. "unknown": the record itself is needed."""
        entry = self.by_tag(tag)
        if entry is None or version > entry.record.sequence + MAX_BEATS:
            verdict: Verdict = "unknown"
        else:
            verdict = self._beat(entry, version - entry.record.sequence, value, now)
        self.counts[verdict] += 1
        return verdict

    def suspect(self, node: NodeId) -> None:
        """The link to `node` was lost: offer nothing of it until it has spoken twice, or `trust`."""
        self._linked.discard(node)
        for entry in self.of_node(node):
            entry.trusted_from, entry.is_linked = entry.record.version + 2, False

    def trust(self, node: NodeId, *, is_linked: bool = False) -> None:
        """`node` answered, which proved its key: what it says is on its own account from now on.

        `is_linked`: a link to it is up, and `suspect` will tell when it is lost.
        """
        self._known.pop(node, None)
        self._known[node] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        if is_linked:
            self._linked.add(node)
        for entry in self.of_node(node):
            entry.trusted_from, entry.is_linked = 0, node in self._linked
            self._charge(entry, node)

    def is_known(self, node: NodeId) -> bool:
        """Whether a link has proven the key of `node`, now or earlier (the latest MAX_KNOWN are remembered)."""
        return node == self._me or node in self._known

    def expire(self, now: float) -> list[Record]:
        """Forget what is over; returns it."""
        over = [key for key, entry in self._entries.items() if entry.is_over(now)]
        return [self._remove(key).record for key in over]

    def records(self, now: float) -> list[Record]:
        """Fresh records."""
        return [entry.record for entry in self._entries.values() if entry.is_fresh(now)]

    def in_order(self) -> Iterator[HeldRecord]:
        """All that is held, by tag."""
        return map(self._by_tag.__getitem__, self._tags)

    def in_turn(self, without: Container[object] = ()) -> Iterator[HeldRecord]:
        """But for nodes of `without`: what those said that proved their keys here, then of the rest one of each introducer in
        turn. So a flood that one peer introduced stands behind all that others did."""
        accounts = [
            (name, [self._entries[key] for key in keys if key.node not in without])
            for name, keys in self._accounts.items()
        ]
        for name, entries in accounts:
            yield from (entry for entry in entries if entry.record.node == name)
        turns = deque(iter([e for e in entries if e.record.node != name]) for name, entries in accounts)
        while turns:
            introduced = turns.popleft()
            if (entry := next(introduced, None)) is not None:
                yield entry
                turns.append(introduced)

    def get(self, key: RecordKey) -> HeldRecord | None:
        return self._entries.get(key)

    def by_tag(self, tag: bytes) -> HeldRecord | None:
        return self._by_tag.get(tag)

    def was_seen_lately(self, node: NodeId, now: float) -> bool:
        """Whether a beat of `node` came within SEEN_S."""
        return any(now - entry.seen_at < SEEN_S for entry in self.of_node(node))

    def of_node(self, node: NodeId) -> list[HeldRecord]:
        """What is held of `node`."""
        return list(self._of_node.get(node, {}).values())

    def has_left(self, node: NodeId) -> bool:
        """Whether `node` has withdrawn all its records: it left, and was not lost."""
        entries = self._of_node.get(node, {}).values()
        return bool(entries) and all(entry.record.is_withdrawn for entry in entries)

    def left(self) -> set[NodeId]:
        """Nodes that `has_left` holds of."""
        return {node for node in self._of_node if self.has_left(node)}

    def __iter__(self) -> Iterator[HeldRecord]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def _take(self, data: bytes, now: float, sender: NodeId | None) -> RecordChange:
        record, size = read(data)
        signed, beat = data[:size], read_beat(data[size:])
        key, known = record.key, self._entries.get(record.key)
        verdict: Verdict = "same"
        if known is None or known.signed != signed:
            verdict = self._replace(known, record, signed, now, sender)
        if beat is not None and verdict in ("new", "same"):
            beat_verdict = self._beat(self._entries[key], *beat, now)
            verdict = "new" if verdict == "new" else beat_verdict  # a bad beat takes nothing from a good record
        return RecordChange(verdict, self._entries[key] if verdict == "new" else None, known is None)

    def _replace(
        self, entry: HeldRecord | None, record: Record, signed: bytes, now: float, sender: NodeId | None
    ) -> Verdict:
        key = record.key
        if entry is not None and record.sequence <= entry.record.version and record.sequence != entry.record.sequence:
            return "stale"
        if entry is None and key.tag in self._by_tag:
            raise RecordRefused("full", f"another key that is held here has the tag {key.tag.hex()}")
        teller = sender or record.node
        account = entry.account if entry is not None else record.node if self.is_known(record.node) else teller
        crowded = None if entry is not None else self._make_way(record.node, account)
        check_signature(record, signed)
        if entry is not None and record.sequence == entry.record.sequence:
            _note(self.forks, record.node, (entry.record.addresses, record.addresses))
            if signed < entry.signed:  # any rule will do that makes all views equal
                return "fork"
            self._keep(HeldRecord(record, signed, b"", entry.arrived_at, now, entry.tag, account, teller))
            return "fork"
        if crowded is not None:
            self._remove(crowded)
        trusted_from = 0 if entry is None else entry.trusted_from
        self._keep(HeldRecord(record, signed, b"", now, now, key.tag, account, teller, trusted_from))
        return "new"

    def _beat(self, entry: HeldRecord, beat: int, value: bytes, now: float) -> Verdict:
        record = entry.record
        if beat <= record.beats:
            return "same" if beat == record.beats and value == entry.value else "stale"
        if entry.has_ended(now) or record.is_withdrawn:
            return "expired"
        try:
            entry.record = check_beat(record, beat, value)
        except RecordRefused as exc:
            return exc.verdict
        entry.value, entry.seen_at = value, now
        return "new"

    def _make_way(self, node: NodeId, account: NodeId) -> RecordKey | None:
        """The key to be removed for a new one of `node` on `account`, None: there is room. Raises RecordRefused: none."""
        held = len(self._accounts.get(account, ()))
        if len(self._of_node.get(node, ())) >= MAX_RECORDS_PER_NODE:
            raise RecordRefused("full", f"node {node[:16]} has {MAX_RECORDS_PER_NODE} records here, the limit")
        if account != node and held >= self._max_records // 2:
            raise RecordRefused("full", f"peer {account[:16]} has introduced {held} records here, the limit")
        if len(self._entries) < self._max_records:
            return None
        others = (name for name in self._accounts if name != self._me)
        largest = max(others, key=lambda name: len(self._accounts[name]), default=None)
        if largest is None or (node != self._me and len(self._accounts[largest]) <= held + 1):
            raise RecordRefused("full", f"{len(self._entries)} records are here, the limit")
        return next(reversed(self._accounts[largest]))

    def _keep(self, entry: HeldRecord) -> None:
        key = entry.record.key
        entry.is_linked = key.node in self._linked
        old = self._entries.get(key)
        self._entries[key] = entry
        self._by_tag[entry.tag] = entry
        self._of_node.setdefault(key.node, {})[key] = entry
        if old is None:
            insort(self._tags, entry.tag)
            self._accounts.setdefault(entry.account, {})[key] = None

    def _charge(self, entry: HeldRecord, account: NodeId) -> None:
        """Put `entry` on another account."""
        key = entry.record.key
        self._discharge(key, entry.account)
        entry.account = account
        self._accounts.setdefault(account, {})[key] = None

    def _discharge(self, key: RecordKey, account: NodeId) -> None:
        self._accounts[account].pop(key)
        if not self._accounts[account]:
            del self._accounts[account]

    def _remove(self, key: RecordKey) -> HeldRecord:
        entry = self._entries.pop(key)
        del self._by_tag[entry.tag], self._tags[bisect_left(self._tags, entry.tag)]
        self._discharge(key, entry.account)
        held = self._of_node[key.node]
        del held[key]
        if not held:
            del self._of_node[key.node]
        return entry


def _note(notes: dict[NodeId, V], node: NodeId, value: V) -> None:
    """Remember the newest few."""
    notes.pop(node, None)
    notes[node] = value
    if len(notes) > MAX_NOTES:
        del notes[next(iter(notes))]
