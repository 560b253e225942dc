"""`manyhands stop`: let a node on this machine hand over its sessions and leave."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli.progress import doing
from manyhands.cli.runfile import nodes_here, only_node, run_path, running_pid
from manyhands.errors import BadRequest, NotFound

SHOWN_S = 0.3  # a node without sessions leaves faster


def stop(
    node: Annotated[str, typer.Argument(help="The node's name; may be left out where one alone runs.")] = "",
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for it to leave.")] = 60.0,
    now: Annotated[bool, typer.Option("--now", help="Do not hand over: its sessions are repaired elsewhere.")] = False,
) -> None:
    """Hand the sessions of a node on this machine over to other nodes, then let it leave."""
    name = node or only_node()
    path = run_path(name)
    pid = running_pid(path)
    if pid is None:
        raise NotFound(f"no node {name!r} runs here; {nodes_here()}")
    _tell(path, pid, name, signal.SIGTERM)
    if now:
        _tell(path, pid, name, signal.SIGINT)  # the second of two SIGTERMs is lost while the first waits to be taken
    with contextlib.ExitStack() as stack:
        has_left = _wait(path, pid, min(wait, SHOWN_S))
        if not has_left:
            stack.enter_context(doing(f"{name} hands its sessions over"))
            has_left = _wait(path, pid, wait - SHOWN_S)
    if not has_left:
        typer.echo(
            f"{name} has not left after {wait:g} s: it hands sessions over, or has some that no other node can take; "
            f"manyhands stop {name} --now ends it at once"
        )
        raise typer.Exit(1)
    typer.echo(f"{name} has left")


def _tell(path: Path, pid: int, name: str, number: signal.Signals) -> None:
    """Send a signal to the process that wrote `path`, and to no other that got its id meanwhile. Raises BadRequest."""
    try:
        process = os.pidfd_open(pid)  # what is signalled is this process, whatever becomes of its id
        try:
            if running_pid(path) == pid:
                signal.pidfd_send_signal(process, number)
        finally:
            os.close(process)
    except ProcessLookupError:
        return
    except OSError as error:
        raise BadRequest(f"process {pid} of {name} takes no signal from you: {error.strerror}") from error


def _wait(path: Path, pid: int, seconds: float) -> bool:
    """Whether the process has left within `seconds`."""
    deadline = time.monotonic() + seconds
    while (has_left := running_pid(path) != pid) is False and time.monotonic() < deadline:
        time.sleep(0.05)
    return has_left
