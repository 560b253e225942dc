"""How much sooner does the second turn of a chat begin where its history is cached on the hops, and is the text the same?

    python -m bench.reuse [--shape 0.5b|tales] [--history 2004] [--reps 7] [--quick]

Three node processes, each with a third of the layers. In every repetition a history that was never seen before is computed
once for a tenant; then the same second turn, 20 tokens longer, is asked with and without a tenant, in turns which of the two
goes first. Measured is the time to the first token, opening included. Target: >= 20 times sooner, all texts equal.
"""

import argparse
import asyncio
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from bench.report import finish, measuring, paired, spread
from bench.shapes import CONTEXT, checkpoint
from bench.swarm import base, origin, prompt_ids
from manyhands.core import SamplingParams
from manyhands.origin import Answer, Origin

TARGET = 20.0
QUESTION, NEW = 20, 8
NODES = 3


@dataclass(slots=True)
class Samples:
    """Seconds to the first token of each arm, what was cached, and how many pairs of texts were equal."""

    anew_s: list[float] = field(default_factory=list)
    reused_s: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    num_same: int = 0


async def first_token_s(origin: Origin, ids: list[int], tenant: str | None) -> tuple[float, Answer]:
    """Ask for NEW tokens; how long the first one took."""
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    answer = origin.answer(origin.request_ids(ids, params))
    began, first_s = time.perf_counter(), 0.0
    async for _ in origin.stream(answer, tenant=tenant):
        first_s = first_s or time.perf_counter() - began
    return first_s, answer


async def measure(arguments: argparse.Namespace) -> Samples:
    samples = Samples()
    async with base(checkpoint(arguments.shape), arguments.threads) as home, AsyncExitStack() as stack:
        asked = await origin(stack, home, NODES, arguments.threads)
        await first_token_s(asked, prompt_ids(8), None)  # links, first steps
        for rep in range(arguments.reps):
            history = prompt_ids(arguments.history, salt=rep + 1)
            _, told = await first_token_s(asked, history, "bench")
            ids = [*history, *told.token_ids, *prompt_ids(QUESTION, salt=rep + 100)]
            texts = []
            for arm in ("anew", "reused") if rep % 2 else ("reused", "anew"):
                with measuring(arm):
                    took_s, answer = await first_token_s(asked, ids, "bench" if arm == "reused" else None)
                (samples.reused_s if arm == "reused" else samples.anew_s).append(took_s)
                texts.append(answer.token_ids)
                if arm == "reused":
                    samples.cached.append(answer.cached_tokens)
            samples.num_same += texts[0] == texts[1]
    return samples


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--history", type=int, default=CONTEXT - QUESTION - 3 * NEW)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    arguments.reps = min(arguments.reps, 2) if arguments.quick else arguments.reps
    samples = asyncio.run(measure(arguments))
    sooner = paired(samples.anew_s, samples.reused_s, 1)
    figures = {
        "shape": arguments.shape,
        "history": arguments.history,
        "nodes": NODES,
        "anew_s": spread(samples.anew_s, 4),
        "reused_s": spread(samples.reused_s, 4),
        "cached_tokens": min(samples.cached),
        "times_sooner": sooner,
        "same_text": samples.num_same,
    }
    holds = {
        "times_sooner": sooner["median"] >= TARGET,
        "same_text": samples.num_same == arguments.reps,
        "cached": min(samples.cached) >= arguments.history,
    }
    return finish("reuse", figures, {"times_sooner": TARGET, "same_text": "all"}, holds)


if __name__ == "__main__":
    sys.exit(main())
