"""Grammars of answers whose messages have heads (channels.py, recipients.py): thoughts first, freely; then the answer or calls,
each behind its head."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.text.dialects import MUSE
from manyhands.text.grammar import Function, call_rule, marker_rule
from manyhands.text.json_rule import json_rule
from manyhands.text.reasoning import CHANNEL, CONSTRAIN, END, MESSAGE, MORE, START, Heads

Marks = Mapping[str, int]


def headed_grammar(
    heads: Heads,
    functions: Sequence[Function],
    marks: Marks,
    schema: Mapping[str, Any] | None,
    *,
    is_free: bool,
    forced: bool,
    parallel: bool,
) -> str:
    """The answer is JSON by `schema` or, if `is_free`, any text, or a call of one of `functions`; forced: nothing but a call,
    its arguments by their schema also where it is not strict. `parallel`: several calls may follow each other, where heads
    name recipients. `marks`: ids of markers that are special.

    Raises BadRequest for a schema that the dialect cannot be held to.
    """
    in_channels = heads == "channels"
    end, channel, message, start = (marker_rule(mark, marks) for mark in (_end(heads), CHANNEL, MESSAGE, START))
    thought = f'{channel} ("analysis" | "commentary")' if in_channels else '" to=self"'
    head = f'{channel} "final" tail' if in_channels else '" to=user"'
    again = f' ({end} {start} "assistant" call)*' if parallel and not in_channels else ""
    said = ([] if forced else ["answer"]) + ([f"call{again}"] if functions else [])
    rules = [
        f"start: before* ({' | '.join(said)})",
        f'before: {thought} {message} closed {start} "assistant"',
        f"closed: TEXT {end}" if _end(heads) in marks else f"closed[lazy]: TEXT {json.dumps(_end(heads))}",
        "TEXT: /(.|\\n)*/",
    ]
    if in_channels:
        rules.append(f'tail: " "? {marker_rule(CONSTRAIN, marks)} "json" | " json" | " "?')
    if not forced:
        rules.append(f"answer: {head} {message} {'TEXT' if is_free else 'json'}")
        rules += [] if is_free else [f"json: {json_rule(schema if schema is not None else {'type': 'object'})}"]
    if functions:
        rules.append(f"call: {' | '.join(f'said_{index}' for index in range(len(functions)))}")
    write = _in_channel if in_channels else _to_function
    return "\n".join([*rules, *(write(at, function, marks, forced) for at, function in enumerate(functions))]) + "\n"


def _end(heads: Heads) -> str:
    return END if heads == "channels" else MORE


def _in_channel(at: int, function: Function, marks: Marks, forced: bool) -> str:
    """The rules of a call: its arguments are the message."""
    channel, name = marker_rule(CHANNEL, marks), json.dumps(f" to=functions.{function.name}")
    held = function.parameters if function.is_strict or forced else {"type": "object"}
    return (
        f"said_{at}: head_{at} tail {marker_rule(MESSAGE, marks)} args_{at}\n"
        f'head_{at}: {channel} "commentary" {name} | {name} {channel} "commentary"\n'
        f"args_{at}: {json_rule(held)}"
    )


def _to_function(at: int, function: Function, marks: Marks, forced: bool) -> str:
    """The rules of a call: it stands between tags."""
    head, lead, close = (json.dumps(text) for text in (f" to={function.name}", MUSE.lead, MUSE.close))
    said = f"said_{at}: {head} {marker_rule(MESSAGE, marks)} {lead} call_{at} {close}\n"
    return said + call_rule(at, function, MUSE, marks, forced=forced)
