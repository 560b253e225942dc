"""`manyhands ticket`: make and read the text that lets machines join a swarm."""

from typing import Annotated

import typer

from manyhands.core import NodeAddr
from manyhands.swarm.ticket import Ticket

app = typer.Typer(no_args_is_help=True, help="Make and read the text that lets machines join a swarm.")

Address = Annotated[list[str] | None, typer.Option("--address", help="host:port of a node; may be repeated.")]


@app.command()
def new(name: Annotated[str, typer.Option(help="What to call the swarm.")] = "home", address: Address = None) -> None:
    """Found a swarm: print a ticket with a new secret."""
    ticket = Ticket.new(name)
    for text in reversed(address or []):
        ticket = ticket.with_address(NodeAddr.parse(text))
    typer.echo(ticket.encode())


@app.command()
def add(ticket: str, address: str) -> None:
    """Print the ticket with one more node's address (host:port) in it."""
    typer.echo(Ticket.parse(ticket).with_address(NodeAddr.parse(address)).encode())


@app.command()
def show(ticket: str) -> None:
    """Say which swarm and which addresses a ticket names; the secret is not shown."""
    found = Ticket.parse(ticket)
    typer.echo(f"swarm {found.name}")
    for addr in found.addresses:
        typer.echo(f"  {addr}" + (f"  node {addr.node[:16]}" if addr.node else ""))
