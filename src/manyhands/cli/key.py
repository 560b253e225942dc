"""`manyhands key`: who may use the gateway of this machine."""

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli.lines import fitted
from manyhands.cli.options import Json
from manyhands.errors import BadRequest

app = typer.Typer(no_args_is_help=True, help="Who may use the gateway: make, list and revoke API keys.")

if TYPE_CHECKING:  # help is instant: the gateway's packages are imported inside the commands
    from manyhands.api.auth import KeyRing


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            help="Requests at once; default, as of the others: as [limits] of the configuration has it.",
        ),
    ] = None,
    requests: Annotated[int | None, typer.Option("--requests-per-minute", help="Requests a minute.")] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens-per-minute", help="Tokens (prompt and answer) a minute.")
    ] = None,
    daily: Annotated[int | None, typer.Option("--tokens-per-day", help="Tokens a day.")] = None,
    model: Annotated[list[str] | None, typer.Option("--model", help="Only this model; may be repeated.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May also change the swarm (evict, reassign).")] = False,
) -> None:
    """Make a key and print it, this once: only its hash is kept."""
    from manyhands.api.limits import Quota

    if model and not all(name.strip() for name in model):
        raise BadRequest("--model is empty: name a model as `manyhands status` shows it, or leave it out for all")
    quota = Quota(concurrency, requests, tokens, daily)
    typer.echo(_ring().add(name, time.time(), quota=quota, models=tuple(model or ()) or None, is_admin=admin))


@app.command("list")
def list_(as_json: Json = False) -> None:
    """Show the keys: names, limits and dates."""
    from dataclasses import asdict

    keys = _ring().keys
    if as_json:
        shown = [{name: value for name, value in asdict(key).items() if name != "sha256"} for key in keys]
        typer.echo(json.dumps({"keys": shown}))
        return
    if not keys:
        said = "no keys: this machine's gateway asks for none, and lets no other machine in (manyhands key add NAME)"
        typer.echo(fitted(said, sys.stdout))
    for key in keys:
        limits = [f"{name} {value}" for name, value in asdict(key.quota).items() if value is not None]
        limits += [f"only {', '.join(key.models)}"] if key.models else []
        limits += ["admin"] if key.is_admin else []
        state = f"revoked {_day(key.revoked)}" if key.revoked else f"since {_day(key.created)}"
        typer.echo(fitted(f"{key.name}  {state}" + (f"  {'; '.join(limits)}" if limits else ""), sys.stdout))


@app.command()
def revoke(name: Annotated[str, typer.Argument(help="As `manyhands key list` shows it.")]) -> None:
    """Refuse a key from now on, also in a gateway that runs."""
    _ring().revoke(name, time.time())
    typer.echo(f"{name} is revoked")


def _ring() -> "KeyRing":
    from manyhands.api.auth import FILE, KeyRing
    from manyhands.config import home_from_env

    return KeyRing(home_from_env() / FILE)


def _day(unix_s: int) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(unix_s))
