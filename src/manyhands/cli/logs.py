"""`manyhands logs`: what a node that was started with -d says."""

from typing import Annotated

import typer

from manyhands.cli.log_file import follow, last_lines, log_path
from manyhands.cli.runfile import run_path, running_pid
from manyhands.config import home_from_env
from manyhands.errors import NotFound


def logs(
    node: Annotated[str, typer.Argument(help="The node's name; may be left out where there is one log.")] = "",
    is_followed: Annotated[bool, typer.Option("-f", "--follow", help="Go on until it ends, or Ctrl-C.")] = False,
    count: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many of the last lines.")] = 50,
) -> None:
    """Show what a node in the background has said: who came and went, what is missing, why it ended."""
    name = node or _only_log()
    path = log_path(name)
    if not path.exists():
        raise NotFound(f"{name} has no log here ({path}); {_which()}")
    for line in last_lines(path, count):
        typer.echo(line)
    if is_followed:
        for line in follow(path, lambda: running_pid(run_path(name)) is not None):
            typer.echo(line)


def _logged() -> list[str]:
    return sorted(path.stem for path in (home_from_env() / "logs").glob("*.log"))


def _which() -> str:
    names = _logged()
    return (
        f"there are those of {', '.join(names)}" if names else "nodes started with -d have one (manyhands up MODEL -d)"
    )


def _only_log() -> str:
    """The one node that has a log; of several, the one that runs. Raises NotFound."""
    names = _logged()
    running = [name for name in names if running_pid(run_path(name)) is not None]
    for found in (names, running):
        if len(found) == 1:
            return found[0]
    raise NotFound(f"which node? {_which()}" if names else f"there is no log here; {_which()}")
