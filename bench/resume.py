"""How soon does a stream that was cut go on at another gateway: over warm hops, by recomputing, against a repair and a prefill?

    python -m bench.resume [--shape tales|0.5b] [--prompt 512] [--after 200] [--reps 7] [--quick]

Three node processes, each with a third of the layers, and a spare with all of them; two origins. In every repetition a new
prompt is answered until `after` tokens have come. Then, from the request to the first token that the client lacks:

    adopted      the other origin goes on with the session that the first one left on its hops
    recomputed   the other origin has nothing but the request: it draws all tokens again
    prefill      the prompt and the tokens as one prompt, computed anew
    repair       the middle hop is evicted while the first origin answers: the pause until the next token

Targets: adopted <= 1.5x a repair, recomputed <= 1.2x a prefill, all texts equal.
"""

import argparse
import asyncio
import sys
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

from bench.report import finish, measuring, paired, spread
from bench.shapes import checkpoint
from bench.swarm import Base, base, prompt_ids
from manyhands.checkpoint.config_fields import read_facts
from manyhands.cli.connect import tls_node
from manyhands.core import SamplingParams, even_cut
from manyhands.local import NodeOptions, node_processes
from manyhands.origin import Answer, Origin
from manyhands.origin.adoption import Adoption, HopMark

ADOPTED_X, RECOMPUTED_X = 1.5, 1.2
NODES = 3


@dataclass(slots=True)
class Samples:
    """Seconds of each arm, how many sessions were adopted, and how many texts were right."""

    adopted_s: list[float] = field(default_factory=list)
    recomputed_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    repair_s: list[float] = field(default_factory=list)
    num_adopted: int = 0
    num_same: int = 0


async def origins(stack: AsyncExitStack, home: Base, threads: int) -> tuple[Origin, Origin]:
    """Two over the same nodes: those of the cut and a spare."""
    layers = read_facts(home.folder).num_layers
    options = NodeOptions(str(home.folder), "bf16", threads=threads)
    spans = even_cut(layers, NODES)
    running = await stack.enter_async_context(node_processes(spans, options, home.ticket))
    other = await stack.enter_async_context(tls_node(home.ticket, None, is_ephemeral=True))
    addrs = [node.address for node in running]
    return Origin(home.node, home.model, home.device, addrs), Origin(other, home.model, home.device, addrs)


async def until(
    origin: Origin, ids: list[int], new: int, adoption: Adoption, evict: bool = False
) -> tuple[Answer, float]:
    """An answer of `new` tokens, and the wait for the last of them; with `evict` its middle hop goes before that one."""
    params = SamplingParams(max_tokens=new + 8, ignore_eos=True)
    answer = origin.answer(origin.request_ids(ids, params))
    async with aclosing(origin.stream(answer, adoption=adoption)) as stream:
        for _ in range(new - 1):
            await anext(stream)
        began, lost = time.perf_counter(), None
        if evict:
            assert answer.session is not None
            lost = answer.session.route.hops[1].offer.node
            origin.routes.evict(lost)
        await anext(stream)
        took_s = time.perf_counter() - began
        if lost is not None:
            origin.routes.readmit(lost)
    return answer, took_s


async def go_on(origin: Origin, ids: list[int], new: int, adoption: Adoption) -> tuple[Answer, float]:
    """The answer of `new` tokens at another origin, and the time to the one after those of `adoption`."""
    began = time.perf_counter()
    answer, _ = await until(origin, ids, new, adoption)
    return answer, time.perf_counter() - began


async def measure(arguments: argparse.Namespace) -> Samples:
    samples, after = Samples(), arguments.after
    async with base(checkpoint(arguments.shape), arguments.threads) as home, AsyncExitStack() as stack:
        first, second = await origins(stack, home, arguments.threads)
        for origin in (first, second):
            await until(origin, prompt_ids(8), 8, Adoption(bytes(16)))  # links, first steps
        for rep in range(arguments.reps):
            ids, handle = prompt_ids(arguments.prompt, salt=rep + 1), rep.to_bytes(16, "big")
            cut, _ = await until(first, ids, after, Adoption(handle))
            assert cut.session is not None
            spans = [(hop.offer.node[:12], hop.offer.info.span) for hop in cut.session.route.hops]
            marks = tuple(HopMark(node, span.start, span.end) for node, span in spans)
            with measuring("adopted"):
                adopted, took_s = await go_on(second, ids, after + 1, Adoption(handle, marks, after))
            samples.adopted_s.append(took_s)
            with measuring("recomputed"):
                anew, took_s = await go_on(second, ids, after + 1, Adoption(b"other" + handle[5:]))
            samples.recomputed_s.append(took_s)
            with measuring("prefill"):
                _, took_s = await go_on(second, [*ids, *cut.token_ids], 1, Adoption(b"again" + handle[5:]))
            samples.prefill_s.append(took_s)
            with measuring("repair"):
                repaired, took_s = await until(first, ids, after + 1, Adoption(b"fault" + handle[5:]), evict=True)
            samples.repair_s.append(took_s)
            samples.num_adopted += adopted.redrawn == after
            samples.num_same += adopted.token_ids == anew.token_ids == repaired.token_ids
    return samples


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="tales")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--after", type=int, default=200)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    arguments.reps = min(arguments.reps, 2) if arguments.quick else arguments.reps
    samples = asyncio.run(measure(arguments))
    adopted = paired(samples.adopted_s, samples.repair_s, 2)
    recomputed = paired(samples.recomputed_s, samples.prefill_s, 2)
    arms = {name: spread(getattr(samples, name), 4) for name in ("adopted_s", "recomputed_s", "prefill_s", "repair_s")}
    figures = {
        "shape": arguments.shape,
        "prompt": arguments.prompt,
        "after": arguments.after,
        **arms,
        "adopted_x": adopted,
        "recomputed_x": recomputed,
        "num_adopted": samples.num_adopted,
        "same_text": samples.num_same,
    }
    holds = {
        "adopted_x": adopted["median"] <= ADOPTED_X,
        "recomputed_x": recomputed["median"] <= RECOMPUTED_X,
        "num_adopted": samples.num_adopted == arguments.reps,
        "same_text": samples.num_same == arguments.reps,
    }
    return finish("resume", figures, {"adopted_x": ADOPTED_X, "recomputed_x": RECOMPUTED_X, "same_text": "all"}, holds)


if __name__ == "__main__":
    sys.exit(main())
