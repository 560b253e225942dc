"""manyhands.api.jobs: what is remembered, for how long, and that it is not the prompt."""

import asyncio
import contextlib
import json
import sqlite3
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyhands.api.jobs import History, JobFile, job_object
from manyhands.api.run import Job
from manyhands.errors import BadRequest
from tests.api.observed import PROMPT, observed
from tests.waiting import until


def job(number: int, ended: float) -> Job:
    """A job that ended at `ended`."""
    return Job(f"job-{number}", "tiny", "native", "ann", ended - 1, 3, 8, outcome="done", ended=ended)


def history(*, now: float = 1000.0, **options: Any) -> History:
    return History(wall_clock=lambda: now, **options)


def ids(jobs: Iterable[dict[str, Any]]) -> list[str]:
    return [job["id"] for job in jobs]


def test_the_newest_jobs_are_kept_newest_first() -> None:
    kept = history(max_jobs=3)
    for number in range(5):
        kept.ended(job(number, 990.0 + number), "done")
    assert ids(kept.recent()) == ["job-4", "job-3", "job-2"]
    found = kept.find("job-3")
    assert found is not None and found["status"] == "done"
    assert kept.find("job-0") is None


def test_of_several_attempts_at_a_stream_the_last_one_is_shown() -> None:
    """A stream that was cut and went on to its end was shown as cancelled."""
    kept = history()
    kept.ended(replace(job(1, 990.0), outcome="cancelled"), "cancelled")
    kept.ended(job(1, 991.0), "done")
    found = kept.find("job-1")
    assert found is not None and found["status"] == "done"


def test_old_jobs_are_forgotten() -> None:
    kept = history(now=1000.0, max_age_s=100.0)
    kept.ended(job(1, 899.0), "done")
    kept.ended(job(2, 901.0), "done")
    assert ids(kept.recent()) == ["job-2"]


def test_jobs_of_long_routes_take_little_memory(folder: Path) -> None:
    """500 jobs of 255 hops, with what was measured at each: 100 MB as objects."""

    async def one() -> Job:
        async with observed(folder) as scene:
            return await scene.evicting(1, at_token=3)

    ended = asyncio.run(one())
    hop = ended.hops[0]
    ended.hops = ended.route = tuple(replace(hop, name=f"n{number}") for number in range(255))
    kept = history(now=ended.ended or 0.0)
    tracemalloc.start()
    for _ in range(500):
        kept.ended(ended, "done")
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 16 << 20
    found = next(kept.recent())
    assert found == json.loads(json.dumps(job_object(ended))) and len(found["hops"]) == 255


def test_a_file_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "state" / "jobs.sqlite"
    with JobFile(path, max_jobs=3) as file:
        kept = history(file=file)
        for number in range(5):
            kept.ended(job(number, 990.0 + number), "done")
    assert path.stat().st_mode & 0o077 == 0
    with JobFile(path, max_jobs=3) as file:
        assert ids(history(file=file).recent()) == ["job-4", "job-3", "job-2"]


def test_a_file_forgets_by_age(tmp_path: Path) -> None:
    with JobFile(tmp_path / "jobs", max_age_s=50.0) as file:
        file.add(job_object(job(1, 100.0)))
        file.add(job_object(job(2, 140.0)))
        file.add(job_object(job(3, 160.0)))
    assert ids(file.recent()) == ["job-2", "job-3"]


def test_a_file_that_cannot_be_written_costs_no_request(tmp_path: Path, caplog: Any) -> None:
    with JobFile(tmp_path / "jobs") as file:
        kept = history(file=file)
        with contextlib.closing(sqlite3.connect(file.path)) as database:
            database.execute("DROP TABLE jobs")
        kept.ended(job(1, 990.0), "done")
    assert ids(kept.recent()) == ["job-1"]
    assert "not written" in caplog.text


def test_a_full_disk_is_said_once_and_so_is_its_end(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    """It was said with each request: "1 jobs are not written"."""
    is_full, write = True, JobFile._write
    tried: list[Any] = []

    def written(file: JobFile, database: sqlite3.Connection, jobs: Any) -> None:
        if is_full:
            tried.extend(jobs)
            raise sqlite3.OperationalError("database or disk is full")
        write(file, database, jobs)

    monkeypatch.setattr(JobFile, "_write", written)
    with JobFile(tmp_path / "jobs") as file:
        for number in range(3):
            file.add(job_object(job(number, 100.0)))
        asyncio.run(until(lambda: len(tried) == 3))
        is_full = False
        file.add(job_object(job(3, 100.0)))
    said = [record.message for record in caplog.records]
    assert said == [
        f"jobs are not written to {file.path} (database or disk is full): is its disk full?",
        f"jobs are written to {file.path} again; it lacks 3",
    ]
    assert ids(file.recent()) == ["job-3"]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("this is no database, and it is longer than a header would be" * 20)
    with pytest.raises(BadRequest, match="cannot keep jobs"), JobFile(tmp_path / "jobs"):
        pass


def test_a_job_tells_route_timings_and_repairs_but_not_the_text(folder: Path) -> None:
    async def main() -> None:
        async with observed(folder) as scene:
            done = await scene.evicting(1, at_token=3)
            (told,) = scene.history.recent()
            assert told == json.loads(json.dumps(told)) == job_object(done)
            assert (told["status"], told["finish_reason"], told["completion_tokens"]) == ("done", "length", 12)
            assert [hop["name"] for hop in told["route"]] == ["n0", "n1"]
            assert [hop["name"] for hop in told["hops"]] == ["n0", "n2"]
            assert [repair["lost"] for repair in told["repairs"]] == [["n1"]]
            assert [event["kind"] for event in told["reshard_events"]] == ["shard_failover"]
            assert told["timings"]["ttft_ms"] > 0 and told["timings"]["total_ms"] >= told["timings"]["ttft_ms"]
            assert PROMPT not in json.dumps(told) and "xylophone" not in json.dumps(told)

    asyncio.run(main())


def test_what_is_written_holds_no_text(folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with observed(folder) as scene:
            with JobFile(tmp_path / "jobs") as file:
                scene.gateway.observers.append(History(file=file))
                run = await scene.answer(8, seed=3)
            assert run.answer.text not in ("", " ")
            job_ids.append(run.job.id)
            texts.append(run.answer.text)

    job_ids: list[str] = []
    texts: list[str] = []
    asyncio.run(main())
    raw = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert job_ids[0].encode() in raw
    assert b"xylophone" not in raw and texts[0].encode() not in raw
