"""`manyhands jobs`: what a running gateway does and did, without a word of it."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli import options
from manyhands.cli.client import Api, ApiKey, call, print_json, shown

if TYPE_CHECKING:
    from rich.table import Table


def jobs(
    count: Annotated[int, typer.Option("-n", "--count", min=1, max=1000, help="How many at most.")] = 20,
    api: Api = "",
    api_key: ApiKey = "",
    as_json: options.Json = False,
) -> None:
    """Requests that run and that ran lately: timings, route, repairs."""
    told = call(api, api_key, "GET", f"/api/jobs?limit={count}")
    if as_json:
        print_json(told)
    else:
        from rich.console import Console

        Console().print(_table(told["jobs"], time.time()))


def _table(found: list[dict[str, Any]], now: float) -> "Table":
    from rich.table import Table

    table = Table("job", "age", "model", "api", "status", "tokens", "first", "tokens/s", "route", "repairs", box=None)
    for job in found:
        timings = job["timings"]
        table.add_row(
            shown(job["id"][:8]),
            _age(now - job["created_unix_s"]),
            shown(job["model"]),
            shown(job["api"]),
            _status(job),
            f"{job['prompt_tokens']}+{job['completion_tokens']}",
            _figure(timings["ttft_ms"], "{:.0f} ms"),
            _figure(timings["decode_tokens_per_s"], "{:.1f}"),
            shown(" > ".join(hop["name"] for hop in job["hops"])) or "-",
            str(len(job["repairs"]) or "-"),
        )
    return table


def _status(job: dict[str, Any]) -> str:
    """How it stands: the finish reason, the error's code, or running."""
    told = job["error"] or job["finish_reason"] or job["status"]
    colour = {"failed": "red", "refused": "red", "cancelled": "yellow", "done": "green"}.get(job["status"], "cyan")
    return f"[{colour}]{shown(told)}[/{colour}]"


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
