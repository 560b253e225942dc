"""`manyhands stop`: let a node on this machine hand over its sessions and leave."""

import contextlib
import os
import select
import signal
import sys
from typing import Annotated

import typer

from manyhands.cli.lines import fitted
from manyhands.cli.progress import doing
from manyhands.cli.runfile import nodes_here, only_node, run_path, running_pid
from manyhands.errors import BadRequest, NotFound

SHOWN_S = 0.3  # a node without sessions leaves faster
LONGEST_S = 1e9  # what select takes


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
    has_left = True
    with contextlib.ExitStack() as stack, contextlib.suppress(ProcessLookupError):  # it has ended by itself
        process = os.pidfd_open(pid)  # what is signalled and waited for is this process, whatever becomes of its id
        stack.callback(os.close, process)
        if running_pid(path) == pid:
            _tell(process, pid, name, signal.SIGTERM)
            if now:
                _tell(process, pid, name, signal.SIGINT)  # the second of two SIGTERMs is lost while the first waits
            has_left = _wait(process, min(wait, SHOWN_S))
            if not has_left:
                stack.enter_context(doing(f"{name} hands its sessions over"))
                has_left = _wait(process, wait - SHOWN_S)
    if not has_left:
        said = (
            f"{name} has not left after {wait:g} s: it hands sessions over, or has some that no other node can take; "
            f"manyhands stop {name} --now ends it at once"
        )
        typer.echo(fitted(said, sys.stdout))
        raise typer.Exit(1)
    typer.echo(f"{name} has left")


def _tell(process: int, pid: int, name: str, number: signal.Signals) -> None:
    """Send a signal to the process of a descriptor. Raises BadRequest; ProcessLookupError if it has ended."""
    try:
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        raise
    except OSError as error:
        raise BadRequest(f"process {pid} of {name} takes no signal from you: {error.strerror}") from error


def _wait(process: int, seconds: float) -> bool:
    """Whether the process has ended within `seconds`: not only said so, or it might hold its key and memory yet."""
    return bool(select.select([process], [], [], min(max(0.0, seconds), LONGEST_S))[0])
