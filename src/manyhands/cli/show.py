"""What people see of an answer: the route, the text as it grows, the figures; or one JSON object."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import typer

from manyhands.cli.exactness import explained, print_audit
from manyhands.cli.lines import Flow, fitted, width_of
from manyhands.origin import Answer, Origin
from manyhands.plain import counted, figure_of, one_line, without_controls

if TYPE_CHECKING:
    from manyhands.origin.repair_plan import Event
    from manyhands.route.search import Offer

NEW_ROUTE: Final = ("shard_failover", "reshard")


async def show_answer(
    origin: Origin,
    answer: Answer,
    *,
    as_json: bool,
    lead: str = "",
    on_token: Callable[[], object] = lambda: None,
    **options: Any,
) -> None:
    """Stream the route and an answer to the terminal, or collect it silently for `print_json`.

    `lead`: the text that the answer goes on from, shown before it where stdout is a terminal; a pipe gets the answer alone.
    The route is shown again after each repair. `on_token` is called after each token.
    """
    shown_events = 0
    flow = Flow(width_of(sys.stdout))
    try:
        async for token in origin.stream(answer, **options):
            if not as_json:
                if len(answer.token_ids) == 1:
                    print_route(answer.route)
                    typer.echo(flow.feed(for_stdout(lead) * sys.stdout.isatty()), nl=False)
                news = answer.events[shown_events:]
                if news:
                    typer.echo(flow.end(), nl=False)
                for event in news:
                    typer.secho(fitted(f"\n{told_of(event)}", sys.stderr), dim=True, err=True)
                if answer.session is not None and any(event.kind in NEW_ROUTE for event in news):
                    print_route([hop.offer for hop in answer.session.route.hops])
                shown_events = len(answer.events)
                typer.echo(flow.feed(for_stdout(token.text)), nl=False)
            on_token()
    finally:
        if answer.token_ids and not as_json:  # also where it breaks off: what is said of that has a line of its own
            typer.echo(flow.end())


def told_of(event: "Event") -> str:
    """What happened to the route, as people say it."""
    names = ", ".join(dict.fromkeys(event.nodes)) or "a node"
    said = {
        "shard_status": f"{names}: {event.detail.removeprefix('degraded: ').partition(': link to')[0]}",
        "shard_failover": f"{names} goes on in place of {event.detail.partition(' -> ')[0]}",
        "reshard": f"the layers are cut anew: {event.detail}",
        "pipeline_aborted": f"given up: {event.detail}",
        "audit": f"audit {event.detail}",
    }.get(event.kind, event.detail)
    return one_line(f"[at token {event.at_token}: {said}]", 600)


def for_stdout(text: str) -> str:
    """A model's text as it is, or without control characters where stdout is a terminal, which would obey them."""
    return without_controls(text) if sys.stdout.isatty() else text


def print_route(offers: "Sequence[Offer]") -> None:
    for index, offer in enumerate(offers):
        where = f"{offer.addr.host}:{offer.addr.port}"
        name = one_line(offer.name)
        line = f"hop {index}  layers {offer.info.span!s:<7} {name:<12} {one_line(where):<21} {offer.node[:8]}"
        typer.secho(line, dim=True, err=True)


def print_figures(answer: Answer, load_s: float) -> None:
    speed = answer.timings.decode_tokens_per_s(len(answer.token_ids))
    audit = None if answer.audit is None else answer.audit.as_object()
    parts = [
        counted(len(answer.token_ids), "token"),
        f"{figure_of(speed)} tokens/s" if speed else "",
        f"first after {answer.timings.ttft_s:.3f} s" if answer.timings.ttft_s is not None else "",
        f"loaded in {load_s:.1f} s",
        _drafted(answer),
        explained(answer.exactness, audit),
        f"finish: {answer.finish_reason}",
    ]
    typer.secho(fitted(" · ".join(p for p in parts if p), sys.stderr), dim=True, err=True)
    print_audit(audit)


def _drafted(answer: Answer) -> str:
    """What drafting won, or why it is off, in a few words; "" if it had nothing to say."""
    drafting = answer.drafting
    if drafting.accepted:
        each = drafting.tokens_per_traversal
        return f"{drafting.accepted} of {drafting.drafted} drafts accepted, {each:.2f} tokens a traversal"
    return ""


def as_object(answer: Answer, load_s: float) -> dict[str, Any]:
    """The JSON form of an answer (docs/cli.md)."""
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "exactness": answer.exactness,
        "route": [
            {
                "node": o.node,
                "name": o.name,
                "layers": str(o.info.span),
                "address": str(o.addr),
                "arithmetic": o.info.arithmetic,
            }
            for o in answer.route
        ],
        "usage": {
            "prompt_tokens": len(answer.prompt),
            "completion_tokens": len(answer.token_ids),
            "total_tokens": len(answer.prompt) + len(answer.token_ids),
        },
        "drafting": {**asdict(answer.drafting), "tokens_per_traversal": _rounded(answer.drafting.tokens_per_traversal)},
        "routing": answer.routing.as_object(),
        "audit": None if answer.audit is None else answer.audit.as_object(),
        "repairs": [_rounded_floats(asdict(repair)) for repair in answer.repairs],
        "events": [asdict(event) for event in answer.events],
        "timings": {
            "load_s": round(load_s, 3),
            "open_s": _rounded(answer.timings.open_s),
            "ttft_s": _rounded(answer.timings.ttft_s),
            "decode_tokens_per_s": _rounded(answer.timings.decode_tokens_per_s(len(answer.token_ids))),
        },
    }


def print_json(answer: Answer, load_s: float) -> None:
    typer.echo(json.dumps(as_object(answer, load_s)))  # in ASCII: nothing in it ends a line or moves a cursor


def _rounded_floats(values: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
