"""`manyhands status`: the swarm as a running member sees it."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

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
            with _shows(is_screen=False) as (show, width):
                show(_rendered(view, width))
    elif as_json:
        while True:
            print_json(call(where, api_key, "GET", "/api/swarm"))
            time.sleep(REFRESH_S)
    else:
        _watch(where, api_key)


def _watch(api: str, key: str) -> None:
    from rich.console import Group
    from rich.text import Text

    with _shows(is_screen=sys.stdout.isatty()) as (show, width):
        shown: RenderableType = ""
        while True:
            try:
                shown = _rendered(call(api, key, "GET", "/api/swarm"), width)
                show(shown)
            except ManyhandsError as error:  # a gateway that is away may come back
                show(Group(shown, Text(f"\n{one_line(error, 2000)}", "bold red")))
            time.sleep(REFRESH_S)


@contextlib.contextmanager
def _shows(*, is_screen: bool) -> "Iterator[tuple[Callable[[RenderableType], object], Callable[[], int]]]":
    """What shows one thing after the other, and how wide it is: on a screen in each other's place, else one below the other."""
    from rich.console import Console
    from rich.live import Live

    if not is_screen:
        console = Console()
        yield console.print, lambda: console.width
        return
    with Live(auto_refresh=False, screen=True) as live:
        yield (lambda what: live.update(what, refresh=True)), lambda: live.console.width


def _rendered(view: dict[str, Any], width: Callable[[], int]) -> "RenderableType":
    from manyhands.cli.status_screen import render

    return render(view, width())
