"""`manyhands benchmark`: how fast a running gateway answers, over prompts that are always the same (L9-R07)."""

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from manyhands.cli import options
from manyhands.cli.client import Api, ApiKey, ask, headers_for, print_json, running_api
from manyhands.cli.lines import fitted, rows_within, width_of
from manyhands.cli.progress import doing
from manyhands.errors import LinkClosed, ManyhandsError
from manyhands.plain import figure_of, one_line

PROMPTS = (
    "Once upon a time there was a king who had three sons, and",
    "The quick brown fox",
    "In a small village at the edge of the forest",
    "The most important thing about a network is",
    "Long ago, before there were roads,",
    "She opened the old book and read:",
    "A list of things to take on a journey:",
    "The miller said to his daughter:",
    "On the third day the wind turned, and",
    "Explain how many hands make light work:",
)


HEADINGS: Final = ("answered", "mean latency", "first token", "tokens/s", "while decoding", "tokens")
NUM_FIRST: Final = 3  # columns that stand in a line of their own on a narrow terminal
# Refusals that every further request would get too: what is asked, the key, what it may use, the model.
HOPELESS = frozenset({400, 401, 403, 404})


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: `latency_s` as this command saw it. `error` is a code, None if it was answered."""

    latency_s: float
    tokens: int = 0
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    workers: tuple[str, ...] = ()
    error: str | None = None


def benchmark(
    count: Annotated[
        int, typer.Option("-n", "--count", min=1, max=1_000_000, help="Requests, one after the other.")
    ] = 5,
    max_tokens: Annotated[int, typer.Option("-m", "--max-tokens", min=1, help="Tokens of each answer at most.")] = 30,
    model: Annotated[str, typer.Option("--model", help="A model of the gateway; may be left out if it has one.")] = "",
    api: Api = "",
    api_key: ApiKey = "",
    wan: Annotated[
        bool,
        typer.Option(
            "--wan",
            help="Instead: what a ring and drafting win over a wide area network emulated here; takes 2 minutes.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Ask a gateway the same prompts and say how many were answered, and how fast. Exit code 1 if any was not."""
    if wan:
        _ladder(as_json)
        return
    headers_for(api := api or running_api(), api_key)  # what is wrong with either is said once
    outcomes = []
    for prompt in itertools.islice(itertools.cycle(PROMPTS), count):
        body = {"prompt": prompt, "max_tokens": max_tokens, "deterministic": True} | ({"model": model} if model else {})
        outcomes.append(_measure(api, api_key, body))
        if not as_json:
            _print_outcome(outcomes[-1], prompt)
    told = summary(outcomes)
    if as_json:
        print_json(told)
    else:
        for line in rows_within(width_of(sys.stdout), HEADINGS, [_cells(told)], NUM_FIRST):
            typer.echo(fitted(line, sys.stdout))
    if told["succeeded"] < count:
        raise typer.Exit(1)


def _ladder(as_json: bool) -> None:
    """A star, a ring and every way of drafting over six emulated hops, in a process of its own."""
    command = [sys.executable, "-P", "-m", "manyhands.testing.ladder", *(["--json"] if as_json else [])]
    with doing("emulating six hops, 22 to 75 ms apart: some two minutes"):
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    typer.echo(found.stdout if as_json else fitted(found.stdout, sys.stdout), nl=False)
    raise typer.Exit(found.returncode)


def _measure(api: str, key: str, body: dict[str, Any]) -> Outcome:
    """One request. Raises LinkClosed where there is no gateway at all, GatewayError for what no request would be answered."""
    began = time.monotonic()
    try:
        said = ask(api, key, "POST", "/api/infer", body)
    except LinkClosed:
        raise
    except ManyhandsError as error:
        if error.http_status in HOPELESS:
            raise
        return Outcome(time.monotonic() - began, error=error.code)
    timings = said["timings"]
    ttft_ms = timings["ttft_ms"]
    return Outcome(
        time.monotonic() - began,
        said["tokens_generated"],
        None if ttft_ms is None else ttft_ms / 1e3,
        timings["decode_tokens_per_s"],
        tuple(worker["name"] for worker in said["worker_trace"]),
    )


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """The figures of a run; means over answered requests, None without any. `tokens_per_s`: all tokens over all time."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    took_s = sum(outcome.latency_s for outcome in good)
    return {
        "requests": len(outcomes),
        "succeeded": len(good),
        "success_rate": round(len(good) / len(outcomes), 4),
        "tokens": sum(outcome.tokens for outcome in good),
        "mean_latency_s": _mean(outcome.latency_s for outcome in good),
        "mean_ttft_s": _mean(o.ttft_s for o in good if o.ttft_s is not None),
        "tokens_per_s": round(sum(o.tokens for o in good) / took_s, 2) if took_s else None,
        "mean_decode_tokens_per_s": _mean(o.tokens_per_s for o in good if o.tokens_per_s is not None),
        "errors": sorted(outcome.error for outcome in outcomes if outcome.error is not None),
    }


def _mean(values: Iterator[float]) -> float | None:
    known = list(values)
    return round(statistics.fmean(known), 4) if known else None


def _print_outcome(outcome: Outcome, prompt: str) -> None:
    told = one_line(outcome.error or f"{outcome.tokens} tokens over {' > '.join(outcome.workers)}")
    line = f"{outcome.latency_s:7.2f} s  {told}  ({prompt[:40]})"
    typer.secho(fitted(line, sys.stderr), dim=outcome.error is None, err=True)


def _cells(told: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{told['succeeded']} of {told['requests']}",
        *(_time(told[name]) for name in ("mean_latency_s", "mean_ttft_s")),
        *(_rate(told[name]) for name in ("tokens_per_s", "mean_decode_tokens_per_s")),
        str(told["tokens"]),
    )


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"


def _rate(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else figure_of(tokens_per_s)
