"""`manyhands workers`: the nodes behind a running gateway, and what an operator may do to them."""

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from manyhands.cli import options
from manyhands.cli.client import Api, ApiKey, call, print_json, shown
from manyhands.plain import one_line

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(invoke_without_command=True)
Worker = Annotated[str, typer.Argument(help="A node's id, the first digits of one, or its name.")]
_COLOURS = {"active": "green", "evicted": "yellow", "unreachable": "red"}


@app.callback()
def workers(context: typer.Context, api: Api = "", api_key: ApiKey = "", as_json: options.Json = False) -> None:
    """Every node that a running gateway sees, and the route a request would take now."""
    if context.invoked_subcommand is not None:
        return
    told = call(api, api_key, "GET", "/api/workers")
    if as_json:
        print_json(told)
        return
    from rich.console import Console

    console = Console()
    console.print(_table(told["workers"]))
    for model, route in told["scheduler"]["routes"].items():
        hops = "  ->  ".join(shown(f"{hop['name']} ({hop['layers']})") for hop in route or ())
        console.print(f"{shown(model)}: {hops or '[red]no route now[/red]'}", highlight=False)


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
    told = call(api, api_key, "DELETE", path)
    _say(
        told,
        as_json,
        f"{told.get('name') or worker} is out; {told.get('repaired_sessions')} sessions move to others{_finishing(told)}",
    )


@app.command("readmit")
def readmit(worker: Worker, api: Api = "", api_key: ApiKey = "", as_json: options.Json = False) -> None:
    """Let an evicted node back."""
    told = call(api, api_key, "POST", f"/api/workers/{quote(worker, safe='')}/readmit")
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
    """Ask a node to serve other layers; it decides by its own rules, and says why if it will not."""
    path = f"/api/workers/{quote(worker, safe='')}/reassign"
    told = call(api, api_key, "POST", path, {"to": layers, "force": force})
    what = "now serves" if told.get("status") == "reassigned" else "is moving to"
    _say(told, as_json, f"{worker} {what} layers {told.get('new_stage')}")


def _say(told: Any, as_json: bool, sentence: str) -> None:
    if as_json:
        print_json(told)
    else:
        print(one_line(sentence, 2000))


def _finishing(told: dict[str, Any]) -> str:
    count = told.get("finishing_sessions")
    return f", {count} end there: no other node holds its layers" if count else ""


def _role(span: dict[str, Any]) -> str:
    if not _is_loaded(span):
        return " (in need)"
    return " (spare)" if span["is_spare"] else ""


def _is_loaded(span: dict[str, Any]) -> bool:
    return bool(span.get("is_loaded", True))  # older gateways do not say


def _table(found: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table("node", "id", "status", "model: layers", "sessions", "round trip", "free cache", "address", box=None)
    for worker in found:
        rtt, spans = worker["rtt_ms"], worker["spans"]
        colour = _COLOURS.get(worker["status"], "red")
        table.add_row(
            shown(worker["name"]) or "-",
            shown(worker["worker_id"][:8]),
            f"[{colour}]{shown(worker['status'])}[/{colour}]",
            shown(", ".join(f"{s['model']}: {s['layers']}{_role(s)}" for s in spans)) or "-",
            shown(worker["sessions"]),
            "-" if rtt is None else f"{rtt:.2f} ms",
            str(sum(span["free_positions"] for span in spans if _is_loaded(span))) if spans else "-",
            shown(worker["address"]) or "-",
        )
    return table
