"""Random plans, shapes and steps of the native engine, on one back end after the other. For nightly runs.

    PYTHONPATH=src .venv/bin/python -m tools.fuzz_kernels --minutes 60 --seed 1 [--races]

Builds the library under AddressSanitizer and UndefinedBehaviourSanitizer (gcc with libasan; AMX's tiles are emulated where
the machine has none) and runs itself on it. What fits must compute the same bits on all back ends; what does not fit must be
refused. First all but plain C must reproduce the golden digests. Prints how many plans it ran; exits with 1, the sanitizers'
report and the seed at the first that reads or writes out of bounds or differs.

`--races`: under ThreadSanitizer (gcc with libtsan), on one back end, with the smallest jobs shared by all threads; ends at the
first race.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.engine import golden, library
from manyhands.engine.cache import SessionCache
from manyhands.engine.golden_cases import reals, stored
from manyhands.engine.golden_small import blocks
from manyhands.engine.grids import stand_in
from manyhands.engine.layout import Segment
from manyhands.engine.library import Array, Plan, Team
from manyhands.engine.quants import FORMS, KEPT, pack_blocks, packed_bytes, round_weights
from manyhands.errors import ManyhandsError
from tools.fuzz_plans import POSITIONS, operation
from tools.fuzz_shapes import Integer, Shape, shape_of
from tools.sanitized import MEMORY, RACES, ROOT, Sanitizers, build, quick

LEAST: Final = 4  # plans with operations, however slow the machine
ODD: Final = (np.nan, np.inf, -np.inf, 3e38, 1e-45, -0.0)


def rows_of(integer: Integer, count: int, width: int) -> Array:
    """Rows of a step; now and then with numbers that are none, or hardly."""
    rows = reals(integer(1, 99), count, width)
    if integer(0, 3) == 0:
        rows.reshape(-1)[:: integer(1, 50)] = ODD[integer(0, len(ODD) - 1)]
    return rows


def step(plan: Plan, team: Team, integer: Integer, width: int, row_type: str) -> list[bytes]:
    """A few steps of some of three sessions; what they gave. Between them caches are forked, and steps beyond a cache are
    refused. Positions that a session has skipped are zeros in its cache."""
    caches, out = [SessionCache(plan) for _ in range(3)], list[bytes]()
    for _ in range(4):
        segments, ends, row = list[Segment](), dict[int, int](), 0
        for i in [i for i in range(3) if integer(0, 2)] or [integer(0, 2)]:
            start = caches[i].reachable(integer(0, caches[i].length if integer(0, 19) else POSITIONS))
            count = (1, integer(1, 40), integer(60, 70), integer(200, 300))[
                (0, 0, 1, 1, 1, 1, 1, 2, 2, 3)[integer(0, 9)]
            ]
            count = count if start < 1000 else min(count, 3)
            if integer(0, 39) == 0:  # to the last position of a plan, or one beyond
                start, count = caches[i].reachable(POSITIONS - 3), integer(3, 4)
            segments.append(caches[i].segment(start, row, count))
            ends[i], row = start + count, row + count
        rows = np.ascontiguousarray(stored(rows_of(integer, row, width), row_type)).view(np.uint8).reshape(-1)
        if integer(0, 3) == 0:
            plan.release()
        try:
            out.append(plan.run(team, integer(1, 4), segments, rows, row).tobytes())
            for i, end in ends.items():
                caches[i].done(end)
        except ManyhandsError as error:
            out.append(str(error).encode())
        number, other, end = integer(0, 2), integer(0, 2), integer(0, 300)
        place = caches[number].reachable(integer(0, caches[number].length))
        if place and integer(0, 1):
            caches[other] = caches[number].fork(place, 0)
        if plan.block_bytes and integer(0, 3) == 0:
            out.append(beyond(plan, team, integer, caches[number], caches[number].reachable(end), len(rows) // row))
        if max(plan.state_bytes, plan.now_bytes) and integer(0, 3) == 0:
            out.append(astray(plan, team, integer, caches[number], len(rows) // row))
    return out


def beyond(plan: Plan, team: Team, integer: Integer, cache: SessionCache, start: int, row_bytes: int) -> bytes:
    """A step of a row in a cache that is told to be smaller or to lack blocks, or at a later position than it is: refused."""
    segment = cache.segment(start, 0, 1)
    missing = np.zeros(segment.num_blocks, np.uintp)
    fewer, later = start // 64 - segment.num_blocks, 64 * segment.num_blocks
    field, by = (
        ("num_blocks", fewer),
        ("blocks", (library.address(missing) or 0) - segment.blocks),
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
    match integer(0, 4):
        case 0:
            given = table
        case 1:
            given = library.pack(table, name)
        case 2:
            small = ("w8", "w4")[integer(0, 1)]
            given, name = round_weights(back_end, table, name, small), small
        case _:
            kind, depth = tuple(KEPT)[integer(0, len(KEPT) - 1)], integer(1, 4)
            width, name = depth * BLOCKS[kind][0], KEPT[kind]
            given = pack_blocks(blocks(integer(1, 99), vocab, depth, kind), kind, grid=stand_in(kind))
    ids = [integer(0, vocab - 1 + (integer(0, 9) == 0)) for _ in range(integer(0, 5))]
    shape = (vocab + (integer(0, 9) == 0), width + (integer(0, 9) == 0))
    try:
        return library.embed(back_end, given, name, shape, ids, 1.0 + integer(0, 2), row_type).tobytes()
    except ManyhandsError as error:
        return str(error).encode()


def fill(plan: Plan, integer: Integer, shape: Shape) -> int:
    """Add random operations; how many did fit. Some are there twice: products of one source into one register are not computed
    at once."""
    accepted = 0
    for _ in range(integer(1, 12)):
        op = operation(integer, shape)
        for _ in range(1 + (integer(0, 9) == 0)):
            try:
                plan.add(*op)
            except ManyhandsError:
                continue
            accepted += 1
    return accepted


def case(seed: int, teams: Team, back_ends: Sequence[str] = ()) -> bool:
    """One random plan, and a table, on these back ends (default: all); whether the plan had operations that fit."""
    found: list[tuple[int, list[bytes]]] = []
    for back_end in back_ends or library.supported():
        random = np.random.default_rng(seed)

        def integer(low: int, high: int, random: np.random.Generator = random) -> int:
            return int(random.integers(low, high + 1))

        shape = shape_of(integer)
        widths = shape.widths
        row_type = ("bf16", "f32")[integer(0, 1)]
        out_type = ("bf16", "f32")[integer(0, 1)]
        plan = Plan(back_end, row_type, widths, integer(0, len(widths) - 1), out_type, POSITIONS)
        accepted = fill(plan, integer, shape)
        given = [*step(plan, teams, integer, widths[0], row_type), embedded(integer, back_end), packed_wrong(integer)]
        found.append((accepted, given))
    assert all(other == found[0] for other in found), f"seed {seed}: back ends differ"
    return found[0][0] > 0


def run_sanitized(
    path: Path, seed: int, seconds: float, use: Sanitizers = MEMORY, back_end: str = ""
) -> subprocess.CompletedProcess[str]:
    """This module on a library that `build` made, in a process of its own."""
    environment = {
        **os.environ,
        **use.options,
        "LD_PRELOAD": " ".join(use.preloads()),
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONMALLOC": "malloc",  # so that the sanitizers know where Python's arrays end
    }
    command = [sys.executable, "-m", "tools.fuzz_kernels", "--library", str(path)]
    command += ["--seed", str(seed), "--minutes", str(seconds / 60), *["--back-end", back_end] * bool(back_end)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def fuzz(path: Path, seed: int, seconds: float, back_end: str = "") -> None:
    """At least LEAST plans that have operations, and as many as there is time for in `seconds`, on one back end or on all."""
    library.PATH = path
    back_ends = [back_end] if back_end else library.supported()
    for name in set(back_ends) - {"scalar"}:
        wrong = golden.failures(name)
        assert not wrong, f"{name} does not reproduce {wrong}"
    team, until, fitting, number = Team(4), time.monotonic() + seconds, 0, 0
    while fitting < LEAST or time.monotonic() < until:
        fitting += case(seed + number, team, back_ends)
        number += 1
    sys.stdout.write(f"{number} plans, {fitting} with operations, on {', '.join(back_ends)}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--races", action="store_true", help="look for races between threads instead")
    parser.add_argument("--library", type=Path, help="a library built already: no other is built")
    parser.add_argument("--back-end", default="", help="of that library alone, not all")
    given = parser.parse_args()
    if given.library:
        fuzz(given.library, given.seed, 60 * given.minutes, given.back_end)
        return 0
    use, alone = (RACES, quick()) if given.races else (MEMORY, "")
    if missing := use.missing():
        sys.stderr.write(f"{missing}\n")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder), sanitized=alone, use=use)
        done = run_sanitized(path, given.seed, 60 * given.minutes, use, alone)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr[-8000:])
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
