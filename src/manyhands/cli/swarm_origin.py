"""An origin in this process for the nodes of a ticket, and those that they know: of `infer --ticket`, `chat --ticket`."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from manyhands.aside import aside
from manyhands.cli import options
from manyhands.cli.connect import load_origin, visitor
from manyhands.cli.own_layers import keep_layers
from manyhands.cli.progress import doing
from manyhands.config import home_from_env
from manyhands.core import Precision, Span
from manyhands.errors import BadRequest, NotFound, ShardUnavailable, WeightsMismatch
from manyhands.member.providers import providers_of
from manyhands.member.weights import ServedModel, kinds_of, known_kinds, weights_in
from manyhands.plain import one_line
from manyhands.swarm.ticket import Ticket
from manyhands.weights.fetch import resolve_model
from manyhands.weights.names import is_here, label
from manyhands.weights.provider import Provider
from manyhands.weights.reading import read_aside
from manyhands.weights.refetch import use_fetched
from manyhands.worker.execute import Device

if TYPE_CHECKING:
    from manyhands.member.member import Member
    from manyhands.origin import Origin

NEWS_S = 10.0  # for the directory to name nodes for all layers, where those of the ticket do not hold them
Fetch = Callable[[Span], Awaitable[Path]]  # a folder with the layers of a span, and the ends
FIRST = Span(0, 1)  # comes along with the ends: a folder without any layer is no checkpoint


@asynccontextmanager
async def swarm_origin(
    model: str, ticket_text: str, computing: options.Computing, routing: options.RouteOptions
) -> AsyncIterator["Origin"]:
    """An origin of `model`: what lies here by that name, a hub id, or as the swarm calls it; "": what the swarm serves.

    Raises TicketError, ModelError, BadRequest, NotFound, ShardUnavailable.
    """
    ends = computing.ends_at
    ticket = Ticket.parse(ticket_text)
    found = options.settings()
    ticket.agree(found.swarm.directory)
    request = routing.applied(found.request)
    with doing(f"reading {model}" if model else "asking the swarm for its model") as screen:
        device = Device.start(computing.threads)
        try:
            async with visitor(ticket, found.swarm, request) as member:
                fetch, precision = await _local(model, computing) if model and is_here(model) else (None, None)
                screen.say(f"calling the nodes of swarm {ticket.name}")
                await member.call()
                if fetch is None:
                    fetch, precision = await _named(member, model, computing)
                assert precision is not None
                addrs, directory = list(ticket.addresses), member.directory

                async def load(folder: Path) -> "Origin":
                    assert precision is not None
                    called = label(model) if model else "the swarm's model"
                    return await load_origin(
                        member.node, folder, precision, ends, device, addrs, directory, called=called
                    )

                async def again() -> Path:
                    return await fetch(FIRST)

                origin = await use_fetched(await fetch(FIRST), None if is_here(model) else again, load)
                await keep_layers(origin, device, fetch)
                screen.say("waiting until every layer is held")
                if not await member.wait_until(origin.routes.is_covered, NEWS_S):
                    screen.clear()
                    for line in member.complaints():
                        typer.secho(f"! {one_line(line, 2000)}", fg="yellow", err=True)
                screen.end()
                yield origin
        finally:
            device.close()


async def _local(model: str, computing: options.Computing) -> tuple[Fetch, Precision]:
    """A model by its name on this machine or the hub."""

    async def fetch(span: Span) -> Path:
        with doing(f"reading {model}") as bar:
            return await read_aside(lambda told: resolve_model(model, span, True, home_from_env(), told), bar)

    return fetch, await aside(computing.precision, model)  # it may ask the hub


async def _named(member: "Member", model: str, computing: options.Computing) -> tuple[Fetch, Precision]:
    """A model as the swarm calls it, from its nodes; else from the hub. Raises NotFound, ModelError."""

    def known() -> list[ServedModel]:
        kinds = known_kinds(member.records(), lambda node: member.node.pool.find(node, "control") is not None)
        return [kind for kind in kinds if model in ("", kind.name)]

    await member.wait_until(lambda: bool(known()), NEWS_S if not model else NEWS_S / 2)
    if not known():
        return await _unknown(member, model, computing)
    kind = known()[0]
    if computing.dtype not in ("auto", kind.precision):
        raise WeightsMismatch(
            f"the swarm serves {kind.name} in {kind.precision}, not {computing.dtype}: leave --dtype out"
        )
    home = home_from_env()

    def providers() -> list[Provider]:
        return providers_of(member, [record for record in member.records() if kind.is_of(record)])

    with doing(f"asking the swarm for {kind.name}") as bar:
        weights = await weights_in(kind, providers(), home, bar)

    async def fetch(span: Span) -> Path:
        with doing(f"reading {kind.name}") as bar:
            folder, _ = await weights.fetch(span, home, providers(), bar, with_ends=True)
            return folder

    return fetch, kind.precision


async def _unknown(member: "Member", model: str, computing: options.Computing) -> tuple[Fetch, Precision]:
    """What to do with a name that the swarm does not serve by its records: a hub id may be one. Raises NotFound."""
    if "/" in model:
        return await _local(model, computing)
    served = sorted({kind.name for kind in kinds_of(member.records())})
    linked = member.node.requests.known_offers(list(member.ticket.addresses), ())  # nodes of `serve` have no records
    by_hand = one_line(", ".join(sorted({offer.info.model_name for offer in linked})), 300)
    if not model and by_hand:
        raise BadRequest(f"the nodes of this ticket hold {by_hand} and have no directory: name MODEL, as it lies here")
    if not model:
        raise ShardUnavailable(
            f"swarm {member.ticket.name} serves no model yet: run `manyhands up MODEL` on a machine of it"
        )
    if not served:
        raise BadRequest(
            f"{model!r:.80} is no model here, and swarm {member.ticket.name} names none: give its folder or hub id"
        )
    raise NotFound(f"swarm {member.ticket.name} serves no {model!r:.80}; it has {one_line(', '.join(served), 300)}")
