"""What a node holds of the directory: the newest statement of every key, and why others were refused. Pure.

Freshness is judged by *our* clock: a record is fresh for FRESH_S after it, or a beat of it, came as news. The signer's clock
matters only for the lifetime (120 s) and against records from the future (60 s).

    FRESH_S = 13 s: a beat every 5 s that takes up to 6 s to get here leaves 2 s for a node that is held up; and a node that
    crashed is gone from every view after at most 6 + 13 = 19 s. A lost link (`suspect`) takes it out at once, until the link
    is back or the node spoke twice: the first beat to come may have been on its way already.

A withdrawn record stays as a tombstone until everything it replaced has ended, so that nobody can replay it.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from manyhands.core import ModelId, NodeAddr, NodeId
from manyhands.swarm.record import (
    MAX_BEATS,
    MAX_FUTURE_S,
    MAX_LIFETIME_S,
    Key,
    Record,
    RecordRefused,
    Verdict,
    check_beat,
    check_signature,
    check_time,
    read,
    read_beat,
    with_beat,
)

FRESH_S = 13.0
MAX_RECORDS_PER_NODE = 64
MAX_NODES = 10_000
MAX_RECORDS = 20_000
MAX_NOTES = 64  # nodes whose clock or key is remembered as odd
V = TypeVar("V")


@dataclass(slots=True)
class Entry:
    """The newest statement of a key. `signed` is its part without the beat; `value` proves `record.beats`."""

    record: Record
    signed: bytes
    value: bytes
    heard_at: float  # when it last became newer here
    tag: bytes  # of the record's key
    trusted_from: int = 0  # the version from which the node is no longer suspect

    @property
    def data(self) -> bytes:
        """The whole statement, for those who do not have the record."""
        return with_beat(self.signed, self.record.beats, self.value) if self.record.beats else self.signed

    def is_fresh(self, now: float) -> bool:
        """Whether the record may be offered: its node spoke lately and it is neither withdrawn nor over."""
        record = self.record
        return not record.is_withdrawn and record.version >= self.trusted_from and self.is_current(now)

    def is_current(self, now: float) -> bool:
        """Whether others should have it too: its node spoke lately, or withdrew it."""
        record = self.record
        return now < record.expires_at and (record.is_withdrawn or now - self.heard_at <= FRESH_S)

    def is_over(self, now: float) -> bool:
        """Whether it may be forgotten. A tombstone outlives every older record of its key."""
        if self.record.is_withdrawn:
            return now > self.record.issued_at + MAX_LIFETIME_S + MAX_FUTURE_S
        return now >= self.record.expires_at


class Change(NamedTuple):
    """What a statement did to the shelf. `entry`: where it stands now, if it was news; `is_arrival`: its key was not known."""

    verdict: Verdict
    entry: Entry | None
    is_arrival: bool


class OnShelf:
    """What back-ends have in common that hold all they hear of on one `shelf`: there is nothing to be watched."""

    shelf: "Shelf"

    def watch(self, model: ModelId) -> None:
        """It is at hand."""

    def unwatch(self, model: ModelId) -> None:
        """It stays at hand."""

    def addresses(self, node: NodeId) -> tuple[NodeAddr, ...]:
        """Where `node` can be dialled, as its records say, also those that are not fresh."""
        return tuple(addr for entry in self.shelf.of_node(node) for addr in entry.record.addresses)

    def complaints(self) -> list[str]:
        """What a person should mend, a line each."""
        return complaints(self.shelf.skews, self.shelf.forks)

    def records(self, now: float) -> list[Record]:
        """Fresh records, our own included."""
        return self.shelf.records(now)


class Shelf:
    """Raises nothing: hostile statements are counted by verdict in `counts` and dropped.

    `skews`: node -> seconds its clock is ahead of ours, for nodes whose own words were refused as "future" or "expired".
    `forks`: node -> the two lists of addresses under which its key said different things with one number.
    """

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self.counts: Counter[Verdict] = Counter()
        self.skews: dict[NodeId, float] = {}
        self.forks: dict[NodeId, tuple[tuple[NodeAddr, ...], tuple[NodeAddr, ...]]] = {}
        self._entries: dict[Key, Entry] = {}
        self._by_tag: dict[bytes, Key] = {}
        self._of_node: dict[NodeId, set[Key]] = {}

    def put(self, data: bytes, now: float) -> Verdict:
        """Take a statement. "new": it, or its beat, was news. Everything else left the shelf as it was, or ("fork") nearly."""
        return self.take(data, now).verdict

    def take(self, data: bytes, now: float, sender: NodeId | None = None) -> Change:
        """As `put`, and says what changed. `sender`: who passed it on, where that is known."""
        try:
            change = self._take(data, now, sender)
        except RecordRefused as exc:
            change = Change(exc.verdict, None, False)
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
        for entry in self.of_node(node):
            entry.trusted_from = entry.record.version + 2

    def trust(self, node: NodeId) -> None:
        """A link to `node` is up (again)."""
        for entry in self.of_node(node):
            entry.trusted_from = 0

    def expire(self, now: float) -> list[Record]:
        """Forget what is over; returns it."""
        over = [key for key, entry in self._entries.items() if entry.is_over(now)]
        return [self._remove(key).record for key in over]

    def records(self, now: float, model: ModelId | None = None) -> list[Record]:
        """Fresh records, of all models or of one."""
        fresh = (entry.record for entry in self._entries.values() if entry.is_fresh(now))
        return [record for record in fresh if model is None or (record.info is not None and record.info.model == model)]

    def get(self, key: Key) -> Entry | None:
        return self._entries.get(key)

    def by_tag(self, tag: bytes) -> Entry | None:
        key = self._by_tag.get(tag)
        return None if key is None else self._entries[key]

    def of_node(self, node: NodeId) -> list[Entry]:
        return [self._entries[key] for key in self._of_node.get(node, ())]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def _take(self, data: bytes, now: float, sender: NodeId | None) -> Change:
        record, size = read(data)
        signed, beat = data[:size], read_beat(data[size:])
        key, known = record.key, self._entries.get(record.key)
        verdict: Verdict = "same"
        if known is None or known.signed != signed:
            verdict = self._replace(known, record, signed, now, sender)
        if beat is not None and verdict in ("new", "same"):
            beat_verdict = self._beat(self._entries[key], *beat, now)
            verdict = "new" if verdict == "new" else beat_verdict  # a bad beat takes nothing from a good record
        return Change(verdict, self._entries[key] if verdict == "new" else None, known is None)

    def _replace(
        self, entry: Entry | None, record: Record, signed: bytes, now: float, sender: NodeId | None
    ) -> Verdict:
        if entry is not None and record.sequence <= entry.record.version and record.sequence != entry.record.sequence:
            return "stale"
        check_signature(record, signed)
        self._check_time(record, now, sender)
        if entry is not None and record.sequence == entry.record.sequence:
            _note(self.forks, record.node, (entry.record.addresses, record.addresses))
            if signed < entry.signed:  # any rule will do that makes all views equal
                return "fork"
            self._keep(record, signed, now)
            return "fork"
        if entry is None and not self._has_room(record.node):
            return "full"
        self._keep(record, signed, now, 0 if entry is None else entry.trusted_from)
        return "new"

    def _check_time(self, record: Record, now: float, sender: NodeId | None) -> None:
        try:
            check_time(record, now)
        except RecordRefused:
            if sender in (None, record.node):  # an old record from somebody else says nothing of its node's clock
                _note(self.skews, record.node, record.issued_at - now)
            raise

    def _beat(self, entry: Entry, beat: int, value: bytes, now: float) -> Verdict:
        record = entry.record
        if beat <= record.beats:
            return "same" if beat == record.beats and value == entry.value else "stale"
        if now >= record.expires_at or record.is_withdrawn:
            return "expired"
        try:
            entry.record = check_beat(record, beat, value)
        except RecordRefused as exc:
            return exc.verdict
        entry.value, entry.heard_at = value, now
        return "new"

    def _has_room(self, node: NodeId) -> bool:
        if len(self._entries) >= self._max_records:
            return False
        keys = self._of_node.get(node)
        return len(self._of_node) < MAX_NODES if keys is None else len(keys) < MAX_RECORDS_PER_NODE

    def _keep(self, record: Record, signed: bytes, now: float, trusted_from: int = 0) -> None:
        key = record.key
        entry = Entry(record, signed, b"", now, key.tag, trusted_from)
        self._entries[key] = entry
        self._by_tag[entry.tag] = key
        self._of_node.setdefault(record.node, set()).add(key)
        self.skews.pop(record.node, None)

    def _remove(self, key: Key) -> Entry:
        entry = self._entries.pop(key)
        del self._by_tag[entry.tag]
        keys = self._of_node[key.node]
        keys.remove(key)
        if not keys:
            del self._of_node[key.node]
        return entry


def _note(notes: dict[NodeId, V], node: NodeId, value: V) -> None:
    """Remember the newest few."""
    notes.pop(node, None)
    notes[node] = value
    if len(notes) > MAX_NOTES:
        del notes[next(iter(notes))]


def complaints(
    skews: Mapping[NodeId, float], forks: Mapping[NodeId, tuple[tuple[NodeAddr, ...], tuple[NodeAddr, ...]]]
) -> list[str]:
    """What a person should mend, a line each, from a shelf's notes."""
    lines = []
    if len(skews) >= 2 and max(skews.values()) - min(skews.values()) < 2 * MAX_FUTURE_S:
        off = statistics.median(skews.values())
        where = "behind" if off > 0 else "ahead of"
        lines.append(
            f"this machine's clock is {abs(off):.0f} s {where} that of {len(skews)} nodes: set it, best by NTP"
        )
    else:
        for node, off in skews.items():
            where = "ahead of" if off > 0 else "behind"
            lines.append(
                f"the clock of node {node[:16]} is {abs(off):.0f} s {where} this machine's: set one of them by NTP"
            )
    for node, homes in forks.items():
        first, second = (", ".join(str(addr) for addr in home) or "an unknown address" for home in homes)
        lines.append(
            f"two nodes use the key {node[:16]}, at {first} and {second}: move node.key away on one and start it again"
        )
    return lines
