"""`manyhands serve`: host layers of a model until stopped."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli import gateway, options
from manyhands.cli.process import freeze_startup
from manyhands.cli.runfile import run_file
from manyhands.core import NodeAddr, Precision, Span
from manyhands.errors import ManyhandsError

if TYPE_CHECKING:
    from manyhands.origin.node import FullNode
    from manyhands.swarm.ticket import Ticket
    from manyhands.worker.execute import Device
    from manyhands.worker.serve import SpanHost


def serve(
    model: options.Model,
    layers: Annotated[str, typer.Option("--layers", help='Layers to host, for example "0-7" (counted from 0).')],
    listen: Annotated[str, typer.Option("--listen", help="Address to accept peers at; port 0: any.")] = "127.0.0.1:0",
    ticket: Annotated[
        str, typer.Option("--ticket", envvar="MANYHANDS_TICKET", help="The swarm to serve; none: found a new one.")
    ] = "",
    dtype: options.DType = "bf16",
    ends: Annotated[bool, typer.Option("--ends", help="Also hold embedding or head (first and last hop).")] = False,
    spare: Annotated[bool, typer.Option("--spare", help="Serve only where nobody else does: after a death.")] = False,
    can_load: Annotated[
        int, typer.Option("--can-load", min=0, help="Load so many further layers when nobody else holds them.")
    ] = 0,
    advertise: Annotated[str, typer.Option(help="Address for others, if it is not the one listened at.")] = "",
    name: Annotated[str, typer.Option(help="What to call this node; default: the host's name.")] = "",
    key: Annotated[Path | None, typer.Option(help="This node's key file; default: $MANYHANDS_HOME/node.key.")] = None,
    threads: options.Threads = None,
    max_sessions: Annotated[int, typer.Option(help="Sessions served at once; beyond it: Busy.")] = 32,
    cache_tokens: Annotated[int, typer.Option(help="Positions of cache leased in all; beyond it: Busy.")] = 65536,
    log_bytes: Annotated[int, typer.Option(help="Memory for output logs (repairs replay them); 0: none.")] = 256 << 20,
    evict_after: Annotated[float, typer.Option(help="Drop the weights after so many idle seconds; 0: never.")] = 0.0,
    api: gateway.Api = "",
    insecure: gateway.Insecure = False,
    allow_host: gateway.AllowHost = None,
    cors: gateway.Cors = None,
    job_file: gateway.JobFile = None,
    trace: gateway.Trace = "",
    log_json: gateway.LogJson = False,
    as_json: Annotated[bool, typer.Option("--json", help="Events as JSON lines.")] = False,
    while_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Host layers of a model for whoever holds the ticket.

    Ctrl-C once: hand the sessions over to other nodes, then leave. Twice: leave at once.
    """
    try:
        worker = replace(
            options.settings().worker,
            max_sessions=max_sessions,
            cache_tokens=cache_tokens,
            log_bytes=log_bytes,
            evict_after_s=evict_after,
        )
        precision, addr = options.precision_of(dtype), NodeAddr.parse(listen)
        shown = NodeAddr.parse(advertise) if advertise else None
        name = name or socket.gethostname()
        opened = gateway.ApiPlan.of(api, insecure, job_file, trace, log_json, gateway.Names.of(allow_host, cors))
        job = _Job(model, Span.parse(layers), precision, ends, spare, addr, shown, name, key, threads, opened, can_load)
        options.run(_serve(job, ticket, worker, as_json, while_stdin))
    except ManyhandsError as error:
        if as_json:
            _say(True, "error", code=error.code, message=str(error))
        raise


class _Job:
    """What to serve, and as whom."""

    def __init__(
        self,
        model: str,
        span: Span,
        precision: Precision,
        has_ends: bool,
        is_spare: bool,
        listen: NodeAddr,
        advertise: NodeAddr | None,
        name: str,
        key: Path | None,
        threads: int | None,
        api: gateway.ApiPlan,
        can_load: int = 0,
    ) -> None:
        self.can_load = can_load
        self.model, self.span, self.precision, self.has_ends = model, span, precision, has_ends
        self.is_spare, self.api = is_spare, api
        self.listen, self.advertise, self.name, self.key, self.threads = listen, advertise, name, key, threads


async def _serve(job: _Job, ticket_text: str, worker: Any, as_json: bool, while_stdin: bool) -> None:
    from manyhands.checkpoint.folder import read_config
    from manyhands.cli.connect import tls_node
    from manyhands.cli.model import progress_bar
    from manyhands.config import home_from_env
    from manyhands.member.neighbours import reachable
    from manyhands.swarm.ticket import Ticket
    from manyhands.weights.fetch import folder_named, resolve_model
    from manyhands.weights.refetch import use_fetched
    from manyhands.worker.execute import device_of_process
    from manyhands.worker.runner import widening_note

    ticket = Ticket.parse(ticket_text) if ticket_text else Ticket.new("home")
    with_ends = job.has_ends or job.api.addr is not None

    async def fetch() -> Path:
        with progress_bar() as bar:
            return await asyncio.to_thread(resolve_model, job.model, job.span, with_ends, home_from_env(), bar)

    folder = await fetch()
    stop, leave = _signals(while_stdin)
    with device_of_process(job.threads) as device:
        found = options.settings()
        swarm = (
            None if while_stdin else found.swarm
        )  # children of `local` share with it alone: its ticket is nobody else's
        async with tls_node(ticket, job.key, swarm=swarm, name=job.name, worker=worker, request=found.request) as node:

            async def serve(folder: Path) -> "SpanHost":
                return await node.worker.host(
                    folder,
                    job.span,
                    job.precision,
                    device,
                    model_name=job.model,
                    has_ends=job.has_ends,
                    is_spare=job.is_spare,
                )

            host = await use_fetched(folder, None if folder_named(job.model) else fetch, serve)
            if job.can_load:
                await _offer_to_load(node, folder, job, device)
            bound = await node.listen(job.listen)
            addr = job.advertise or reachable(bound)
            ticket = ticket.with_address(NodeAddr(addr.host, addr.port, bound.node))
            _say(
                as_json,
                "serving",
                model=job.model,
                layers=str(job.span),
                dtype=job.precision,
                address=str(addr),
                node=str(bound.node),
                model_id=host.info.model,
                note=widening_note(read_config(folder), job.precision),
                ticket=ticket.encode(),
            )
            # Children of `local` are nobody's to drain by name, and several `local` have nodes of the same names.
            with contextlib.nullcontext() if while_stdin else run_file(job.name):
                async with _api(job, node, folder, device, ticket, as_json):
                    freeze_startup()
                    await _first(stop, leave)
                if not stop.is_set():
                    _say(as_json, "draining")
                    await _drain(node.worker.drain(), stop)
        _say(as_json, "stopped")


async def _offer_to_load(node: "FullNode", folder: Path, job: _Job, device: "Device") -> None:
    """Layers of the folder that this node would load when nobody else holds them."""
    from manyhands.checkpoint.config_fields import read_facts
    from manyhands.checkpoint.folder import read_entries
    from manyhands.checkpoint.partition import longest_run

    here = longest_run((entry.name for entry in read_entries(folder)), read_facts(folder).num_layers)
    await node.worker.offer_to_load(folder, here, job.precision, device, model_name=job.model, max_layers=job.can_load)


@contextlib.asynccontextmanager
async def _api(
    job: _Job, node: "FullNode", folder: Path, device: "Device", ticket: "Ticket", as_json: bool
) -> AsyncIterator[None]:
    """With --api: the HTTP API while the block runs, over the nodes of the ticket, this one among them."""
    if job.api.addr is None:
        yield
        return
    from manyhands.cli.connect import load_origin

    origin = await load_origin(node, folder, job.precision, "origin", device, list(ticket.addresses))
    name = gateway.served_name(job.model)
    async with job.api.open({name: origin}, node.worker.config.max_sessions) as url:
        if as_json:
            _say(True, "api", url=url, model=name)
        else:
            gateway.say_api(url, name)
        yield


def _signals(while_stdin: bool) -> tuple[asyncio.Event, asyncio.Event]:
    """(stop, leave). SIGINT or SIGTERM sets `leave`, a second one `stop`; so does the end of stdin (the parent died)."""
    stop, leave = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: stop.set() if leave.is_set() else leave.set())
    if while_stdin:
        loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 4096) else stop.set())
    return stop, leave


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


async def _drain(drain: Awaitable[None], stop: asyncio.Event) -> None:
    """Run `drain` until it is done or `stop` is set."""
    tasks = [asyncio.ensure_future(drain), asyncio.ensure_future(stop.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _say(as_json: bool, event: str, **facts: str) -> None:
    if as_json:
        print(json.dumps({"event": event, **facts}), flush=True)
    elif event == "serving":
        print(f"serving {facts['model']} layers {facts['layers']} in {facts['dtype']} at {facts['address']}")
        print(facts["note"] + "\n" if facts["note"] else "", end="")
        print(f"ticket for other nodes and origins (a password):\n{facts['ticket']}", flush=True)
    else:
        print(event, flush=True)
