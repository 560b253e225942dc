"""Does a node that hosts a third of the layers hold a third of the memory? And how much does a whole model take at w4?

    python -m bench.memory [--shape 0.5b|1.1b] [--dtype w4]

Three `serve` processes of the same checkpoint: all layers, a third, and one layer. Resident memory from
/proc/PID/smaps_rollup after loading; what the interpreter and libraries take is measured with a one-layer node and
subtracted (less that layer). Targets: a third holds 0.30 to 0.37 of the whole's weights; the rest is 60 MB at most.

With --dtype: one process that serves all layers, embedding and head at this precision. Targets, at the 1.1B shape: 700 MB of
weights, and 60 MB beside them. MB are 10^6 bytes.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from bench.report import finish, machine
from bench.shapes import checkpoint
from manyhands.checkpoint.config_fields import read_facts
from manyhands.checkpoint.manifest import build_manifest
from manyhands.config import home_from_env
from manyhands.core import SMALL_WEIGHTS, Precision, Span, even_cut
from manyhands.local import NodeOptions, node_processes
from manyhands.place.shape import look_up
from manyhands.swarm.ticket import Ticket


def resident_mb(pid: int) -> float:
    """Resident memory of a process in MB (proportional share of what it shares)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"no Pss of {pid}")


async def node_mb(folder: Path, span: Span, precision: Precision = "bf16", *, has_ends: bool = False) -> float:
    """Resident memory of a node that serves `span`, once it serves."""
    options = NodeOptions(str(folder), precision, has_ends)
    async with node_processes([span], options, Ticket.new("memory")) as nodes:
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


async def measure_small(shape: str, precision: Precision) -> dict[str, float]:
    folder = checkpoint(shape)
    build_manifest(folder)
    found = look_up(str(folder), precision, home_from_env()).shape
    weights = sum(found.layer_bytes) + found.ends_bytes
    resident = (1 << 20) * await node_mb(folder, Span(0, len(found.layer_bytes)), precision, has_ends=True)
    figures = {"weights_mb": weights, "resident_mb": resident, "beside_mb": resident - weights}
    return {name: round(size / 1e6, 1) for name, size in figures.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="1.1b")
    parser.add_argument("--dtype", choices=sorted(SMALL_WEIGHTS))
    args = parser.parse_args()
    if args.dtype:
        found = asyncio.run(measure_small(args.shape, args.dtype))
        most = {"weights_mb": 700, "beside_mb": 60}
        return finish("memory", {**vars(args), **found}, most, {name: found[name] <= most[name] for name in most})
    figures = asyncio.run(measure(args.shape))
    holds = {"third": 0.30 <= figures["third_of_whole_weights"] <= 0.37, "libraries_mb": figures["libraries_mb"] <= 60}
    target = {"third": [0.30, 0.37], "libraries_mb": 60}
    return finish("memory", {"shape": args.shape, "machine": machine(), **figures}, target, holds)


if __name__ == "__main__":
    sys.exit(main())
