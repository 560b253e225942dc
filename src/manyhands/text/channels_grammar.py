"""Grammars of answers in channels (channels.py): thoughts first, freely; then the answer or a call, each behind its head."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.text.grammar import Function, marker_rule
from manyhands.text.json_rule import json_rule
from manyhands.text.reasoning import CHANNEL, CONSTRAIN, END, MESSAGE, START


def channels_grammar(
    functions: Sequence[Function],
    marks: Mapping[str, int],
    schema: Mapping[str, Any] | None,
    *,
    is_free: bool,
    forced: bool,
) -> str:
    """The answer is JSON by `schema` or, if `is_free`, any text, or a call of one of `functions`; forced: nothing but a call,
    its arguments by their schema also where it is not strict. `marks`: ids of markers that are special."""
    channel, message = marker_rule(CHANNEL, marks), marker_rule(MESSAGE, marks)
    said = [] if forced else ["answer"]
    said += [f"call_{index}" for index in range(len(functions))]
    rules = [
        f"start: before* ({' | '.join(said)})",
        f'before: {channel} ("analysis" | "commentary") {message} closed {marker_rule(START, marks)} "assistant"',
        f"closed: TEXT {marker_rule(END, marks)}" if END in marks else f"closed[lazy]: TEXT {json.dumps(END)}",
        f'tail: " "? {marker_rule(CONSTRAIN, marks)} "json" | " json" | " "?',
        "TEXT: /(.|\\n)*/",
    ]
    if not forced:
        body = "TEXT" if is_free else "json"
        rules.append(f'answer: {channel} "final" tail {message} {body}')
        rules += [] if is_free else [f"json: {json_rule(schema if schema is not None else {'type': 'object'})}"]
    for index, function in enumerate(functions):
        name = json.dumps(f" to=functions.{function.name}")
        held = function.parameters if function.is_strict or forced else {"type": "object"}
        rules += [
            f"call_{index}: head_{index} tail {message} args_{index}",
            f'head_{index}: {channel} "commentary" {name} | {name} {channel} "commentary"',
            f"args_{index}: {json_rule(held)}",
        ]
    return "\n".join(rules) + "\n"
