"""Does a node that hosts a third of the layers hold a third of the memory?

    python -m bench.memory [--shape 0.5b|1.1b]

Three `serve` processes of the same checkpoint: all layers, a third, and one layer. Resident memory from
/proc/PID/smaps_rollup after loading; what the interpreter and libraries take is measured with a one-layer node and
subtracted (less that layer). Targets: a third holds 0.30 to 0.37 of the whole's weights; the rest is 60 MB at most.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from bench.report import finish, machine
from bench.shapes import checkpoint
from manyhands.checkpoint.config_fields import read_facts
from manyhands.checkpoint.manifest import build_manifest
from manyhands.core import Span, even_cut
from manyhands.local import NodeOptions, node_processes
from manyhands.swarm.ticket import Ticket


def resident_mb(pid: int) -> float:
    """Resident memory of a process in MB (proportional share of what it shares)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"no Pss of {pid}")


async def node_mb(folder: Path, span: Span) -> float:
    """Resident memory of a node that serves `span`, once it serves."""
    async with node_processes([span], NodeOptions(str(folder)), Ticket.new("memory")) as nodes:
        await asyncio.sleep(0.5)
        return resident_mb(nodes[0].process.pid)


async def measure(shape: str) -> dict[str, float]:
    folder = checkpoint(shape)
    build_manifest(folder)
    num_layers = read_facts(folder).num_layers
    third = even_cut(num_layers, 3)[1]
    whole_mb = await node_mb(folder, Span(0, num_layers))
    third_mb = await node_mb(folder, third)
    one_mb = await node_mb(folder, Span(0, 1))
    layer_mb = (whole_mb - one_mb) / (num_layers - 1)
    base_mb = one_mb - layer_mb
    return {
        "whole_mb": round(whole_mb),
        "third_mb": round(third_mb),
        "one_layer_mb": round(one_mb),
        "libraries_mb": round(base_mb),
        "third_of_whole": round(third_mb / whole_mb, 3),
        "third_of_whole_weights": round((third_mb - base_mb) / (whole_mb - base_mb), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="1.1b")
    args = parser.parse_args()
    figures = asyncio.run(measure(args.shape))
    holds = {"third": 0.30 <= figures["third_of_whole_weights"] <= 0.37, "libraries_mb": figures["libraries_mb"] <= 60}
    target = {"third": [0.30, 0.37], "libraries_mb": 60}
    return finish("memory", {"shape": args.shape, "machine": machine(), **figures}, target, holds)


if __name__ == "__main__":
    sys.exit(main())
