"""Does a model of 7B run on nodes none of which holds it? How soon, how fast, and does a stream survive one of them?

    python -m bench.large [--dtype w4] [--reps 5]

The shape of Mistral-7B with random weights (14.5 GB in bf16 on the disk), served at `dtype` by three node processes of a third
of the layers each, and a spare for the middle third. `resident_mb`: of each node; `weights_mb`: of the whole model at `dtype`,
which none may come near. `packed_s`: until the first start serves, which packs the weights; `serving_s`: until a later one
does. Decode: tokens per second over all three, against the floor: the bytes of weights that a token reads at the bandwidth
of memory measured in each repetition. At last the middle node is killed with kill -9 in mid stream: `pause_s`, and whether the
text is the undisturbed one.
"""

import argparse
import asyncio
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

from bench.memory import resident_mb
from bench.repair import disturbed
from bench.report import finish, measuring, note, spread
from bench.shapes import checkpoint
from bench.step import bandwidth_gbs
from bench.swarm import base, generate, prompt_ids
from manyhands.checkpoint.config_fields import read_facts
from manyhands.cli.local import InjectedFault
from manyhands.config import home_from_env
from manyhands.core import SMALL_WEIGHTS, Precision, Span, even_cut
from manyhands.local import NodeOptions, NodeProcess, node_processes
from manyhands.origin import Origin
from manyhands.place.shape import look_up
from manyhands.swarm.ticket import Ticket

NODES, MIDDLE = 3, 1
PROMPT, NEW = 64, 32
TARGET = {"largest_node": 0.40, "of_floor": 0.8, "pause_s": 3.0, "same_text": True}


async def start(
    stack: AsyncExitStack, folder: Path, ticket: Ticket, precision: Precision, spans: list[Span], num_spares: int = 0
) -> list[NodeProcess]:
    options = NodeOptions(str(folder), precision, num_spares=num_spares)
    return await stack.enter_async_context(node_processes(spans, options, ticket))


async def measure(folder: Path, precision: Precision, reps: int) -> dict[str, Any]:
    shape = look_up(str(folder), precision, home_from_env()).shape
    spans = even_cut(read_facts(folder).num_layers, NODES)
    per_token = sum(shape.layer_bytes) + shape.ends_bytes // 2  # the embedding reads a row
    buffer, rates, of_floor, first_s = torch.ones(1 << 28), list[float](), list[float](), list[float]()
    async with base(folder, 2, precision=precision) as home, AsyncExitStack() as stack:
        began = time.monotonic()
        async with AsyncExitStack() as once:
            await start(once, folder, home.ticket, precision, spans)
            packed_s = time.monotonic() - began
        began = time.monotonic()
        nodes = await start(stack, folder, home.ticket, precision, spans)
        serving_s = time.monotonic() - began
        resident = [resident_mb(node.process.pid) for node in nodes]
        note(f"serving in {serving_s:.1f} s, {packed_s:.1f} s the first time; resident {resident}")
        origin = Origin(home.node, home.model, home.device, [node.address for node in nodes])
        for rep in range(-1, reps):
            with measuring(f"rep {rep}"):
                gbs = await home.device.run(lambda: bandwidth_gbs(buffer))
                run = await generate(origin, prompt_ids(PROMPT), NEW)
            if rep >= 0:
                rates.append(run.decode_tps)
                of_floor.append(run.decode_tps * per_token / gbs / 1e9)
                first_s.append(run.ttft_s)
        spare = await start(stack, folder, home.ticket, precision, [spans[MIDDLE]], num_spares=1)
        guarded = Origin(home.node, home.model, home.device, [node.address for node in [*nodes, *spare]])
        fault = InjectedFault("kill", MIDDLE, NEW // 2, "")
        trial = await disturbed(guarded, prompt_ids(PROMPT), run.answer.token_ids, fault, nodes[MIDDLE])
    weights_mb = (sum(shape.layer_bytes) + shape.ends_bytes) / 1e6
    return {
        "shape": "7b",
        "dtype": precision,
        "weights_mb": round(weights_mb),
        "resident_mb": [round(each * 1.048576) for each in resident],
        "largest_node": round(max(resident) * 1.048576 / weights_mb, 3),
        "packed_s": round(packed_s, 1),
        "serving_s": round(serving_s, 1),
        "tokens_per_s": spread(rates),
        "of_floor": spread(of_floor, 3),
        "first_token_s": spread(first_s),
        "pause_s": round(trial.pause_s, 3),
        "same_text": trial.is_same and trial.repairs == 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", choices=["bf16", *sorted(SMALL_WEIGHTS)], default="w4")
    parser.add_argument("--reps", type=int, default=5)
    args = parser.parse_args()
    found = asyncio.run(measure(checkpoint("7b"), args.dtype, args.reps))
    holds = {
        "largest_node": found["largest_node"] <= TARGET["largest_node"],
        "of_floor": found["of_floor"]["median"] >= TARGET["of_floor"],
        "pause_s": found["pause_s"] <= TARGET["pause_s"],
        "same_text": found["same_text"],
    }
    return finish("large", found, TARGET, holds)


if __name__ == "__main__":
    sys.exit(main())
