"""`manyhands chat`: a conversation with a swarm or a gateway. Ctrl-C stops the answer, not the program."""

import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli import options
from manyhands.cli.chat_wishes import ChatWishes
from manyhands.cli.client import ApiKey, running_api
from manyhands.cli.grouped import grouped
from manyhands.cli.lines import fitted
from manyhands.cli.progress import doing
from manyhands.plain import one_line

if TYPE_CHECKING:
    from manyhands.cli.chat_source import GatewaySource, Source

Model = Annotated[str, typer.Argument(help="As the swarm or the gateway has it; may be left out if that has one.")]
Ticket = Annotated[
    str, typer.Option("--ticket", envvar="MANYHANDS_TICKET", help="Call the nodes of this swarm, without a gateway.")
]
Api = Annotated[
    list[str] | None,
    typer.Option(
        "--api",
        envvar="MANYHANDS_API",
        help="Ask this gateway; default: of a node that runs here. Again: another one of the swarm, should it be gone.",
    ),
]
ASKING = "asking the gateway for its models"


@grouped
def chat(
    context: typer.Context,
    model: Model = "",
    ticket: Ticket = "",
    api: Api = None,
    api_key: ApiKey = "",
    system: Annotated[str, typer.Option("--system", callback=options.is_text, help="What the model shall be.")] = "",
    history: Annotated[bool, typer.Option("--history/--no-history", help="Remember what was typed.")] = True,
    sampling: options.Sampling = options.Sampling(max_tokens=None, temperature=0.7, top_p=0.95),
    computing: options.Computing = options.Computing(),
    routing: options.RouteOptions = options.RouteOptions(),
) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D leaves. Sampling is as its publisher recommends where you do not say.

    Asks the gateway of a node that runs on this machine, or that of --api; with --ticket the nodes of a swarm, without one.
    """
    wishes, path = ChatWishes(sampling.params, options.given_of(context)), computing.path_kind
    if ticket and not options.is_given(context, "api"):
        computing.use_device()
        source = _from_swarm(model, ticket, wishes, computing, routing)
    else:
        options.check_no_origin(context)
        draft = options.draft_asked(context, routing)
        with doing(ASKING):  # while Python loads what asks
            from manyhands.cli.chat_source import GatewaySource

            gateway = GatewaySource(api or [running_api()], api_key, model, wishes, path, draft)
        source = _from_gateway(gateway)
    options.run(_chat(source, system, history))


@asynccontextmanager
async def _from_swarm(
    model: str, ticket: str, wishes: ChatWishes, computing: options.Computing, routing: options.RouteOptions
) -> "AsyncIterator[Source]":
    """This process as an origin of the swarm of `ticket`."""
    with doing(f"reading {model}" if model else "calling the swarm"):
        from manyhands.cli.chat_source import OriginSource
        from manyhands.cli.swarm_origin import swarm_origin

    async with swarm_origin(model, ticket, computing, routing) as origin:
        names = [] if model else [offer.info.model_name for offer in await origin.routes.offers(())]
        name = model or next(iter(names), "the model")
        yield OriginSource(origin, name, wishes, computing.path_kind)


@asynccontextmanager
async def _from_gateway(gateway: "GatewaySource") -> "AsyncIterator[Source]":
    """The first of its gateways that is there."""
    with doing(ASKING) as screen:
        others = await gateway.choose()
        if others:
            screen.clear()
            named = one_line(", ".join(others), 300)
            typer.secho(f"also here: {named}; /model NAME goes on with another", dim=True, err=True)
    yield gateway


async def _chat(source: "AbstractAsyncContextManager[Source]", system: str, has_history: bool) -> None:
    from manyhands.cli.chat_loop import ChatHistory, prompt_of
    from manyhands.cli.chat_text import introduced

    async with source as other:
        typer.secho(
            fitted(f"talking with {introduced(other.model)}; /help lists the commands", sys.stderr), dim=True, err=True
        )
        conversation = ChatHistory(other, prompt_of(has_history), system)
        await conversation.run()
    if conversation.num_failed:
        raise typer.Exit(1)
