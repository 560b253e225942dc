"""What do output logs and heartbeats cost a token, and what a standby? Three node processes, one stream, with and without.

    python -m bench.upkeep [--shape tales|0.5b] [--reps N] [--most M] [--quick]

Arms, interleaved, on the same processes (two sets of processes of one code differ by more than 1 %): everything on; no output
logs; no heartbeats, that is, no ping and no look at a link; neither; everything on and a fourth node that stands by for all
hops (`[request] standby`). Logs and heartbeats are switched while the processes run (switched_node.py).
Tokens/s wander by more than 1 % on any shared machine, so the CPU seconds of a token are taken as well, of the nodes and of the
origin: logs and heartbeats wait for nothing, what they cost is CPU. After `--reps` rounds of all arms the two that are compared
go on alone, until the median of their ratios is known within WITHIN, 95 % sure, or there are `--most` pairs. Holds if with both
a token takes at most 1 % more CPU than with neither, to the upper end of that interval. What the standby costs is shown, of its
own node apart, and does not count.
"""

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import switched_node
from bench.report import finish, measuring, median_interval, paired, spread
from bench.shapes import checkpoint
from bench.swarm import base, generate, prompt_ids
from manyhands.checkpoint.config_fields import read_facts
from manyhands.cli.options import run as run_loop
from manyhands.config import RequestConfig
from manyhands.core import Span, even_cut
from manyhands.local import NodeOptions, node_processes
from manyhands.origin import Origin

TARGET = {"both_x": 0.99, "both_cpu_x": 1.01}  # of tokens/s, shown; of CPU, which decides
NODES, PROMPT = 3, 16
OFF: dict[str, tuple[str, ...]] = {
    "both": (),
    "no logs": ("logs",),
    "no heartbeats": ("heartbeats",),
    "neither": ("logs", "heartbeats"),
    "standby": (),
}
COMPARED = ("both", "neither")
WITHIN = 0.005
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
Samples = dict[str, dict[str, list[float]]]


def cpu_s(pids: list[int]) -> float:
    """CPU seconds that these processes have used."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) * TICK_S


async def measure(options: argparse.Namespace, folder: Path) -> Samples:
    """By arm: tokens/s, CPU seconds of a token in the origin and its hops, and in the standby's node."""
    samples: Samples = {arm: defaultdict(list) for arm in OFF}
    spans = even_cut(read_facts(folder).num_layers, NODES)
    async with AsyncExitStack() as stack:
        off = Path(stack.enter_context(TemporaryDirectory())) / "off"
        off.write_text("")
        os.environ[switched_node.NAMED_BY] = str(off)
        switched_node.install()
        plain = await stack.enter_async_context(base(folder, 1))
        guarded = await stack.enter_async_context(
            base(folder, 1, RequestConfig(standby=True, draft="off"), plain.ticket)
        )
        what = NodeOptions(str(folder), "bf16", threads=1, module="bench.switched_node", num_spares=1)
        nodes = await stack.enter_async_context(node_processes([*spans, Span(0, spans[-1].end)], what, plain.ticket))
        addresses = [node.address for node in nodes]
        origins = [Origin(home.node, home.model, home.device, addresses) for home in (plain, guarded)]
        for origin in origins:
            await generate(origin, prompt_ids(PROMPT), 4)
        hops, spare = [node.process.pid for node in nodes[:NODES]], [nodes[NODES].process.pid]
        for arm in turns(options, samples):
            off.write_text(" ".join(OFF[arm]))
            await asyncio.sleep(switched_node.SWITCHED_S)
            hops_s, spare_s, own_s = cpu_s(hops), cpu_s(spare), time.process_time()
            with measuring(f"{arm} rep {len(samples[arm]['tps'])}"):
                run = await generate(origins[arm == "standby"], prompt_ids(PROMPT), options.new)
            used_s = cpu_s(hops) - hops_s + time.process_time() - own_s
            samples[arm]["tps"].append(run.decode_tps)
            samples[arm]["cpu_ms"].append(1e3 * used_s / options.new)
            samples[arm]["spare_cpu_ms"].append(1e3 * (cpu_s(spare) - spare_s) / options.new)
    return samples


def turns(options: argparse.Namespace, samples: Samples) -> Iterator[str]:
    """Which arm runs next. Every other round in the reverse order."""
    for rep in itertools.count():
        arms = tuple(OFF) if rep < options.reps else COMPARED
        low, high = median_interval(ratios(samples)) if rep >= options.reps else (0.0, 1.0)
        if rep >= options.most or high - low <= 2 * WITHIN:
            return
        yield from arms if rep % 2 else reversed(arms)


def ratios(samples: Samples) -> list[float]:
    """CPU of a token with both, of that with neither."""
    both, neither = (samples[arm]["cpu_ms"] for arm in COMPARED)
    return [a / b for a, b in zip(both, neither, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["0.5b", "tales"], default="tales")
    parser.add_argument("--reps", type=int, default=0, help="default: 15, or 5 with --quick")
    parser.add_argument("--most", type=int, default=45, help="pairs of the arms that are compared")
    parser.add_argument("--new", type=int, default=400, help="tokens per stream; a CPU second has 100 ticks")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.reps = options.reps or (5 if options.quick else 15)
    options.most = max(options.reps, options.most)
    samples = run_loop(measure(options, checkpoint(options.shape)))
    plain = samples["neither"]
    others = [arm for arm in OFF if arm != "neither"]
    low, high = median_interval(ratios(samples))
    figures = {
        "shape": options.shape,
        "tps": {arm: spread(taken["tps"]) for arm, taken in samples.items()},
        "cpu_ms": {arm: spread(taken["cpu_ms"], 2) for arm, taken in samples.items()},
        "of_neither": {arm: against(samples, arm, plain, "tps") for arm in others},
        "cpu_of_neither": {arm: against(samples, arm, plain, "cpu_ms") for arm in others},
        "cpu_interval": [round(low, 4), round(high, 4)],
        "standby_cpu_ms": spread(samples["standby"]["spare_cpu_ms"], 2),
        "standby_tps_x": against(samples, "standby", samples["both"], "tps"),
    }
    return finish("upkeep", figures, TARGET, {"both": high <= TARGET["both_cpu_x"]})


def against(samples: Samples, arm: str, other: dict[str, list[float]], what: str) -> dict[str, float]:
    """The ratio of two arms over the rounds that had both."""
    taken = samples[arm][what]
    return paired(taken, other[what][: len(taken)])


if __name__ == "__main__":
    sys.exit(main())
