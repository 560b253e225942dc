"""What a token and a request take on this machine beside the compute: *tales* on two node processes, asked a few times.

Tokens over one of them and over both differ by what a hop adds; compute is measured in this process and taken off. Prompts are
one chunk of the least size, which leaves right behind the Opens: the first token comes later than the compute of a chunk and of
the ends by what opening a session takes, and what the first step of a session costs a hop beyond other steps: its cache is
new. Opening one hop more counts with the origin's own work, in CPU seconds of this process, since the nodes here share its
cores. Some five seconds.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, NamedTuple

from manyhands.cli.connect import tls_node
from manyhands.cli.options import run
from manyhands.config import RequestConfig
from manyhands.core import SamplingParams, Span
from manyhands.engine.span import SpanRunner
from manyhands.errors import ManyhandsError
from manyhands.local import NodeOptions, node_processes
from manyhands.origin import Origin, OriginModel
from manyhands.place.machines import DOZE_S
from manyhands.place.measure import Overheads, ending, paired, stepping
from manyhands.resources import num_cores
from manyhands.route.chunks import LEAST_ROWS
from manyhands.route.offer import Offer
from manyhands.swarm.ticket import Ticket
from manyhands.tales import model_path
from manyhands.worker.execute import Device
from manyhands.worker.runner import load_ends, load_span

REQUESTS: Final = 9
TOKENS: Final = 24
PROMPT: Final = range(1, 1 + LEAST_ROWS)


class Timed(NamedTuple):
    """Seconds, the median over requests: to the first token, from one token to the next in the mean, as tokens/s count, and of
    this process's CPU to the first token."""

    first_s: float
    token_s: float
    own_s: float


class Compute(NamedTuple):
    """Median seconds of a token: of all layers in one step, of both halves in two, of the ends; and of a chunk of LEAST_ROWS:
    of all layers, of both halves."""

    whole_s: float
    halves_s: float
    ends_s: float
    chunk_s: float
    half_chunks_s: float


class Rehearsal(NamedTuple):
    """Requests over one hop that is found, over one and over two that are given, and the compute among them."""

    found: Timed
    one: Timed
    two: Timed
    compute: Compute


def rehearsed() -> Overheads:
    """What the rehearsal says; the usual overheads where it cannot be held. Blocking."""
    try:
        return overheads_of(run(rehearse()))
    except (ManyhandsError, OSError):
        return Overheads()


async def rehearse() -> Rehearsal:
    """Raises ManyhandsError if the nodes do not start."""
    folder, ticket, device = model_path(), Ticket.new("rehearsal"), Device.start(num_cores())
    try:
        async with AsyncExitStack() as stack:
            config = RequestConfig(draft="off", reuse=False)
            node = await stack.enter_async_context(tls_node(ticket, None, request=config))
            model = await device.run(lambda: OriginModel(folder, "bf16"))
            spans = [Span(0, model.num_layers)] * 2
            running = await stack.enter_async_context(node_processes(spans, NodeOptions(str(folder)), ticket))
            first = Origin(node, model, device, [running[0].address])
            near, far = await node.requests.survey([each.address for each in running])
            half = model.num_layers // 2
            both = near.part(Span(0, half)), far.part(Span(half, model.num_layers))
            found, one, two = await _ask(first, (None, (near,), both))
            return Rehearsal(found, one, two, await device.run(lambda: _compute(folder, spans[0])))
    finally:
        device.close()


def overheads_of(held: Rehearsal) -> Overheads:
    """What is left of the times without the compute. None is below 0, however the machine wavers."""
    found, one, two, compute = held
    hop_s = max(0.0, two.token_s - one.token_s - (compute.halves_s - compute.whole_s))
    origin_s = max(0.0, one.token_s - compute.whole_s - compute.ends_s - hop_s)
    open_s = max(0.0, two.own_s - one.own_s)
    new_s = max(0.0, two.first_s - one.first_s - open_s - (compute.half_chunks_s - compute.chunk_s) - hop_s)
    # A hop counts twice: its Open and the chunk each find it.
    begin_s = max(0.0, found.first_s - compute.chunk_s - compute.ends_s - origin_s - 2 * hop_s - new_s)
    return Overheads(hop_s, origin_s, begin_s, open_s, new_s)


async def _ask(origin: Origin, routes: Sequence[tuple[Offer, ...] | None]) -> list[Timed]:
    """Over each of the routes (None: over the one that `origin` finds), in turn; the first request of each opens links."""
    taken = [list[Timed]() for _ in routes]
    for _, (route, kept) in itertools.product(range(REQUESTS + 1), zip(routes, taken, strict=True)):
        await asyncio.sleep(DOZE_S)
        answer = origin.answer(origin.request_ids(PROMPT, SamplingParams(max_tokens=TOKENS, ignore_eos=True)))
        at = [(time.perf_counter(), time.process_time())]
        at.extend([(time.perf_counter(), time.process_time()) async for _ in origin.stream(answer, route=route)])
        (began_s, own_began_s), (first_s, own_first_s) = at[:2]
        kept.append(Timed(first_s - began_s, (at[-1][0] - first_s) / (TOKENS - 1), own_first_s - own_began_s))
    return [Timed(*map(statistics.median, zip(*kept[1:], strict=True))) for kept in taken]


def _compute(folder: Path, whole: Span) -> Compute:
    threads, half = num_cores(), len(whole) // 2
    span, ends = load_span(folder, whole, "bf16", threads), load_ends(folder, "bf16", threads)
    one_s, halves_s = _whole_and_halves(span, whole, half, 1)
    chunk_s, half_chunks_s = _whole_and_halves(span, whole, half, LEAST_ROWS)
    return Compute(one_s, halves_s, paired(ending(ends, "bf16"), lambda: None)[0], chunk_s, half_chunks_s)


def _whole_and_halves(span: SpanRunner, whole: Span, half: int, rows: int) -> tuple[float, float]:
    parts = (whole, Span(0, half), Span(half, whole.end))
    steps = [stepping(span, part, rows, num_cores(), "bf16") for part in parts]

    def halves() -> None:
        steps[1]()
        steps[2]()

    return paired(steps[0], halves)
