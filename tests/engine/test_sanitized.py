"""The engine under AddressSanitizer, UndefinedBehaviourSanitizer and ThreadSanitizer, over random plans, shapes and steps."""

import shutil
from pathlib import Path

import pytest

from manyhands.engine import library
from tools.fuzz_kernels import LEAST, run_sanitized
from tools.sanitized import MEMORY, NATIVE, RACES, build, quick

SECONDS = 5
BEST = library.supported()[0]
needs_sanitizers = pytest.mark.skipif(bool(MEMORY.missing()), reason=f"NOT RUN: {MEMORY.missing()}")
needs_races = pytest.mark.skipif(bool(RACES.missing()), reason=f"NOT RUN: {RACES.missing()}")


@pytest.mark.slow
@needs_sanitizers
def test_nothing_is_read_or_written_out_of_bounds(tmp_path: Path) -> None:
    """In this machine's best kernels; all are compiled for it, in a minute, by the nightly step `fuzz kernels`."""
    done = run_sanitized(build(tmp_path, sanitized=BEST), 7, SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split(" plans, ")[1].split()[0]) >= LEAST
    if "avx512" in library.supported():  # tiles emulated in its lanes, if need be: the same digests and bits
        assert "amx" in done.stdout


@pytest.mark.nightly  # it builds the library once more
@needs_sanitizers
def test_a_write_beyond_an_array_is_found(tmp_path: Path) -> None:
    """The same run finds one lane too many in the last part of a row."""
    native = tmp_path / "native"
    shutil.copytree(NATIVE, native)
    source = native / "lanes.h"
    right, wrong = "memcpy(at, room, (size_t)count * 4);", "memcpy(at, room, (size_t)count * 4 + 4);"
    text = source.read_text()
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong))
    done = run_sanitized(build(tmp_path, native, BEST), 7, 8 * SECONDS)
    # Which thread's write is reported first, and so where, differs from run to run.
    assert done.returncode != 0 and "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[:4000]


@pytest.mark.nightly  # where the fuzzer of races runs longer, too
@needs_races
def test_threads_of_a_team_do_not_race(tmp_path: Path) -> None:
    """In all operations of the golden cases, and random plans, with up to 4 threads."""
    done = run_sanitized(build(tmp_path, sanitized=quick(), use=RACES), 7, SECONDS, RACES, quick())
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split(" plans, ")[1].split()[0]) >= LEAST


@pytest.mark.nightly  # it builds the library once more
@needs_races
@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("run.c", "row < (task + 1) * job->per_task; row++", "row <= (task + 1) * job->per_task; row++"),
        ("run.c", "|| !are_apart(plan, before->numbers, n))", ")"),
        ("team.c", "(&team->gate, __ATOMIC_ACQUIRE) != CLOSED; i++)", "(&team->gate, __ATOMIC_ACQUIRE) < 0; i++)"),
    ],
    ids=["two tasks compute a row", "two products write the same columns", "a job does not wait for its members"],
)
def test_a_race_is_found(file: str, right: str, wrong: str, tmp_path: Path) -> None:
    native = tmp_path / "native"
    shutil.copytree(NATIVE, native)
    text = (native / file).read_text()
    assert text.count(right) == 1
    (native / file).write_text(text.replace(right, wrong))
    done = run_sanitized(build(tmp_path, native, quick(), RACES), 7, 8 * SECONDS, RACES, quick())
    assert done.returncode != 0 and "ThreadSanitizer: data race" in done.stderr, done.stderr[:4000]
