"""What a node says about itself, and when: signed records, beats between them, withdrawals. Pure: times and facts in.

Times are unix seconds: they number the first record of a run, in eighths, so that it exceeds those of the run before, also of
one that ended soon and said more than one thing a second.

A node that restarts finds its own old records in the directory. Those of a key that it no longer hosts are withdrawn at
once (no ghosts); those with a higher number than ours (the clock went back) are exceeded. A record that was signed with our
key after we started, but not by us, means that two nodes use one key: `twin` names it. Or our clock is behind, and it is of an
earlier run: then no beat follows it, and once it was silent for long it is a ghost as well. One that is followed by anything is
a twin's, and none is withdrawn from then on: two machines with one key do not take turns.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from manyhands.core import NodeAddr, SpanInfo, SpanLoad
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.record import MAX_BEATS, MAX_LIFETIME_S, REFRESH_S, Chain, NearNode, Record, RecordKey, Scope
from manyhands.swarm.statement import sign, with_beat

NUMBERS_PER_S = 8  # between two runs; news.py says how those are compared by 16 bits


@dataclass(frozen=True, slots=True)
class Profile:
    """What all records of a node have in common."""

    name: str
    addresses: tuple[NodeAddr, ...]
    relay: str | None
    scope: Scope
    memory_bytes: int
    cores: int
    device: str
    process: int = 0
    uplink_Bps: float = 0.0
    near: tuple[NearNode, ...] = ()


@dataclass(slots=True)
class _Said:
    """The newest record of a key and the beats given since."""

    record: Record
    signed: bytes
    chain: Chain
    beats: int = 0


@dataclass(slots=True)
class _Later:
    """A record in our name that was signed after our start: its newest version, and when that came; `news_at`: the second."""

    version: int
    heard_at: float
    news_at: float | None = None


class Announcer:
    """`entropy(n)` gives n unpredictable bytes. `profile` may be replaced at any time: `announce` signs it anew."""

    def __init__(self, key: NodeKey, profile: Profile, entropy: Callable[[int], bytes], now: float) -> None:
        self.profile = profile
        self.twin: Record | None = None
        self._key = key
        self._entropy = entropy
        self._started_at = now
        self._said: dict[RecordKey, _Said] = {}
        self._floor = 0  # sequences must exceed it
        self._later: dict[RecordKey, _Later] = {}
        self._is_twin_alive = False

    def announce(self, hosted: Sequence[tuple[SpanInfo, SpanLoad]], now: float) -> list[bytes]:
        """The statements that are due, given all that this node hosts and how busy that is. Call every BEAT_S.

        What is new comes before what is withdrawn, so that a node that changes its layers is in every view all the time. As
        statements may overtake each other on the way, the record that a node hosts nothing is withdrawn one beat after the
        first record of a span was sent.
        """
        facts: Sequence[tuple[SpanInfo | None, SpanLoad]] = hosted or [(None, SpanLoad())]
        records = {record.key: record for record in (self._draft(info, load, now) for info, load in facts)}
        is_known = any(key in self._said for key in records)
        gone = [
            said.record
            for key, said in self._said.items()
            if key not in records and (is_known or key.hosted is not None)
        ]
        said = [self._say(record, now) for record in records.values()]
        return said + [self._withdraw(record, now) for record in gone]

    def withdraw(self, now: float) -> list[bytes]:
        """Take back everything: this node leaves."""
        return [self._withdraw(said.record, now) for said in list(self._said.values())]

    def answer(self, seen: Iterable[Record], now: float, clock: float, silent_s: float) -> list[bytes]:
        """Withdrawals of what the directory holds in our name although we do not say so. Numbers exceed from now on all that
        it holds, withdrawn records too: one of a run whose clock was ahead would hide all that we say. `clock` is monotonic;
        a node of which nothing came for `silent_s` does not live. One that goes on for half as long after its first news does.
        """
        strange = [record for record in seen if record.node == self._key.node_id and self._is_strange(record)]
        for record in strange:
            self._floor = max(self._floor, record.version)
            if self._is_later(record):
                known = self._later.setdefault(record.key, _Later(record.version, clock))
                if record.version > known.version:
                    known.news_at = clock if known.news_at is None else known.news_at
                    self._is_twin_alive |= clock - known.news_at >= silent_s / 2
                    known.version, known.heard_at = record.version, clock
                self.twin = record
            if record.key in self._said:
                self._said[record.key].beats = MAX_BEATS  # sign it anew, with a higher number
        silent = set[RecordKey]()
        if not self._is_twin_alive:
            silent = {key for key, known in self._later.items() if clock - known.heard_at >= silent_s}
            if silent == set(self._later):
                self.twin = None
        elif not any(map(self._is_later, strange)) and all(
            clock - known.heard_at >= MAX_LIFETIME_S for known in self._later.values()
        ):
            self.twin = None  # its owner has parted the two; should it speak again, it is named again
        ghosts = [r for r in strange if not r.is_withdrawn and r.key not in self._said]
        return [self._withdraw(ghost, now) for ghost in ghosts if not self._is_later(ghost) or ghost.key in silent]

    def _is_later(self, record: Record) -> bool:
        """Whether it was signed after our start, by the clocks of both; an own one perhaps, if it is withdrawn."""
        return record.issued_at > self._started_at and not record.is_withdrawn

    def _is_strange(self, record: Record) -> bool:
        said = self._said.get(record.key)
        return said is None or record.sequence > said.record.sequence

    def _say(self, draft: Record, now: float) -> bytes:
        said = self._said.get(draft.key)
        if said is None or self._is_due(said, draft, now):
            said = self._said[draft.key] = self._sign(draft, now)
            return said.signed
        said.beats += 1
        self._floor = max(self._floor, said.record.sequence + said.beats)
        return with_beat(said.signed, said.beats, said.chain.value(said.beats))

    def _is_due(self, said: _Said, draft: Record, now: float) -> bool:
        """Whether a beat does not do: something changed, or the record grows old."""
        old = said.record
        if said.beats >= MAX_BEATS or not 0 <= now - old.issued_at < REFRESH_S:
            return True
        return replace(draft, sequence=old.sequence, issued_at=old.issued_at, anchor=old.anchor) != old

    def _sign(self, draft: Record, now: float) -> _Said:
        """Give `draft` its number and its chain of beats."""
        # The clock may jump, numbers must not.
        self._floor = self._floor + 1 if self._floor else int(now * NUMBERS_PER_S)
        chain = Chain(draft.node, self._floor, self._entropy(32))
        record = replace(draft, sequence=chain.sequence, issued_at=now, anchor=chain.value(0))
        return _Said(record, sign(record, self._key), chain)

    def _withdraw(self, record: Record, now: float) -> bytes:
        self._said.pop(record.key, None)
        return self._sign(replace(record, is_withdrawn=True, lifetime_s=MAX_LIFETIME_S, beats=0), now).signed

    def _draft(self, info: SpanInfo | None, load: SpanLoad, now: float) -> Record:
        profile = self.profile
        return Record(
            node=self._key.node_id,
            name=profile.name,
            sequence=0,
            issued_at=now,
            lifetime_s=MAX_LIFETIME_S,
            addresses=profile.addresses,
            relay=profile.relay,
            scope=profile.scope,
            info=info,
            load=replace(load, layer_s=_rough(load.layer_s), row_s=_rough(load.row_s), p95_s=_rough(load.p95_s)),
            memory_bytes=profile.memory_bytes,
            cores=profile.cores,
            device=profile.device,
            process=profile.process,
            uplink_Bps=_rough(profile.uplink_Bps),
            near=profile.near,
        )


def _rough(seconds: float) -> float:
    """To two digits: so noise in a measured speed is no change, which would have to be signed."""
    return float(f"{seconds:.2g}")
