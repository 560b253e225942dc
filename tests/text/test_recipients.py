"""Answers that are messages to recipients (Muse): thoughts, the answer and calls, however the text is cut, and grammars."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import BadRequest
from manyhands.testing.tiny import EOS, make_tiny
from manyhands.text.dialects import MUSE, find_dialect
from manyhands.text.grammar import Function, Grammars
from manyhands.text.headed_grammar import headed_grammar
from manyhands.text.reasoning import find_level, find_thinking
from manyhands.text.recipients import RecipientReader
from manyhands.text.tokenizer import load_tokenizer
from manyhands.text.tools import CallStart, ToolReader
from tests.text.answers import Read, accepts, read

PLACE = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTIONS: dict[str, dict[str, Any]] = {"f": PLACE, "get_tide": {}}
NEXT = "<|eom|><|start|>assistant"
THOUGHT = f" to=self<|message|>Is 1 < 2?\n{NEXT}"


def call(*said: str, to: str = "f", name: str = "f", opened: str = "<atem:function_calls>\n") -> str:
    """A message to a function, with parameters "key=value"."""
    tags = "".join('<atem:parameter name="{}">{}</atem:parameter>\n'.format(*one.split("=", 1)) for one in said)
    invoke = f'<atem:invoke name="{name}">\n{tags}</atem:invoke>\n'
    return f" to={to}<|message|>{opened}{invoke}</atem:function_calls>"


def read_messages(parts: list[str], *, can_call: bool = True) -> Read:
    functions = FUNCTIONS if can_call else {}
    return read(RecipientReader(functions), ToolReader(MUSE, functions) if can_call else None, parts)


BODY = call("days=3").partition("<|message|>")[2]
TO_PARIS = call("place=Paris\n<i>", "days=3")
PARIS = ("f", '{"place": "Paris\\n<i>", "days": 3}')
CASES: dict[str, Read] = {
    f"{THOUGHT} to=user<|message|>Yes, *1* < 2.": ("Is 1 < 2?\n", "Yes, *1* < 2.", []),
    " to=user<|message|>Yes": ("", "Yes", []),
    "<|message|>Yes": ("", "Yes", []),
    "Yes, to be": ("", "Yes, to be", []),  # an answer that goes on
    f"{THOUGHT} to=self<|message|>So.{NEXT}{TO_PARIS}": ("Is 1 < 2?\n\n\nSo.", "", [PARIS]),
    f"{call('days=3')}{NEXT}{call(to='get_tide', name='get_tide')}<|eom|>": (
        "",
        "",
        [("f", '{"days": 3}'), ("get_tide", "{}")],
    ),
    call("days=3", to="f.f", name="f.f"): ("", "", [("f", '{"days": 3}')]),
    call(to="get_tide.get_tide", name="get_tide"): ("", "", [("get_tide", "{}")]),
    call("days=3", opened="\n "): ("", "", [("f", '{"days": 3}')]),  # without what opens it
    f"{THOUGHT} to=user<|message|>I look.{NEXT}{call('days=3')}": ("Is 1 < 2?\n", "I look.", [("f", '{"days": 3}')]),
    f"{call('days=3')}{NEXT} to=user<|message|>Done.": ("", "Done.", [("f", '{"days": 3}')]),
    f" to=user<|message|>Write {BODY}.": ("", f"Write {BODY}.", []),  # as an example
    f" to=self<|message|>So {call('days=3')[15:]}.{NEXT} to=user<|message|>No": (
        f"So {call('days=3')[15:]}.",
        "No",
        [],
    ),
    call("days=3", to="h"): ("", BODY, []),  # there is none
    call("days=3", name="h"): ("", BODY.removeprefix("<atem:function_calls>").replace('"f"', '"h"'), []),
    f" to=self<|message|>I must look.\n{call('days=3').lstrip()}": ("I must look.", "", [("f", '{"days": 3}')]),
    " to=self<|message|>potato=x<|message|> to=": ("potato=x<|message|> to=", "", []),
    " to=self<|message|>for ever <|eo": ("for ever <|eo", "", []),
    " to=self<|message|>So.<|eom|>": ("So.", "", []),
    call("days=3", to="functions.f", name="functions.f"): ("", "", [("f", '{"days": 3}')]),
    " to=user<|message|>So.<|eom|><|start|>assis": ("", "So.", []),
    " to=f<|message|><atem:func": ("", "", []),
    f' to=user<|message|>So.{NEXT} to=f<|message|><atem:function_calls>\n<atem:invoke name="f': ("", "So.", []),
    f" to={'x' * 700}<|message|>hi": ("", f" to={'x' * 700}<|message|>hi", []),
    " to=se": ("", "", []),
    "": ("", "", []),
}


@pytest.mark.parametrize("text", CASES)
@given(places=st.lists(st.integers(0, 10_000)))
def test_messages_are_read_however_they_are_cut(text: str, places: list[int]) -> None:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    assert read_messages([text[a:b] for a, b in itertools.pairwise(edges)]) == CASES[text]
    assert read_messages(list(text)) == CASES[text]


def test_without_functions_a_call_is_text() -> None:
    assert read_messages(list(call("days=3")), can_call=False) == ("", BODY, [])


def test_what_is_said_comes_before_its_end() -> None:
    reader = RecipientReader(FUNCTIONS)
    assert reader.feed(" to=self<|message|>Is") == ("Is", "") and reader.is_thinking
    assert reader.feed(f"?{NEXT} to=f<|message|><atem:function_calls>\n<atem") == ("?", "<|start|>\n<atem")
    assert not reader.is_thinking


def test_of_a_thought_no_more_than_a_head_is_held_back() -> None:
    reader, shown = RecipientReader(FUNCTIONS), ""
    written = f" to={'x' * 5000}"
    reader.feed(" to=self<|message|>")
    for place, char in enumerate(written):
        shown += reader.feed(char)[0]
        assert place + 1 - len(shown) < 600
    assert shown + reader.finish()[0] == written


def test_recipients_are_known_by_the_template() -> None:
    template = "{% if tools %}<atem:function_calls>{% endif %}to=self<|message|>{{ reasoning_strength }}"
    tokenizer = SimpleNamespace(chat_template=template, get_added_vocab=dict[str, int])
    thinking = find_thinking(tokenizer)
    assert find_dialect(tokenizer) is MUSE and thinking is not None and thinking.heads == "recipients"
    assert thinking.marks == {"<|start|>", "<|message|>", "<|eom|>"} and find_level(tokenizer) == "reasoning_strength"


# -- grammars ---------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ASKED = [Function("f", SCHEMA, is_strict=True), Function("g", {"type": "object"})]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = make_tiny("llama", tmp_path_factory.mktemp("grammar") / "m", layers=1)
    return Grammars(load_tokenizer(folder), 264, frozenset([EOS]))


def test_json_stands_in_the_answer(grammars: Grammars) -> None:
    made = headed_grammar("recipients", [], {}, SCHEMA, is_free=False, forced=False, parallel=True, is_open=False)
    grammar = grammars.compile(made)
    for before in ("", THOUGHT, THOUGHT * 2):
        assert accepts(grammar, list(f'{before} to=user<|message|>{{"a": 1}}'.encode()))
        assert not accepts(grammar, list(f'{before} to=user<|message|>{{"a": "1"}}'.encode()))
    for said in ('{"a": 1}', " to=user<|message|>Yes", THOUGHT, call("a=1")):
        assert not accepts(grammar, list(said.encode()))


def test_calls(grammars: Grammars) -> None:
    def compiled(*, is_free: bool = True, forced: bool = False, parallel: bool = True) -> Any:
        schema = None if is_free else SCHEMA
        flags = {"is_free": is_free, "forced": forced, "parallel": parallel, "is_open": False}
        return grammars.compile(headed_grammar("recipients", ASKED, {}, schema, **flags))

    forced, free, either = compiled(forced=True), compiled(), compiled(is_free=False)
    for grammar in (forced, free, either):
        for before in ("", THOUGHT):
            assert accepts(grammar, list(f"{before}{call('a=1')}".encode()))
            assert accepts(grammar, list(f"{before}{call('a=1')}{NEXT}{call('b=x', to='g', name='g')}".encode()))
            assert not accepts(grammar, list(f"{before}{call('a=x')}".encode()))
            assert not accepts(grammar, list(f"{before}{call('a=1', to='g')}".encode()))
            assert not accepts(grammar, list(f"{before}{call('a=1', to='h', name='h')}".encode()))
    before = f"{THOUGHT} to=user<|message|>I look.{NEXT}"
    assert [accepts(g, list(f"{before}{call('a=1')}".encode())) for g in (forced, free, either)] == [False, True, False]
    single = compiled(forced=True, parallel=False)
    assert not accepts(single, list(f"{call('a=1')}{NEXT}{call('a=1')}".encode()))
    said = f"{THOUGHT} to=user<|message|>Yes"
    assert [accepts(grammar, list(said.encode())) for grammar in (forced, free, either)] == [False, True, False]


def test_special_markers_are_tokens(grammars: Grammars) -> None:
    marks = {"<|message|>": 258, "<|eom|>": 259, "<|start|>": 260}
    grammar = grammars.compile(
        headed_grammar("recipients", ASKED, marks, SCHEMA, is_free=False, forced=False, parallel=True, is_open=False)
    )

    def ids(text: str) -> list[int]:
        for mark, token in marks.items():
            text = text.replace(mark, chr(token))
        return [id for char in text for id in ([ord(char)] if ord(char) > 255 else char.encode())]

    assert accepts(grammar, ids(f'{THOUGHT} to=user<|message|>{{"a": 1}}'))
    assert accepts(grammar, ids(f"{THOUGHT}{call('a=1')}{NEXT}{call('a=2')}"))
    assert not accepts(grammar, list(b' to=user<|message|>{"a": 1}'))


def test_what_tags_cannot_be_held_to_is_refused() -> None:
    long = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    asked = [Function("f", long, is_strict=True)]
    with pytest.raises(BadRequest, match="maxLength of a text between tags cannot be enforced"):
        headed_grammar("recipients", asked, {}, None, is_free=True, forced=False, parallel=True, is_open=False)


def test_a_name_as_long_as_a_request_may_give_is_read() -> None:
    name = f"{'n' * 128}__{'t' * 128}"
    heads, tools = RecipientReader({name}), ToolReader(MUSE, {name: {}})
    said = f" to=self<|message|>Well,{call('a=1', to=f'{name}.{name}', name=f'{name}.{name}')}"  # a thought without its end
    text = "".join(heads.feed(char)[1] for char in said)
    assert tools.feed(text)[0] == CallStart(0, name)
