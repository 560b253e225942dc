"""What do output logs and heartbeats cost a token? Three node processes, one stream, each with and without them.

    python -m bench.upkeep [--shape tales|0.5b] [--reps N] [--quick]

Arms, interleaved: everything on; no output logs (serve --log-bytes 0); no heartbeats (nodes and origin never ping); neither.
Holds if with both a token takes at most 1 % longer than with neither (median of the ratios rep by rep).
"""

import argparse
import itertools
import sys
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import manyhands.net.liveness
from bench.report import finish, measuring, note, paired, spread
from bench.shapes import checkpoint
from bench.swarm import base, generate, prompt_ids
from manyhands.checkpoint.config_fields import read_facts
from manyhands.cli.options import run as run_loop
from manyhands.core import even_cut
from manyhands.local import NodeOptions, node_processes
from manyhands.origin import Origin

TARGET = {"both_x": 0.99}
NODES, PROMPT = 3, 16
ARMS = ("both", "no logs", "no heartbeats", "neither")
NEVER_S = 1e9


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = defaultdict(list)
    spans = even_cut(read_facts(folder).num_layers, NODES)
    usual_s = manyhands.net.liveness.HEARTBEAT_S
    async with AsyncExitStack() as stack:
        origins: dict[str, Origin] = {}
        for arm in ARMS:
            beats = arm in ("both", "no logs")
            home = await stack.enter_async_context(base(folder, 1))
            what = NodeOptions(str(folder), "bf16", threads=1)
            if arm in ("no logs", "neither"):
                what = replace(what, extra=("--log-bytes", "0"))
            if not beats:
                what = replace(what, module="bench.silent_node")
            nodes = await stack.enter_async_context(node_processes(spans, what, home.ticket))
            # The origin's own heartbeats begin with its links: as long as they take, this arm's constant is in force.
            manyhands.net.liveness.HEARTBEAT_S = usual_s if beats else NEVER_S
            origins[arm] = Origin(home.node, home.model, home.device, [n.address for n in nodes])
            await generate(origins[arm], prompt_ids(PROMPT), 4)
            note(f"{arm} is ready")
        manyhands.net.liveness.HEARTBEAT_S = usual_s
        for rep, arm in itertools.product(range(options.reps), ARMS):
            with measuring(f"{arm} rep {rep}"):
                run = await generate(origins[arm], prompt_ids(PROMPT), options.new)
            samples[arm].append(run.decode_tps)
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["0.5b", "tales"], default="tales")
    parser.add_argument("--reps", type=int, default=0, help="default: 15, or 5 with --quick")
    parser.add_argument("--new", type=int, default=100, help="tokens per stream")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.reps = options.reps or (5 if options.quick else 15)
    samples = run_loop(measure(options, checkpoint(options.shape)))
    ratios = {arm: paired(samples[arm], samples["neither"]) for arm in ARMS if arm != "neither"}
    figures = {
        "shape": options.shape,
        "tps": {arm: spread(taken) for arm, taken in samples.items()},
        "of_neither": ratios,
    }
    return finish("upkeep", figures, TARGET, {"both": ratios["both"]["median"] >= TARGET["both_x"]})


if __name__ == "__main__":
    sys.exit(main())
