"""`manyhands ticket`: make and read the text that lets machines join a swarm."""

import sys
from typing import Annotated

import typer

from manyhands.cli import options
from manyhands.cli.lines import fitted
from manyhands.config import home_from_env
from manyhands.core import NodeAddr
from manyhands.errors import BadRequest
from manyhands.member.home import TICKET, list_running, load_ticket, save_ticket
from manyhands.plain import one_line
from manyhands.swarm.ticket import Ticket

app = typer.Typer(no_args_is_help=True, help="Make and read the text that lets machines join a swarm.")

Address = Annotated[list[str] | None, typer.Option("--address", help="host:port of a node; may be repeated.")]

KINDS = "How its nodes keep the directory: gossip, dht or static; default: "
Directory = Annotated[str, typer.Option("--directory", help=f"{KINDS}gossip.")]
NewDirectory = Annotated[str, typer.Option("--directory", help=f"{KINDS}as it was.")]
Mine = Annotated[str, typer.Argument(help="mh1...; default: that of this machine's swarm.")]


@app.command()
def new(
    name: Annotated[str, typer.Option(help="What to call the swarm.")] = "home",
    address: Address = None,
    directory: Directory = "",
) -> None:
    """Found a swarm: print a ticket with a new secret."""
    ticket = Ticket.new(name, directory)
    for text in reversed(address or []):
        ticket = ticket.with_address(NodeAddr.parse(text))
    typer.echo(ticket.encode())


@app.command()
def add(
    ticket: Annotated[str, typer.Argument(help="mh1...")],
    address: Annotated[str, typer.Argument(help="HOST:PORT of a node.")],
) -> None:
    """Print the ticket with one more node's address (host:port) in it."""
    typer.echo(Ticket.parse(ticket).with_address(NodeAddr.parse(address)).encode())


@app.command()
def show(ticket: Mine = "") -> None:
    """Say which swarm and which addresses a ticket names. The secret is not shown."""
    found = Ticket.parse(ticket) if ticket else _mine()
    typer.echo(fitted(f"swarm {found.name}  {found.fingerprint}  directory by {found.directory}", sys.stdout))
    for addr in found.addresses:
        node = f"  node {addr.node[:16]}" if addr.node else ""
        typer.echo(fitted(one_line(f"  {addr}") + node, sys.stdout))


@app.command()
def qr(ticket: Mine = "") -> None:
    """Draw a ticket as a QR code. What a phone reads there is the text after `manyhands join`: a password."""
    from manyhands.swarm.qr import qr_lines, qr_rows

    found = Ticket.parse(ticket) if ticket else _mine()
    for line in qr_lines(qr_rows(found.encode()), is_coloured=sys.stdout.isatty()):
        typer.echo(line)


@app.command()
def rotate(ticket: Mine = "", directory: NewDirectory = "") -> None:
    """Print a ticket with a new secret. Nodes that start with it admit no machine that has the old one alone.

    Without TICKET, that of this machine's swarm, which is replaced.
    """
    if ticket:
        typer.echo(Ticket.parse(ticket).rotate(directory).encode())
        return
    home = home_from_env()
    fresh = _mine().rotate(directory)
    save_ticket(home, fresh)
    typer.echo(fresh.encode())
    said = (
        f"{home / TICKET} has it. Nodes keep the old secret until they start again with this ticket: "
        "hand it to those who shall stay, on each machine stop and join anew."
    )
    typer.secho(fitted(said, sys.stderr), dim=True, err=True)
    if (told := options.settings().get("swarm", "ticket")).value:
        also = f"{told.source} has another one, which goes first where a node starts: put the new one there too"
        typer.secho(fitted(also, sys.stderr), err=True)
    for running in list_running(home):
        here = f"running here with the old one: {running.name} (manyhands stop {running.name})"
        typer.secho(fitted(here, sys.stderr), err=True)


def _mine() -> Ticket:
    """The ticket of this machine's swarm. Raises BadRequest if it belongs to none."""
    found = load_ticket(home_from_env())
    if found is None:
        raise BadRequest(
            f"this machine belongs to no swarm ({home_from_env() / TICKET}): give a ticket, or start one with "
            "`manyhands up MODEL`"
        )
    return found
