"""Which tensor is fetched next from which provider, and which one sent a wrong one. Pure: no clock, no network, no disk.

A tensor comes from one provider, so that a wrong hash names the node that sent it. Where a provider stalls or goes away in the
middle, another one goes on where it ended: such a mixed tensor, if wrong, is fetched once more from one provider
alone, and then each old piece is compared with the truth.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from manyhands.checkpoint.header import TensorEntry
from manyhands.weights.provider import Data

# An idle provider takes a tensor over from one that would need this much longer, and at least STEAL_S more.
STEAL_FACTOR: Final = 4.0
STEAL_S: Final = 3.0


@dataclass(slots=True)
class TensorPiece:
    """Bytes [start, end) of a tensor, given by `node`; `sha256` once they turned out to be part of a wrong whole."""

    node: str
    start: int
    end: int
    sha256: str = ""


@dataclass(slots=True, eq=False)
class TensorJob:
    """One tensor to fetch."""

    entry: TensorEntry
    node: str | None = None  # that is fetching it
    turn: int = 0  # counts takers
    since: float = 0.0
    is_writing: bool = False  # the disk is at it: no other may start
    pieces: list[TensorPiece] = field(default_factory=list)
    suspects: list[TensorPiece] = field(default_factory=list)
    sha256: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    passed: set[str] = field(
        default_factory=set
    )  # nodes that have come by it in their lists since it was last given back

    @property
    def done(self) -> int:
        return self.pieces[-1].end if self.pieces else 0

    @property
    def givers(self) -> set[str]:
        return {piece.node for piece in self.pieces}

    def add(self, node: str, data: Data) -> None:
        """Note that `data` was hashed and written behind what is there."""
        if not self.pieces or self.pieces[-1].node != node:
            self.pieces.append(TensorPiece(node, self.done, self.done))
        self.pieces[-1].end += len(data)

    def reset(self) -> None:
        self.pieces = []
        self.sha256 = hashlib.sha256()


class DownloadSchedule:
    """All jobs of a pull. Every method changes nothing outside. None but `drop` looks at all jobs for each that is asked for: a
    model may have 46,000 tensors, and a node may lack them one by one."""

    def __init__(self, entries: Iterable[TensorEntry]) -> None:
        # The largest is taken first, from the end.
        self.waiting: dict[TensorJob, None] = {TensorJob(entry): None for entry in sorted(entries, key=len)}
        self.running: set[TensorJob] = set()
        self.dropped: set[str] = set()
        self.untrusted_nodes: set[str] = set()
        self._lacks: dict[str, set[str]] = {}
        self._lists: dict[str, list[TensorJob]] = {}  # of each node what it has not come by yet
        self._rates: dict[str, float] = {}  # bytes/s of each node's last finished tensor

    @property
    def unfinished(self) -> list[TensorJob]:
        return [*self.waiting, *self.running]

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self.running

    def take(self, node: str, now: float) -> TensorJob | None:
        """What `node` should fetch now: the largest that waits, else one that is better taken from a slow provider."""
        if node in self.dropped:
            return None
        if (job := self._next_waiting(node)) is not None:
            return self._start(job, node, now)
        lacks = self._lacks.get(node, set())
        slow = [job for job in self.running if job.entry.name not in lacks and self._is_slow(job, node, now)]
        return self._start(max(slow, key=lambda job: len(job.entry) - job.done), node, now) if slow else None

    def _next_waiting(self, node: str) -> TensorJob | None:
        """It waits no more. Each that `node` comes by it will come by again only after that was given back."""
        if (left := self._lists.get(node)) is None:
            left = self._lists[node] = list(self.waiting)
            for job in self.running:
                job.passed.add(node)
        lacks = self._lacks.get(node, set())
        while left:
            job = left.pop()
            job.passed.add(node)
            if job in self.waiting and job.entry.name not in lacks:
                del self.waiting[job]
                return job
        return None

    def is_hopeless(self, node: str) -> bool:
        """Whether `node` cannot be of use any more."""
        return node in self.dropped or not self.running

    def finish(self, job: TensorJob, now: float) -> None:
        """The tensor is whole and right."""
        assert job.node is not None
        if len(job.entry):  # an empty one says nothing of it
            self._rates[job.node] = len(job.entry) / max(now - job.since, 1e-6)
        self.running.discard(job)

    def give_back(self, job: TensorJob, turn: int) -> None:
        """Its taker stops working on a job; harmless if another took it over or it is finished."""
        if job.turn != turn or job not in self.running:
            return
        self.running.discard(job)
        if job.is_writing or job.suspects or job.givers & self.untrusted_nodes:
            job.reset()
        job.node, job.is_writing = None, False
        self.waiting[job] = None
        for node in job.passed:
            if job.entry.name not in self._lacks.get(node, ()):
                self._lists[node].append(job)
        job.passed.clear()

    def lack(self, node: str, name: str) -> None:
        self._lacks.setdefault(node, set()).add(name)

    def drop(self, node: str, *, is_untrusted: bool) -> None:
        """Ask `node` for nothing more. What an untrusted node gave of unfinished tensors is forgotten."""
        self.dropped.add(node)
        if is_untrusted:
            self.untrusted_nodes.add(node)
        for job in self.waiting:
            if job.givers & self.untrusted_nodes:
                job.reset()

    def _start(self, job: TensorJob, node: str, now: float) -> TensorJob:
        if job.suspects:
            job.reset()
        job.node, job.since, job.turn = node, now, job.turn + 1
        self.running.add(job)
        return job

    def _is_slow(self, job: TensorJob, node: str, now: float) -> bool:
        """Whether `node` would be much faster with the rest of `job` than the one that has it."""
        if job.node == node or job.is_writing or node not in self._rates:
            return False
        mine_s = (len(job.entry) - job.done) / self._rates[node]
        spent_s = now - job.since
        theirs_s = spent_s * (len(job.entry) - job.done) / max(_given(job), 1)
        return theirs_s > STEAL_FACTOR * mine_s + STEAL_S and spent_s > STEAL_S


def _given(job: TensorJob) -> int:
    """Bytes that the node now at work has given."""
    last = job.pieces[-1] if job.pieces else None
    return last.end - last.start if last is not None and last.node == job.node else 0
