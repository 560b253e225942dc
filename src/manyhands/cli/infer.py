"""`manyhands infer`: one prompt to a swarm, from the addresses of its ticket on."""

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from manyhands.cli import options
from manyhands.core import PathKind, SamplingParams
from manyhands.plain import one_line

if TYPE_CHECKING:
    from manyhands.origin import Origin

NEWS_S = 10.0  # for the directory to name nodes for all layers, where those of the ticket do not hold them


@options.grouped
def infer(
    model: options.Model,
    prompt: options.Prompt,
    ticket: options.Ticket,
    sampling: options.Sampling = options.Sampling(),
    computing: options.Computing = options.Computing(),
    routing: options.RouteOptions = options.RouteOptions(),
    as_json: options.Json = False,
) -> None:
    """Ask a swarm to go on from a prompt; this machine is the origin."""
    params, path = sampling.params, computing.path_kind
    options.run(_infer(swarm_origin(model, ticket, computing, routing), prompt, params, path, as_json))


async def _infer(
    made: AbstractAsyncContextManager["Origin"], prompt: str, params: SamplingParams, path: PathKind, as_json: bool
) -> None:
    from manyhands.cli.show import print_figures, print_json, show_answer

    began = time.monotonic()
    async with made as origin:
        load_s = time.monotonic() - began
        answer = origin.answer(origin.request(prompt, params))
        await show_answer(origin, answer, as_json=as_json, path=path)
        if as_json:
            print_json(answer, load_s)
        else:
            print_figures(answer, load_s)


@asynccontextmanager
async def swarm_origin(
    model: str, ticket_text: str, computing: options.Computing, routing: options.RouteOptions
) -> AsyncIterator["Origin"]:
    """An origin in this process that asks the nodes of a ticket, and those that they know.

    Raises TicketError, ModelError, BadRequest, ShardUnavailable.
    """
    precision, ends, draft = computing.precision(model), computing.ends_at, computing.drafts
    import asyncio

    from manyhands.cli.connect import load_origin, visitor
    from manyhands.cli.own_layers import keep_layers
    from manyhands.cli.progress import doing
    from manyhands.config import home_from_env
    from manyhands.core import Span
    from manyhands.swarm.ticket import Ticket
    from manyhands.weights.fetch import resolve_model
    from manyhands.weights.names import is_here
    from manyhands.weights.refetch import use_fetched
    from manyhands.worker.execute import Device

    ticket = Ticket.parse(ticket_text)
    found = options.settings()
    ticket.agree(found.swarm.directory)

    async def fetch(span: Span = Span(0, 1)) -> Path:
        with doing(f"reading {model}") as bar:
            # Layer 0 comes along with the ends: a folder without any layer is no checkpoint.
            return await asyncio.to_thread(resolve_model, model, span, True, home_from_env(), bar)

    request = routing.applied(replace(found.request, draft=draft))
    folder = await fetch()
    again = None if is_here(model) else fetch
    device = Device.start(computing.threads)
    try:
        async with visitor(ticket, found.swarm, request) as member:
            await member.call()
            addrs, directory = list(ticket.addresses), member.directory

            async def load(folder: Path) -> "Origin":
                return await load_origin(member.node, folder, precision, ends, device, addrs, directory)

            origin = await use_fetched(folder, again, load)
            await keep_layers(origin, device, fetch)
            if not await member.wait_until(origin.routes.is_covered, NEWS_S):
                for line in member.complaints():
                    typer.secho(f"! {one_line(line, 2000)}", fg="yellow", err=True)
            yield origin
    finally:
        device.close()
