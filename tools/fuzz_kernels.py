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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.engine import golden, library
from manyhands.engine.cache import SessionCache
from manyhands.engine.golden_cases import Op, reals, stored
from manyhands.engine.golden_small import blocks
from manyhands.engine.library import Array, Plan, Team
from manyhands.engine.quants import KEPT, pack_blocks, packed_bytes, round_weights
from manyhands.errors import ManyhandsError
from tools.sanitized import ROOT, build, preloads

LEAST: Final = 4  # plans with operations, however slow the machine
Integer = Callable[[int, int], int]


def matrix(integer: Integer, n: int, k: int, groups: int = 1) -> tuple[int, Array]:
    """Packed out of views of all kinds: as it is, transposed, every other row, rows by number, at odd addresses."""
    name = ("bf16", "f16", "f32")[integer(0, 2)]
    packed = []
    if (form := integer(0, 8)) < 3:
        fits = [kind for kind in KEPT if BLOCKS[kind][0] == 32 or k % BLOCKS[kind][0] == 0]
        kind = fits[integer(0, len(fits) - 1)]
        rows = np.array([integer(0, n - 1) for _ in range(n)], np.int64) if integer(0, 1) else None
        drawn = [blocks(integer(1, 99), n, -(-k // BLOCKS[kind][0]), kind) for _ in range(groups)]
        return library.TYPES[KEPT[kind]], np.concatenate([pack_blocks(raw, kind, rows) for raw in drawn])
    small = ("w8", "w4")[form - 3] if form < 5 else ""
    for _ in range(groups):
        whole, rows = stored(reals(integer(1, 99), 2 * n, k), name), None
        match integer(0, 4):
            case 0:
                given = whole[:n]
            case 1:
                given = np.ascontiguousarray(whole[n:].T).T
            case 2:
                given = whole[::2]
            case 3:
                given, rows = whole, np.array([integer(0, 2 * n - 1) for _ in range(n)], np.int64)
            case _:
                given = np.frombuffer(b"x" + whole[:n].tobytes(), np.uint8)[1:].view(whole.dtype).reshape(n, k)
        kept = small or ("bf16" if name == "f32" and groups == 1 and integer(0, 1) else name)
        if small:
            packed.append(round_weights("scalar", given, name, small, rows))
        else:
            packed.append(library.pack(given, name, kept, rows))
    return library.TYPES[kept], np.concatenate(packed)


def maybe(integer: Integer, n: int) -> Array | None:
    return reals(integer(1, 99), n) if integer(0, 1) else None


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths of a plan's registers, the heads they hold, and registers that fit some kinds of operation."""

    widths: list[int]
    heads: int = 0
    key_heads: int = 0
    fitting: dict[int, tuple[int, ...]] = field(default_factory=dict)


def shape_of(integer: Integer) -> Shape:
    """Random widths, or those of attention, of latents, of a mixture of experts, of linear attention."""
    hidden, heads, width = integer(1, 4) * integer(1, 30), integer(1, 6), integer(1, 70)
    common: dict[int, tuple[int, ...]] = {
        library.ADD: (5, 5, 0, 5),
        library.NORM: (0, 5, 0, 0),
        library.MULTIPLY: (5, 6, 5, 0),
    }
    match integer(0, 4):
        case 1:
            key_heads, value = integer(1, 3), integer(1, 70)
            many = heads * key_heads
            widths = [hidden, many * width, key_heads * width, key_heads * value, many * value, hidden, 1]
            return Shape(widths, many, key_heads, {**common, library.ATTENTION: (1, 2, 3, 4)})
        case 2:
            widths = [hidden, heads * width, width, hidden, heads * integer(1, width), hidden, 1]
            return Shape(widths, heads, 1, {**common, library.ATTENTION: (1, 2, 2, 4)})
        case 3:
            experts, inner = integer(2, 40), integer(1, 80)
            widths = [hidden, experts, 2 * integer(1, min(experts, 4)), hidden, inner, hidden, 1, inner]
            mixture = {library.ROUTE: (1, 2, 0, 0), library.EXPERTS: (0, 2, 3, 0), library.GATE: (4, 7, 4, 0)}
            return Shape(widths, 0, 0, {**common, **mixture})
        case 4:
            key_heads, value = integer(1, 3), integer(1, 70)
            many = heads * key_heads
            widths = [hidden, key_heads * width, key_heads * width, many * value, many, many, many * value]
            linear = {library.DELTA: (1, 2, 3, 4, 5, 6), library.DECAY: (4, 5, 0, 0), library.CONVOLVE: (1, 2, 0, 0)}
            return Shape([*widths, hidden, 1], many, key_heads, {library.NORM: (0, 7, 0, 0), **linear})
    return Shape([integer(1, 4) * integer(1, 30) for _ in range(integer(2, 6))])


def operation(integer: Integer, whole: Shape) -> Op:
    """An operation that often fits, and sometimes not."""
    kind, widths = integer(0, library.DELTA), whole.widths
    r = [integer(0, len(widths) - 1 + (integer(0, 30) == 0)) for _ in range(6)]
    if kind in whole.fitting and integer(0, 5):
        r = list(whole.fitting[kind])
    w = [widths[i] if i < len(widths) else 8 for i in r]
    odd = integer(0, 12) == 0  # something is off by one
    shape: tuple[int, ...]
    match kind:
        case library.NORM:
            groups = next(g for g in (integer(1, 4), 1) if w[0] % g == 0)
            return kind, (r[0], r[1], groups, integer(0, 1)), (1e-5, 0.0), (maybe(integer, w[0] + odd), None)
        case library.PRODUCT:
            groups = integer(1, 3) if integer(0, 2) == 0 and min(w[:2]) >= 6 else 1
            c, t = integer(0, w[0] // groups - 1), integer(0, w[1] // groups - 1)
            k, n = integer(1, w[0] // groups - c), integer(1, w[1] // groups - t)
            number, packed = matrix(integer, n, k, groups)
            columns = (c + odd, k, t, n, groups, integer(0, w[0] // groups), w[1] // groups)
            return kind, (r[0], r[1], number, integer(0, 6), *columns), (), (packed, maybe(integer, n * groups))
        case library.ROTARY:
            turns = integer(1, max(1, w[0] // 2))
            rates = np.ones(turns + odd, np.float32)
            return kind, (r[0], 1, w[0], integer(0, max(0, w[0] - 2 * turns)), turns, integer(0, 1)), (1.0,), (rates,)
        case library.ATTENTION:
            heads, kv = whole.heads or 1, whole.key_heads or 1
            latent = int(r[1] == r[2])  # values are the beginning of keys
            value = w[3] // heads if latent else w[2] // kv
            window, coded = integer(0, 1) * integer(1, 90), integer(0, 1) * (not latent or odd)
            shape = (*r[:4], heads, kv, max(1, w[1] // kv), max(1, value), window, latent, coded)
            return kind, shape, (0.1, integer(0, 1) * 2.0), (maybe(integer, heads + odd),)
        case library.ROUTE:
            groups = next(g for g in (integer(1, 3), 1) if w[0] % g == 0)
            top = max(1, w[1] // 2)
            vectors = maybe(integer, w[0] + odd), maybe(integer, w[0])
            shape = (r[0], r[1], w[0], top, integer(0, 1), integer(0, 1), groups, integer(1, groups))
            return kind, shape, (1.0, 1e-20), vectors
        case library.EXPERTS:
            inner, top = integer(1, 40), max(1, w[1] // 2)
            experts = integer(top, top + 9)
            first, before = matrix(integer, inner, w[0], experts)
            second, after = matrix(integer, w[2], inner, experts)
            shape = (r[0], r[1], r[2], experts + odd, top, inner, first, integer(0, 6), second)
            gates = before if integer(0, 2) else None
            return kind, shape, (1.0, 0.0, 0.0), (gates, before, after, maybe(integer, experts * inner))
        case library.CONVOLVE:
            taps = integer(1, 32 + odd)
            weights = reals(integer(1, 99), taps, w[0] + (integer(0, 9) == 0))
            return kind, (r[0], r[1], taps, integer(0, 6 + odd)), (), (weights, maybe(integer, w[1] + odd))
        case library.DECAY:
            rates = np.abs(reals(integer(1, 99), w[0] + odd)).astype(np.float64)
            return kind, (r[0], r[1]), (), (rates if integer(0, 2) else None, reals(integer(1, 99), w[1]))
        case library.DELTA:
            heads, kv = whole.heads or integer(1, 4), whole.key_heads or 1
            shape = (*r, heads, kv, max(1, w[0] // kv) + odd, max(1, w[2] // heads), integer(0, 1))
            return kind, shape, (), (maybe(integer, heads + odd),)
        case library.COPY:
            shape = (r[0], r[1], *(integer(0, 9) for _ in range(6)))
            chosen = np.array([integer(0, max(0, shape[4] - 1 + odd)) for _ in range(shape[4])], np.int32)
            return kind, shape, (), (chosen if integer(0, 1) else None,)
        case _:
            return kind, (*r[:3], integer(0, 6 + odd)), (1.0, float(integer(0, 3)), 0.0), ()


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
        rows = np.ascontiguousarray(stored(reals(integer(1, 99), row, width), row_type)).view(np.uint8).reshape(-1)
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
        if plan.state_bytes and integer(0, 3) == 0:
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
    """A step of a row that is told of states which are not there, or not of that position: refused."""
    segment = cache.segment(cache.reachable(integer(0, 300)), 0, 1)
    field, value = (("states", None), ("now", None), ("num_states", 0), ("from_", segment.start + 1), ("from_", -2))[
        integer(0, 4)
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
    off = [integer(-1, 1) if integer(0, 4) == 0 else 0 for _ in range(4)]
    rows = (
        np.array([integer(0, n - 1 + (integer(0, 40) == 0)) for _ in range(n + 1)], np.int64) if integer(0, 1) else None
    )
    room = np.zeros(packed_bytes(KEPT[kind], n, depth * 32), np.uint8)
    given = (library.address(raw), raw.nbytes + min(0, off[0]), n + off[1], depth + off[2], library.address(rows))
    code = library.load().mh_pack_blocks(
        library.TYPES[KEPT[kind]], *given, library.address(room), room.nbytes + min(0, off[3])
    )
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
