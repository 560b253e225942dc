"""`manyhands plan MODEL --swarm` and `--apply`: the swarm that runs, as its gateway plans for it."""

import sys
from typing import Any

import typer

from manyhands.cli.client import ask, print_json
from manyhands.cli.lines import error_line, fitted
from manyhands.plain import figure_of, one_line


def plan_swarm(api: str, key: str, body: dict[str, Any], *, as_json: bool) -> None:
    """Ask the gateway at `api` for a plan, and to apply it where `body` says so; exit code 1 where a node refuses its part.
    Raises as the gateway refuses."""
    told = ask(api, key, "POST", "/api/plan", body)
    print_json(told) if as_json else _show(told)
    moves = (told.get("applied") or {"moves": []})["moves"]
    if refused := [move for move in moves if move["status"] == "refused"]:
        who = ", ".join(f"{move['name']} (layers {move['to']})" for move in refused)
        typer.echo(error_line(f"{len(refused)} of {len(moves)} moves refused: {who}", sys.stderr), err=True)
        raise typer.Exit(1)


def _show(told: dict[str, Any]) -> None:
    from rich.console import Console

    if told["after"] is not None:
        Console().print(_hops(told))
    for line in told["advice"]:
        typer.echo(fitted(one_line(line, 2000), sys.stdout))
    if (applied := told.get("applied")) is not None:
        for line in applied_lines(applied):
            typer.echo(fitted(line, sys.stdout))


def applied_lines(applied: dict[str, Any]) -> list[str]:
    """What became of a plan, a line for each node that was asked."""
    lines = []
    for move in applied["moves"]:
        why = f" ({move['said']})" if move["said"] else ""
        held = ", ".join(move["from"]) or "none"
        lines.append(one_line(f"{move['name']}: layers {held} -> {move['to']}: {move['status']}{why}"))
    said = f": {applied['said']}" if applied["said"] else ""
    return [*lines, one_line(f"{applied['status']}{said}")]


def _hops(told: dict[str, Any]) -> Any:
    from rich.table import Table
    from rich.text import Text

    after = told["after"]
    title = f"best placement, {figure_of(after['tokens_per_s'])} tokens/s expected"
    table = Table("machine", "layers", "link ms", "compute ms", title=title)
    for hop in after["hops"]:
        table.add_row(
            Text(one_line(hop["machine"])), hop["layers"], figure_of(hop["link_ms"]), figure_of(hop["compute_ms"])
        )
    return table
