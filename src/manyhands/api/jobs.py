"""Which requests ran lately: bounded in count and age, in memory, and on disk if a file is named. Never a prompt or a text.

History is an observer (run.py) and keeps ended jobs packed: as objects 500 of them take 10 MB, with 255 hops each 100 MB.
JobFile writes them in one thread of its own, so that a slow disk delays no request.
"""

import contextlib
import json
import logging
import marshal
import os
import queue
import sqlite3
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from manyhands.api.run import Job, Outcome
from manyhands.errors import BadRequest
from manyhands.origin import Token
from manyhands.origin.repair_plan import Event, Repair
from manyhands.route.search import Offer

logger = logging.getLogger(__name__)

MAX_JOBS = 500
MAX_AGE_S = 7 * 86400.0
# Ended jobs that may wait for the disk; beyond it the newest are not written (and that is logged).
MAX_UNWRITTEN = 1000
# A longer one is compressed; a job of a few hops is shorter, and to compress it would take its request longer than to pack it.
MAX_PLAIN_BYTES = 4096

JobObject = dict[str, Any]  # a job as JSON (docs/api.md)


def job_object(job: Job) -> JobObject:
    """A job as JSON. Times end in their unit; what is not known yet is null."""
    events = [_plain(event) for event in job.events]
    return {
        "id": job.id,
        "session": job.session,
        "model": job.model,
        "api": job.api,
        "key": job.key,
        "caller": job.caller,
        "status": job.outcome or ("queued" if job.queue_s is None else "running"),
        "finish_reason": job.finish_reason,
        "error": job.error,
        "created_unix_s": round(job.created, 3),
        "ended_unix_s": _rounded(job.ended),
        "prompt_tokens": job.prompt_tokens,
        "cached_tokens": job.cached_tokens,
        "prefilled_tokens": job.prefilled_tokens,
        "completion_tokens": job.completion_tokens,
        "max_tokens": job.max_tokens,
        "exactness": job.exactness,
        "route": [hop_object(offer) for offer in job.route],
        "hops": [hop_object(offer) for offer in job.hops],
        "timings": timings_object(job),
        "drafting": drafting_object(job),
        "routing": job.routing.as_object(),
        "audit": None if job.audit is None else job.audit.as_object(),
        "repairs": [_plain(repair) for repair in job.repairs],
        "events": events,
        "reshard_events": [e for e in events if e["kind"] in ("shard_failover", "reshard")],
    }


def hop_object(offer: Offer) -> JobObject:
    """One hop of a route as JSON."""
    where = {"worker_id": offer.node, "name": offer.name, "address": str(offer.addr), "layers": str(offer.info.span)}
    return {**where, "arithmetic": offer.info.arithmetic}


def timings_object(job: Job) -> JobObject:
    """The times of a job in ms, its speed, and where the time of a token went (waterfall.py), all in all and by hop."""
    timings = job.timings
    return {
        "queue_ms": in_ms(job.queue_s),
        "open_ms": in_ms(timings.open_s),
        "ttft_ms": in_ms(timings.ttft_s),
        "total_ms": in_ms(timings.total_s),
        "decode_tokens_per_s": _rounded(timings.decode_tokens_per_s(job.completion_tokens)),
        "per_token": job.waterfall.mean(),
        "hops": job.waterfall.hops(),
    }


def prefill_object(job: Job, now_s: float) -> JobObject:
    """How far a prompt has been computed, by llama.cpp's names: tokens, and ms since the request was admitted."""
    started = job.created + (job.queue_s or 0.0)
    counts = {"total": job.prompt_tokens, "cache": job.cached_tokens, "processed": job.prefilled_tokens}
    return {**counts, "time_ms": round(1e3 * max(0.0, now_s - started), 1)}


def drafting_object(job: Job) -> JobObject:
    """What drafting did in a job, and whether it pays (docs/speculation.md)."""
    done = job.drafting
    shown = {one.name: getattr(done, one.name) for one in fields(done)}  # asdict copies each value, in a request's time
    shown["drafters"] = {name: asdict(tally) for name, tally in done.drafters.items()}
    return {**shown, "tokens_per_traversal": _rounded(done.tokens_per_traversal)}


def in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _plain(happened: Event | Repair) -> JobObject:
    """As JSON has it: lists for tuples, no needless digits."""
    return {k: list(v) if isinstance(v, tuple) else _rounded(v) for k, v in asdict(happened).items()}


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


class EndedJob(NamedTuple):
    """A job that has ended. `key`: the name of the key that it was asked with."""

    id: str
    key: str | None
    ended_unix_s: float
    packed: bytes  # by marshal, which takes a fifth of JSON's time
    is_compressed: bool

    @classmethod
    def pack(cls, job: JobObject) -> "EndedJob":
        packed = marshal.dumps(job)
        is_long = len(packed) > MAX_PLAIN_BYTES
        return cls(job["id"], job["key"], job["ended_unix_s"], zlib.compress(packed, 1) if is_long else packed, is_long)

    def unpack(self) -> JobObject:
        job: JobObject = marshal.loads(zlib.decompress(self.packed) if self.is_compressed else self.packed)
        return job


class History:
    """The last `max_jobs` ended jobs that are no older than `max_age_s`, newest last. `file`: where they go as well."""

    def __init__(
        self,
        *,
        max_jobs: int = MAX_JOBS,
        max_age_s: float = MAX_AGE_S,
        file: "JobFile | None" = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._ended = deque(map(EndedJob.pack, file.recent() if file else ()), maxlen=max_jobs)
        self._max_age_s, self._file, self._wall_clock = max_age_s, file, wall_clock

    def recent(self, may_see: Callable[[str | None], bool] = lambda key: True) -> Iterator[JobObject]:
        """Ended jobs of the keys that `may_see` admits, newest first, each unpacked when it is asked for."""
        seen = [job for job in reversed(self._kept()) if may_see(job.key)]
        return (job.unpack() for job in seen)

    def find(self, job_id: str) -> JobObject | None:
        """The newest of that id: each attempt at a native stream has it."""
        return next((job.unpack() for job in reversed(self._kept()) if job.id == job_id), None)

    def _kept(self) -> deque[EndedJob]:
        """Those that are not too old."""
        horizon = self._wall_clock() - self._max_age_s
        while self._ended and self._ended[0].ended_unix_s < horizon:
            self._ended.popleft()
        return self._ended

    def started(self, job: Job) -> None:
        """Nothing to remember yet."""

    def token(self, job: Job, token: Token) -> None:
        """Texts are not kept."""

    def event(self, job: Job, event: Event) -> None:
        """The job keeps its events."""

    def ended(self, job: Job, outcome: Outcome) -> None:
        ended = job_object(job)
        self._ended.append(EndedJob.pack(ended))
        if self._file is not None:
            self._file.add(ended)


class JobFile:
    """Ended jobs in an SQLite file (mode 0600), at most `max_jobs` of at most `max_age_s`. Enter it before use.

    A file that cannot be written later is logged, and again once it can, and fails no request. Entering raises as `make`.
    """

    def __init__(self, path: Path, *, max_jobs: int = MAX_JOBS, max_age_s: float = MAX_AGE_S) -> None:
        self.path, self._max_jobs, self._max_age_s = path, max_jobs, max_age_s
        self._unwritten: queue.Queue[JobObject | None] = queue.Queue(MAX_UNWRITTEN)
        self._thread = threading.Thread(target=self._write_all, name="jobs", daemon=True)

    def make(self) -> None:
        """Make it if it is not there. Raises BadRequest if it cannot be made, or is something else."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            with contextlib.closing(self._connect()) as database:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, ended REAL, job TEXT)")
        except (OSError, sqlite3.Error) as error:
            raise BadRequest(f"cannot keep jobs in {self.path} ({error}): name another file") from error

    def __enter__(self) -> Self:
        self.make()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unwritten.put(None)
        self._thread.join()

    def recent(self) -> list[JobObject]:
        """The jobs of the file, newest last. Blocking: for the start."""
        with contextlib.closing(self._connect()) as database:
            rows = database.execute("SELECT job FROM jobs ORDER BY ended DESC LIMIT ?", (self._max_jobs,)).fetchall()
        return [json.loads(row[0]) for row in reversed(rows)]

    def add(self, job: JobObject) -> None:
        """Write an ended job soon."""
        try:
            self._unwritten.put_nowait(job)
        except queue.Full:
            logger.warning("job=%s is not written: %d wait for the disk already", job["id"], MAX_UNWRITTEN)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=5.0)

    def _write_all(self) -> None:
        with contextlib.closing(self._connect()) as database:
            is_open, num_lost = True, 0
            while is_open:
                batch = [self._unwritten.get()]
                with contextlib.suppress(queue.Empty):
                    while batch[-1] is not None:
                        batch.append(self._unwritten.get_nowait())
                is_open = batch[-1] is not None
                jobs = [job for job in batch if job is not None]
                try:
                    self._write(database, jobs)
                except sqlite3.Error as error:
                    if num_lost == 0:
                        logger.warning("jobs are not written to %s (%s): is its disk full?", self.path, error)
                    num_lost += len(jobs)
                else:
                    if num_lost and jobs:  # without any nothing was tried
                        logger.warning("jobs are written to %s again; it lacks %d", self.path, num_lost)
                        num_lost = 0

    def _write(self, database: sqlite3.Connection, jobs: Iterable[JobObject]) -> None:
        rows = [(job["id"], job["ended_unix_s"], json.dumps(job)) for job in jobs]
        with database:
            database.executemany("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?)", rows)
            newest = "SELECT id FROM jobs ORDER BY ended DESC LIMIT ?"
            database.execute(f"DELETE FROM jobs WHERE id NOT IN ({newest})", (self._max_jobs,))
            if rows:
                database.execute("DELETE FROM jobs WHERE ended < ?", (rows[-1][1] - self._max_age_s,))
