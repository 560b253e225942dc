"""`manyhands local`: a swarm of node processes on this machine, for trying and testing, with faults on request.

With a prompt it answers and ends; with --api it opens the HTTP API and runs until stopped.
"""

import json
import re
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from manyhands.cli import gateway, options
from manyhands.cli.ahead import import_ahead
from manyhands.cli.grouped import grouped
from manyhands.cli.process import steady_memory
from manyhands.cli.progress import Screen, doing
from manyhands.core import EndsAt, PathKind, Precision, SamplingParams
from manyhands.errors import BadRequest

if TYPE_CHECKING:
    from manyhands.cli.signals import StopSignals
    from manyhands.core import Span
    from manyhands.local import NodeOptions, NodeProcess
    from manyhands.origin import Answer, Origin

FaultKind = Literal["kill", "freeze", "slow", "poison", "drain"]
# Requests that run at once with --api: so many sessions on every node.
MAX_RUNNING = 64
RESERVE_TOKENS = 4096  # positions of cache that layers of a node that died are to find room for, as of a member
HopAtToken = "HOP@TOKEN: when so many tokens have come; may be repeated."


@grouped
def local(
    model: options.Model,
    prompt: options.Prompt = "",
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=255, help="How many node processes.")] = 2,
    cut: Annotated[str, typer.Option("--cut", help='Layers of each node, for example "0-7,8-15,16-23".')] = "",
    spares: Annotated[
        int, typer.Option("--spares", min=0, help="Further nodes that hold every layer, just in case.")
    ] = 0,
    standby: options.Standby = False,
    kill: Annotated[list[str] | None, typer.Option("--kill", help=f"kill -9 a hop, {HopAtToken}")] = None,
    freeze: Annotated[list[str] | None, typer.Option("--freeze", help=f"Stop a hop's process, {HopAtToken}")] = None,
    slow: Annotated[list[str] | None, typer.Option("--slow", help="HOP@TOKEN:SECONDS, each of its steps.")] = None,
    poison: Annotated[
        list[str] | None, typer.Option("--poison", help="HOP@TOKEN:nan|inf|scale|zero|nudge, what it computes.")
    ] = None,
    drain: Annotated[list[str] | None, typer.Option("--drain", help=f"Ask a hop to leave, {HopAtToken}")] = None,
    routing: options.RouteOptions = options.RouteOptions(),
    sampling: options.Sampling = options.Sampling(),
    computing: options.Computing = options.Computing(),
    api: gateway.Api = "",
    opened: gateway.ApiOptions = gateway.ApiOptions(),
    as_json: options.Json = False,
) -> None:
    """Run a model cut over several node processes on this machine, and disturb them if asked to.

    Give a prompt to have it answered, or --api HOST:PORT to open the HTTP API until stopped.
    """
    params, path = sampling.params, computing.path_kind
    computing.use_device()
    given: dict[FaultKind, list[str] | None] = {
        "kill": kill, "freeze": freeze, "slow": slow, "poison": poison, "drain": drain
    }  # fmt: skip
    faults = [InjectedFault.parse(kind, text) for kind, texts in given.items() for text in texts or ()]
    planned = opened.plan(api)
    if bool(api) == bool(prompt):
        raise BadRequest("give either a prompt (-p TEXT) or an address for the API (--api 127.0.0.1:8000)")
    _check_hops(faults, cut.count(",") + 1 if cut else nodes)
    if api and faults:
        raise BadRequest(f"--{faults[0].kind} counts the tokens of one answer: it goes with -p, not with --api")
    plan = LocalPlan(
        model,
        nodes,
        cut,
        computing.precision(model),
        computing.ends_at,
        computing.threads,
        spares,
        bool(faults),
        routing,
        standby,
        MAX_RUNNING if api else None,
    )
    with doing(f"reading {gateway.served_name(model)}"):
        import_ahead(owns_requests=True, has_api=bool(api))
        from manyhands.cli.drafters import fetch_named

        fetch_named(plan.routing.applied(options.settings().request).draft)
        options.run(_serve(plan, planned, as_json) if api else _local(plan, prompt, params, path, faults, as_json))


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """Disturb the process of hop `hop` (of the first route) once `at_token` tokens have come."""

    kind: FaultKind
    hop: int
    at_token: int
    value: str

    @classmethod
    def parse(cls, kind: FaultKind, text: str) -> "InjectedFault":
        """Read "1@20" or, for slow and poison, "1@20:value". Raises BadRequest."""
        needs = {"slow": r":(\d+(?:\.\d+)?)s?", "poison": r":(nan|inf|scale|zero|nudge)"}.get(kind, r"()")
        match = re.fullmatch(r"(\d+)@(\d+)" + needs, text)
        if match is None:
            form = {"slow": "1@20:1.5", "poison": "1@20:nan"}.get(kind, "1@20")
            raise BadRequest(f"--{kind} {text!r} is not of the form {form} (hop, @, tokens)")
        return cls(kind, int(match[1]), int(match[2]), match[3])

    def apply(self, node: "NodeProcess") -> None:
        match self.kind:
            case "kill":
                node.process.send_signal(signal.SIGKILL)
            case "freeze":
                node.process.send_signal(signal.SIGSTOP)
            case "drain":
                node.process.send_signal(signal.SIGTERM)
            case _:
                node.fault_file.write_text(f"{self.kind} {self.value}")


def _check_hops(faults: Sequence[InjectedFault], num_hops: int) -> None:
    for fault in faults:
        if fault.hop >= num_hops:
            raise BadRequest(f"--{fault.kind}: there is no hop {fault.hop}; hops are 0 to {num_hops - 1}")


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What to start."""

    model: str
    nodes: int
    cut: str = ""
    precision: Precision = "bf16"
    ends: EndsAt = "origin"
    threads: int | None = None
    spares: int = 0
    is_faulty: bool = False
    routing: options.RouteOptions = options.RouteOptions()
    standby: bool = False
    max_sessions: int | None = None  # of each node, where it is not the default

    def node_options(self, folder: Path, can_load: int) -> "NodeOptions":
        """What the nodes are started with, over the model's folder. `can_load`: layers that each takes in need."""
        from manyhands.local import NodeOptions

        module = "manyhands.testing.faulty_node" if self.is_faulty else "manyhands.cli"
        extra = ("--max-sessions", str(self.max_sessions)) if self.max_sessions is not None else ()
        has_ends = self.ends == "edges"
        spares = self.spares
        return NodeOptions(str(folder), self.precision, has_ends, self.threads, spares, can_load, module, extra)


class FaultInjector:
    """Applies faults as an answer grows; `check` is called after every token."""

    def __init__(self, faults: Sequence[InjectedFault], nodes: "Sequence[NodeProcess]", answer: "Answer") -> None:
        self._waiting, self._nodes, self._answer = list(faults), nodes, answer
        self._first_route: list[str] = []

    def check(self) -> list[str]:
        """The names of the nodes that it has just disturbed."""
        disturbed = []
        self._first_route = self._first_route or [offer.name for offer in self._answer.route]
        for fault in [f for f in self._waiting if len(self._answer.token_ids) >= f.at_token]:
            self._waiting.remove(fault)
            name = self._first_route[fault.hop]
            fault.apply(next(node for node in self._nodes if node.name == name))
            disturbed.append(name)
        return disturbed


async def _local(
    plan: LocalPlan, prompt: str, params: SamplingParams, path: PathKind, faults: Sequence[InjectedFault], as_json: bool
) -> None:
    from manyhands.aside import aside
    from manyhands.checkpoint.folder import read_config
    from manyhands.cli.show import print_figures, print_json, show_answer
    from manyhands.worker.runner import precision_note

    began = time.monotonic()
    async with local_swarm(plan) as (origin, nodes):
        load_s = time.monotonic() - began
        if note := precision_note(read_config(origin.model.folder), plan.precision):
            typer.echo(note, err=True)
        answer = origin.answer(await aside(origin.request, prompt, params))
        disturber = FaultInjector(faults, nodes, answer)
        await show_answer(origin, answer, as_json=as_json, lead=prompt, on_token=disturber.check, path=path)
        if as_json:
            print_json(answer, load_s)
        else:
            print_figures(answer, load_s)


async def _serve(plan: LocalPlan, api: gateway.ApiPlan, as_json: bool) -> None:
    """Open the API over the swarm until SIGINT or SIGTERM."""
    from manyhands.cli.signals import StopSignals

    with StopSignals() as signals:
        await signals.run(_answer_api(plan, api, as_json, signals))
    signals.check_interrupted()


async def _answer_api(plan: LocalPlan, api: gateway.ApiPlan, as_json: bool, signals: "StopSignals") -> None:
    name = gateway.served_name(plan.model)
    async with (
        local_swarm(plan) as (origin, nodes),
        gateway.open_by_hand(api, origin, "local", name, MAX_RUNNING) as url,
    ):
        _say_api(url, name, nodes, as_json=as_json)
        async with steady_memory():
            await signals.leaving()


def _say_api(url: str, model: str, nodes: "Sequence[NodeProcess]", *, as_json: bool) -> None:
    if as_json:
        told = [{"name": n.name, "layers": str(n.span), "address": str(n.address), "pid": n.process.pid} for n in nodes]
        typer.echo(json.dumps({"event": "api", "url": url, "model": model, "nodes": told}))
        return
    for node in nodes:
        typer.echo(f"{node.name:<8} layers {node.span!s:<7} at {node.address}  process {node.process.pid}")
    gateway.say_api(url, model)


@asynccontextmanager
async def local_swarm(plan: LocalPlan) -> "AsyncIterator[tuple[Origin, list[NodeProcess]]]":
    """An origin in this process and its node processes. Raises ModelError, CutError, and what a node says."""
    import asyncio

    from manyhands.checkpoint.config_fields import read_facts
    from manyhands.checkpoint.manifest import build_manifest
    from manyhands.cli.connect import load_origin, tls_node
    from manyhands.cli.own_layers import keep_layers
    from manyhands.config import home_from_env
    from manyhands.core import Span, even_cut, parse_cut
    from manyhands.local import node_processes
    from manyhands.swarm.ticket import Ticket
    from manyhands.weights.fetch import resolve_model
    from manyhands.weights.reading import read_aside
    from manyhands.worker.execute import Device

    name = gateway.served_name(plan.model)
    with ExitStack() as shown:
        screen = shown.enter_context(doing(f"reading {name}"))
        folder = await read_aside(lambda told: resolve_model(plan.model, None, True, home_from_env(), told), screen)
        num_layers = read_facts(folder).num_layers
        spans = parse_cut(plan.cut, num_layers) if plan.cut else even_cut(num_layers, plan.nodes)
        # Once, before every node wants it.
        await read_aside(lambda told: build_manifest(folder, told, called=name), screen)
        spans += [Span(0, num_layers)] * plan.spares
        can_load = await asyncio.to_thread(_reserve, folder, plan.precision, spans)
        ticket = Ticket.new("local")
        device = Device.start(plan.threads)
        shown.callback(device.close)
        request = plan.routing.applied(replace(options.settings().request, standby=plan.standby))
        waiting = NodesToCome(screen, name, len(spans))
        async with (
            node_processes(
                spans, plan.node_options(folder, can_load), ticket, waiting.serves, waiting.loads
            ) as running,
            tls_node(ticket, None, request=request) as node,
        ):
            addrs = [n.address for n in running]
            origin = await load_origin(node, folder, plan.precision, plan.ends, device, addrs, called=name)
            await keep_layers(origin, device, lambda _: asyncio.sleep(0, folder))
            for child in running:
                node.start(_forget_ended(child, origin))
            screen.end()
            yield origin, running


async def _forget_ended(child: "NodeProcess", origin: "Origin") -> None:
    """A process of this swarm that has ended is not started again: no request waits for it."""
    await child.process.wait()
    origin.routes.addrs = [addr for addr in origin.routes.addrs if addr != child.address]


def _reserve(folder: Path, precision: Precision, spans: "Sequence[Span]") -> int:
    """Layers that memory still holds beside `spans`: a survivor of a death may load so many. Blocking."""
    from manyhands.config import home_from_env
    from manyhands.place.budget import layers_in_reserve
    from manyhands.place.shape import look_up
    from manyhands.resources import available_memory

    shape = look_up(str(folder), precision, home_from_env()).shape
    return layers_in_reserve(available_memory(), shape, spans, min(RESERVE_TOKENS, shape.context))


class NodesToCome:
    """Says how many nodes are waited for, and how much they have loaded together."""

    def __init__(self, screen: Screen, model: str, count: int) -> None:
        self._screen, self._model, self._count, self._left = screen, model, count, count
        self._loads: dict[str, tuple[int, int]] = {}  # node -> bytes done, bytes in all
        self._shown, self._done = ("", 0), 0
        self._tell()

    def serves(self, node: str) -> None:
        """One more node serves."""
        self._left -= 1
        self._tell()

    def loads(self, node: str, done: int, total: int) -> None:
        """A node has loaded `done` bytes of `total`."""
        self._loads[node] = (done, total)
        self._tell()

    def _tell(self) -> None:
        done, total = (sum(sizes) for sizes in zip((0, 0), *self._loads.values(), strict=True))
        text = f"starting {self._count} node processes of {self._model}"
        text += f", {self._left} to come" if self._left < self._count else ""
        if not self._left:
            text, total = f"{self._count} node processes serve {self._model}", 0
        if (text, total) != self._shown:
            self._shown, self._done = (text, total), done
            self._screen.start(text, total, done) if total else self._screen.say(text)
        self._screen.advance(done - self._done)
        self._done = done
