"""How soon does a stream that was cut go on at another gateway?

    python -m bench.resume [--shape tales|0.5b] [--prompt 512] [--after 200] [--reps 7] [--quick]

Three node processes, each with a third of the layers, and a spare with all of them; two origins. In every repetition a new
prompt is answered until `after` tokens have come. Then, from the request to the first token that the client lacks:

    adopted      the other origin goes on with the session that the first one left on its hops
    recomputed   requests that need all positions have taken the caches: what is left are the last hop's rows
    redrawn      the other origin has nothing but the request: it draws all tokens one by one (no target)
    received     the same, and the client says which text it has: no hop has anything of the stream. (The shapes have random
                 weights, whose tokens are no text: it is taken to be split into the tokens that were drawn.)
    prefill      the prompt and the tokens as one prompt, computed anew
    repair       the middle hop is evicted while the first origin answers: the pause until the next token

Targets: adopted <= 1.5x a repair, recomputed and received <= 1.2x a prefill, all texts equal. Ratios are taken rep by rep.
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
from manyhands.core import SamplingParams, Span, even_cut
from manyhands.local import NodeOptions, node_processes
from manyhands.origin import Answer, Origin
from manyhands.origin.adoption import Adoption, HopMark
from manyhands.text.received import ReceivedText

ADOPTED_X, RECOMPUTED_X = 1.5, 1.2
NODES = 3
SESSIONS = 4  # of the longest request, that a node has cache for
ARMS = ("adopted_s", "recomputed_s", "redrawn_s", "received_s", "prefill_s", "repair_s")


@dataclass(slots=True)
class Samples:
    """Seconds of each arm, and how many repetitions adopted, drew from rows alone, and told the same text in every arm."""

    adopted_s: list[float] = field(default_factory=list)
    recomputed_s: list[float] = field(default_factory=list)
    redrawn_s: list[float] = field(default_factory=list)
    received_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    repair_s: list[float] = field(default_factory=list)
    num_adopted: int = 0
    num_recomputed: int = 0
    num_same: int = 0


@dataclass(slots=True)
class Scene:
    """Two origins over the same nodes; `capacity` positions are what each request of a repetition leases."""

    first: Origin
    second: Origin
    capacity: int

    async def until(
        self, origin: Origin, ids: list[int], new: int, adoption: Adoption, *, evict: bool = False
    ) -> tuple[Answer, float, float]:
        """An answer of `new` tokens, and the waits for the last of them from the request and from the token before; with
        `evict` the middle hop goes at that one."""
        params = SamplingParams(max_tokens=self.capacity - len(ids), ignore_eos=True)
        asked = time.perf_counter()
        answer, lost = origin.answer(origin.request_ids(ids, params)), None
        async with aclosing(origin.stream(answer, adoption=adoption)) as stream:
            for _ in range(new - 1):
                await anext(stream)
            before = time.perf_counter()
            if evict:
                assert answer.session is not None
                lost = answer.session.route.hops[1].offer.node
                origin.routes.evict(lost)
            await anext(stream)
            now = time.perf_counter()
            if lost is not None:
                origin.routes.readmit(lost)
        return answer, now - asked, now - before

    async def fill(self) -> None:
        """Lease every position of every node at once, for a moment: all parked caches have to go."""
        origin, params = self.second, SamplingParams(max_tokens=self.capacity - 8, ignore_eos=True)
        async with AsyncExitStack() as stack:
            for number in range(SESSIONS):
                answer = origin.answer(origin.request_ids(prompt_ids(8, salt=1000 + number), params))
                await anext(await stack.enter_async_context(aclosing(origin.stream(answer))))


async def scene(stack: AsyncExitStack, home: Base, threads: int, capacity: int) -> Scene:
    """The nodes of the cut, a spare that is evicted until a repair needs it, and two origins."""
    layers = read_facts(home.folder).num_layers
    extra = ("--cache-tokens", str(SESSIONS * capacity))
    options = NodeOptions(str(home.folder), "bf16", threads=threads, num_spares=1, extra=extra)
    spans = [*even_cut(layers, NODES), Span(0, layers)]
    running = await stack.enter_async_context(node_processes(spans, options, home.ticket))
    other = await stack.enter_async_context(tls_node(home.ticket, None))
    addrs = [node.address for node in running]
    first, second = (Origin(node, home.model, home.device, addrs) for node in (home.node, other))
    return Scene(first, second, capacity)


async def repetition(it: Scene, arguments: argparse.Namespace, rep: int, samples: Samples) -> None:
    after, ids = arguments.after, prompt_ids(arguments.prompt, salt=rep + 1)

    def name(arm: int) -> bytes:
        return bytes([arm]) + rep.to_bytes(15, "big")

    cut, _, _ = await it.until(it.first, ids, after, Adoption(name(0)))
    assert cut.session is not None
    spans = [(hop.offer.node[:12], hop.offer.info.span) for hop in cut.session.route.hops]
    left = Adoption(name(0), tuple(HopMark(node, span.start, span.end) for node, span in spans), after)
    with measuring("adopted"):
        adopted, took_s, _ = await it.until(it.second, ids, after + 1, left)
    samples.adopted_s.append(took_s)
    with measuring("repair"):
        repaired, _, took_s = await it.until(it.first, ids, after + 1, Adoption(name(1)), evict=True)
    samples.repair_s.append(took_s)
    with measuring("redrawn"):
        anew, took_s, _ = await it.until(it.second, ids, after + 1, Adoption(name(2)))
    samples.redrawn_s.append(took_s)
    await it.fill()
    text = ReceivedText("?" * after, tuple(cut.token_ids), tuple(range(after)))
    said = Adoption(name(4), (), after, received=text)
    arms = ("recomputed", "prefill", "received")
    for arm in arms[rep % 3 :] + arms[: rep % 3]:
        with measuring(arm):
            if arm == "prefill":
                _, took_s, _ = await it.until(it.second, [*ids, *cut.token_ids], 1, Adoption(name(3)))
                samples.prefill_s.append(took_s)
            elif arm == "received":
                received, took_s, _ = await it.until(it.second, ids, after + 1, said)
                samples.received_s.append(took_s)
            else:
                recomputed, took_s, _ = await it.until(it.second, ids, after + 1, left)
                samples.recomputed_s.append(took_s)
    samples.num_adopted += adopted.redrawn == after and adopted.cached_tokens == len(ids)
    samples.num_recomputed += recomputed.redrawn == after and recomputed.cached_tokens == 0
    answers = (adopted, anew, repaired, recomputed, received)
    samples.num_same += all(answer.token_ids == anew.token_ids for answer in answers)


async def measure(arguments: argparse.Namespace) -> Samples:
    samples = Samples()
    async with base(checkpoint(arguments.shape), arguments.threads) as home, AsyncExitStack() as stack:
        it = await scene(stack, home, arguments.threads, arguments.prompt + arguments.after + 8)
        await repetition(it, arguments, arguments.reps, Samples())  # links, first steps, what is learnt of the hops
        for rep in range(arguments.reps):
            await repetition(it, arguments, rep, samples)
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
    received = paired(samples.received_s, samples.prefill_s, 2)
    counts = (samples.num_adopted, samples.num_recomputed, samples.num_same)
    figures = {
        "shape": arguments.shape,
        "prompt": arguments.prompt,
        "after": arguments.after,
        **{name: spread(getattr(samples, name), 3) for name in ARMS},
        "adopted_x": adopted,
        "recomputed_x": recomputed,
        "received_x": received,
        "redrawn_x": paired(samples.redrawn_s, samples.prefill_s, 2),
        "same_text": min(counts),
    }
    holds = {
        "adopted_x": adopted["median"] <= ADOPTED_X,
        "recomputed_x": recomputed["median"] <= RECOMPUTED_X,
        "received_x": received["median"] <= RECOMPUTED_X,
        "same_text": counts == (arguments.reps,) * 3,
    }
    targets = {"adopted_x": ADOPTED_X, "recomputed_x": RECOMPUTED_X, "received_x": RECOMPUTED_X, "same_text": "all"}
    return finish("resume", figures, targets, holds)


if __name__ == "__main__":
    sys.exit(main())
