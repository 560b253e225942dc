"""`manyhands stop`: let a node on this machine hand over its sessions and leave."""

import contextlib
import os
import select
import signal
import sys
import time
from typing import Annotated, Self

import typer

from manyhands.cli.lines import fitted
from manyhands.cli.progress import doing
from manyhands.cli.runfile import is_leaving, nodes_here, only_node, run_path, running_pid
from manyhands.errors import BadRequest, NotFound
from manyhands.member.process import is_there

SHOWN_S = 0.3  # a node without sessions leaves faster
LONGEST_S = 1e9  # what select takes
LOOK_S = 0.05  # between two looks at a process where nothing tells of its end


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
        process = stack.enter_context(_Process(pid))
        if running_pid(path) == pid:
            if not is_leaving(path):  # else this would be the second signal, which ends it at once
                process.tell(name, signal.SIGTERM)
            if now:
                process.tell(name, signal.SIGINT)  # the second of two SIGTERMs is lost while the first waits
            has_left = process.ends_within(min(wait, SHOWN_S))
            if not has_left:
                stack.enter_context(doing(f"{name} hands its sessions over"))
                has_left = process.ends_within(wait - SHOWN_S)
    if not has_left:
        said = (
            f"{name} has not left after {wait:g} s: it hands sessions over, or has some that no other node can take; "
            f"manyhands stop {name} --now ends it at once"
        )
        typer.echo(fitted(said, sys.stdout))
        raise typer.Exit(1)
    typer.echo(f"{name} has left")


class _Process:
    """Process `pid` of this machine; where the system has descriptors of processes (Linux) that one, whatever becomes of its
    id. Raises ProcessLookupError if it has ended."""

    def __init__(self, pid: int) -> None:
        self._pid, self._descriptor = pid, os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def tell(self, name: str, number: signal.Signals) -> None:
        """Send a signal. Raises BadRequest, naming the node; ProcessLookupError if it has ended."""
        try:
            if self._descriptor is None:
                os.kill(self._pid, number)
            else:
                signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            raise
        except OSError as error:
            raise BadRequest(f"process {self._pid} of {name} takes no signal from you: {error.strerror}") from error

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended within `seconds`: not only said so, or it might hold its key and memory yet."""
        if self._descriptor is not None:
            return bool(select.select([self._descriptor], [], [], min(max(0.0, seconds), LONGEST_S))[0])
        until = time.monotonic() + seconds
        while is_there(self._pid):
            if time.monotonic() >= until:
                return False
            time.sleep(LOOK_S)
        return True
