"""How long does a stream pause when a hop's process is killed with kill -9, and is the text the same?

    python -m bench.repair [--shape tales|0.5b] [--kills 30] [--after 200] [--fault kill|freeze|drain] [--standby]

Three node processes, each with a third of the layers, and a spare that holds them all. In every trial a random hop is
disturbed at a random moment of a stream; the pause is the longest wait for a token from then on, the text is compared with
the undisturbed one, and the dead process is started anew before the next trial. Targets: p50 <= 1 s, p99 <= 3 s (kill),
p50 <= 0.3 s (kill with a standby), <= 4 s (freeze), 0.3 s (drain); no token lost, repeated or changed.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench.report import finish, machine, measuring, note, spread
from bench.shapes import checkpoint
from bench.swarm import Base, base, generate, prompt_ids
from manyhands.checkpoint.config_fields import read_facts
from manyhands.cli.local import InjectedFault
from manyhands.config import RequestConfig
from manyhands.core import SamplingParams, Span, even_cut
from manyhands.local import NodeOptions, NodeProcess, node_processes
from manyhands.origin import Origin

LIMITS = {"kill": (1.0, 3.0), "standby": (0.3, 3.0), "freeze": (4.0, 4.0), "drain": (0.3, 0.3)}
AFTERMATH = 64  # tokens after the last moment of a fault: a drain takes some to hand over
HOPS = 3


@dataclass(slots=True)
class Trial:
    """One disturbed stream. `pause_s`: the longest wait for a token from the fault on."""

    pause_s: float
    is_same: bool
    repairs: int


async def start(stack: AsyncExitStack, home: Base, span: Span, threads: int, *, is_spare: bool = False) -> NodeProcess:
    """One more node process on `span`."""
    options = NodeOptions(str(home.folder), "bf16", threads=threads, num_spares=int(is_spare))
    return (await stack.enter_async_context(node_processes([span], options, home.ticket)))[0]


async def disturbed(
    origin: Origin, ids: list[int], reference: list[int], fault: InjectedFault, node: NodeProcess
) -> Trial:
    """The stream whose undisturbed tokens are `reference`, with `fault` applied to `node` on the way."""
    answer = origin.answer(origin.request_ids(ids, SamplingParams(max_tokens=len(reference), ignore_eos=True)))
    last, pause_s = None, 0.0
    async for _ in origin.stream(answer):
        now = time.perf_counter()
        if last is not None:
            last, pause_s = now, max(pause_s, now - last)
        if len(answer.token_ids) == fault.at_token:
            fault.apply(node)
            last = time.perf_counter()
    return Trial(pause_s, answer.token_ids == reference, len(answer.repairs))


async def measure(args: argparse.Namespace) -> list[Trial]:
    folder = checkpoint(args.shape)
    spans = even_cut(read_facts(folder).num_layers, HOPS)
    whole = Span(0, spans[-1].end)
    ids, new = prompt_ids(64), args.after + AFTERMATH
    rng = random.Random(args.seed)
    trials: list[Trial] = []
    async with base(folder, args.threads, RequestConfig(standby=args.standby)) as home, AsyncExitStack() as stack:
        spare = await start(stack, home, whole, args.threads, is_spare=True)
        nodes = [await start(stack, home, span, args.threads) for span in spans]
        undisturbed = Origin(home.node, home.model, home.device, [n.address for n in [*nodes, spare]])
        reference = (await generate(undisturbed, ids, new)).answer.token_ids
        for trial in range(args.kills):
            hop, at = rng.randrange(HOPS), rng.randrange(max(1, args.after // 2), args.after)
            origin = Origin(home.node, home.model, home.device, [n.address for n in [*nodes, spare]])
            with measuring(f"{args.fault} hop {hop} at token {at}"):
                trials.append(
                    await disturbed(origin, ids, reference, InjectedFault(args.fault, hop, at, ""), nodes[hop])
                )
            note(f"trial {trial}: pause {trials[-1].pause_s:.3f} s, same text: {trials[-1].is_same}")
            nodes[hop] = await start(stack, home, spans[hop], args.threads)
    return trials


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="tales")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--after", type=int, default=200, help="tokens before the fault at most")
    parser.add_argument("--fault", choices=["kill", "freeze", "drain"], default="kill")
    parser.add_argument("--standby", action="store_true", help="the spare follows every hop")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    trials = asyncio.run(measure(args))
    pauses = sorted(t.pause_s for t in trials)
    p50, p99 = statistics.median(pauses), pauses[min(len(pauses) - 1, int(len(pauses) * 0.99))]
    limit50, limit99 = LIMITS["standby" if args.standby and args.fault == "kill" else args.fault]
    figures = {
        "shape": args.shape,
        "fault": args.fault,
        "standby": args.standby,
        "machine": machine(),
        "trials": len(trials),
        "same_text": sum(t.is_same for t in trials),
        "repairs": sum(t.repairs for t in trials),
        "pause_s": spread(pauses, 3),
        "pause_p50_s": round(p50, 3),
        "pause_p99_s": round(p99, 3),
    }
    holds = {"same_text": all(t.is_same for t in trials), "p50": p50 <= limit50, "p99": p99 <= limit99}
    return finish("repair", figures, {"p50_s": limit50, "p99_s": limit99, "same_text": "all"}, holds)


if __name__ == "__main__":
    sys.exit(main())
