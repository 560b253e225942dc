"""Random plans, shapes and steps of the native engine, on one back end after the other. For nightly runs.

    PYTHONPATH=src .venv/bin/python -m tools.fuzz_kernels --minutes 60 --seed 1

Builds the library under AddressSanitizer and UndefinedBehaviourSanitizer (gcc with libasan; AMX's tiles are emulated where
the machine has none) and runs itself on it. What fits must compute the same bits on all back ends; what does not fit must be
refused. First all but plain C must reproduce the golden digests. Prints how many plans it ran; exits with 1, the sanitizers'
report and the seed at the first that reads or writes out of bounds or differs.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.engine import golden, library
from manyhands.engine.cache import SessionCache
from manyhands.engine.golden_cases import reals, stored
from manyhands.engine.golden_small import blocks
from manyhands.engine.grids import stand_in
from manyhands.engine.library import Array, Plan, Team
from manyhands.engine.quants import FORMS, KEPT, packed_bytes, round_weights
from manyhands.errors import ManyhandsError
from tools.fuzz_plans import Integer, operation, shape_of
from tools.sanitized import ROOT, build, preloads

LEAST: Final = 4  # plans with operations, however slow the machine
ODD: Final = (np.nan, np.inf, -np.inf, 3e38, 1e-45, -0.0)


def rows_of(integer: Integer, count: int, width: int) -> Array:
    """Rows of a step; now and then with numbers that are none, or hardly."""
    rows = reals(integer(1, 99), count, width)
    if integer(0, 3) == 0:
        rows.reshape(-1)[:: integer(1, 50)] = ODD[integer(0, len(ODD) - 1)]
    return rows


def step(plan: Plan, team: Team, integer: Integer, width: int, row_type: str) -> list[bytes]:
    """A few steps of a few sessions; what they gave. Between them caches are forked, and steps beyond a cache are refused."""
    caches, at, out = [SessionCache(plan) for _ in range(3)], [0, 0, 0], []
    for _ in range(3):
        at = [cache.reachable(length) for cache, length in zip(caches, at, strict=True)]
        counts = [integer(1, 40) if integer(0, 9) else integer(200, 300) for _ in caches]
        segments, row = [], 0
        for i, count in enumerate(counts):
            start = caches[i].reachable(integer(0, at[i]))
            segments.append(caches[i].segment(start, row, count))
            at[i], row = start + count, row + count
        rows = np.ascontiguousarray(stored(rows_of(integer, row, width), row_type)).view(np.uint8).reshape(-1)
        try:
            out.append(plan.run(team, integer(1, 4), segments, rows, row).tobytes())
            for cache, end in zip(caches, at, strict=True):
                cache.done(end)
        except ManyhandsError as error:
            out.append(str(error).encode())
        number, other, end = integer(0, 2), integer(0, 2), integer(0, 300)
        at = [cache.reachable(length) for cache, length in zip(caches, at, strict=True)]
        if at[number] and integer(0, 1):
            caches[other], at[other] = caches[number].fork(at[number], 0), at[number]
        if plan.block_bytes and integer(0, 3) == 0:
            out.append(beyond(plan, team, integer, caches[number], caches[number].reachable(end), len(rows) // row))
        if max(plan.state_bytes, plan.now_bytes) and integer(0, 3) == 0:
            out.append(astray(plan, team, integer, caches[number], len(rows) // row))
    return out


def beyond(plan: Plan, team: Team, integer: Integer, cache: SessionCache, start: int, row_bytes: int) -> bytes:
    """A step of a row in a cache that is told to be smaller or to lack blocks, or at a later position than it is: refused."""
    segment = cache.segment(start, 0, 1)
    missing = (ctypes.c_void_p * segment.num_blocks)()
    fewer, later = start // 64 - segment.num_blocks, 64 * segment.num_blocks
    field, by = (
        ("num_blocks", fewer),
        ("blocks", ctypes.addressof(missing) - segment.blocks),
        ("start", later),
        ("count", 2),
    )[integer(0, 3)]
    setattr(segment, field, getattr(segment, field) + by)
    try:
        plan.run(team, 1, [segment], np.zeros(row_bytes, np.uint8), 1)
    except ManyhandsError as error:
        return str(error).encode()
    raise AssertionError(f"a segment whose {field} is off by {by} was taken")


def astray(plan: Plan, team: Team, integer: Integer, cache: SessionCache, row_bytes: int) -> bytes:
    """A step of a row that is told of states which are not there, or not of that position, or has no rings: refused."""
    segment = cache.segment(cache.reachable(integer(0, 300)), 0, 1)
    field, value = (("now", None), ("states", None), ("num_states", 0), ("from_", segment.start + 1), ("from_", -2))[
        integer(0, 4) if plan.state_bytes else 0
    ]
    setattr(segment, field, value)
    try:
        plan.run(team, 1, [segment], np.zeros(row_bytes, np.uint8), 1)
    except ManyhandsError as error:
        return str(error).encode()
    raise AssertionError(f"a segment whose {field} is {value} was taken")


def packed_wrong(integer: Integer) -> bytes:
    """Blocks of any type, as they are told to be or one off, into their packed form: the code, and what was written."""
    kind = tuple(KEPT)[integer(0, len(KEPT) - 1)]
    n, depth = integer(1, 40), BLOCKS[kind][0] // 32 * integer(1, 6)
    raw = blocks(integer(1, 99), n, depth * 32 // BLOCKS[kind][0], kind)
    off = [integer(-1, 1) if integer(0, 4) == 0 else 0 for _ in range(5)]
    rows = (
        np.array([integer(0, n - 1 + (integer(0, 40) == 0)) for _ in range(n + 1)], np.int64) if integer(0, 1) else None
    )
    room = np.zeros(packed_bytes(KEPT[kind], n, depth * 32), np.uint8)
    given = (library.address(raw), raw.nbytes + min(0, off[0]), n + off[1], depth + off[2], library.address(rows))
    grid = stand_in(kind)
    entries = (library.address(grid), 0 if grid is None else grid.nbytes // 4 + off[4])
    sizes = (library.address(room), room.nbytes + min(0, off[3]), *entries)
    code = library.load().mh_pack_blocks(FORMS[kind], *given, *sizes)
    return bytes([code]) + room.tobytes()


def embedded(integer: Integer, back_end: str) -> bytes:
    """Rows of a random table, packed or not; now and then of an id that it has not, or as more rows than there are."""
    vocab, width, row_type = integer(1, 40), integer(1, 600), ("bf16", "f32")[integer(0, 1)]
    name = ("bf16", "f16", "f32")[integer(0, 2)]
    table = stored(reals(integer(1, 99), vocab, width), name)
    given = library.pack(table, name) if integer(0, 1) else table
    if integer(0, 2) == 0:
        small = ("w8", "w4")[integer(0, 1)]
        given, name = round_weights(back_end, table, name, small), small
    ids = [integer(0, vocab - 1 + (integer(0, 9) == 0)) for _ in range(integer(0, 5))]
    shape = (vocab + (integer(0, 9) == 0), width + (integer(0, 9) == 0))
    try:
        return library.embed(back_end, given, name, shape, ids, 1.0 + integer(0, 2), row_type).tobytes()
    except ManyhandsError as error:
        return str(error).encode()


def case(seed: int, teams: Team) -> bool:
    """One random plan, and a table, on every back end; whether the plan had operations that fit."""
    found: list[tuple[int, list[bytes]]] = []
    for back_end in library.supported():
        random = np.random.default_rng(seed)

        def integer(low: int, high: int, random: np.random.Generator = random) -> int:
            return int(random.integers(low, high + 1))

        shape = shape_of(integer)
        widths = shape.widths
        row_type = ("bf16", "f32")[integer(0, 1)]
        out_type = ("bf16", "f32")[integer(0, 1)]
        plan = Plan(back_end, row_type, widths, integer(0, len(widths) - 1), out_type, 700)
        accepted = 0
        for _ in range(integer(1, 12)):
            try:
                plan.add(*operation(integer, shape))
                accepted += 1
            except ManyhandsError:
                pass
        given = [*step(plan, teams, integer, widths[0], row_type), embedded(integer, back_end), packed_wrong(integer)]
        found.append((accepted, given))
    assert all(other == found[0] for other in found), f"seed {seed}: back ends differ"
    return found[0][0] > 0


def run_sanitized(path: Path, seed: int, seconds: float) -> subprocess.CompletedProcess[str]:
    """This module on a library that `build` made, in a process of its own."""
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(preloads()),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONMALLOC": "malloc",  # so that the sanitizers know where Python's arrays end
    }
    command = [sys.executable, "-m", "tools.fuzz_kernels", "--library", str(path)]
    command += ["--seed", str(seed), "--minutes", str(seconds / 60)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def fuzz(path: Path, seed: int, seconds: float) -> None:
    """At least LEAST plans that have operations, and as many as there is time for in `seconds`."""
    library.PATH = path
    for name in set(library.supported()) - {"scalar"}:
        wrong = golden.failures(name)
        assert not wrong, f"{name} does not reproduce {wrong}"
    team, until, fitting, number = Team(3), time.monotonic() + seconds, 0, 0
    while fitting < LEAST or time.monotonic() < until:
        fitting += case(seed + number, team)
        number += 1
    sys.stdout.write(f"{number} plans, {fitting} with operations, on {', '.join(library.supported())}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--library", type=Path, help="a library built already: no other is built")
    given = parser.parse_args()
    if given.library:
        fuzz(given.library, given.seed, 60 * given.minutes)
        return 0
    if not preloads():
        sys.stderr.write("gcc with libasan and libubsan is not installed\n")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        done = run_sanitized(build(Path(folder)), given.seed, 60 * given.minutes)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr[-8000:])
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
