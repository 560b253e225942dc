"""`manyhands infer`: one prompt to a gateway, or to the nodes of a swarm, which its ticket names."""

import time
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli import options
from manyhands.cli.client import ApiKey
from manyhands.cli.grouped import grouped
from manyhands.cli.progress import doing
from manyhands.core import PathKind, SamplingParams
from manyhands.errors import BadRequest

if TYPE_CHECKING:
    from manyhands.origin import Origin

Model = Annotated[str, typer.Argument(help="As `manyhands status` shows it; may be left out where there is one.")]
Ticket = Annotated[
    str, typer.Option("--ticket", envvar="MANYHANDS_TICKET", help="Call the nodes of this swarm, without a gateway.")
]
Api = Annotated[
    str,
    typer.Option("--api", envvar="MANYHANDS_API", help="Ask this gateway; default: of a node that runs here."),
]


@grouped
def infer(
    context: typer.Context,
    prompt: options.Prompt,
    model: Model = "",
    ticket: Ticket = "",
    api: Api = "",
    api_key: ApiKey = "",
    sampling: options.Sampling = options.Sampling(),
    computing: options.Computing = options.Computing(),
    routing: options.RouteOptions = options.RouteOptions(),
    as_json: options.Json = False,
) -> None:
    """Ask a model to go on from a prompt.

    Asks the gateway of a node that runs on this machine, or that of --api; with --ticket the nodes of a swarm, without one.
    """
    params, path = sampling.params, computing.path_kind
    if ticket and not options.is_given(context, "api"):
        computing.use_device()
        with doing(f"reading {model}" if model else "calling the swarm"):
            from manyhands.cli.swarm_origin import swarm_origin

            options.run(_infer(swarm_origin(model, ticket, computing, routing), prompt, params, path, as_json))
        return
    options.check_no_origin(context)
    draft = options.draft_asked(context, routing)
    from manyhands.cli.infer_gateway import infer_by_gateway

    if not prompt:
        raise BadRequest("the prompt is empty: give -p TEXT")
    options.run(infer_by_gateway(api, api_key, model, prompt, params, path, draft, as_json=as_json))


async def _infer(
    made: AbstractAsyncContextManager["Origin"], prompt: str, params: SamplingParams, path: PathKind, as_json: bool
) -> None:
    from manyhands.aside import aside
    from manyhands.cli.show import print_figures, print_json, show_answer

    began = time.monotonic()
    async with made as origin:
        load_s = time.monotonic() - began
        answer = origin.answer(await aside(origin.request, prompt, params))
        await show_answer(origin, answer, as_json=as_json, lead=prompt, path=path)
        if as_json:
            print_json(answer, load_s)
        else:
            print_figures(answer, load_s)
