"""Answers in blocks (Inkling) and in sections (Kimi K3), however their text is cut, and grammars of them."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.testing.tiny import EOS, make_tiny
from manyhands.text.dialects import INKLING, KIMI3, Dialect, find_dialect
from manyhands.text.grammar import Function, Grammars
from manyhands.text.headed_grammar import headed_grammar
from manyhands.text.readers import answer_reader
from manyhands.text.reasoning import Heads, Thinking, find_level, find_thinking
from manyhands.text.tokenizer import load_tokenizer
from manyhands.text.tools import ToolReader
from tests.text.answers import Read, accepts, read

PLACE = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTIONS: dict[str, dict[str, Any]] = {"f": PLACE, "get_tide": {}}
DIALECTS: dict[Heads, Dialect] = {"blocks": INKLING, "sections": KIMI3}
NEXT = "<|end_message|><|message_model|>"
THOUGHT = f"<|content_thinking|>Is 1 < 2?\n{NEXT}"


def block(arguments: str, name: str = "f") -> str:
    return f'{name}<|content_invoke_tool_json|>{{"name":"{name}","args":{arguments}}}'


def tag(name: str, text: str = "", said: str = "") -> str:
    return f"<|open|>{name}{said}<|sep|>{text}<|close|>{name}<|sep|>"


def call(*arguments: tuple[str, str, str], name: str = "f", index: int = 1) -> str:
    """A call in a section, with arguments (key, type, value)."""
    said = "".join(tag("argument", value, f' key="{key}" type="{kind}"') for key, kind, value in arguments)
    return tag("call", said, f' tool="{name}" index="{index}"')


ANSWERED = "Is 1 < 2?\n<|close|>think<|sep|><|open|>response<|sep|>"
TOOLS_END = "<|close|>tools<|sep|>"
CLOSED = "<|close|>response<|sep|>"
PARIS, DAYS = ("place", "string", "Paris\n<i>"), ("days", "number", "3")
TYPED = ("a&amp;&quot;", "string", "3"), ("b", "number", "3"), ("c", "string", "true")
# Whether the prompt ends within a thought: (heads, text) -> what is read.
CASES: dict[tuple[Heads, bool, str], Read] = {
    ("blocks", False, f"{THOUGHT}<|content_text|>Yes, 1 < 2.<|end_message|>"): ("Is 1 < 2?\n", "Yes, 1 < 2.", []),
    ("blocks", False, "<|content_text|>Yes"): ("", "Yes", []),
    ("blocks", False, "Yes, get_"): ("", "Yes, get_", []),  # an answer that goes on
    ("blocks", False, "get_t"): ("", "get_t", []),
    ("blocks", False, THOUGHT + block('{"a": [1, {}]}')): ("Is 1 < 2?\n", "", [("f", '{"a": [1, {}]}')]),
    ("blocks", False, f"{block('{}')}{NEXT}{block('{}', 'get_tide')}<|end_message|>"): (
        "",
        "",
        [("f", "{}"), ("get_tide", "{}")],
    ),
    ("blocks", False, f"<|content_text|>I look.{NEXT}{block('{}')}"): ("", "I look.", [("f", "{}")]),
    ("blocks", False, f"{block('{}')}{NEXT}<|content_text|>Done."): ("", "Done.", [("f", "{}")]),
    ("blocks", False, f"{THOUGHT}{block('{}', 'h')}"): ("Is 1 < 2?\n", '{"name":"h","args":{}}', []),  # there is none
    ("blocks", False, "<|content_thinking|>for ever <|end_mes"): ("for ever <|end_mes", "", []),
    ("blocks", False, f"{THOUGHT}<|content_tex"): ("Is 1 < 2?\n", "", []),
    ("blocks", False, '<|content_text|>So.<|end_message|><|message_model|>f<|content_invoke_tool_json|>{"na'): (
        "",
        "So.",
        [],
    ),
    ("blocks", False, "<|content_thinking|>hm<|content_text|>Yes"): ("hm", "Yes", []),  # without an end
    ("blocks", True, f"hm{NEXT}<|content_text|>Yes"): ("hm", "Yes", []),
    ("blocks", False, f"{THOUGHT}f<|content_invoke_tool_text|>ls -l<|end_message|>"): ("Is 1 < 2?\n", "ls -l", []),
    ("blocks", False, f"{'x' * 700}<|content_text|>Yes"): ("", f"{'x' * 700}\n\nYes", []),
    ("blocks", False, ""): ("", "", []),
    ("sections", True, f"{ANSWERED}Yes, 1 < 2.{CLOSED}<|close|>message<|sep|>"): ("Is 1 < 2?\n", "Yes, 1 < 2.", []),
    ("sections", False, f"Yes{CLOSED}"): ("", "Yes", []),
    ("sections", True, "for ever <|clo"): ("for ever <|clo", "", []),
    ("sections", True, f"{ANSWERED}{CLOSED}{tag('tools', call(PARIS, DAYS))}<|close|>message<|sep|>"): (
        "Is 1 < 2?\n",
        "",
        [("f", '{"place": "Paris\\n<i>", "days": 3}')],
    ),
    ("sections", False, f"I look.{CLOSED}{tag('tools', call(DAYS) + call(name='get_tide', index=2))}"): (
        "",
        "I look.",
        [("f", '{"days": 3}'), ("get_tide", "{}")],
    ),
    ("sections", False, f"So.{CLOSED}{tag('tools', call(DAYS, name='h'))}"): (
        "",
        f"So.{call(DAYS, name='h')}{TOOLS_END}",
        [],
    ),
    ("sections", False, f'So.{CLOSED}<|open|>tools<|sep|><|open|>call tool="f'): ("", "So.", []),
    ("sections", False, f"So.{CLOSED}<|open|>tools<|sep|>{call(DAYS)}<|close|>message<|sep|>"): (
        "",
        "So.",
        [("f", '{"days": 3}')],
    ),
    ("sections", False, f"So.{CLOSED}and then{tag('tools', call(DAYS))}"): ("", "So.", [("f", '{"days": 3}')]),
    ("sections", False, f"{CLOSED}{tag('tools', call(*TYPED, name='get_tide'))}"): (
        "",
        "",
        [("get_tide", '{"a&\\"": "3", "b": 3, "c": "true"}')],
    ),
    ("sections", False, f"Use <|open|>{'x' * 700}<|sep|>ok"): ("", f"Use <|open|>{'x' * 700}<|sep|>ok", []),
    ("sections", False, ""): ("", "", []),
}


def read_answer(heads: Heads, is_open: bool, parts: list[str], *, can_call: bool = True) -> Read:
    functions = FUNCTIONS if can_call else {}
    reader = answer_reader(Thinking("", "", None, None, None, heads), functions, is_open=is_open)
    return read(reader, ToolReader(DIALECTS[heads], functions) if can_call else None, parts)


@pytest.mark.parametrize("case", CASES)
@given(places=st.lists(st.integers(0, 10_000)))
def test_answers_are_read_however_they_are_cut(case: tuple[Heads, bool, str], places: list[int]) -> None:
    heads, is_open, text = case
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    assert read_answer(heads, is_open, [text[a:b] for a, b in itertools.pairwise(edges)]) == CASES[case]
    assert read_answer(heads, is_open, list(text)) == CASES[case]


def test_without_functions_a_call_is_text() -> None:
    assert read_answer("blocks", False, list(block("{}")), can_call=False) == ("", 'f\n\n{"name":"f","args":{}}', [])
    said = f"So.{CLOSED}{tag('tools', call(DAYS))}"
    assert read_answer("sections", False, list(said), can_call=False) == ("", "So.", [])


@pytest.mark.parametrize(
    ("template", "dialect", "heads", "marks"),
    [
        (
            "{% if tools %}<|content_invoke_tool_json|>{% endif %}<|content_thinking|>{{ reasoning_effort }}",
            INKLING,
            "blocks",
            {
                "<|message_model|>",
                "<|content_text|>",
                "<|content_thinking|>",
                "<|content_invoke_tool_json|>",
                "<|content_invoke_tool_text|>",
                "<|end_message|>",
            },
        ),
        (
            "{% if tools %}{{ '<|open|>' + 'argument' }}{% endif %}<|close|>{{ 'think' if thinking else 'response' }}"
            "{{ thinking_effort }}",
            KIMI3,
            "sections",
            {"<|open|>", "<|close|>", "<|sep|>"},
        ),
    ],
)
def test_heads_are_known_by_the_template(template: str, dialect: Dialect, heads: Heads, marks: set[str]) -> None:
    tokenizer = SimpleNamespace(chat_template=template, get_added_vocab=dict[str, int])
    thinking = find_thinking(tokenizer)
    assert find_dialect(tokenizer) is dialect and thinking is not None and thinking.heads == heads
    assert thinking.marks == marks
    assert find_level(tokenizer) == ("thinking_effort" if heads == "sections" else "reasoning_effort")
    assert thinking.switch == ("thinking" if heads == "sections" else None)


# -- grammars ---------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ASKED = [Function("f", SCHEMA, is_strict=True), Function("g", {"type": "object"})]
ONE, TEXT = ("a", "number", "1"), ("a", "string", "x")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = make_tiny("llama", tmp_path_factory.mktemp("grammar") / "m", layers=1)
    return Grammars(load_tokenizer(folder), 264, frozenset([EOS]))


def compiled(
    grammars: Grammars,
    heads: Heads,
    *,
    is_free: bool = True,
    forced: bool = False,
    parallel: bool = True,
    is_open: bool,
) -> Any:
    schema, flags = None if is_free else SCHEMA, {"forced": forced, "parallel": parallel, "is_open": is_open}
    return grammars.compile(headed_grammar(heads, ASKED, MARKS[heads], schema, is_free=is_free, **flags))


MARKS: dict[Heads, dict[str, int]] = {
    "blocks": {
        mark: 258 + at
        for at, mark in enumerate(("<|message_model|>", "<|content_text|>", "<|content_thinking|>", "<|end_message|>"))
    }
    | {"<|content_invoke_tool_json|>": 262},
    "sections": {"<|open|>": 258, "<|close|>": 259, "<|sep|>": 260},
}


def ids(heads: Heads, text: str) -> list[int]:
    for mark, token in MARKS[heads].items():
        text = text.replace(mark, chr(token))
    return [id for char in text for id in ([ord(char)] if ord(char) > 255 else char.encode())]


def test_blocks_are_held_to_a_grammar(grammars: Grammars) -> None:
    def takes(grammar: Any, said: str) -> bool:
        return accepts(grammar, ids("blocks", said))

    one, text, none, other = block('{"a":1}'), block('{"a":"x"}'), block("{}", "g"), block("{}", "h")
    free, forced = (compiled(grammars, "blocks", forced=forced, is_open=False) for forced in (False, True))
    either = compiled(grammars, "blocks", is_free=False, is_open=False)
    single = compiled(grammars, "blocks", forced=True, parallel=False, is_open=False)
    for grammar in (free, forced, either):
        for before in ("", THOUGHT, THOUGHT * 2):
            assert takes(grammar, f"{before}{one}<|end_message|>")
            assert takes(grammar, f"{before}{one}{NEXT}{none}<|end_message|>")
            assert not takes(grammar, f"{before}{text}<|end_message|>")
            assert not takes(grammar, f"{before}{other}<|end_message|>")
    assert not takes(single, f"{one}{NEXT}{none}<|end_message|>")
    looked = f"{THOUGHT}<|content_text|>So.{NEXT}{one}<|end_message|>"
    assert [takes(grammar, looked) for grammar in (free, forced, either)] == [True, False, False]
    assert not takes(free, f"<|content_text|>So.{NEXT}{text}<|end_message|>")
    for said, wanted in (("Yes", [True, False, False]), ('{"a": 2}', [True, False, True])):
        for end in ("", "<|end_message|>"):
            assert [takes(g, f"{THOUGHT}<|content_text|>{said}{end}") for g in (free, forced, either)] == wanted


def test_sections_are_held_to_a_grammar(grammars: Grammars) -> None:
    def takes(grammar: Any, said: str) -> bool:
        return accepts(grammar, ids("sections", said))

    for is_open in (False, True):
        begun, end = ANSWERED if is_open else "", "<|close|>message<|sep|>"
        free, forced = (compiled(grammars, "sections", forced=forced, is_open=is_open) for forced in (False, True))
        either = compiled(grammars, "sections", is_free=False, is_open=is_open)
        single = compiled(grammars, "sections", forced=True, parallel=False, is_open=is_open)
        for grammar in (free, forced, either):
            for after in ("", end):
                assert takes(grammar, f"{begun}{CLOSED}{tag('tools', call(ONE))}{after}")
                assert takes(
                    grammar, f"{begun}{CLOSED}{tag('tools', call(ONE) + call(TEXT, name='g', index=2))}{after}"
                )
            assert not takes(grammar, f"{begun}{CLOSED}{tag('tools', call(TEXT))}")
            assert not takes(grammar, f"{begun}{CLOSED}{tag('tools', call(('a', 'number', 'x')))}")
            assert not takes(grammar, f"{begun}{CLOSED}{tag('tools', call(name='h'))}")
        assert not takes(single, f"{begun}{CLOSED}{tag('tools', call(ONE) + call(TEXT, name='g', index=2))}")
        looked = f"{begun}So.{CLOSED}{tag('tools', call(ONE))}"
        assert [takes(grammar, looked) for grammar in (free, forced, either)] == [True, False, False]
        assert not takes(free, f"{begun}So.{CLOSED}{tag('tools', call(TEXT))}")
        for said, wanted in (("Yes", [True, False, False]), ('{"a": 2}', [True, False, True])):
            assert [takes(g, f"{begun}{said}{CLOSED}{end}") for g in (free, forced, either)] == wanted
