"""`manyhands infer` by a gateway: POST /api/infer/stream, its text as it comes, then its figures; or one JSON object."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from manyhands.aside import aside
from manyhands.cli.chat_events import BrokenStream, events_of
from manyhands.cli.client import GatewayError, call, check_address, print_json, running_api
from manyhands.cli.exactness import explained, print_audit
from manyhands.cli.lines import Flow, fitted, width_of
from manyhands.cli.progress import clear_line, doing
from manyhands.core import PathKind, SamplingParams
from manyhands.plain import counted, figure_of, one_line, without_controls


async def infer_by_gateway(
    api: str, key: str, model: str, prompt: str, params: SamplingParams, path: PathKind, draft: str, *, as_json: bool
) -> None:
    """Print the answer. Raises GatewayError, LinkClosed, BrokenStream if it is cut. `model` "": the gateway's only one, `draft`
    "": as its node is set up.
    """
    where = (api or running_api()).rstrip("/")
    check_address(where)
    with doing(f"asking the gateway at {where}") as screen:
        if model:
            screen.say(f"asking {model}")
        named = {name: value for name, value in (("model", model), ("draft", draft)) if value}
        body = {**named, "prompt": prompt, "path": path, **_sampling(params)}
        if as_json:
            print_json(await aside(call, where, key, "POST", "/api/infer", body))
            return
        telling = Telling(prompt)
        async with contextlib.aclosing(events_of(where, key, body, path="/api/infer/stream")) as events:
            async for _, event in events:
                clear_line()
                screen.end()
                try:
                    if telling.take(event):
                        return
                except (TypeError, KeyError, AttributeError) as error:
                    raise BrokenStream(f"the gateway at {where} sent what is no event: {event!r:.100}") from error


class Telling:
    """Shows the events of /api/infer/stream (docs/api.md): the text on stdout, all else on stderr.

    `prompt` stands before the text where stdout is a terminal.
    """

    def __init__(self, prompt: str) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._lead = prompt if self._is_terminal else ""
        self._has_text = False
        self._flow = Flow(width_of(sys.stdout))

    def take(self, event: Mapping[str, Any]) -> bool:
        """Show one event; whether it was the last. Raises GatewayError for an error event."""
        if "token_text" in event:
            text = self._lead + str(event["token_text"])
            self._lead, self._has_text = "", True
            typer.echo(self._flow.feed(without_controls(text) if self._is_terminal else text), nl=False)
        elif "assignments" in event:
            self._route(event["assignments"])
        elif "dropped_worker" in event:
            typer.echo(self._flow.end(), nl=False)
            self._note(f"\n[{_change(event)}]")
            self._route(event["remaining"])
        elif "worker_trace" in event:
            typer.echo(self._flow.end())
            self._note(figures(event))
            print_audit(event["audit"])
            return True
        elif "detail" in event:
            if self._has_text:
                typer.echo(self._flow.end())  # what broke off stands in a line of its own
            raise GatewayError(one_line(event["detail"], 2000), one_line(event.get("code"), 64), 502)
        return False

    def _route(self, hops: Sequence[Mapping[str, Any]]) -> None:
        for hop, each in enumerate(hops):
            self._note(f"hop {hop}  layers {each['layers']:<7} {each['name']:<12} {each['address']}")

    def _note(self, text: str) -> None:
        for line in text.split("\n"):
            typer.secho(fitted(one_line(line, 600), sys.stderr), dim=True, err=True)


def _change(event: Mapping[str, Any]) -> str:
    """Of a `reshard` event: what was repaired, or why the request began alone (without a `repair_ms`)."""
    if event["repair_ms"] is None:
        return str(event["reason"])
    return f"repair at token {event['token_index']}: {event['dropped_worker']} was lost, {event['repair_ms']:.0f} ms"


def figures(done: Mapping[str, Any]) -> str:
    """The last line: of the `done` event."""
    timings, repairs = done["timings"], len(done["reshard_events"])
    speed, first = timings.get("decode_tokens_per_s"), timings.get("ttft_ms")
    parts = [
        counted(done["tokens_generated"], "token"),
        f"{figure_of(speed)} tokens/s" if speed else "",
        f"first after {first / 1e3:.3f} s" if first is not None else "",
        counted(repairs, "repair") if repairs else "",
        explained(done["exactness"], done["audit"]),
        f"finish: {done['finish_reason']}",
    ]
    return " · ".join(part for part in parts if part)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    return {
        "max_tokens": params.max_tokens,
        "deterministic": params.deterministic,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": params.seed,
        "repetition_penalty": params.repetition_penalty,
        **({"stop": list(params.stop)} if params.stop else {}),
    }
