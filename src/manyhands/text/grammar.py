"""Grammars for answers: JSON, JSON by a schema, function calls. Compiled and matched by llguidance.

A `Grammar` is a sampler's Constraint: it says which tokens may follow the generated ids. Its matcher is moved to
whatever ids it is asked about (back by rollback, on by consuming), so drafts may be tried and dropped.
"""

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance._lib import LLParserLimits  # it has no public name

from manyhands.errors import BadRequest
from manyhands.plain import size_of
from manyhands.text.dialects import Dialect
from manyhands.text.heap import heap_bytes
from manyhands.text.json_rule import json_rule
from manyhands.text.kept_grammars import KeptGrammars
from manyhands.text.literal_grammar import literal_rules
from manyhands.text.reasoning import Thinking
from manyhands.text.tagged_grammar import marked, tagged_rules
from manyhands.text.tokenizer_parts import for_grammars

Schema = Mapping[str, Any]
_TEXT = "TEXT: /(.|\\n)*/\n"
_NUMBER = "/[0-9]{1,3}/"
# A tenth of llguidance's own: 20 patterns under one allOf, 13.7 s of a core by its defaults, are refused within 10 ms; a step's
# mask takes 4 ms at most (14,000 of fuel, 20,000 items a millisecond). Nothing is computed ahead over the whole vocabulary.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=50_000,
    step_max_items=50_000,
    max_lexer_states=25_000,
    max_grammar_size=50_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
# What one may take to compile, checked in a process first. 2,000 properties: 57,000 letters, 0.4 s, 8 MB. A constant list of
# 9,800 numbers took 93 MB, and 44 ms for the mask of each step; 500 patterns of properties' names, any two compared, 10 s.
MAX_COMPILE_S = 2.0
MAX_COMPILED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. `parameters` is a JSON schema of its arguments; strict: they must obey it."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False


def json_grammar(schema: Mapping[str, Any] | None) -> str:
    """Any JSON object, or what `schema` describes."""
    return f"start: {json_rule(schema if schema is not None else {'type': 'object'})}\n"


def behind_thought(grammar: str, closes: str) -> str:
    """The same behind a thought that the prompt has begun, where no token of its own ends it."""
    rest = grammar.removeprefix("start: ")
    return (
        f"start: thought GAP begun\nthought[lazy]: /(.|\\n)*/ {json.dumps(closes)}\nGAP: /[ \\n]{{0,3}}/\nbegun: {rest}"
    )


def calls_grammar(dialect: Dialect, functions: Sequence[Function], marks: Mapping[str, int], *, parallel: bool) -> str:
    """One call of one of `functions`, or (parallel) several, and nothing else. `marks`: ids of markers that are special.

    Raises BadRequest for a schema that the dialect cannot be held to.
    """
    return f"start: calls\n{_calls(dialect, functions, marks, parallel=parallel, forced=True)}"


def answer_grammar(
    dialect: Dialect, functions: Sequence[Function], marks: Mapping[str, int], schema: Schema | None, *, parallel: bool
) -> str:
    """Either calls, as `calls_grammar` but that only strict functions are held to their schema, or JSON as `json_grammar`.

    Raises BadRequest as `calls_grammar`, and where a call is JSON without a mark, so that the two cannot be told apart.
    """
    if dialect.name == "llama3":
        raise BadRequest(
            "a call of this model is JSON without a mark, as is the answer: send tool_choice none or required"
        )
    calls = _calls(dialect, functions, marks, parallel=parallel, forced=False)
    return f"start: calls | answer\nanswer: {json_rule(schema if schema is not None else {'type': 'object'})}\n{calls}"


def _calls(
    dialect: Dialect, functions: Sequence[Function], marks: Mapping[str, int], *, parallel: bool, forced: bool
) -> str:
    """The rule `calls` and those below it."""
    body = _body(dialect, functions, marks, forced=forced)
    if not dialect.marker:
        return f"calls: call\n{body}"
    inside, marker = _inside(dialect, marks, parallel=parallel), marker_rule(dialect.marker, marks)
    apart = f"{marked(dialect.apart, marks)} " if dialect.apart else ""
    several = f" ({apart}{marker} inside)*" if parallel and dialect.between is None else ""
    first = "inside" if dialect.is_begun else f"{marker} inside"
    return f"calls: {first}{several}\ninside: {inside}\n{body}"


def strict_grammar(dialect: Dialect, functions: Sequence[Function], marks: Mapping[str, int]) -> str:
    """Free text, but once a call begins it is one of `functions`, its arguments by the schema if it is strict."""
    body = _body(dialect, functions, marks, forced=False)
    if dialect.name == "llama3":
        return f"start: (call | OTHER)?\nOTHER: /[^{{\\[\\s](.|\\n)*/\n{body}"
    inside = _inside(dialect, marks, parallel=True)
    # Where a call may stand first, a text begins with a line break: so it does in the model's training.
    start = "start: (call rest | /\\n/ rest)?\nrest" if dialect.is_begun else "start"
    if dialect.marker in marks:
        return f"{start}: tag* TEXT\ntag: TEXT {marker_rule(dialect.marker, marks)} {inside}\n{body}"
    trigger = f"trigger[lazy]: TEXT {json.dumps(dialect.marker)}\n"
    return f"{start}: tag* tail\ntail: TEXT\ntag: trigger {inside}\n{trigger}{body}"


def _inside(dialect: Dialect, marks: Mapping[str, int], *, parallel: bool) -> str:
    """What stands behind the marker of calls."""
    between = None if dialect.between is None else marked(dialect.between, marks)
    several = f"({between} call)*" if parallel and between is not None else ""
    parts = (marked(dialect.lead, marks), "call", several, marked(dialect.trail + dialect.close, marks))
    return " ".join(filter(None, parts))


def _body(dialect: Dialect, functions: Sequence[Function], marks: Mapping[str, int], *, forced: bool) -> str:
    """The rule `call` and those below it, and TEXT."""
    rules = "".join(call_rule(i, f, dialect, marks, forced=forced) for i, f in enumerate(functions))
    return f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}\n{rules}{_TEXT}"


def call_rule(index: int, function: Function, dialect: Dialect, marks: Mapping[str, int], *, forced: bool) -> str:
    """The rule `call_{index}` and those below it. Raises BadRequest as `calls_grammar`."""
    schema = function.parameters if function.is_strict or forced else {"type": "object"}
    if dialect.tags is not None:
        return tagged_rules(function.name, index, schema, dialect.tags, marks)
    if dialect.notation is not None:
        return literal_rules(function.name, index, schema, dialect.notation, marks)
    form = dialect.forms[0].replace("{name}", function.name)
    head = [_NUMBER if part == "{n}" else marked(part, marks) for part in re.split(r"(\{n\})", form)]
    parts = filter(None, [*head, f"args_{index}", marked(dialect.tail, marks)])
    return f"call_{index}: {' '.join(parts)}\nargs_{index}: {json_rule(schema, compact=dialect.is_compact)}\n"


def marker_rule(text: str, marks: Mapping[str, int]) -> str:
    """A marker: a token if it is special, else its text."""
    return f"<[{marks[text]}]>" if text in marks else json.dumps(text)


class Grammars:
    """Compiles grammars for one tokenizer; its table of tokens is made once, when first wanted (about 1 s for 150k).

    Blocking, from any thread. What was compiled is kept in `kept`, which several may share.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int], kept: KeptGrammars | None = None
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._table: LLTokenizer | None = None
        self._kept = KeptGrammars() if kept is None else kept
        self._lock = threading.Lock()

    @property
    def table(self) -> Any:
        """llguidance's view of the tokenizer. Raises BadRequest if it has none."""
        with self._lock:
            if self._table is None:
                try:
                    backend = for_grammars(self._tokenizer.backend_tokenizer)
                    size = max(self._vocab_size, backend.get_vocab_size(with_added_tokens=True))
                    ends = sorted(id for id in self._eos_ids if 0 <= id < size)
                    self._table = LLTokenizer(backend.to_str(), n_vocab=size, eos_token=ends)
                except BadRequest:
                    raise
                except Exception as error:  # a slow tokenizer, or one that llguidance cannot read
                    raise BadRequest(
                        f"this model's tokenizer takes no grammars ({error}): ask without response_format, tool_choice "
                        "and logprobs"
                    ) from error
            return self._table

    def size(self, grammar: str) -> int | None:
        """Bytes that it takes, if it is kept compiled."""
        return self._kept.size(self, grammar)

    def copy(self, grammar: str, thinking: Thinking | None = None, *, is_open: bool = False) -> "Grammar | None":
        """As `compile` if it is kept compiled, which takes microseconds; else None."""
        matcher = self._kept.find(self, grammar)
        return None if matcher is None else self._copied(matcher, thinking, is_open=is_open)

    def compile(self, grammar: str, thinking: Thinking | None = None, *, is_open: bool = False) -> "Grammar":
        """Raises BadRequest saying what is wrong with the grammar. `thinking`: thoughts come first, freely."""
        matcher = self._kept.find(self, grammar)
        if matcher is None:
            table, before = self.table, heap_bytes()
            matcher = compile_matcher(table, grammar)
            # With what other threads took meanwhile, or less by what they gave back.
            self._kept.add(self, grammar, matcher, max(0, heap_bytes() - before))
        return self._copied(matcher, thinking, is_open=is_open)

    def _copied(self, matcher: LLMatcher, thinking: Thinking | None, *, is_open: bool) -> "Grammar":
        return Grammar(matcher.deep_copy(), self._vocab_size, thinking, is_open=is_open)


def compile_matcher(table: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at its beginning, from which a token can be drawn. Raises BadRequest saying what is wrong."""
    matcher = LLMatcher(table, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_logit_bias()  # what has no first token is found here, not in the middle of an answer
    if not matcher.is_error():
        return matcher
    reason = _first_line(matcher.get_error())
    if reason.startswith("NoExtension"):
        reason = "no text can satisfy it (does a $ref lead back to itself?)"
    raise BadRequest(f"the schema cannot be enforced: {reason}")


def check_grammar(grammar: str) -> int:
    """Compile against bytes instead of a model's vocabulary, which costs as much but for the vocabulary's own table: how many
    bytes it takes.

    Raises BadRequest as `Grammars.compile` does, and for what costs too much. For a process that does nothing else meanwhile.
    """
    table, text = LLTokenizer("byte"), re.sub(r"<\[\d+\]>", "<[0]>", grammar)
    began, before = time.thread_time(), heap_bytes()
    made = compile_matcher(table, text)
    took_s, size = time.thread_time() - began, heap_bytes() - before
    del made
    if took_s > MAX_COMPILE_S:
        raise _costly(f"takes {took_s:.1f} s to compile; at most {MAX_COMPILE_S:g}")
    if size > MAX_COMPILED_BYTES:
        raise _costly(
            f"takes {size_of(size)} once it is compiled; at most {size_of(MAX_COMPILED_BYTES, is_limit=True)}"
        )
    return max(0, size)


def _costly(what: str) -> BadRequest:
    return BadRequest(f"the schema cannot be enforced: it {what}: send fewer or shorter patterns, names and constants")


class Grammar:
    """Which tokens may follow (a sampler's Constraint). One request's; used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, thinking: Thinking | None, *, is_open: bool) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._thinking, self._is_open = thinking, is_open
        self._consumed: list[int] = []

    def allowed(self, output: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """As generate.sample.Constraint. None within a thought."""
        start = self._start(output)
        if start is None:
            return None
        self._move(list(output[start:]))
        bias = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
        allowed_V: npt.NDArray[np.bool_] = bias[: self._vocab_size] != 0
        if not output and self._thinking is not None and self._thinking.open_id is not None:
            allowed_V[self._thinking.open_id] = True
        if self._matcher.is_error() or not allowed_V.any():
            raise BadRequest(f"the schema cannot be enforced further: {_first_line(self._matcher.get_error())}")
        return allowed_V

    def copy(self) -> "Grammar":
        """The same, for another thread. To be taken before it is asked."""
        return Grammar(self._matcher.deep_copy(), self._vocab_size, self._thinking, is_open=self._is_open)

    def _start(self, output: Sequence[int]) -> int | None:
        """Where the grammar begins: behind the thought, if there is one; None within it."""
        thinking = self._thinking
        if thinking is None or thinking.close_id is None:
            return 0
        if not self._is_open and not (output and output[0] == thinking.open_id):
            return 0
        return output.index(thinking.close_id) + 1 if thinking.close_id in output else None

    def _move(self, ids: list[int]) -> None:
        """Bring the matcher to `ids`."""
        shared = _shared(self._consumed, ids)
        if shared < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - shared)
        for token in ids[shared:]:
            self._matcher.consume_token(token)
        self._consumed = ids


def _shared(a: list[int], b: list[int]) -> int:
    """The length of the common beginning; quick where one begins the other."""
    shortest = min(len(a), len(b))
    if a[:shortest] == b[:shortest]:
        return shortest
    return next(i for i in range(shortest) if a[i] != b[i])


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300] or "it leaves no token to draw"
