"""`manyhands workers`: the nodes behind a running gateway, and what an operator may do to them."""

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from manyhands.cli import options
from manyhands.cli.client import Api, ApiKey, ask, print_json
from manyhands.cli.lines import fitted, rows_within, width_of
from manyhands.plain import one_line

app = typer.Typer(invoke_without_command=True)
Worker = Annotated[str, typer.Argument(help="A node's id, the first digits of one, or its name.")]
HEADINGS: Final = ("node", "id", "status", "sessions", "round trip", "layers", "free cache", "address")
NUM_FIRST: Final = 5  # columns that stand in a line of their own on a narrow terminal
_COLOURS: Final = {"active": None, "evicted": "yellow", "unreachable": "red"}


@app.callback()
def workers(context: typer.Context, api: Api = "", api_key: ApiKey = "", as_json: options.Json = False) -> None:
    """Every node that a running gateway sees, and the route a request would take now."""
    if context.invoked_subcommand is not None:
        return
    told = ask(api, api_key, "GET", "/api/workers")
    if as_json:
        print_json(told)
        return
    heading, *lines = rows_within(width_of(sys.stdout), HEADINGS, [_cells(one) for one in told["workers"]], NUM_FIRST)
    typer.echo(fitted(heading, sys.stdout))
    for worker, line in zip(told["workers"], lines, strict=True):
        typer.secho(fitted(line, sys.stdout), fg=_COLOURS.get(worker["status"], "red"))
    if not told["scheduler"]["routes"]:
        said = "none yet: a gateway asks nodes once a model is asked for here; `manyhands status` shows the swarm"
        typer.echo(fitted(said, sys.stdout))
    for model, route in told["scheduler"]["routes"].items():
        hops = "  ->  ".join(f"{hop['name']} ({hop['layers']})" for hop in route or ())
        said = one_line(f"{model}: {hops or 'no route now'}", 4000)
        typer.secho(fitted(said, sys.stdout), fg=None if hops else "red")


@app.command("evict")
def evict(
    worker: Worker,
    force: Annotated[bool, typer.Option("--force", help="Also if no other node holds its layers.")] = False,
    api: Api = "",
    api_key: ApiKey = "",
    as_json: options.Json = False,
) -> None:
    """Keep a node out; requests that run through it go on over others."""
    path = f"/api/workers/{quote(worker, safe='')}" + ("?force=true" if force else "")
    told = ask(api, api_key, "DELETE", path)
    _say(
        told,
        as_json,
        f"{told.get('name') or worker} is out; {told.get('repaired_sessions')} sessions move to others{_finishing(told)}",
    )


@app.command("readmit")
def readmit(worker: Worker, api: Api = "", api_key: ApiKey = "", as_json: options.Json = False) -> None:
    """Let an evicted node back."""
    told = ask(api, api_key, "POST", f"/api/workers/{quote(worker, safe='')}/readmit")
    _say(told, as_json, f"{told.get('name') or worker} may be used again")


@app.command("reassign")
def reassign(
    worker: Worker,
    layers: Annotated[str, typer.Argument(help='Layers to move to, for example "0-7".')],
    force: Annotated[bool, typer.Option("--force", help="Also if no other node holds its layers.")] = False,
    api: Api = "",
    api_key: ApiKey = "",
    as_json: options.Json = False,
) -> None:
    """Ask a node to serve other layers. It decides by its own rules, and says why if it will not."""
    path = f"/api/workers/{quote(worker, safe='')}/reassign"
    told = ask(api, api_key, "POST", path, {"to": layers, "force": force})
    what = "now serves" if told.get("status") == "reassigned" else "is moving to"
    _say(told, as_json, f"{worker} {what} layers {told.get('new_stage')}")


def _say(told: Any, as_json: bool, sentence: str) -> None:
    if as_json:
        print_json(told)
    else:
        print(fitted(one_line(sentence, 2000), sys.stdout))


def _finishing(told: dict[str, Any]) -> str:
    count = told.get("finishing_sessions")
    return f", {count} end there: no other node holds its layers" if count else ""


def _role(span: dict[str, Any]) -> str:
    if not _is_loaded(span):
        return " (in need)"
    return " (spare)" if span["is_spare"] else ""


def _is_loaded(span: dict[str, Any]) -> bool:
    return bool(span.get("is_loaded", True))  # older gateways do not say


def _cells(worker: Mapping[str, Any]) -> tuple[str, ...]:
    rtt, spans = worker["rtt_ms"], worker["spans"]
    held = ", ".join(f"{span['model']}: {span['layers']}{_role(span)}" for span in spans)
    return (
        one_line(worker["name"], 24) or "-",
        one_line(worker["worker_id"])[:8],
        one_line(worker["status"], 16),
        one_line(worker["sessions"], 9),
        "-" if rtt is None else f"{rtt:.2f} ms",
        one_line(held, 400) or "-",
        str(sum(span["free_positions"] for span in spans if _is_loaded(span))) if spans else "-",
        one_line(worker["address"], 80) or "-",
    )
