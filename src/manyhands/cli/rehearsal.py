"""What a token and a request take on this machine beside the compute: *tales* on two node processes, asked a few times.

Tokens over one of them and over both differ by what a hop adds; compute is measured in this process and taken off. A prompt of
one id takes what a token takes, so its first token comes later than a token does by what opening a session takes. Some three
seconds.
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
from manyhands.core import NodeAddr, SamplingParams, Span
from manyhands.errors import ManyhandsError
from manyhands.local import NodeOptions, node_processes
from manyhands.origin import Origin, OriginModel
from manyhands.place.machines import DOZE_S
from manyhands.place.measure import Overheads, ending, paired, stepping
from manyhands.resources import num_cores
from manyhands.route.offer import Offer
from manyhands.swarm.ticket import Ticket
from manyhands.tales import model_path
from manyhands.worker.execute import Device
from manyhands.worker.runner import load_ends, load_span

REQUESTS: Final = 9
TOKENS: Final = 16


class Timed(NamedTuple):
    """Median seconds: to the first token, from one token to the next."""

    first_s: float
    token_s: float


class Compute(NamedTuple):
    """Median seconds of a token: of all layers in one step, of both halves in two, of the ends."""

    whole_s: float
    halves_s: float
    ends_s: float


def rehearsed() -> Overheads:
    """What the rehearsal says; the usual overheads where it cannot be held. Blocking."""
    try:
        return run(rehearse())
    except (ManyhandsError, OSError):
        return Overheads()


async def rehearse() -> Overheads:
    """Raises ManyhandsError if the nodes do not start."""
    folder, ticket, device = model_path(), Ticket.new("rehearsal"), Device.start(num_cores())
    try:
        async with AsyncExitStack() as stack:
            config = RequestConfig(draft="off", reuse=False)
            node = await stack.enter_async_context(tls_node(ticket, None, is_ephemeral=True, request=config))
            model = await device.run(lambda: OriginModel(folder, "bf16"))
            spans = [Span(0, model.num_layers)] * 2
            running = await stack.enter_async_context(node_processes(spans, NodeOptions(str(folder)), ticket))
            first = Origin(node, model, device, [running[0].address])
            one, two = await _ask(first, await _both(first, [each.address for each in running]))
            return overheads_of(one, two, await device.run(lambda: _compute(folder, spans[0])))
    finally:
        device.close()


def overheads_of(one: Timed, two: Timed, compute: Compute) -> Overheads:
    """From times over one hop and over two, the compute among them. None is below 0, however the machine wavers."""
    hop_s = max(0.0, two.token_s - one.token_s - (compute.halves_s - compute.whole_s))
    origin_s = max(0.0, one.token_s - compute.whole_s - compute.ends_s - hop_s)
    return Overheads(hop_s, origin_s, max(0.0, one.first_s - one.token_s - hop_s))


async def _both(origin: Origin, addrs: Sequence[NodeAddr]) -> tuple[Offer, ...]:
    """A route over both nodes, half of the layers on each."""
    near, far = await origin.node.requests.survey(addrs)
    num_layers = origin.model.num_layers
    return near.part(Span(0, num_layers // 2)), far.part(Span(num_layers // 2, num_layers))


async def _ask(origin: Origin, both: tuple[Offer, ...]) -> tuple[Timed, Timed]:
    """Over the route that `origin` finds, and over `both`, in turn; the first request of each opens links."""
    taken: tuple[list[Timed], list[Timed]] = ([], [])
    for _, (route, kept) in itertools.product(range(REQUESTS + 1), zip((None, both), taken, strict=True)):
        await asyncio.sleep(DOZE_S)
        answer = origin.answer(origin.request_ids([1], SamplingParams(max_tokens=TOKENS, ignore_eos=True)))
        at = [time.perf_counter()]
        at.extend([time.perf_counter() async for _ in origin.stream(answer, route=route)])
        tokens = [b - a for a, b in itertools.pairwise(at[1:])]
        kept.append(Timed(at[1] - at[0], statistics.median(tokens)))
    one, two = (Timed(*map(statistics.median, zip(*kept[1:], strict=True))) for kept in taken)
    return one, two


def _compute(folder: Path, whole: Span) -> Compute:
    threads, half = num_cores(), len(whole) // 2
    span, ends = load_span(folder, whole, "bf16", threads), load_ends(folder, "bf16", threads)
    steps = [stepping(span, part, 1, threads, "bf16") for part in (whole, Span(0, half), Span(half, whole.end))]

    def halves() -> None:
        steps[1]()
        steps[2]()

    whole_s, halves_s = paired(steps[0], halves)
    return Compute(whole_s, halves_s, paired(ending(ends, "bf16"), lambda: None)[0])
