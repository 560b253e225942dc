"""A swarm of node processes on this machine, for trying, testing and measuring: real processes, real TLS on loopback.

Each node is `manyhands serve --json` in a process of its own with its own key. Its stdin is a pipe that we hold: a node
whose parent dies reads the end of it and leaves, so nothing is left behind.
"""

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.core import NodeAddr, Precision, Span, caches_codes, weight_precision
from manyhands.engine.devices import CPU, torch_device
from manyhands.errors import ManyhandsError, ModelError, first_of
from manyhands.refusals import no_process, refused
from manyhands.swarm.ticket import Ticket

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 5.0


@dataclass(slots=True)
class NodeProcess:
    """One running `serve` process and where it listens."""

    name: str
    span: Span
    address: NodeAddr
    process: asyncio.subprocess.Process
    fault_file: Path
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=20))


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What every node of a local swarm is started with."""

    model: str
    precision: Precision = "bf16"
    has_ends: bool = False
    threads: int | None = None
    num_spares: int = 0  # the last so many spans are spares
    can_load: int = 0  # layers that each of the others loads when no other node holds them
    module: str = "manyhands.cli"  # testing/faulty_node.py: nodes that can be made to misbehave
    extra: tuple[str, ...] = ()


@asynccontextmanager
async def node_processes(
    spans: Sequence[Span],
    options: NodeOptions,
    ticket: Ticket,
    on_serving: Callable[[str], None] = lambda name: None,
    on_loading: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> AsyncIterator[list[NodeProcess]]:
    """Start one node per span at once, wait until all serve, stop them on leaving.

    `on_serving` is told the name of each node as soon as it serves, `on_loading` how many bytes one has loaded, and of how
    many.
    Raises what a node said when it could not start (its code and its one line), and ModelError for one that says nothing for
    START_TIMEOUT_S.
    """
    with tempfile.TemporaryDirectory(prefix="manyhands-") as keys:
        started: list[asyncio.subprocess.Process] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_start(i, span, options, ticket, Path(keys), started, len(spans), on_loading))
                    for i, span in enumerate(spans)
                ]
                for task in tasks:
                    task.add_done_callback(lambda task: _tell(task, on_serving))
        except BaseException as raised:  # a TaskGroup that is cancelled raises no group
            await _stop(started)
            error = first_of(raised, ManyhandsError) if isinstance(raised, BaseExceptionGroup) else None
            if error is None:
                raise
            raise error  # noqa: B904 -- what it came of stays its cause
        nodes = [task.result() for task in tasks]
        drains = [asyncio.ensure_future(_drain(node)) for node in nodes]
        try:
            yield nodes
        finally:
            await _stop(started)
            for drain in drains:
                await drain


async def _start(
    index: int,
    span: Span,
    options: NodeOptions,
    ticket: Ticket,
    keys: Path,
    started: list[asyncio.subprocess.Process],
    num_nodes: int,
    on_loading: Callable[[str, int, int], None],
) -> NodeProcess:
    is_spare = index >= num_nodes - options.num_spares
    name = f"spare-{index}" if is_spare else f"node-{index}"
    arguments = ["serve", options.model, "--layers", str(span), "--listen", f"{loopback()}:0", "--name", name]
    arguments += [
        "--key",
        str(keys / f"{name}.key"),
        "--dtype",
        weight_precision(options.precision),
        "--json",
        "--while-stdin",
    ]
    arguments += ["--cache-dtype", "w8" if caches_codes(options.precision) else "auto"]
    arguments += ["--device", torch_device() or CPU]
    arguments += ["--ends"] if options.has_ends else []
    arguments += ["--spare"] if is_spare else ["--can-load", str(options.can_load)]
    fault_file = keys / f"{name}.fault"
    arguments += ["--threads", str(options.threads)] if options.threads else []
    # The ticket not in argv: it is a password, and argv is there for every user to read. What comes is read as UTF-8.
    passed = {"MANYHANDS_TICKET": ticket.encode(), "MANYHANDS_FAULT_FILE": str(fault_file), "PYTHONIOENCODING": "utf-8"}
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", options.module, *arguments, *options.extra),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **passed},
        )
    except OSError as error:
        why = no_process() if error.errno == errno.EAGAIN else refused(error) or str(error)
        raise ManyhandsError(f"{name} (layers {span}) cannot be started: {why}") from error
    started.append(process)
    assert process.stdout is not None and process.stderr is not None
    while line := await _next_line(process.stdout, f"{name} (layers {span})"):
        event = json.loads(line)
        if event["event"] == "serving":
            return NodeProcess(name, span, NodeAddr.parse(event["address"], event["node"]), process, fault_file)
        if event["event"] == "error":
            raise _error(event["code"], f"{name} (layers {span}): {event['message']}")
        if event["event"] == "loading":
            on_loading(name, event["done"], event["total"])
    said = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
    why = said[-1].removeprefix("manyhands: ") if said else _ending(await process.wait())
    raise ModelError(f"{name} (layers {span}) ended before it served: {why}")


async def _next_line(stdout: asyncio.StreamReader, name: str) -> bytes:
    """The next event that a starting node prints; empty at the end. Raises ModelError where none comes in START_TIMEOUT_S."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            return await stdout.readline()
    except TimeoutError:
        raise ModelError(f"{name} has said nothing for {START_TIMEOUT_S:g} s and does not serve") from None


def _ending(code: int) -> str:
    """How a process ended that said nothing, for an error."""
    if code == -signal.SIGKILL:
        return "it was killed, as a system does that runs out of memory (dmesg): give it more, or fewer layers to each node"
    return f"without a word ({f'signal {-code}' if code < 0 else f'exit code {code}'})"


def loopback() -> str:
    """The address at which processes of this machine meet: IPv6's where there is no IPv4."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return "[::1]"
    return "127.0.0.1"


def _tell(task: "asyncio.Task[NodeProcess]", on_serving: Callable[[str], None]) -> None:
    if not task.cancelled() and task.exception() is None:
        on_serving(task.result().name)


def _error(code: str, message: str) -> ManyhandsError:
    kinds = {kind.code: kind for kind in ManyhandsError.__subclasses__()}
    return kinds.get(code, ModelError)(message)


async def _drain(node: NodeProcess) -> None:
    """Keep the last lines of a node's stderr, so that its pipe never fills."""
    assert node.process.stderr is not None
    while line := await node.process.stderr.readline():
        node.stderr.append(line.decode(errors="replace").rstrip())


async def _stop(processes: Sequence[asyncio.subprocess.Process]) -> None:
    """SIGTERM twice (leave at once), SIGCONT for the frozen, SIGKILL for those that do not care."""
    for process in processes:
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGTERM):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
        if process.stdin is not None:
            process.stdin.close()
    for process in processes:
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
