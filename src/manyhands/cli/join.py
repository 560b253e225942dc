"""`manyhands join`: become a member of a swarm: find it, take the layers that help it most, serve them."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli import gateway, options
from manyhands.cli import up as ups
from manyhands.cli.background import check_not_running
from manyhands.cli.member_options import MemberOptions
from manyhands.errors import BadRequest
from manyhands.plain import one_line

if TYPE_CHECKING:
    from manyhands.swarm.lan import Nearby
    from manyhands.swarm.ticket import Ticket

SEARCH_S = 3.0

Api = Annotated[
    str,
    typer.Option("--api", help='Answer the API here too (HOST:PORT); default: on a free port of 127.0.0.1; or "off".'),
]


@options.grouped
def join(
    ticket: Annotated[
        str,
        typer.Argument(
            envvar="MANYHANDS_TICKET", help="The swarm's ticket (mh1...); -: from stdin; none: look on this network."
        ),
    ] = "",
    wish: MemberOptions = MemberOptions(),
    api: Api = "",
    opened: gateway.ApiOptions = gateway.ApiOptions(),
    routing: options.RouteOptions = options.RouteOptions(),
    detach: ups.Detach = False,
    as_json: ups.Json = False,
    while_stdin: ups.WhileStdin = False,
) -> None:
    """Join a swarm and serve the layers that help it most.

    Without a ticket: come back to this machine's swarm, or look for one on the local network and ask for its code. Ctrl-C
    once: hand the sessions over, then leave. Twice: leave at once.
    """
    check_not_running(wish.node_name)
    swarm = _ticket(ticket)
    from manyhands.cli.membership import start

    plan = opened.member_plan(api)
    start(wish, plan, routing, swarm, None, as_json=as_json, while_stdin=while_stdin, detach=detach)


def _ticket(text: str) -> "Ticket":
    """The ticket given, or this machine's, or one that is asked for. Raises TicketError, BadRequest."""
    from manyhands.config import home_from_env
    from manyhands.member.home import load_ticket
    from manyhands.swarm.ticket import Ticket

    if text == "-":
        text = sys.stdin.readline().strip()  # so that it is neither among the arguments nor in the shell's history
        if not text:
            raise BadRequest("join - reads the ticket from stdin, which has none")
    if text:
        return Ticket.parse(text)
    if (known := load_ticket(home_from_env())) is not None and known.addresses:
        return known
    return _ask()


def _ask() -> "Ticket":
    """Look on the local network, list what is there, and ask for the code."""
    from dataclasses import replace

    from manyhands.swarm.ticket import Ticket

    typer.echo(f"looking for swarms on this network ({SEARCH_S:g} s)", err=True)
    found = options.run(_search())
    for swarm in {near.fingerprint: near for near in found}.values():
        count = sum(near.fingerprint == swarm.fingerprint for near in found)
        line = f"  {swarm.swarm}: {count} {'node' if count == 1 else 'nodes'}, at {swarm.addresses[0]}"
        typer.echo(one_line(line), err=True)
    if not sys.stdin.isatty():
        what = "found, but its code is needed" if found else "found on this network"
        raise BadRequest(
            f"{'a swarm was' if found else 'no swarm was'} {what}: manyhands join mh1... (`up` prints the line)"
        )
    if not found:
        typer.echo("  none found", err=True)
    ticket = Ticket.parse(typer.prompt("its code (mh1..., printed by `manyhands up`)"))
    near = tuple(a for each in found if each.fingerprint == ticket.fingerprint for a in each.addresses[:1])
    return replace(ticket, addresses=tuple(dict.fromkeys((*near, *ticket.addresses)))[:16])


async def _search() -> "list[Nearby]":
    import asyncio

    from manyhands.swarm.lan import Browser

    browser = Browser()
    try:
        async with browser.listen():
            await asyncio.sleep(SEARCH_S)
    except OSError as error:
        raise BadRequest(
            f"this network cannot be searched ({error}): give the ticket, manyhands join mh1..."
        ) from error
    return list(browser.found.values())
