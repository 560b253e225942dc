"""How do the benchmarks come to an origin with node processes behind it? As `manyhands local` does: TLS on loopback."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from manyhands.checkpoint.config_fields import read_facts
from manyhands.checkpoint.manifest import build_manifest
from manyhands.cli.connect import tls_node
from manyhands.config import RequestConfig
from manyhands.core import Precision, SamplingParams, even_cut
from manyhands.local import NodeOptions, node_processes
from manyhands.origin import Answer, Origin, OriginModel
from manyhands.origin.node import FullNode
from manyhands.swarm.ticket import Ticket
from manyhands.worker.execute import Device


@dataclass(slots=True)
class Base:
    """One origin process: its node, its model and its compute thread, shared by the origins of several swarms."""

    folder: Path
    ticket: Ticket
    node: FullNode
    model: OriginModel
    device: Device


@asynccontextmanager
async def base(
    folder: Path,
    threads: int,
    request: RequestConfig | None = None,
    ticket: Ticket | None = None,
    precision: Precision = "bf16",
) -> AsyncIterator[Base]:
    """An origin without a swarm yet, or of that of `ticket`. `request` None: no drafts, which random weights invite by
    repeating themselves."""
    build_manifest(folder)
    ticket = ticket or Ticket.new("bench")
    device = Device.start(threads)
    try:
        request = request or RequestConfig(draft="off")
        async with tls_node(ticket, None, request=request) as node:
            model = await device.run(lambda: OriginModel(folder, precision))
            yield Base(folder, ticket, node, model, device)
    finally:
        device.close()


async def origin(stack: AsyncExitStack, home: Base, nodes: int, threads: int, device: Device | None = None) -> Origin:
    """An origin whose model is cut over `nodes` new node processes of `threads` compute threads each."""
    spans = even_cut(read_facts(home.folder).num_layers, nodes)
    options = NodeOptions(str(home.folder), "bf16", threads=threads)
    running = await stack.enter_async_context(node_processes(spans, options, home.ticket))
    return Origin(home.node, home.model, device or home.device, [n.address for n in running])


@dataclass(slots=True)
class Run:
    """One answer and the moments (time.perf_counter) of its tokens. `began`: when it was asked for."""

    answer: Answer
    began: float
    at: list[float]

    @property
    def ttft_s(self) -> float:
        return self.at[0] - self.began

    @property
    def decode_tps(self) -> float:
        return (len(self.at) - 1) / (self.at[-1] - self.at[0])


async def generate(origin: Origin, ids: Sequence[int], new: int) -> Run:
    """Exactly `new` greedy tokens after `ids`."""
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    answer = origin.answer(origin.request_ids(ids, params))
    run = Run(answer, time.perf_counter(), [])
    async for _ in origin.stream(answer):
        run.at.append(time.perf_counter())
    return run


async def generate_all(origin: Origin, prompts: Sequence[Sequence[int]], new: int) -> list[Run]:
    """All at once."""
    return list(await asyncio.gather(*(generate(origin, ids, new) for ids in prompts)))


def aggregate_tps(runs: Sequence[Run]) -> float:
    """Tokens of all runs over the time from the first request to the last token."""
    return sum(len(r.at) for r in runs) / (max(r.at[-1] for r in runs) - min(r.began for r in runs))


def prompt_ids(count: int, salt: int = 0) -> list[int]:
    """A prompt of `count` byte tokens; another `salt` gives another one."""
    return [(salt * 31 + i * 7) % 251 for i in range(count)]
