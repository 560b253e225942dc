"""What do output logs and heartbeats cost a token, and what a standby? Three node processes, one stream, with and without.

    python -m bench.upkeep [--shape tales|0.5b] [--reps N] [--standby-reps N] [--quick]

What they cost is CPU: logs and heartbeats wait for nothing. Two ways to it, on the same processes (switched_node.py):

account   Logs: the time inside their functions, counted in the hops while they serve, and with it all collections of garbage,
          which the steps that logs keep may have caused. Heartbeats: CPU of a token with looks and pings OFTEN times as often
          as usual, less that with the usual, over the looks that were more: system calls, TLS, wake-ups and all. Both as a
          share of a token's CPU, of hops and origin together.
arms      CPU of a token with both over CPU of one with neither, in pairs. It has what the account leaves out (caches and
          pages that logs take), and the noise of two whole arms: pairs of the same arm differ by more than 1 %.

The claim rests on the account: it holds if its share is at most 1 % to the upper end of the interval in which its median lies,
95 % sure. The arms are interleaved, every other round in the reverse order. Then `--standby-reps` rounds with and without a
fourth node that stands by for all hops (`[request] standby`): what that costs is shown, and does not count.
"""

import argparse
import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import switched_node
from bench.report import finish, measuring, median_interval, paired, spread
from bench.shapes import checkpoint
from bench.swarm import base, generate, prompt_ids
from bench.switched_node import Spent, Switch, numbers
from manyhands.checkpoint.config_fields import read_facts
from manyhands.cli.options import run as run_loop
from manyhands.config import RequestConfig
from manyhands.core import Span, even_cut
from manyhands.local import NodeOptions, node_processes
from manyhands.origin import Origin

TARGET = {"percent": 1.0}  # of a token's CPU
NODES, PROMPT = 3, 16
OFTEN = 32
ARMS = {
    "both": Switch(1, 1),
    "neither": Switch(0, 0),
    "often": Switch(1, OFTEN),
    "standby": Switch(1, 1),
    "no standby": Switch(1, 1),
}
MEASURED = ("cpu_ms", "spare_cpu_ms", "logs_ms", "collections_ms", "looks")  # each a token
Samples = dict[str, dict[str, list[float]]]


def cpu_ns(pids: list[int]) -> int:
    """CPU that these processes have used (clock_getcpuclockid; Linux)."""
    return sum(time.clock_gettime_ns(~pid << 3 | 2) for pid in pids)


async def measure(options: argparse.Namespace, folder: Path) -> Samples:
    """By arm: tokens/s, and milliseconds a token: CPU in the origin and its hops, and in the standby's node; time in logs."""
    samples: Samples = {arm: defaultdict(list) for arm in ARMS}
    spans = even_cut(read_facts(folder).num_layers, NODES)
    async with AsyncExitStack() as stack:
        shared = Path(stack.enter_context(TemporaryDirectory()))
        os.environ[switched_node.NAMED_BY] = str(shared)
        switched_node.install()
        home = await stack.enter_async_context(base(folder, 1))
        what = NodeOptions(str(folder), "bf16", threads=1, module="bench.switched_node", num_spares=1)
        nodes = await stack.enter_async_context(node_processes([*spans, Span(0, spans[-1].end)], what, home.ticket))
        pids = [node.process.pid for node in nodes]
        hops, spare = [*pids[:NODES], os.getpid()], pids[NODES:]
        switch = numbers(shared / "switch")

        async def take(arm: str, origin: Origin) -> None:
            switch[0], switch[1] = ARMS[arm]
            await asyncio.sleep(switched_node.SWITCHED_S)
            before = cpu_ns(hops), cpu_ns(spare), *spent_ns(shared, hops)
            with measuring(f"{arm} rep {len(samples[arm]['tps'])}"):
                run = await generate(origin, prompt_ids(PROMPT), options.new)
            after = cpu_ns(hops), cpu_ns(spare), *spent_ns(shared, hops)
            samples[arm]["tps"].append(run.decode_tps)
            for name, a, b in zip(MEASURED, before, after, strict=True):
                samples[arm][name].append((1 if name == "looks" else 1e-6) * (b - a) / options.new)

        origin = Origin(home.node, home.model, home.device, [node.address for node in nodes[:NODES]])
        await generate(origin, prompt_ids(PROMPT), 4)
        for rep in range(options.reps):
            for arm in ("both", "neither", "often")[:: 1 if rep % 2 else -1]:
                await take(arm, origin)
        # Only now: its links would be pinged too.
        guarded = await stack.enter_async_context(
            base(folder, 1, RequestConfig(standby=True, draft="off"), home.ticket)
        )
        watched = Origin(guarded.node, guarded.model, guarded.device, [node.address for node in nodes])
        await generate(watched, prompt_ids(PROMPT), 4)
        for rep in range(options.standby_reps):
            for arm in ("standby", "no standby")[:: 1 if rep % 2 else -1]:
                await take(arm, watched if arm == "standby" else origin)
    return samples


def spent_ns(shared: Path, pids: list[int]) -> Spent:
    return Spent(*map(sum, zip(*(numbers(shared / str(pid)) for pid in pids), strict=True)))


def account(samples: Samples) -> dict[str, list[float]]:
    """Round by round: how many percent of a token's CPU logs, collections and heartbeats have, and all of them."""
    both, often = samples["both"], samples["often"]
    more = sum(often["looks"]) / sum(both["looks"]) - 1  # a timer is late, and a token takes longer
    shares = {
        "logs": [a / b for a, b in zip(both["logs_ms"], both["cpu_ms"], strict=True)],
        "collections": [a / b for a, b in zip(both["collections_ms"], both["cpu_ms"], strict=True)],
        "heartbeats": [(a / b - 1) / more for a, b in zip(often["cpu_ms"], both["cpu_ms"], strict=True)],
    }
    shares["all"] = [sum(each) for each in zip(*shares.values(), strict=True)]
    return {name: [100 * share for share in each] for name, each in shares.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["0.5b", "tales"], default="tales")
    parser.add_argument("--reps", type=int, default=0, help="default: 60, or 6 with --quick")
    parser.add_argument("--standby-reps", type=int, default=0, help="default: 12, or 3 with --quick")
    parser.add_argument("--new", type=int, default=0, help="tokens per stream (default: 200, or 16 of 0.5b)")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.reps = options.reps or (6 if options.quick else 60)
    options.standby_reps = options.standby_reps or (3 if options.quick else 12)
    options.new = options.new or (200 if options.shape == "tales" else 16)
    samples = run_loop(measure(options, checkpoint(options.shape)))
    shares = account(samples)
    figures = {
        "shape": options.shape,
        "tps": {arm: spread(taken["tps"]) for arm, taken in samples.items()},
        "cpu_ms": {arm: spread(taken["cpu_ms"], 3) for arm, taken in samples.items()},
        "logs_us": spread([1e3 * each for each in samples["both"]["logs_ms"]], 2),
        "percent": {name: known(each) for name, each in shares.items()},
        "of_neither": {"both": against(samples, "both", "neither", "tps")},
        "cpu_of_neither": {"both": against(samples, "both", "neither", "cpu_ms")},
        "standby_cpu_ms": spread(samples["standby"]["spare_cpu_ms"], 2),
        "standby_tps_x": against(samples, "standby", "no standby", "tps"),
    }
    _, high = median_interval(shares["all"])
    return finish("upkeep", figures, TARGET, {"percent": high <= TARGET["percent"]})


def known(percents: Sequence[float]) -> dict[str, float]:
    """Median and extremes, and between which the true median lies, 95 % sure."""
    low, high = median_interval(percents)
    return {**spread(percents, 3), "low": round(low, 3), "high": round(high, 3)}


def against(samples: Samples, arm: str, other: str, what: str) -> dict[str, float]:
    """The ratio of two arms, round by round."""
    return paired(samples[arm][what], samples[other][what])


if __name__ == "__main__":
    sys.exit(main())
