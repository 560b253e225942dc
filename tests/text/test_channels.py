"""Answers in channels (gpt-oss): thoughts, the answer and calls, however the text is cut, and grammars of them."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.testing.tiny import EOS, make_tiny
from manyhands.text.channels import ChannelReader
from manyhands.text.dialects import HARMONY, find_dialect
from manyhands.text.grammar import Function, Grammars
from manyhands.text.headed_grammar import headed_grammar
from manyhands.text.reasoning import find_thinking
from manyhands.text.tokenizer import load_tokenizer
from manyhands.text.tools import CallArguments, CallStart, ToolReader
from tests.text.answers import Read, accepts, read

FUNCTIONS: dict[str, dict[str, Any]] = {"f": {"type": "object"}, "g": {}}
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Is 1 < 2?\n{NEXT}"
ARGUMENTS = '{"a": [1, {"b": "}\\"{<|"}], "c": "\\u00e9"}'


def read_channels(parts: list[str], *, can_call: bool = True) -> Read:
    functions = FUNCTIONS if can_call else {}
    return read(ChannelReader(functions), ToolReader(HARMONY, functions) if can_call else None, parts)


CASES: dict[str, Read] = {
    f"{THOUGHT}<|channel|>final<|message|>Yes, *1* < 2.": ("Is 1 < 2?\n", "Yes, *1* < 2.", []),
    "<|channel|>final<|message|>Yes": ("", "Yes", []),
    "Yes, to be": ("", "Yes, to be", []),  # an answer that goes on
    "to be": ("", "to be", []),
    f"{THOUGHT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGUMENTS}": (
        "Is 1 < 2?\n",
        "",
        [("f", ARGUMENTS)],
    ),
    f"{THOUGHT} to=functions.f<|channel|>commentary json<|message|>{ARGUMENTS}": (
        "Is 1 < 2?\n",
        "",
        [("f", ARGUMENTS)],
    ),
    " to=functions.g<|channel|>commentary<|message|>{}": ("", "", [("g", "{}")]),
    f"<|channel|>commentary<|message|>I look.{NEXT}<|channel|>commentary to=functions.g<|message|>{{}}": (
        "",
        "I look.",
        [("g", "{}")],
    ),
    f"<|channel|>commentary<|message|>I look.{NEXT}<|channel|>final<|message|>So.": ("", "I look.\n\nSo.", []),
    f"{THOUGHT}<|channel|>analysis<|message|>Yes.{NEXT}<|channel|>final <|constrain|>json<|message|>{{}}": (
        "Is 1 < 2?\n\n\nYes.",
        "{}",
        [],
    ),
    "<|channel|>commentary to=functions.h json<|message|>{}": ("", "{}", []),  # there is none
    f"<|channel|>analysis to=python code<|message|>1 + 1{NEXT}<|channel|>final<|message|>2": ("1 + 1", "2", []),
    "<|channel|>analysis<|message|>for ever <|en": ("for ever <|en", "", []),
    "<|channel|>analysis<|message|>So.<|end|>": ("So.", "", []),
    "<|channel|>analysis<|message|>So.<|end|>no head": ("So.", "no head", []),
    "<|channel|>ana": ("", "", []),
    f"{THOUGHT}{'no head ' * 40}": ("Is 1 < 2?\n", f"<|start|>assistant{'no head ' * 40}", []),
    "": ("", "", []),
}


@pytest.mark.parametrize("text", CASES)
@given(places=st.lists(st.integers(0, 10_000)))
def test_channels_are_read_however_they_are_cut(text: str, places: list[int]) -> None:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    assert read_channels([text[a:b] for a, b in itertools.pairwise(edges)]) == CASES[text]
    assert read_channels(list(text)) == CASES[text]


def test_without_functions_a_call_is_text() -> None:
    said = f"<|channel|>commentary to=functions.f json<|message|>{ARGUMENTS}"
    assert read_channels(list(said), can_call=False) == ("", ARGUMENTS, [])


def test_what_is_said_comes_before_its_end() -> None:
    reader = ChannelReader(FUNCTIONS)
    assert reader.feed("<|channel|>analysis<|message|>Is") == ("Is", "") and reader.is_thinking
    assert reader.feed(f"?{NEXT}<|channel|>commentary to=functions.f<|message|>{{") == ("?", "<|channel|>f[ARGS]{")
    assert not reader.is_thinking


@pytest.mark.parametrize(
    "tools, dialect", [("{% if tools %}to=functions.{% endif %}", HARMONY), ("", None)], ids=["tools", "no tools"]
)
def test_channels_are_known_by_the_template(tools: str, dialect: object) -> None:
    tokenizer = SimpleNamespace(
        chat_template=f"{tools}<|start|>assistant<|channel|>final<|message|>", get_added_vocab=dict[str, int]
    )
    thinking = find_thinking(tokenizer)
    assert find_dialect(tokenizer) is dialect and thinking is not None and thinking.heads == "channels"
    assert {"<|start|>", "<|end|>", "<|constrain|>"} < thinking.marks


# -- grammars ---------------------------------------------------------------------------------------------------------

VOCAB = 264
KIND = {"parallel": False, "is_open": False}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ASKED = [Function("f", SCHEMA, is_strict=True), Function("g", {"type": "object"})]
FINAL, CALL = "<|channel|>final<|message|>", "<|channel|>commentary to=functions."
HEADS = (
    f"{CALL}f<|message|>",
    f"{CALL}f <|constrain|>json<|message|>",
    " to=functions.f<|channel|>commentary json<|message|>",
)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = make_tiny("llama", tmp_path_factory.mktemp("grammar") / "m", layers=1)
    return Grammars(load_tokenizer(folder), VOCAB, frozenset([EOS]))


def test_json_stands_in_the_final_channel(grammars: Grammars) -> None:
    grammar = grammars.compile(headed_grammar("channels", [], {}, SCHEMA, is_free=False, forced=False, **KIND))
    for before in ("", THOUGHT, THOUGHT * 2, f"<|channel|>commentary<|message|>So.{NEXT}"):
        assert accepts(grammar, list(f'{before}{FINAL}{{"a": 1}}'.encode()))
        assert not accepts(grammar, list(f'{before}{FINAL}{{"a": "1"}}'.encode()))
    for said in ('{"a": 1}', f"{FINAL}Yes", THOUGHT, f'{HEADS[0]}{{"a": 1}}'):
        assert not accepts(grammar, list(said.encode()))


@pytest.mark.parametrize("head", HEADS)
def test_calls(head: str, grammars: Grammars) -> None:
    forced = grammars.compile(headed_grammar("channels", ASKED, {}, None, is_free=True, forced=True, **KIND))
    free = grammars.compile(headed_grammar("channels", ASKED, {}, None, is_free=True, forced=False, **KIND))
    either = grammars.compile(headed_grammar("channels", ASKED, {}, SCHEMA, is_free=False, forced=False, **KIND))
    for grammar in (forced, free, either):
        for before in ("", THOUGHT):
            assert accepts(grammar, list(f'{before}{head}{{"a": 1}}'.encode()))
            assert not accepts(grammar, list(f'{before}{head}{{"a": "1"}}'.encode()))
            assert not accepts(grammar, list(f"{before}{head.replace('functions.f', 'functions.h')}{{}}".encode()))
    said = f"{THOUGHT}{FINAL}Yes"
    assert [accepts(grammar, list(said.encode())) for grammar in (forced, free, either)] == [False, True, False]
    said = f'{THOUGHT}{FINAL}{{"a": 2}}'
    assert [accepts(grammar, list(said.encode())) for grammar in (forced, free, either)] == [False, True, True]


def test_special_markers_are_tokens(grammars: Grammars) -> None:
    marks = {"<|channel|>": 258, "<|message|>": 259, "<|end|>": 260, "<|start|>": 261}
    grammar = grammars.compile(headed_grammar("channels", ASKED, marks, SCHEMA, is_free=False, forced=False, **KIND))

    def ids(text: str) -> list[int]:
        for mark, token in marks.items():
            text = text.replace(mark, chr(token))
        return [id for char in text for id in ([ord(char)] if ord(char) > 255 else char.encode())]

    assert accepts(grammar, ids(f'{THOUGHT}{FINAL}{{"a": 1}}')) and accepts(
        grammar, ids(f'{THOUGHT}{HEADS[1]}{{"a": 1}}')
    )
    assert not accepts(grammar, list(f'{FINAL}{{"a": 1}}'.encode()))


def test_a_head_without_end_is_not_kept() -> None:
    """After 640 characters it is text: no more than that is held back, and a mark."""
    reader, written, shown = ChannelReader(()), "<|channel|>" + "x" * 100, ""
    shown += reader.feed(written)[1]
    assert shown == ""
    for _ in range(100):
        written += "y" * 100
        shown += reader.feed("y" * 100)[1]
        assert len(written) - len(shown) <= 672
    assert shown + reader.finish()[1] == written


def test_a_name_as_long_as_a_request_may_give_is_read() -> None:
    name = f"{'n' * 128}__{'t' * 128}"
    channels, tools = ChannelReader({name}), ToolReader(HARMONY, {name: {}})
    said = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{}}"
    text = "".join(channels.feed(char)[1] for char in said) + channels.finish()[1]
    assert tools.feed(text) == [CallStart(0, name), CallArguments(0, "{}")]
