"""The engine under AddressSanitizer and UndefinedBehaviourSanitizer, over random plans, shapes and steps."""

import shutil
from pathlib import Path

import pytest

from manyhands.engine import library
from tools.fuzz_kernels import LEAST, run_sanitized
from tools.sanitized import NATIVE, build, preloads

SECONDS = 5
BEST = library.supported()[0]
needs_sanitizers = pytest.mark.skipif(
    not preloads(),
    reason="NOT RUN: gcc with libasan is not installed: the engine was not fuzzed under sanitizers",
)


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
