"""`manyhands join`: become a member of a swarm: find it, take the layers that help it most, serve them."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli import gateway, options
from manyhands.cli import up as ups
from manyhands.cli.grouped import grouped
from manyhands.cli.member_options import MemberOptions
from manyhands.cli.progress import doing
from manyhands.cli.runfile import check_not_running
from manyhands.errors import BadRequest
from manyhands.net.pairing.code import TICKET_WAY, is_code, read_code

if TYPE_CHECKING:
    from manyhands.swarm.ticket import Ticket

Api = Annotated[
    str,
    typer.Option("--api", help='Answer the API here too (HOST:PORT); default: on a free port of 127.0.0.1; or "off".'),
]
Code = Annotated[
    str,
    typer.Option("--code", help="The code that a machine of this network shows, as in ABC-DEF; else it is asked for."),
]
Swarm = Annotated[
    str, typer.Option("--swarm", help="Which swarm of this network: its name, or the machine that shows the code.")
]


@grouped
def join(
    ticket: Annotated[
        str,
        typer.Argument(
            envvar="MANYHANDS_TICKET", help="The swarm's ticket (mh1...); -: from stdin; none: look on this network."
        ),
    ] = "",
    code: Code = "",
    swarm: Swarm = "",
    wish: MemberOptions = MemberOptions(),
    api: Api = "",
    opened: gateway.ApiOptions = gateway.ApiOptions(),
    routing: options.RouteOptions = options.RouteOptions(),
    detach: ups.Detach = False,
    as_json: ups.Json = False,
    while_stdin: ups.WhileStdin = False,
) -> None:
    """Join a swarm and serve the layers that help it most.

    Without a ticket: come back to this machine's swarm, or list those on the local network and ask for the code that one
    shows. Ctrl-C once: hand the sessions over, then leave. Twice: leave at once.
    """
    check_not_running(wish.node_name)
    wish.check()
    plan = opened.member_plan(api)
    found = _ticket(ticket, code, swarm)
    from manyhands.cli.membership import start

    start(wish, plan, routing, found, None, as_json=as_json, while_stdin=while_stdin, detach=detach)


def _ticket(text: str, code: str, swarm: str) -> "Ticket":
    """The ticket given, or this machine's, or one that a code opens. Raises TicketError, BadRequest, and as nearby.py."""
    from manyhands.config import home_from_env
    from manyhands.member.home import load_ticket, save_ticket
    from manyhands.swarm.ticket import Ticket

    if text == "-":
        text = sys.stdin.readline().strip()  # so that it is neither among the arguments nor in the shell's history
        if not text:
            raise BadRequest("join - reads the ticket from stdin, which has none")
    if text and (code or swarm):
        raise BadRequest(
            "--code and --swarm are to join without a ticket: leave them out, or the ticket (MANYHANDS_TICKET)"
        )
    if text:
        if is_code(text):
            raise BadRequest(
                "that is a code, no ticket: manyhands join --code CODE, or manyhands join, which asks for it"
            )
        return Ticket.parse(text)
    given = read_code(code) if code else ""
    known = None if code or swarm else load_ticket(home_from_env())
    if known is not None and known.addresses:
        return known
    if not given and not sys.stdin.isatty():
        raise BadRequest(
            f"no ticket is given: in scripts, manyhands join --code ABC-DEF [--swarm NAME], or {TICKET_WAY}"
        )
    with doing("looking for swarms on this network"):  # while Python loads what looks
        from manyhands.cli.nearby import ask_for_code, ticket_by_code
    ticket = ticket_by_code(given, swarm) if given else ask_for_code(swarm)
    save_ticket(home_from_env(), ticket)  # so that a join that is interrupted goes on without a code
    return ticket
