"""How commands open a gateway: `local --api`, `serve --api` and `up`, until they are stopped."""

import contextlib
import errno
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli import options
from manyhands.cli.lines import fitted
from manyhands.cli.owner import owner_file
from manyhands.config import ApiConfig, home_from_env
from manyhands.core import NodeAddr
from manyhands.errors import BadRequest, NoAddress

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI

    from manyhands.api.auth import KeyRing
    from manyhands.api.gateway import Gateway, OtherModels
    from manyhands.api.jobs import History
    from manyhands.api.metrics import Metrics
    from manyhands.api.native.swarm import SwarmView
    from manyhands.origin import Origin

Api = Annotated[str, typer.Option("--api", help="Open the HTTP API at HOST:PORT (port 0: any) and run until stopped.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Let other machines use the API although no key is needed.")]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host", help="A name of the API beside this machine's own, as behind a proxy; may be repeated."
    ),
]
Cors = Annotated[
    list[str] | None,
    typer.Option("--cors", help="Origin whose pages may use the API, https://HOST[:PORT] or *; may be repeated."),
]
JobFile = Annotated[
    Path | None, typer.Option("--job-file", help="Keep the history of requests in this file; never what was said.")
]
Trace = Annotated[str, typer.Option("--trace", help="Send OpenTelemetry spans to this exporter: otlp, console.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log to stderr as JSON lines.")]


@dataclass(frozen=True, slots=True)
class Names:
    """--allow-host and --cors as given; empty: as configured. Raises BadRequest for what is neither."""

    hosts: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()

    @classmethod
    def of(cls, hosts: list[str] | None, cors: list[str] | None) -> "Names":
        ApiConfig(hosts=tuple(hosts or ()), cors=tuple(cors or ()))
        return cls(tuple(hosts or ()), tuple(cors or ()))


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """The options that only an API gives a meaning."""

    insecure: Insecure = False
    allow_host: AllowHost = None
    cors: Cors = None
    job_file: JobFile = None
    trace: Trace = ""
    log_json: LogJson = False

    @property
    def names(self) -> Names:
        """Raises BadRequest for what is no name."""
        return Names.of(self.allow_host, self.cors)

    def check_alone(self, *names: str) -> None:
        """Raise BadRequest if one of the options `names` is given, which means nothing without --api."""
        given = [name for name in names if getattr(self, name)]
        if given:
            raise BadRequest(f"--{given[0].replace('_', '-')} is for the HTTP API: open it with --api HOST:PORT")

    def plan(self, api: str) -> "ApiPlan":
        """Where --api says. Raises BadRequest, before anything is loaded, for an address that is taken and for an option that
        means nothing without it, and as check_exposure does."""
        names = self.names
        if not api:
            self.check_alone("insecure", "job_file", "trace", "log_json", "allow_host", "cors")
            return ApiPlan(None)
        from manyhands.api.auth import check_exposure

        addr = options.address("--api", api)
        check_exposure(addr.host, _keys(), insecure=self.insecure)
        if addr.port and ":" not in addr.host and (error := refused_at(addr.port, addr.host)):
            raise (BadRequest if error.errno == errno.EACCES else NoAddress)(_in_use(addr, error))
        self._check_watchers()
        return ApiPlan(addr, self.insecure, self.job_file, self.trace, self.log_json, names)

    def _check_watchers(self) -> None:
        """Raise BadRequest, before anything is loaded, for a job file that cannot be one and an exporter that is not there."""
        if self.job_file is not None:
            from manyhands.api.jobs import JobFile

            JobFile(self.job_file).make()
        if self.trace:
            from manyhands.api.trace import trace_exporter

            trace_exporter(self.trace)

    def member_plan(self, api: str) -> "ApiPlan":
        """Of a member: "off" is nowhere, and "" where this machine alone can ask for its view of the swarm.

        Raises BadRequest, now and not when the model is loaded, for what cannot be opened or has no meaning.
        """
        if api not in ("", "off"):
            return self.plan(api)
        self.check_alone("job_file", "trace", "log_json")
        addr = None if api == "off" else NodeAddr("127.0.0.1", 0)
        return ApiPlan(addr, self.insecure, names=self.names, is_told=False)


def _in_use(addr: NodeAddr, error: OSError) -> str:
    """Why the API cannot be opened at `addr`: a node of this user's that has it, or what the system says, which is `error`."""
    from manyhands.cli.runfile import run_path, running_names, running_pid
    from manyhands.member.home import list_running

    for running in list_running(home_from_env()):
        if running.api.rstrip("/").endswith(f":{addr.port}"):
            # `local` can be stopped by no name, `serve` by another one than its API has.
            names = [name for name in running_names() if running_pid(run_path(name)) == running.pid]
            who = f"the node {names[0]}" if names else running.name
            end = f"manyhands stop {names[0]}" if names else f"kill {running.pid}"
            return (
                f"{addr} is in use by {who}, which runs here already (process {running.pid}): `{end}` ends it; "
                "for a second one choose another --api HOST:PORT"
            )
    if error.errno == errno.EADDRINUSE:
        return f"{addr} is in use: stop what listens there, or choose another --api HOST:PORT"
    from manyhands.net.names import reason_of

    remedy = "a port from 1024 on" if error.errno == errno.EACCES else "an address of this machine"
    return f"the API cannot listen on {addr}: {reason_of(error)}; choose {remedy} (--api HOST:PORT)"


@dataclass(frozen=True, slots=True)
class ApiPlan:
    """Where to open the API (None: nowhere) and what looks on."""

    addr: NodeAddr | None
    insecure: bool = False
    job_file: Path | None = None
    trace: str = ""
    log_json: bool = False
    names: Names = Names()
    is_told: bool = True  # asked for by --api; else it only shows a member's view of the swarm

    def open(
        self,
        origins: Mapping[str, "Origin"],
        max_running: int,
        view: "SwarmView | None" = None,
        secret: bytes | None = None,
        more: "Sequence[APIRouter]" = (),
        others: "OtherModels | None" = None,
    ) -> contextlib.AbstractAsyncContextManager[str]:
        """api_for of this plan, which has an address. `secret`: of the swarm whose other gateways go on with its streams.

        `more`: routes of a member alone.
        """
        assert self.addr is not None
        return api_for(
            origins,
            self.addr,
            max_running=max_running,
            insecure=self.insecure,
            job_file=self.job_file,
            trace=self.trace,
            log_json=self.log_json,
            names=self.names,
            view=view,
            secret=secret,
            more=more,
            others=others,
        )


@asynccontextmanager
async def api_for(
    origins: Mapping[str, "Origin"],
    api: NodeAddr,
    *,
    max_running: int = 64,
    insecure: bool = False,
    job_file: Path | None = None,
    trace: str = "",
    log_json: bool = False,
    names: Names = Names(),
    view: "SwarmView | None" = None,
    secret: bytes | None = None,
    more: "Sequence[APIRouter]" = (),
    others: "OtherModels | None" = None,
) -> AsyncIterator[str]:
    """Serve `origins` by name, and `others` once they are asked for, at `api` while the block runs; yields the URL.

    `view`: the swarm as a member sees it (None: as links show it). No more than `max_running` requests run at once, others
    wait: make it what the nodes serve (WorkerConfig.max_sessions), beyond which they would refuse.

    Keys are those of $MANYHANDS_HOME, where commands of this machine find its owner's secret; limits those of the
    configuration, as are the names and origins that `names` leaves out. Raises BadRequest if the address is taken, or
    wider than this machine while no key is needed (unless `insecure`); if the job file cannot be written or the trace
    exporter is not installed.
    """
    from manyhands.api import log
    from manyhands.api.gateway import Gateway
    from manyhands.api.http.app import create_app
    from manyhands.api.http.server import serving
    from manyhands.api.jobs import History, JobFile
    from manyhands.api.metrics import Metrics
    from manyhands.api.names import ModelNames
    from manyhands.api.native.swarm import HopSpeeds, view_by_links
    from manyhands.api.trace import open_tracing
    from manyhands.aside import aside, entered_aside

    if log_json:
        log.log_json(logging.INFO)
    async with AsyncExitStack() as stack:
        found = await aside(options.settings)
        limits = replace(found.limits, max_running=found.limits.max_running or max_running)
        gateway = Gateway(origins, limits, names=ModelNames.of(found.api.aliases), secret=secret, others=others)
        metrics, speeds = Metrics(gateway), HopSpeeds()
        jobs = await stack.enter_async_context(entered_aside(JobFile(job_file))) if job_file else None
        history = await aside(History, file=jobs)
        traced = [stack.enter_context(open_tracing(trace))] if trace else []
        gateway.observers += [log.RequestLog(), metrics, history, *([speeds] if view is None else []), *traced]

        def make_app() -> "FastAPI":
            hosts, cors = names.hosts or found.api.hosts, names.cors or found.api.cors
            routers = [*_routers(gateway, history, metrics, view or view_by_links(gateway, speeds)), *more]
            routers += _debug_routers(gateway) if found.api.debug else []
            return create_app(gateway, keys=_keys(), routers=routers, cors=cors, hosts=hosts)

        app = await aside(make_app)  # takes a second: meanwhile the node answers heartbeats
        bound = await stack.enter_async_context(serving(app, api.host, api.port, insecure=insecure))
        proof = owner_file(home_from_env(), bound.port, app.state.access.owner_secret)
        await stack.enter_async_context(entered_aside(proof))
        yield f"http://{bound}"


def _debug_routers(gateway: "Gateway") -> "list[APIRouter]":
    from manyhands.api.native.process import process_router

    return [process_router(gateway)]


def _routers(gateway: "Gateway", history: "History", metrics: "Metrics", view: "SwarmView") -> "list[APIRouter]":
    """Every route of a gateway but those that create_app brings."""
    from manyhands.api.formats import ModelFormats
    from manyhands.api.native.plan import plan_router
    from manyhands.api.native.routes import native_router
    from manyhands.api.native.swarm import swarm_router
    from manyhands.api.routers import compatible_routers
    from manyhands.api.status import status_router

    formats = ModelFormats(gateway)
    return [
        *compatible_routers(gateway, formats),
        native_router(gateway, history, formats),
        status_router(gateway, metrics),
        swarm_router(view),
        plan_router(gateway, view),
    ]


def refused_at(port: int, host: str = "0.0.0.0") -> OSError | None:
    """Why this machine cannot listen there; None: it can."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error
    return None


def _keys() -> "KeyRing":
    from manyhands.api.auth import FILE, KeyRing

    return KeyRing(home_from_env() / FILE)


@asynccontextmanager
async def open_by_hand(
    plan: ApiPlan, origin: "Origin", swarm: str, model: str, max_running: int, secret: bytes | None = None
) -> AsyncIterator[str]:
    """`plan.open` for the one model of a swarm without a directory, found by the commands of this machine."""
    from manyhands.aside import aside, entered_aside
    from manyhands.member.home import Running, announced

    me = Running(f"{swarm}-{os.getpid()}", os.getpid(), origin.node.transport.node, swarm, "")
    await origin.routes.look_around()  # so that the view is not empty until the first request
    async with plan.open({model: origin}, max_running, secret=secret) as url:
        async with entered_aside(announced(home_from_env(), me)) as announce:
            await aside(announce, url)
            yield url


def served_name(model: str) -> str:
    """What to call MODEL in the API: a folder or a file by its name, "tales" and hub ids as they are."""
    from manyhands.weights.names import label

    return label(model)


def told_url(url: str) -> str:
    """`url` as it can be typed on another machine too: with this machine's own address in place of 0.0.0.0 and [::]."""
    from manyhands.net.own_address import reachable

    scheme, _, addr = url.partition("://")
    return f"{scheme}://{reachable(NodeAddr.parse(addr))}"


def say_api(url: str, model: str, stops: str = "Ctrl-C") -> None:
    """What to do with an API that has just opened. `stops`: what ends it."""
    url = told_url(url)
    lines = (
        f"chat in a browser: {url}/",
        f"API for programs:  {url}/v1",
        f'  described at {url}/docs; the model is "{model}"',
        f"  OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=none",
        f"{stops} stops it",
    )
    typer.echo(fitted("\n".join(lines), sys.stdout))
