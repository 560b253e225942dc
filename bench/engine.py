"""How fast is the native engine? Steps of one row against what memory delivers, many rows against numpy's sgemm, loading.

Layers of a 1.1B or 0.5B model with random weights, on the back end that this process would use; together they are larger than
any cache. All arms take turns, and the best turn of each counts: others on the machine disturb them alike. Times are of the
calling thread's CPU for one thread (others on the machine then count less), of the clock for more. R is one row's speed in
multiply-adds, P the highest of many rows' and sgemm's; `cost` of n rows is their time over one row's, `bound` is
max(1.25, 1.25 n R / P).
Run: python -m bench.engine [--shape 1.1b|0.5b] [--threads N] [--layers N] [--rounds N] [--rows 1,2,...] [--at POSITION]
"""

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bench.report import machine, note
from manyhands.core import Span
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
    """Reads memory with so many threads: what one row can reach at best."""

    def __init__(self, threads: int) -> None:
        memory = Memory().array(READ, np.uint8)
        memory[:] = 1
        self._parts, self._pool = np.array_split(memory, threads), ThreadPoolExecutor(threads)

    def __call__(self) -> None:
        if len(self._parts) == 1:
            self._parts[0].max()
        else:
            list(self._pool.map(np.max, self._parts))


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
    caches = [span.new_cache() for _ in counts]
    for cache in caches:
        cache.reserve(at + max(counts))
    pieces = [Piece(cache, at, count) for cache, count in zip(caches, counts, strict=True)]
    return lambda: span.step(rows, pieces, threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SIZES, default="1.1b")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rows", default="1,2,4,6,8,16,240")
    parser.add_argument("--at", type=int, default=64, help="the position of each session")
    given = parser.parse_args()
    program, team, arms = program_of(given.shape, given.layers), Team(given.threads), Arms(given.threads)
    weights = Weights(program)
    span = CpuSpan(program, Span(0, given.layers), weights, "bf16", team)
    per_layer = golden_models.shapes(program)
    numbers = sum(int(np.prod(shape)) for name, shape in per_layer.items() if ".layers." in name and len(shape) == 2)
    reader, x = Reader(given.threads), np.random.default_rng(1).random((480, 2048), np.float32)
    matrix, packed = (
        np.ones((PACKED, PACKED), np.uint16),
        Memory().array(library.packed_size(PACKED, PACKED), np.uint16),
    )
    calls: dict[str, Callable[[], object]] = {"read": reader, "pack": lambda: library.pack(matrix, "bf16", out=packed)}
    if given.threads == 1:
        calls["sgemm"] = lambda: x[:240] @ x[240:].T
    for count in map(int, given.rows.split(",")):
        rows = np.ascontiguousarray(stored(reals(1, count, program.hidden), "bf16")).view(np.uint8).reshape(-1)
        counts = [1] * count if count <= 16 else [count]  # requests, or one request's prompt
        calls[f"{count}"] = stepper(span, rows, counts, given.at if count <= 16 else 0, given.threads)
    for number in range(given.rounds):
        for name, call in calls.items():
            arms.turn(name, call)
        note(f"round {number + 1} of {given.rounds}")
    best = arms.best
    pack = matrix.nbytes / best.pop("pack") / 1e9
    read, sgemm = READ / best.pop("read") / 1e9, 240 * 240 * 2048 / best.pop("sgemm", 1e9) / 1e9
    speeds = {name: numbers * int(name) / seconds / 1e9 for name, seconds in best.items()}
    peak, one = max(sgemm, *speeds.values()), speeds.get("1", 0.0)
    figures: dict[str, object] = {"read_GB_s": round(read, 1), "sgemm_GMAC_s": round(sgemm, 1)}
    figures["pack_GB_s"] = round(pack, 1)
    for name, seconds in best.items():
        found = {"GB_s": round(2 * numbers / seconds / 1e9, 2), "GMAC_s": round(speeds[name], 1)}
        if one:
            found["cost"] = round(seconds / best["1"], 2)
            found["bound"] = round(max(1.25, 1.25 * int(name) * one / peak), 2)
        figures[f"{name}_rows"] = found
    if one:
        figures["one_row_of_read"] = round(2 * one / read, 2)
    kind = {"back_end": golden.choose(), "calls": library.calls(golden.choose()), "shape": given.shape}
    print(json.dumps({**kind, "threads": given.threads, "at": given.at, **figures, "machine": machine()}))


if __name__ == "__main__":
    main()
