"""`manyhands serve`: host layers of a model until stopped."""

import contextlib
import json
import math
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from manyhands.cli import gateway, options
from manyhands.cli.ahead import import_ahead
from manyhands.cli.background import go_on_in_background
from manyhands.cli.grouped import grouped
from manyhands.cli.lines import say
from manyhands.cli.process import steady_memory
from manyhands.cli.progress import doing, end_lines
from manyhands.cli.runfile import check_not_running, run_file
from manyhands.cli.up import Detach
from manyhands.core import NodeAddr, Precision, Span
from manyhands.errors import ManyhandsError

if TYPE_CHECKING:
    from manyhands.config import RequestConfig, SwarmConfig, WorkerConfig
    from manyhands.host_node import HostNode
    from manyhands.swarm.identity import NodeKey
    from manyhands.swarm.ticket import Ticket
    from manyhands.worker.execute import Device
    from manyhands.worker.serve import SpanHost

EVENTS_S: Final = 0.5  # between two events of one load
Ticket_ = Annotated[
    str, typer.Option("--ticket", envvar="MANYHANDS_TICKET", help="The swarm to serve; none: found a new one.")
]


@grouped
def serve(
    model: options.Model,
    layers: Annotated[str, typer.Option("--layers", help='Layers to host, for example "0-7" (counted from 0).')],
    listen: Annotated[str, typer.Option("--listen", help="Address to accept peers at; port 0: any.")] = "127.0.0.1:0",
    ticket: Ticket_ = "",
    dtype: options.DType = "auto",
    cache_dtype: options.CacheDType = "auto",
    ends: Annotated[bool, typer.Option("--ends", help="Also hold embedding or head (first and last hop).")] = False,
    spare: options.Spare = False,
    can_load: options.CanLoad = 0,
    advertise: Annotated[str, typer.Option(help="Address for others, if it is not the one listened at.")] = "",
    name: Annotated[str, typer.Option(help="What to call this node; default: the host's name.")] = "",
    key: Annotated[Path | None, typer.Option(help="This node's key file; default: $MANYHANDS_HOME/node.key.")] = None,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    routing: options.RouteOptions = options.RouteOptions(),
    max_sessions: Annotated[int, typer.Option(help="Sessions served at once; beyond it: Busy.")] = 32,
    cache_tokens: Annotated[int, typer.Option(help="Cache positions leased per layer; beyond it: Busy.")] = 65536,
    log_bytes: Annotated[int, typer.Option(help="Memory for output logs (repairs replay them); 0: none.")] = 256 << 20,
    evict_after: Annotated[float, typer.Option(help="Drop the weights after so many idle seconds; 0: never.")] = 0.0,
    api: gateway.Api = "",
    opened: gateway.ApiOptions = gateway.ApiOptions(),
    detach: Detach = False,
    as_json: Annotated[bool, typer.Option("--json", help="Events as JSON lines.")] = False,
    while_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Host layers of a model for the swarm. Ctrl-C once: hand the sessions over, then leave; twice: leave at once."""
    try:
        options.use_device(device)
        worker = replace(
            options.settings().worker,
            max_sessions=max_sessions,
            cache_tokens=cache_tokens,
            log_bytes=log_bytes,
            evict_after_s=evict_after,
        )
        job = _Job(
            model,
            Span.parse(layers),
            options.precision_of(dtype, model, cache_dtype),
            ends,
            spare,
            can_load,
            options.address("--listen", listen),
            options.address("--advertise", advertise) if advertise else None,
            name or socket.gethostname(),
            key,
            threads,
            opened.plan(api),
            while_stdin,
            detach,
        )
        request = routing.for_api(options.settings().request, has_api=bool(api))
        _start(job, ticket, worker, request, as_json)
    except ManyhandsError as error:
        if as_json:
            _say(True, "error", code=error.code, message=str(error))
        raise


@dataclass(frozen=True, slots=True)
class _Job:
    """What to serve, and as whom. `is_child`: of `local`, on whose stdin it depends. `is_detached`: it goes on in the
    background once it serves."""

    model: str
    span: Span
    precision: Precision
    has_ends: bool
    is_spare: bool
    can_load: int
    listen: NodeAddr
    advertise: NodeAddr | None
    name: str
    key: Path | None
    threads: int | None
    api: gateway.ApiPlan
    is_child: bool
    is_detached: bool

    async def fetch(self, span: Span | None = None) -> Path:
        """A folder with the layers of `span` (None: to serve), and the ends if they or the API need them. Raises ModelError."""
        from manyhands.config import home_from_env
        from manyhands.weights.here import folder_named

        if (here := folder_named(self.model, home_from_env())) is not None:  # at once, and without the hub's client
            return here
        from manyhands.weights.fetch import resolve_model
        from manyhands.weights.reading import read_aside

        with_ends = self.has_ends or self.api.addr is not None
        layers = span or self.span
        with doing(f"reading {self.model}") as bar:
            return await read_aside(
                lambda told: resolve_model(self.model, layers, with_ends, home_from_env(), told), bar
            )


def _start(job: _Job, ticket: str, worker: "WorkerConfig", request: "RequestConfig", as_json: bool) -> None:
    if not job.is_child:
        check_not_running(job.name)
    serves = go_on_in_background(job.name, as_json=as_json).serves if job.is_detached else lambda: None
    with doing(f"reading {job.model}"):
        has_api = job.api.addr is not None
        import_ahead(owns_requests=has_api, has_api=has_api, has_ends=job.has_ends)
        if has_api:
            from manyhands.cli.drafters import fetch_named

            fetch_named(request.draft)
        options.run(_serve(job, ticket, worker, request, serves, as_json))


async def _serve(
    job: _Job,
    ticket_text: str,
    worker: "WorkerConfig",
    request: "RequestConfig",
    serves: Callable[[], None],
    as_json: bool,
) -> None:
    """Serve until told to leave. `serves` is called once everything that is there from the start has been said."""
    from manyhands.cli.signals import StopSignals
    from manyhands.cli.tls import own_key, own_key_file
    from manyhands.swarm.ticket import Ticket
    from manyhands.weights.shelf import in_use
    from manyhands.worker.execute import device_of_process

    ticket = Ticket.parse(ticket_text) if ticket_text else Ticket.new("home")
    folder = await job.fetch()
    if job.api.addr is not None:
        from manyhands.text.tokenizer import load_tokenizer

        load_tokenizer(folder)  # what cannot be asked says so before it says that it serves
    found = options.settings()
    # Children of `local` share with it alone: no other process has its ticket.
    swarm = None if job.is_child else found.swarm
    key = own_key(job.key)
    # Children of `local` are not stopped by name, and several `local` have nodes of the same names.
    alone = contextlib.nullcontext() if job.is_child else run_file(job.name, own_key_file(job.key))
    with (
        StopSignals(while_stdin=job.is_child, node="" if job.is_child else job.name) as signals,
        alone,
        device_of_process(job.threads) as device,
        in_use(folder),
    ):

        async def work() -> None:
            async with _node(job, key, ticket, swarm, worker, request) as node:
                given = await _host(job, node, folder, device, ticket, signals.begin_serving, as_json)
                async with _api(job, node, folder, device, given, as_json):
                    async with steady_memory():
                        serves()
                        await signals.leaving()
                _say(as_json, "draining")
                await node.worker.drain()

        await signals.run(work())
    _say(as_json, "stopped")
    signals.check_interrupted()


def _node(
    job: _Job,
    key: "NodeKey",
    ticket: "Ticket",
    swarm: "SwarmConfig | None",
    worker: "WorkerConfig",
    request: "RequestConfig",
) -> "HostNode":
    """One that only hosts, which starts in half the time; with --api, one that also owns requests."""
    if job.api.addr is None:
        from manyhands.cli.tls import tls_transport
        from manyhands.host_node import HostNode
        from manyhands.origin.sampling import sampling

        return HostNode(tls_transport(ticket, key, swarm), key.private_key, sampling, name=job.name, worker=worker)
    from manyhands.cli.connect import tls_node

    return tls_node(ticket, key, swarm=swarm, name=job.name, worker=worker, request=request)


async def _host(
    job: _Job,
    node: "HostNode",
    folder: Path,
    device: "Device",
    ticket: "Ticket",
    begin_serving: Callable[[], None],
    as_json: bool,
) -> "Ticket":
    """Load the span, offer what could be loaded beside it, listen, and say so. Returns the ticket that names this node too."""
    from manyhands.checkpoint.folder import read_config
    from manyhands.member.loadable import offer_folder
    from manyhands.net.own_address import reachable
    from manyhands.weights.names import is_here
    from manyhands.weights.refetch import use_fetched
    from manyhands.worker.runner import precision_note

    events = LoadEvents()

    async def load(folder: Path) -> "SpanHost":
        with doing(f"reading {gateway.served_name(job.model)}") as bar:
            return await node.worker.host(
                folder,
                job.span,
                job.precision,
                device,
                model_name=job.model,
                has_ends=job.has_ends,
                is_spare=job.is_spare,
                progress=events if as_json else bar,
            )

    host = await use_fetched(folder, None if is_here(job.model) else job.fetch, load)
    if job.can_load:
        name, most = job.model, job.can_load
        await offer_folder(node, folder, job.precision, device, model_name=name, max_layers=most, has_ends=job.has_ends)
    bound = await node.listen(job.listen)
    begin_serving()
    addr = job.advertise or reachable(bound)
    events.close()
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
        arithmetic=host.info.arithmetic,
        back_end=host.back_end,
        is_spare=job.is_spare,
        note=precision_note(read_config(folder), job.precision),
        ticket=ticket.encode(),
    )
    return ticket


@contextlib.asynccontextmanager
async def _api(
    job: _Job, node: "HostNode", folder: Path, device: "Device", ticket: "Ticket", as_json: bool
) -> AsyncIterator[None]:
    """With --api: the HTTP API while the block runs, over the nodes of the ticket, this one among them."""
    if job.api.addr is None:
        yield
        return
    from manyhands.cli.connect import load_origin
    from manyhands.cli.own_layers import keep_layers
    from manyhands.origin.node import FullNode

    assert isinstance(node, FullNode)  # as _node made it
    name = gateway.served_name(job.model)
    origin = await load_origin(node, folder, job.precision, "origin", device, list(ticket.addresses), called=name)
    await keep_layers(origin, device, job.fetch)
    most = node.worker.config.max_sessions
    async with gateway.open_by_hand(job.api, origin, ticket.name, name, most, ticket.secret) as url:
        if as_json:
            _say(True, "api", url=url, model=name)
        else:
            gateway.say_api(url, name, f"manyhands stop {job.name}" if job.is_detached else "Ctrl-C")
        yield


class LoadEvents:
    """A HashProgress: how far a load is, as events, one every EVENTS_S; none once it is closed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._said_at, self._is_closed = clock, -math.inf, False
        self._text, self._total, self._done = "", 0, 0

    def start(self, name: str, total: int) -> None:
        """As HashProgress.start."""
        self._text, self._total, self._done, self._said_at = name, total, 0, -math.inf
        self.advance(0)

    def advance(self, amount: int) -> None:
        """As HashProgress.advance."""
        self._done += amount
        if self._clock() - self._said_at >= EVENTS_S:
            self.done()

    def done(self) -> None:
        """Say where it stands."""
        self._said_at = self._clock()
        if not self._is_closed:
            _say(True, "loading", text=self._text, done=self._done, total=self._total)

    def close(self) -> None:
        """Say nothing of later loads, after an eviction: what started this node reads no further than that it serves."""
        self._is_closed = True


def _say(as_json: bool, event: str, **facts: str | int) -> None:
    end_lines()
    if as_json:
        say(json.dumps({"event": event, **facts}))
    elif event == "serving":
        spare = " as a spare" if facts["is_spare"] else ""
        say(f"serving {facts['model']} layers {facts['layers']} in {facts['dtype']}{spare} at {facts['address']}")
        if facts["note"]:
            say(str(facts["note"]))
        say(f"ticket for other nodes and origins (a password):\n{facts['ticket']}")
    else:
        say(event)
