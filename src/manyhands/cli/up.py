"""`manyhands up`: start a swarm, or come back to it: host what helps most, answer the API, say what is missing."""

from typing import Annotated

import typer

from manyhands.cli import gateway, options
from manyhands.cli.grouped import grouped
from manyhands.cli.member_options import MemberOptions

Api = Annotated[str, typer.Option("--api", help='Where to answer the API (HOST:PORT), or "off".')]
Directory = Annotated[
    str,
    typer.Option("--directory", help="How a new swarm keeps its directory: gossip, dht or static; default: gossip."),
]
Json = Annotated[bool, typer.Option("--json", help="Events as JSON lines.")]
Detach = Annotated[
    bool, typer.Option("-d", "--detach", help="Go on in the background once it serves: manyhands logs, manyhands stop.")
]
WhileStdin = Annotated[bool, typer.Option(hidden=True)]


@grouped
def up(
    model: options.Model,
    wish: MemberOptions = MemberOptions(),
    api: Api = "127.0.0.1:8000",
    opened: gateway.ApiOptions = gateway.ApiOptions(),
    routing: options.RouteOptions = options.RouteOptions(),
    dtype: Annotated[
        str,
        typer.Option("--dtype", help="Precision: bf16, fp32, w8, w4 or auto; default: the swarm's, else auto."),
    ] = "",
    cache_dtype: options.CacheDType = "auto",
    directory: Directory = "",
    detach: Detach = False,
    as_json: Json = False,
    while_stdin: WhileStdin = False,
) -> None:
    """Start a swarm for a model, or come back to it, and answer the API here.

    Prints the one line to run on other machines. Ctrl-C once: hand the sessions over, then leave. Twice: leave at once.
    """
    from manyhands.cli.membership import Named, start
    from manyhands.cli.runfile import check_not_running

    is_said = dtype not in ("", "auto") or options.check_cache_dtype(cache_dtype)
    precision = options.precision_of(dtype or "auto", model, cache_dtype) if is_said else None
    named = Named(model, precision, directory)
    check_not_running(wish.node_name)
    wish.check()
    plan = opened.member_plan(api)
    start(wish, plan, routing, None, named, as_json=as_json, while_stdin=while_stdin, detach=detach)
