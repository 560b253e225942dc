"""`manyhands drain`: let a node on this machine leave politely."""

import os
import signal
import time
from typing import Annotated

import typer

from manyhands.cli.serve import run_path
from manyhands.errors import BadRequest


def drain(
    node: Annotated[str, typer.Argument(help="The name the node was started with (its host's name by default).")],
    wait: Annotated[float, typer.Option(help="Seconds to wait for it to leave.")] = 60.0,
) -> None:
    """Hand the sessions of a node on this machine over to other nodes, then let it leave."""
    path = run_path(node)
    try:
        pid = int(path.read_text())
        os.kill(pid, signal.SIGTERM)
    except (OSError, ValueError):
        raise BadRequest(f"no node {node!r} runs here ({path} names no process)") from None
    deadline = time.monotonic() + wait
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    typer.echo(f"{node} has left" if not path.exists() else f"{node} still serves sessions nobody else can take")
    if path.exists():
        raise typer.Exit(1)
