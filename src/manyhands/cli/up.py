"""`manyhands up`: start a swarm, or come back to it: host what helps most, answer the API, say what is missing."""

from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli import gateway, options
from manyhands.cli.membership import MemberOptions, Named, start

Layers = Annotated[str, typer.Option("--layers", help='Layers to host, for example "0-7"; default: what helps most.')]
Memory = Annotated[str, typer.Option("--memory", help="What this machine may give, as in 6GB; default: what is free.")]
Api = Annotated[str, typer.Option("--api", help='Where to answer the API (HOST:PORT), or "off".')]
Insecure = Annotated[bool, typer.Option("--insecure", help="Let other machines use the API without a key.")]
Listen = Annotated[
    str, typer.Option("--listen", help="Address to accept peers at; default: every interface, any port.")
]
Advertise = Annotated[str, typer.Option("--advertise", help="Address for others, if it is not the one listened at.")]
Name = Annotated[str, typer.Option("--name", help="What to call this node; default: the host's name.")]
Key = Annotated[Path | None, typer.Option("--key", help="This node's key file; default: $MANYHANDS_HOME/node.key.")]
Scope = Annotated[str, typer.Option("--scope", help="With whom to share: off, lan, trusted or public.")]
Relay = Annotated[
    list[str] | None,
    typer.Option("--relay", help="HOST:PORT of a member that forwards, or the URL of an iroh relay; may be repeated."),
]
Allow = Annotated[list[str] | None, typer.Option("--allow", help="Node id to share with; may be repeated.")]
Deny = Annotated[list[str] | None, typer.Option("--deny", help="Node id to refuse; may be repeated.")]
Directory = Annotated[
    str,
    typer.Option("--directory", help="How a new swarm keeps its directory: gossip, dht or static; default: gossip."),
]
Json = Annotated[bool, typer.Option("--json", help="Events as JSON lines.")]
WhileStdin = Annotated[bool, typer.Option(hidden=True)]


def up(
    model: options.Model,
    layers: Layers = "",
    memory: Memory = "",
    api: Api = "127.0.0.1:8000",
    insecure: Insecure = False,
    allow_host: gateway.AllowHost = None,
    cors: gateway.Cors = None,
    listen: Listen = "",
    advertise: Advertise = "",
    name: Name = "",
    key: Key = None,
    scope: Scope = "lan",
    dtype: Annotated[
        str, typer.Option("--dtype", help="Precision: bf16, fp32 or int8; default: as the swarm has it, else bf16.")
    ] = "",
    relay: Relay = None,
    allow: Allow = None,
    deny: Deny = None,
    directory: Directory = "",
    threads: options.Threads = None,
    as_json: Json = False,
    while_stdin: WhileStdin = False,
) -> None:
    """Start a swarm for a model, or come back to it, and answer the API here.

    Prints the one line to run on other machines. Ctrl-C once: hand the sessions over, then leave. Twice: leave at once.
    """
    precision = options.precision_of(dtype) if dtype else None
    names = gateway.Names.of(allow_host, cors)
    wish = MemberOptions(
        layers,
        memory,
        api,
        insecure,
        names,
        listen,
        advertise,
        name,
        key,
        scope,
        relay,
        allow,
        deny,
        threads,
        directory,
    )
    start(wish, None, Named(model, precision), as_json=as_json, while_stdin=while_stdin)
