"""`manyhands jobs`: what a running gateway does and did, without a word of it."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from manyhands.cli import options
from manyhands.cli.client import Api, ApiKey, ask, print_json
from manyhands.cli.lines import fitted, rows_within, width_of
from manyhands.config import MAX_HOPS
from manyhands.plain import figure_of, one_line

HEADINGS: Final = ("job", "age", "model", "status", "tokens", "first", "tokens/s", "api", "repairs", "rules", "route")
NUM_FIRST: Final = 7  # columns that stand in a line of their own on a narrow terminal
WIDE: Final = 140  # where names of models have room
COLOURS: Final = {"failed": "red", "refused": "red", "cancelled": "yellow", "running": "cyan", "queued": "cyan"}


def jobs(
    count: Annotated[int, typer.Option("-n", "--count", min=1, max=1000, help="How many at most.")] = 20,
    api: Api = "",
    api_key: ApiKey = "",
    as_json: options.Json = False,
) -> None:
    """Requests that run and that ran lately: timings, route, repairs."""
    told = ask(api, api_key, "GET", f"/api/jobs?limit={count}")
    if as_json:
        print_json(told)
        return
    if not told["jobs"]:
        typer.echo("no request has come to this gateway yet")
        return
    heading, *lines = job_lines(told["jobs"], time.time(), width_of(sys.stdout))
    typer.echo(fitted(heading, sys.stdout))
    for job, line in zip(told["jobs"], lines, strict=True):
        typer.secho(fitted(line, sys.stdout), fg=COLOURS.get(job["status"]))


def job_lines(found: Sequence[Mapping[str, Any]], now: float, width: int | None) -> list[str]:
    """The headings, and a text for each job, within `width` characters (None: any number)."""
    longest = 60 if width is None or width > WIDE else 16
    return rows_within(width, HEADINGS, [_cells(job, now, longest) for job in found], NUM_FIRST)


def _cells(job: Mapping[str, Any], now: float, longest: int) -> tuple[str, ...]:
    """`longest`: characters of a model's name."""
    timings = job["timings"]
    return (
        one_line(job["id"])[:8],
        _age(now - job["created_unix_s"]),
        one_line(job["model"], longest),
        one_line(job["error"] or job["finish_reason"] or job["status"], 20),
        f"{job['prompt_tokens']}+{job['completion_tokens']}",
        _told(timings["ttft_ms"], " ms"),
        _told(timings["decode_tokens_per_s"]),
        one_line(job["api"], 20),
        str(len(job["repairs"]) or "-"),
        ", ".join(rules_of(job["routing"])) or "-",
        one_line(" > ".join(hop["name"] for hop in job["hops"]), 400) or "-",
    )


def rules_of(routing: Mapping[str, Any]) -> list[str]:
    """What a request asked of its route and what came of it, where that is not usual (docs/routing.md)."""
    own, trusted = ((routing[f"{whose}_first"], routing[f"{whose}_last"]) for whose in ("own", "trusted"))
    codec = routing["codec"] or {"used": "lossless"}
    said = {
        routing["policy"]: routing["policy"] != "latency",
        "avoid self": not routing["allow_self_as_shard"],
        "kept" if routing["is_kept"] else "sticky": routing["sticky"],
        f"scope {routing['scope']}": routing["scope"],
        f"own {own[0]}+{own[1]}": any(own),
        f"trusted {trusted[0]}+{trusted[1]}": any(trusted),
        f"at most {routing['max_shards_per_request']} hops": routing["max_shards_per_request"] < MAX_HOPS,
        "star": routing.get("path") == "star",  # gateways of before do not say
        "apart": routing["is_star"],
        "no fallback": not routing["fallback_to_local"],
        codec["used"]: codec["used"] != "lossless",
        "alone": routing["is_fallback"],
    }
    return [one_line(word, 30) for word, holds in said.items() if holds]


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _told(value: float | None, unit: str = "") -> str:
    return "-" if value is None else figure_of(value) + unit
