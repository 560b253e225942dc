"""How soon does a node process serve, alone and as one of many on one machine, and how many fit into its memory?

alone_s: from the start of one process with a third of *tales* (6 MB, so reading it counts for nothing) to its word that it
serves. many_s: the same for so many at once, of one layer each, until the last one serves; Python's start and the imports of
each are in it. cpu_s: what one of them took of a CPU until then. many_mb: their memory together (proportional share).
fit: how many of them the machine's memory holds.

Run: python -m bench.start [--nodes 20] [--reps 5]
"""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from bench.memory import resident_mb
from bench.report import finish, machine, measuring, note, spread
from manyhands.core import Span
from manyhands.local import NodeOptions, node_processes
from manyhands.swarm.ticket import Ticket

NUM_LAYERS = 12  # of tales
ALONE_S, MANY_S, FIT = 0.6, 8.0, 60


def cpu_s(pid: int) -> float:
    """Seconds of a CPU that process `pid` has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def start(spans: list[Span]) -> tuple[float, float, float]:
    """Seconds until nodes of `spans` serve, all at once; CPU seconds of one; their memory together in MB."""
    began = time.monotonic()
    async with node_processes(spans, NodeOptions("tales", threads=1), Ticket.new("start")) as nodes:
        took_s = time.monotonic() - began
        pids = [node.process.pid for node in nodes]
        return took_s, sum(map(cpu_s, pids)) / len(pids), sum(map(resident_mb, pids))


async def measure(nodes: int, reps: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {"alone_s": [], "many_s": [], "cpu_s": [], "many_mb": []}
    for _ in range(reps):
        with measuring("alone"):
            alone_s, cpu, _ = await start([Span(4, 8)])
        with measuring("many"):
            many_s, _, many_mb = await start([Span(i % NUM_LAYERS, i % NUM_LAYERS + 1) for i in range(nodes)])
        for name, value in zip(figures, (alone_s, many_s, cpu, many_mb), strict=True):
            figures[name].append(value)
        note(f"alone {alone_s:.2f} s, {nodes} at once {many_s:.1f} s and {many_mb:.0f} MB")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--reps", type=int, default=5)
    options = parser.parse_args()
    figures = {name: spread(values) for name, values in asyncio.run(measure(options.nodes, options.reps)).items()}
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20
    fit = int(memory_mb / (figures["many_mb"]["median"] / options.nodes))
    holds = {
        "alone_s": figures["alone_s"]["median"] <= ALONE_S,
        "many_s": figures["many_s"]["median"] <= MANY_S,
        "fit": fit >= FIT,
    }
    told = {"machine": machine(), "nodes": options.nodes, "fit": fit, **figures}
    return finish("start", told, {"alone_s": ALONE_S, "many_s": MANY_S, "fit": FIT}, holds)


if __name__ == "__main__":
    sys.exit(main())
