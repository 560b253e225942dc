"""`manyhands drain`: let a node on this machine hand over its sessions and leave."""

import os
import signal
import time
from typing import Annotated

import typer

from manyhands.cli.runfile import run_path, running_pid
from manyhands.errors import BadRequest, NotFound


def drain(
    node: Annotated[str, typer.Argument(help="The name the node was started with (its host's name by default).")],
    wait: Annotated[float, typer.Option(help="Seconds to wait for it to leave.")] = 60.0,
) -> None:
    """Hand the sessions of a node on this machine over to other nodes, then let it leave."""
    path = run_path(node)
    pid = running_pid(path)
    if pid is None:
        others = sorted(p.stem for p in path.parent.glob("*.pid") if running_pid(p) is not None)
        raise NotFound(f"no node {node!r} runs here; " + (f"there are {', '.join(others)}" if others else "none does"))
    try:
        os.kill(pid, signal.SIGTERM)
    except OSError as error:
        raise BadRequest(f"process {pid} of {node} takes no signal from you: {error.strerror}") from error
    deadline = time.monotonic() + wait
    while (has_left := running_pid(path) != pid) is False and time.monotonic() < deadline:
        time.sleep(0.05)
    typer.echo(f"{node} has left" if has_left else f"{node} still serves sessions no other node can take")
    if not has_left:
        raise typer.Exit(1)
