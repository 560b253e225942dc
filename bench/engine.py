"""How fast is the native engine? One row against what memory delivers, n rows against their bound, long contexts, loading.

Layers of a 1.1B or 0.5B model with random weights, on the back end that this process would use; together they are larger than
any cache. All arms take turns, and the best turn of each counts: others on the machine disturb them alike. Times are of the
calling thread's CPU for one thread (others on the machine then count less), of the clock for more. R is one row's speed in
multiply-adds, P the highest of many rows' and sgemm's (at w8 and w4 of many rows' alone: integers); `cost` of n rows is their
time over one row's, `bound` is max(1.25, 1.25 n R / P). `at_8192_x`: one row at position 128 over one at 8,192, with a cache
in bf16 and in codes of 8 bit; `codes_x`: at 8,192 a cache in bf16 over one in codes.
Holds if a row reads weights at 0.8 of the bandwidth measured in the run (bf16, 1.1B), n rows stay within their bound, and a
row at 8,192 is at least 0.8 as fast as one at 128, of the layers alone: embedding and head would only hide it.
Run: python -m bench.engine [--shape 1.1b|0.5b] [--dtype bf16|w8|w4] [--threads N] [--layers N] [--rounds N] [--rows 1,2,...]
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bench.report import finish, note
from manyhands.core import Span, with_codes
from manyhands.engine import golden, golden_models, library
from manyhands.engine.cpu import CpuSpan, Piece
from manyhands.engine.golden_cases import draw, reals, stored
from manyhands.engine.library import Array, Team
from manyhands.engine.memory import Memory
from manyhands.engine.weights import Stored
from manyhands.program.families import build_program
from manyhands.program.ops import Program

SIZES: dict[str, dict[str, Any]] = {
    "1.1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2},
}
CONTEXT, READ, PACKED = 16384, 1 << 28, 4096
NEAR, FAR = 128, 8192  # positions of a row
FEW = 16  # rows of so many requests at most; more are one request's prompt
BITS: dict[str, float] = {"bf16": 16, "w8": 8.5, "w4": 4.5}  # of a number
TARGET = {"of_read": 0.8, "at_8192_x": 0.8, "cost_of_bound": 1.0}


def program_of(shape: str, layers: int) -> Program:
    sizes = SIZES[shape]
    changes = {"num_hidden_layers": layers, "head_dim": 64, "max_position_embeddings": CONTEXT}
    return build_program({**golden_models.configs()["llama"], **sizes, **changes})


class Weights:
    """Random bf16 tensors of a model, made when they are read."""

    def __init__(self, program: Program) -> None:
        self._shapes = golden_models.shapes(program)
        self._noise = ((draw(1, 1 << 20) & np.uint64(0x80FF)) | np.uint64(0x3C00)).astype(np.uint16)

    def __call__(self, name: str) -> Stored:
        return Stored("bf16", np.resize(self._noise, self._shapes[name]))


class Reader:
    """Reads memory with so many threads: what one row can reach at best. By a product of a vector with itself, which reads 1.3
    times as fast as `max` does on Zen 5: the fastest of numpy's and torch's that were tried."""

    def __init__(self, threads: int) -> None:
        memory = Memory().array(READ // 4, np.float32)
        memory[:] = 1
        self._parts, self._pool = np.array_split(memory, threads), ThreadPoolExecutor(threads)

    def __call__(self) -> None:
        if len(self._parts) == 1:
            np.dot(self._parts[0], self._parts[0])
        else:
            list(self._pool.map(np.dot, self._parts, self._parts))


class Arms:
    """The spans' steps, timed in turns."""

    def __init__(self, threads: int) -> None:
        self._clock = time.thread_time if threads == 1 else time.perf_counter
        self.best: dict[str, float] = {}

    def turn(self, name: str, call: Callable[[], object]) -> None:
        start = self._clock()
        call()
        self.best[name] = min(self._clock() - start, self.best.get(name, 1e9))


def stepper(span: CpuSpan, rows: Array, counts: list[int], at: int, threads: int) -> Callable[[], object]:
    """A step of sessions at position `at`, with so many rows each."""
    caches = [span.new_cache(at + max(counts)) for _ in counts]
    for cache in caches:
        cache.segment(0, 0, at)
    pieces = [Piece(cache, at, count) for cache, count in zip(caches, counts, strict=True)]
    return lambda: span.step(rows, pieces, threads)


def calls_of(options: argparse.Namespace, program: Program) -> dict[str, Callable[[], object]]:
    """What is timed, by name: reading and packing memory, sgemm, so many rows, a row at positions near and far."""
    team, weights = Team(options.threads), Weights(program)
    spans = {
        kind: CpuSpan(program, Span(0, options.layers), weights, kind, team)
        for kind in (options.dtype, with_codes(options.dtype))
    }
    matrix = np.ones((PACKED, PACKED), np.uint16)
    packed = Memory().array(library.packed_size(PACKED, PACKED), np.uint16)
    reader, x = Reader(options.threads), np.random.default_rng(1).random((480, 2048), np.float32)
    calls: dict[str, Callable[[], object]] = {"read": reader, "pack": lambda: library.pack(matrix, "bf16", out=packed)}
    if options.threads == 1 and options.dtype == "bf16":
        calls["sgemm"] = lambda: x[:240] @ x[240:].T

    def rows_of(count: int) -> Array:
        return np.ascontiguousarray(stored(reals(1, count, program.hidden), "bf16")).view(np.uint8).reshape(-1)

    for count in options.rows:
        counts = [1] * count if count <= FEW else [count]
        at = options.at if count <= FEW else 0
        calls[f"{count}"] = stepper(spans[options.dtype], rows_of(count), counts, at, options.threads)
    for kind, span in spans.items():
        for at in (NEAR, FAR):
            calls[f"{kind} at {at}"] = stepper(span, rows_of(1), [1], at, options.threads)
    return calls


def figures_of(options: argparse.Namespace, numbers: int, best: dict[str, float]) -> dict[str, Any]:
    """numbers: multiply-adds of a row."""
    plain, coded = options.dtype, with_codes(options.dtype)
    size = numbers * BITS[plain] / 8
    read = READ / best["read"] / 1e9
    out: dict[str, Any] = {"read_GB_s": round(read, 1), "pack_GB_s": round(2 * PACKED**2 / best["pack"] / 1e9, 1)}
    speeds = {count: numbers * count / best[f"{count}"] / 1e9 for count in options.rows}
    if "sgemm" in best:
        out["sgemm_GMAC_s"] = round(240 * 240 * 2048 / best["sgemm"] / 1e9, 1)
    peak, one = max(out.get("sgemm_GMAC_s", 0.0), *speeds.values()), speeds[1]
    for count, speed in speeds.items():
        cost, bound = best[f"{count}"] / best["1"], max(1.25, 1.25 * count * one / peak)
        found = {"ms": 1e3 * best[f"{count}"], "GMAC_s": speed, "cost": cost, "bound": bound, "of_bound": cost / bound}
        out[f"{count}_rows"] = {name: round(value, 2) for name, value in found.items()}
    out["of_read"] = round(size / best["1"] / 1e9 / read, 3)
    out["at_8192_x"] = {
        name: round(best[f"{kind} at {NEAR}"] / best[f"{kind} at {FAR}"], 3)
        for name, kind in (("plain", plain), ("codes", coded))
    }
    out["codes_x"] = round(best[f"{plain} at {FAR}"] / best[f"{coded} at {FAR}"], 3)
    out["cost_of_bound"] = max(out[f"{count}_rows"]["of_bound"] for count in options.rows)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SIZES, default="1.1b")
    parser.add_argument("--dtype", choices=BITS, default="bf16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rows", default="1,2,4,6,8,16,256", help="1 among them")
    parser.add_argument("--at", type=int, default=64, help="the position of each session")
    options = parser.parse_args()
    options.rows = sorted(map(int, {"1", *options.rows.split(",")}))
    if not os.environ.get("OPENBLAS_NUM_THREADS"):  # numpy reads it when it is imported: sgemm would take all cores
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "bench.engine", *sys.argv[1:]])
    program, arms = program_of(options.shape, options.layers), Arms(options.threads)
    shapes = golden_models.shapes(program)
    numbers = sum(int(np.prod(shape)) for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
    calls = calls_of(options, program)
    for number in range(options.rounds):
        for name, call in calls.items():
            arms.turn(name, call)
        note(f"round {number + 1} of {options.rounds}")
    out: dict[str, Any] = {"back_end": golden.choose(), **vars(options), **figures_of(options, numbers, arms.best)}
    holds = {
        "rows": out["cost_of_bound"] <= TARGET["cost_of_bound"],
        "at_8192": min(out["at_8192_x"].values()) >= TARGET["at_8192_x"],
    }
    if (options.shape, options.dtype) == ("1.1b", "bf16"):
        holds["read"] = out["of_read"] >= TARGET["of_read"]
    return finish("engine", out, TARGET, holds)


if __name__ == "__main__":
    sys.exit(main())
