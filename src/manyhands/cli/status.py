"""`manyhands status`: the swarm as a running member sees it."""

import contextlib
import time
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli import options
from manyhands.cli.client import ApiKey, ask, call, print_json, running_api
from manyhands.errors import ManyhandsError
from manyhands.plain import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_S = 1.0

Swarm = Annotated[
    str,
    typer.Option("--api", envvar="MANYHANDS_API", help="The gateway to ask; default: of a node that runs here."),
]


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every second, until Ctrl-C.")] = False,
    api: Swarm = "",
    api_key: ApiKey = "",
    as_json: options.Json = False,
) -> None:
    """Who is in the swarm, which layers they hold, how busy and how far away they are, and what is at risk."""
    where = api or running_api()
    with contextlib.suppress(KeyboardInterrupt) if watch else contextlib.nullcontext():
        _tell(where, api_key, watch, as_json)


def _tell(where: str, api_key: str, watch: bool, as_json: bool) -> None:
    if not watch:
        view = ask(where, api_key, "GET", "/api/swarm")
        if as_json:
            print_json(view)
        else:
            from rich.console import Console

            from manyhands.cli.status_screen import render

            console = Console()
            console.print(render(view, console.width))
    elif as_json:
        while True:
            print_json(call(where, api_key, "GET", "/api/swarm"))
            time.sleep(REFRESH_S)
    else:
        _watch(where, api_key)


def _watch(api: str, key: str) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from manyhands.cli.status_screen import render

    with Live(auto_refresh=False, screen=True) as live:
        shown: RenderableType = ""
        while True:
            try:
                shown = render(call(api, key, "GET", "/api/swarm"), live.console.width)
                live.update(shown, refresh=True)
            except ManyhandsError as error:  # a gateway that is away may come back
                live.update(Group(shown, Text(f"\n{one_line(error, 2000)}", "bold red")), refresh=True)
            time.sleep(REFRESH_S)
