"""What does cutting a model over node processes of one machine cost, and how many threads should each of them have?

Arms, interleaved: 1, 2 and 3 node processes (TLS on loopback) x 1 or 2 compute threads a node (the origin has as many) x
1 stream or 3 at once. One stream keeps one node busy at a time; three let the nodes work side by side.
With --busy two processes a core compute for ever meanwhile: teams of threads must not collapse where cores are shared.
Holds if 3 nodes decode one stream at 0.97x of 1 node, for each number of threads (medians of the ratios rep by rep).
Run: python -m bench.split [--shape 0.5b|tales] [--busy] [--reps N] [--quick]
"""

import argparse
import itertools
import os
import sys
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.busy import busy_processes
from bench.report import finish, measuring, note, paired, spread
from bench.shapes import checkpoint
from bench.swarm import aggregate_tps, base, generate_all, origin, prompt_ids
from manyhands.cli.options import run as run_loop
from manyhands.origin import Origin
from manyhands.worker.execute import Device

TARGET = {"three_nodes_x": 0.97}
BUSY_PER_CORE = 2
NODES, THREADS, STREAMS = (1, 2, 3), (1, 2), (1, 3)
PROMPT = 16


@dataclass(frozen=True, slots=True)
class Arm:
    nodes: int
    threads: int
    streams: int

    def __str__(self) -> str:
        return f"{self.nodes}n{self.threads}t{self.streams}s"


async def one(origin: Origin, arm: Arm, new: int) -> float:
    """Tokens/s: of the stream after its first token, or of all streams together, prefill included."""
    runs = await generate_all(origin, [prompt_ids(PROMPT, i) for i in range(arm.streams)], new)
    return runs[0].decode_tps if arm.streams == 1 else aggregate_tps(runs)


async def measure(options: argparse.Namespace, folder: Path) -> dict[Arm, list[float]]:
    samples: dict[Arm, list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        home = await stack.enter_async_context(base(folder, 2))
        origins: dict[tuple[int, int], Origin] = {}
        for threads in options.threads:
            device = Device.start(threads)
            stack.callback(device.close)
            for nodes in NODES:
                origins[nodes, threads] = await origin(stack, home, nodes, threads, device)
                note(f"{nodes} nodes of {threads} threads are ready")
        sizes = itertools.product(options.threads, options.streams, NODES)  # those that are compared follow each other
        arms = [Arm(nodes, threads, streams) for threads, streams, nodes in sizes]
        for arm in arms:
            await one(origins[arm.nodes, arm.threads], arm, 3)  # warm up
        for rep, arm in itertools.product(range(options.reps), arms):
            with measuring(f"{arm} rep {rep}"):
                samples[arm].append(await one(origins[arm.nodes, arm.threads], arm, options.new))
            note(f"  {arm} {samples[arm][-1]:.1f} tok/s")
    return samples


def report(options: argparse.Namespace, samples: dict[Arm, list[float]]) -> int:
    def ratio(arm: Arm, to: Arm) -> dict[str, float]:
        return paired(samples[arm], samples[to])

    out: dict[str, Any] = {"shape": options.shape, "tps": {str(arm): spread(s) for arm, s in samples.items()}}
    out["nodes_x"] = {str(a): ratio(a, Arm(1, a.threads, a.streams)) for a in samples if a.nodes > 1}
    slower = {a: Arm(a.nodes, 1, a.streams) for a in samples if a.threads == 2}
    out["two_threads_x"] = {str(a): ratio(a, one) for a, one in slower.items() if one in samples}
    holds = {
        f"threads_{threads}": out["nodes_x"][str(Arm(3, threads, 1))]["median"] >= TARGET["three_nodes_x"]
        for threads in options.threads
    }
    return finish("split", out, TARGET, holds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["0.5b", "1.1b", "tales"], default="0.5b")
    parser.add_argument("--reps", type=int, default=0, help="default: 7, or 2 with --quick")
    parser.add_argument("--new", type=int, default=24, help="tokens per stream")
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS, choices=THREADS)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS, choices=STREAMS)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.reps = options.reps or (2 if options.quick else 7)
    folder = checkpoint(options.shape)
    with busy_processes(BUSY_PER_CORE * (os.cpu_count() or 1) if options.busy else 0):
        return report(options, run_loop(measure(options, folder)))


if __name__ == "__main__":
    sys.exit(main())
