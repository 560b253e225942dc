"""`manyhands local`: a swarm of node processes on this machine, for trying and testing."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli import options
from manyhands.core import EndsAt, Precision, SamplingParams

if TYPE_CHECKING:
    from manyhands.origin import Origin


def local(
    model: options.Model,
    prompt: options.Prompt,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=255, help="How many node processes.")] = 2,
    cut: Annotated[str, typer.Option("--cut", help='Layers of each node, for example "0-7,8-15,16-23".')] = "",
    max_tokens: options.MaxTokens = 64,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = 0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    stop: options.Stop = None,
    dtype: options.DType = "bf16",
    path: options.Path_ = "ring",
    ends: options.Ends = "origin",
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Run a model cut over several node processes on this machine."""
    params = options.sampling_of(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        stop=stop,
    )
    precision, at, kind = options.precision_of(dtype), options.ends_of(ends), options.path_of(path)
    options.run(_local(model, prompt, nodes, cut, params, precision, kind, at, threads, as_json))


async def _local(
    model: str,
    prompt: str,
    nodes: int,
    cut: str,
    params: SamplingParams,
    precision: Precision,
    path: str,
    ends: EndsAt,
    threads: int | None,
    as_json: bool,
) -> None:
    from manyhands.cli.show import print_figures, print_json, show_answer

    began = time.monotonic()
    async with local_swarm(model, nodes, cut, precision, ends, threads) as origin:
        load_s = time.monotonic() - began
        answer = origin.answer(origin.request(prompt, params))
        await show_answer(origin, answer, as_json=as_json, path=path)
        if as_json:
            print_json(answer, load_s)
        else:
            print_figures(answer, load_s)


@asynccontextmanager
async def local_swarm(
    model: str, nodes: int, cut: str, precision: Precision, ends: EndsAt, threads: int | None
) -> AsyncIterator["Origin"]:
    """An origin in this process and its node processes. Raises ModelError, CutError, and what a node says."""
    from manyhands.cli.connect import load_origin, tls_node
    from manyhands.cli.model import progress_bar
    from manyhands.config import home_from_env
    from manyhands.core import even_cut, parse_cut
    from manyhands.local import NodeOptions, node_processes
    from manyhands.model.fetch import resolve_model
    from manyhands.model.load import read_config
    from manyhands.model.manifest import build_manifest
    from manyhands.swarm.ticket import Ticket
    from manyhands.worker.execute import Device

    with progress_bar() as bar:
        folder = await asyncio.to_thread(resolve_model, model, None, True, home_from_env(), bar)
        num_layers = int(read_config(folder).num_hidden_layers)
        spans = parse_cut(cut, num_layers) if cut else even_cut(num_layers, nodes)
        await asyncio.to_thread(build_manifest, folder, bar)  # once, before every node wants it
    ticket = Ticket.new("local")
    device = Device.start(threads)
    what = NodeOptions(str(folder), precision, ends == "edges", threads)
    try:
        async with node_processes(spans, what, ticket) as running, tls_node(ticket, None, is_ephemeral=True) as node:
            yield await load_origin(node, folder, precision, ends, device, [n.address for n in running])
    finally:
        device.close()
