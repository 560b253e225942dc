"""How fast are the native engine's products? One row against what the memory delivers, many rows against torch's sgemm.

A bf16 product of 8192 x 4096 on the back end that this process would use, weights changing so that they come from memory.
Times are of the calling thread's CPU for one thread (others on the machine then count less), of the clock for more.
Run: python -m bench.engine [--threads N] [--rows 1,2,...]
"""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from bench.report import machine, note
from manyhands.engine import golden, library
from manyhands.engine.golden import draw, reals, stored
from manyhands.engine.library import Array, Plan, Segment, Team

N, K, COPIES, REPS = 8192, 4096, 3, 7


def best(call: Callable[[], object], threads: int) -> float:
    """Seconds of the best of REPS calls."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    times = []
    for _ in range(REPS):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def plan(weight: Array) -> Plan:
    found = Plan(golden.choose(), "bf16", [K, N], 1, "f32", 1)
    found.add(library.PRODUCT, (0, 1, 0, 0), (), (weight, None))
    return found


def product(plans: list[Plan], team: Team, threads: int, rows: int) -> float:
    x = np.ascontiguousarray(stored(reals(1, rows, K), "bf16")).view(np.uint8).reshape(-1)
    segments = [Segment(None, 0, 0, 0, row, 1) for row in range(rows)]
    used = plans if rows <= 16 else plans[:1]
    return best(lambda: [each.run(team, threads, segments, x, rows) for each in used], threads) / len(used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,2,4,6,8,16,240")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    bits = (draw(1, N * K) & np.uint64(0xBFFF)).astype(np.uint16).reshape(N, K)
    plans = [plan(library.pack(bits, "bf16")) for _ in range(COPIES)]
    team, memory = Team(given.threads), torch.zeros(1 << 27, dtype=torch.int64)
    memory += 1
    read = memory.nbytes / best(lambda: memory.sum(), given.threads) / 1e9
    x, weight = torch.rand(240, K), torch.rand(N, K)
    sgemm = 240 * N * K / best(lambda: torch.nn.functional.linear(x, weight), given.threads) / 1e9
    figures: dict[str, object] = {"read_GB_s": round(read, 1), "sgemm_240_rows_GMAC_s": round(sgemm, 1)}
    for rows in map(int, given.rows.split(",")):
        seconds = product(plans, team, given.threads, rows)
        speed = {"GB_s": round(N * K * 2 / seconds / 1e9, 1), "GMAC_s": round(N * K * rows / seconds / 1e9, 1)}
        figures[f"{rows}_rows"] = speed
        note(f"{rows} rows: {speed}")
    print(json.dumps({"back_end": golden.choose(), "threads": given.threads, **figures, "machine": machine()}))


if __name__ == "__main__":
    main()
