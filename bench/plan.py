"""Is what `manyhands plan` predicts what one gets? Predicted tokens/s against measured, over node processes with delayed links.

Each topology is node processes on this machine (TLS on loopback), the layers cut evenly, each node behind an emulated WAN
(testing/wan.py) of so many milliseconds round trip to the origin; two nodes are the sum of theirs apart. Before each round
the machine is measured as `plan` does (place/measure.py, cli/rehearsal.py), afresh; the prediction is place/plan.py's for the
same cut.
The prompt of a route of several nodes is one chunk: longer ones go in chunks that the hops compute at once, as machines of
their own do, and processes that share two cores do not.
Holds if on every topology the medians of predicted / measured tokens/s and time to first token are within 15 % of 1.
Run: python -m bench.plan [--shape tales|0.5b] [--reps N] [--quick]
"""

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.report import finish, measuring, note, spread
from bench.shapes import checkpoint
from bench.swarm import Base, base, generate, prompt_ids
from manyhands.cli.options import run as run_loop
from manyhands.cli.rehearsal import overheads_of, rehearse
from manyhands.config import home_from_env
from manyhands.core import even_cut
from manyhands.local import NodeOptions, node_processes
from manyhands.net.transport import Transport
from manyhands.origin import Origin
from manyhands.place.machines import Fleet, Machine
from manyhands.place.measure import machine_of, measure_speed
from manyhands.place.plan import PlacementPlan, Task, evaluate
from manyhands.place.shape import Checkpoint, look_up
from manyhands.route.chunks import LEAST_ROWS
from manyhands.testing.wan import WanProfile, WanTransport

TARGET = {"off_by": 0.15, "ttft_off_by": 0.15}
RTTS_MS = "BENCH_RTTS_MS"  # in a node's environment: round trip to the origin, by node name
# Round trips of the nodes to the origin, in ms.
TOPOLOGIES: list[tuple[int, ...]] = [
    (0,),
    (30,),
    (0, 0),
    (0, 20),
    (60, 0),
    (0, 0, 0),
    (10, 30, 5),
    (0, 0, 0, 0),
    (5, 20, 60, 10),
]
QUICK: list[tuple[int, ...]] = [(0,), (0, 20), (10, 30, 5), (0, 0, 0, 0)]
KINDS = ("", "ttft_")  # tokens/s, and time to first token


def serve() -> None:
    """`manyhands serve` behind a WAN: what this module is when node_processes starts it."""
    from manyhands.cli import main
    from manyhands.net import reach

    name = sys.argv[sys.argv.index("--name") + 1]
    one_way = WanProfile(delay_s=json.loads(os.environ[RTTS_MS])[name] / 2e3)
    plain: Any = vars(reach)["TlsTransport"]

    def behind_wan(*arguments: Any) -> Transport:
        return WanTransport(plain(*arguments), one_way, one_way)

    setattr(reach, "TlsTransport", behind_wan)  # noqa: B010 - replaced where a node looks it up
    main()


def prompt_length(rtts_ms: tuple[int, ...]) -> int:
    return 64 if len(rtts_ms) == 1 else LEAST_ROWS


async def start(stack: AsyncExitStack, home: Base, model: Checkpoint, rtts_ms: tuple[int, ...]) -> Origin:
    """Node processes at these distances, and an origin that asks them."""
    spans = even_cut(model.shape.num_layers, len(rtts_ms))
    os.environ[RTTS_MS] = json.dumps({f"node-{i}": rtt for i, rtt in enumerate(rtts_ms)})
    options = NodeOptions(str(home.folder), module="bench.plan")
    running = await stack.enter_async_context(node_processes(spans, options, home.ticket))
    return Origin(home.node, home.model, home.device, [node.address for node in running])


def predict(model: Checkpoint, here: Machine, rtts_ms: tuple[int, ...], new: int) -> PlacementPlan:
    nodes = [replace(here, name=f"node-{i}", rtt_s=rtt / 1e3) for i, rtt in enumerate(rtts_ms)]
    prompt = prompt_length(rtts_ms)
    task = Task(model.shape, Fleet((here, *nodes), "origin"), prompt + new, prompt)
    return evaluate(task, list(zip(nodes, even_cut(model.shape.num_layers, len(nodes)), strict=True)))


async def measure(options: argparse.Namespace, folder: Path) -> dict[tuple[int, ...], list[dict[str, float]]]:
    model = look_up(str(folder), "bf16", home_from_env())
    topologies = QUICK if options.quick else TOPOLOGIES
    samples: dict[tuple[int, ...], list[dict[str, float]]] = {rtts: [] for rtts in topologies}
    with ThreadPoolExecutor(1) as thread:
        async with AsyncExitStack() as stack:
            home = await stack.enter_async_context(base(folder, os.cpu_count() or 1))
            for rtts in topologies:
                prompt = prompt_length(rtts)
                async with AsyncExitStack() as nodes:
                    origin = await start(nodes, home, model, rtts)
                    await generate(origin, prompt_ids(prompt), 8)  # warm up
                    for rep in range(options.reps):
                        with measuring(f"{rtts} rep {rep}"):
                            speed, overheads = (
                                thread.submit(measure_speed, model).result(),
                                overheads_of(await rehearse()),
                            )
                            run = await generate(origin, prompt_ids(prompt, rep), options.new)
                        here = machine_of("origin", 1 << 40, speed, overheads)
                        plan = predict(model, here, rtts, options.new)
                        samples[rtts].append(
                            {
                                "predicted": plan.tokens_per_s,
                                "measured": run.decode_tps,
                                "ttft_predicted": plan.ttft_s,
                                "ttft_measured": run.ttft_s,
                                "open_measured": run.answer.timings.open_s or 0.0,
                            }
                        )
                        note(f"  {rtts} {speed} {overheads}")
                        note(f"  {rtts} predicted {plan.tokens_per_s:.1f} measured {run.decode_tps:.1f} tok/s")
                        note(f"  {rtts} first token: predicted {plan.ttft_s:.4f} measured {run.ttft_s:.4f} s")
    return samples


def report(options: argparse.Namespace, samples: dict[tuple[int, ...], list[dict[str, float]]]) -> int:
    out: dict[str, Any] = {"shape": options.shape, "topologies": {}}
    for rtts, rows in samples.items():
        figures = {name: spread([row[name] for row in rows], 4) for name in rows[0]}
        ratios = {
            f"{kind}predicted_over_measured": spread(
                [row[f"{kind}predicted"] / row[f"{kind}measured"] for row in rows], 3
            )
            for kind in KINDS
        }
        out["topologies"]["/".join(map(str, rtts))] = {**figures, **ratios}
    holds: dict[str, bool] = {}
    for kind in KINDS:
        off = {n: abs(row[f"{kind}predicted_over_measured"]["median"] - 1) for n, row in out["topologies"].items()}
        out[f"{kind}worst_off_by"] = round(max(off.values()), 3)
        holds |= {f"{kind}{name}": value <= TARGET[f"{kind}off_by"] for name, value in off.items()}
    return finish("plan", out, TARGET, holds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["0.5b", "1.1b", "tales"], default="tales")
    parser.add_argument("--reps", type=int, default=0, help="default: 5, or 2 with --quick")
    parser.add_argument("--new", type=int, default=48, help="tokens per stream")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.reps = options.reps or (2 if options.quick else 5)
    return report(options, run_loop(measure(options, checkpoint(options.shape))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    else:
        sys.exit(main())
