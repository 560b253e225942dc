"""Grammars of answers whose messages have heads (headed.py): thoughts first, freely; then the answer or calls, each behind its
head."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from manyhands.text.dialects import INKLING, KIMI3, MUSE
from manyhands.text.grammar import Function, call_rule, marker_rule
from manyhands.text.json_rule import json_rule
from manyhands.text.reasoning import (
    CALL_BLOCK,
    CHANNEL,
    CLOSE,
    CONSTRAIN,
    END,
    END_BLOCK,
    MESSAGE,
    MODEL,
    MORE,
    OPEN,
    SEP,
    START,
    TEXT_BLOCK,
    THOUGHT_BLOCK,
    Heads,
)
from manyhands.text.tagged_grammar import marked

Marks = Mapping[str, int]


class _Form(NamedTuple):
    """How answers with one kind of heads are written, by the rules `closed` (a text, and what ends a thought), `body`, `call`;
    `rules`: what else these need."""

    end: str  # of a thought
    thoughts: str
    answer: str
    calls: str  # one
    more: str  # each that follows; "": none does
    write: Callable[[int, Function, Marks, bool], str]  # the rules of a call, `said_{at}` the first
    rules: tuple[str, ...] = ()
    after: str = ""  # behind the last call
    before: str = ""  # an answer before the first call


def headed_grammar(
    heads: Heads,
    functions: Sequence[Function],
    marks: Marks,
    schema: Mapping[str, Any] | None,
    *,
    is_free: bool,
    forced: bool,
    parallel: bool,
    is_open: bool,
) -> str:
    """The answer is JSON by `schema` or, if `is_free`, any text, or a call of one of `functions`; forced: nothing but a call,
    its arguments by their schema also where it is not strict. `parallel`: several calls may follow each other, where models
    write so. `is_open`: the prompt ends within a thought. `marks`: ids of markers that are special.

    Raises BadRequest for a schema that the dialect cannot be held to.
    """
    form = _FORMS[heads](marks, is_open)
    before = f"({form.before})? " if form.before and is_free and not forced else ""
    said = ([] if forced else [form.answer]) + ([before + _calls(form, parallel)] if functions else [])
    rules = [f"start: {form.thoughts} ({' | '.join(said)})", *form.rules, "TEXT: /(.|\\n)*/"]
    is_token = any(mark in form.end for mark in marks)
    rules.append(
        f"closed: TEXT {marked(form.end, marks)}" if is_token else f"closed[lazy]: TEXT {json.dumps(form.end)}"
    )
    if not forced:
        held = {"type": "object"} if schema is None else schema
        rules.append("body: TEXT" if is_free else f"body: {json_rule(held)}")
    if functions:
        rules.append(f"call: {' | '.join(f'said_{at}' for at in range(len(functions)))}")
    return "\n".join([*rules, *(form.write(at, one, marks, forced) for at, one in enumerate(functions))]) + "\n"


def _calls(form: _Form, parallel: bool) -> str:
    more = f" ({form.more})*" if parallel and form.more else ""
    return f"{form.calls}{more}{form.after}"


def _channels(marks: Marks, is_open: bool) -> _Form:
    channel, message, start = (marker_rule(mark, marks) for mark in (CHANNEL, MESSAGE, START))
    return _Form(
        END,
        f'({channel} ("analysis" | "commentary") {message} closed {start} "assistant")*',
        f'{channel} "final" tail {message} body',
        "call",
        "",
        _in_channel,
        (f'tail: " "? {marker_rule(CONSTRAIN, marks)} "json" | " json" | " "?',),
    )


def _in_channel(at: int, function: Function, marks: Marks, forced: bool) -> str:
    channel, name = marker_rule(CHANNEL, marks), json.dumps(f" to=functions.{function.name}")
    held = function.parameters if function.is_strict or forced else {"type": "object"}
    return (
        f"said_{at}: head_{at} tail {marker_rule(MESSAGE, marks)} args_{at}\n"
        f'head_{at}: {channel} "commentary" {name} | {name} {channel} "commentary"\n'
        f"args_{at}: {json_rule(held)}"
    )


def _recipients(marks: Marks, is_open: bool) -> _Form:
    end, message, start = (marker_rule(mark, marks) for mark in (MORE, MESSAGE, START))
    return _Form(
        MORE,
        f'(" to=self" {message} closed {start} "assistant")*',
        f'" to=user" {message} body',
        "call",
        f'{end} {start} "assistant" call',
        _to_function,
        before=f'" to=user" {message} closed {start} "assistant"',
    )


def _to_function(at: int, function: Function, marks: Marks, forced: bool) -> str:
    head, lead, close = (json.dumps(text) for text in (f" to={function.name}", MUSE.lead, MUSE.close))
    said = f"said_{at}: {head} {marker_rule(MESSAGE, marks)} {lead} call_{at} {close}\n"
    return said + call_rule(at, function, MUSE, marks, forced=forced)


def _blocks(marks: Marks, is_open: bool) -> _Form:
    end, model, text, thought = (marker_rule(mark, marks) for mark in (END_BLOCK, MODEL, TEXT_BLOCK, THOUGHT_BLOCK))
    return _Form(
        END_BLOCK,
        f"({thought} closed {model})*",
        f"{text} body {end}?",
        "call",
        f"{model} call",
        _in_block,
        before=f"{text} closed {model}",
    )


def _in_block(at: int, function: Function, marks: Marks, forced: bool) -> str:
    head, end = f"{json.dumps(function.name)} {marker_rule(CALL_BLOCK, marks)}", marker_rule(END_BLOCK, marks)
    return f"said_{at}: {head} call_{at} {end}\n{call_rule(at, function, INKLING, marks, forced=forced)}"


def _sections(marks: Marks, is_open: bool) -> _Form:
    answered, opened, closed, ended = (
        marked(f"{mark}{section}{SEP}", marks)
        for mark, section in ((CLOSE, "response"), (OPEN, "tools"), (CLOSE, "tools"), (CLOSE, "message"))
    )
    thoughts = f"closed {marked(f'{OPEN}response{SEP}', marks)}" if is_open else ""
    return _Form(
        f"{CLOSE}think{SEP}",
        thoughts,
        f"body ({answered} ({ended})?)?",
        f"{answered} {opened} call",
        "call",
        _in_section,
        after=f" {closed} ({ended})?",
        before="body",
    )


def _in_section(at: int, function: Function, marks: Marks, forced: bool) -> str:
    return f"said_{at}: call_{at}\n{call_rule(at, function, KIMI3, marks, forced=forced)}"


_FORMS: Final[Mapping[Heads, Callable[[Marks, bool], _Form]]] = {
    "channels": _channels,
    "recipients": _recipients,
    "blocks": _blocks,
    "sections": _sections,
}
