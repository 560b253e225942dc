"""Function calls and thoughts in text, however it is cut."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.text.reasoning import Thinking, ThoughtReader
from manyhands.text.tools import HERMES, LLAMA3, MISTRAL, CallArguments, CallStart, Content, Dialect, Piece, ToolReader

CALL = '{"name": "f", "arguments": {"a": [1, {"b": "}\\"{"}], "c": "\\u00e9 </tool_call>"}}'
ARGUMENTS = json.loads(CALL)["arguments"]
WRAPPED = {
    HERMES: f"<tool_call>\n{CALL}\n</tool_call>",
    LLAMA3: CALL.replace('"arguments"', '"parameters"', 1),
    MISTRAL: f"[TOOL_CALLS][{CALL}]",
}


def read(dialect: Dialect, parts: list[str]) -> tuple[str, list[tuple[str, str]], ToolReader]:
    """Content, calls (name, arguments) and the reader."""
    reader = ToolReader(dialect, ["f", "g"])
    pieces: list[Piece] = [piece for part in parts for piece in reader.feed(part)] + reader.finish()
    content, calls = "", list[list[str]]()
    for piece in pieces:
        match piece:
            case Content(text):
                content += text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[-1][1] += text
    return content, [(name, arguments) for name, arguments in calls], reader


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("dialect", WRAPPED, ids=lambda d: d.name)
@given(places=st.lists(st.integers(0, 10_000)))
def test_a_call_is_read_however_it_is_cut(dialect: Dialect, places: list[int]) -> None:
    content, calls, reader = read(dialect, cut(WRAPPED[dialect], places))
    assert content == "" and reader.num_calls == 1
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", ARGUMENTS)]


@pytest.mark.parametrize("dialect", [HERMES, MISTRAL], ids=lambda d: d.name)
@given(places=st.lists(st.integers(0, 10_000)))
def test_text_before_a_call_is_content(dialect: Dialect, places: list[int]) -> None:
    content, calls, _ = read(dialect, cut(f"I look <it> up.\n\n{WRAPPED[dialect]}", places))
    assert content == "I look <it> up." and len(calls) == 1


def test_several_calls() -> None:
    two = f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n"
    assert [name for name, _ in read(HERMES, [two])[1]] == ["f", "f"]
    assert len(read(MISTRAL, [f"[TOOL_CALLS][{CALL}, {CALL}]"])[1]) == 2
    assert len(read(LLAMA3, [f"<|python_tag|>{WRAPPED[LLAMA3]}; {WRAPPED[LLAMA3]}"])[1]) == 2


def test_arguments_come_before_the_call_is_complete() -> None:
    reader = ToolReader(HERMES, ["f"])
    assert reader.feed('<tool_call>{"name": "f", "arguments": {"a"') == [CallStart(0, "f"), CallArguments(0, '{"a"')]
    assert reader.feed(": 1") == [CallArguments(0, ": 1")]


def test_other_orders_and_forms() -> None:
    late = '<tool_call>{"arguments": {"a": 1}, "id": {"x": [1]}, "name": "f"}</tool_call>'
    assert read(HERMES, [late])[1] == [("f", '{"a": 1}')]
    assert read(HERMES, ['<tool_call>{"name": "f"}</tool_call>'])[1] == [("f", "{}")]
    quoted = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read(HERMES, [quoted])[1] == [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "<tool_call>no object</tool_call>",
        "<tool_call>",
        "<tool_ca",
        '<tool_call>{"name": "f"',
        "<tool_call>\n",
        "a < b <tool",
        "[TOOL_CALLS]",
        "{}",
        "",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    """Nothing is lost of what the model said (white space around a marker aside)."""
    for dialect in (HERMES, MISTRAL, LLAMA3):
        for parts in ([text], list(text)):
            content, calls, _ = read(dialect, parts)
            assert calls == [] and "".join(content.split()) == "".join(text.split())


@given(st.text(alphabet='<tool_call>{}[]",:\\ nameargutsf\n', max_size=80), st.lists(st.integers(0, 100)))
def test_any_text_is_read_the_same_however_it_is_cut(text: str, places: list[int]) -> None:
    for dialect in (HERMES, MISTRAL, LLAMA3):
        assert read(dialect, [text])[:2] == read(dialect, cut(text, places))[:2]


THINKING = Thinking("<think>", "</think>", None, None, None)


def split(parts: list[str], *, is_open: bool) -> tuple[str, str]:
    reader = ThoughtReader(THINKING, is_open=is_open)
    pairs = [reader.feed(part) for part in parts] + [reader.finish()]
    return "".join(a for a, _ in pairs), "".join(b for _, b in pairs)


@pytest.mark.parametrize(
    "text, is_open, wanted",
    [
        ("<think>\nhm < 3\n</think>\n\nYes.", False, ("hm < 3", "Yes.")),
        ("hm\n</think>Yes </think>", True, ("hm", "Yes </think>")),
        ("No thought <think> here", False, ("", "No thought <think> here")),
        ("<think>for ever </thin", False, ("for ever </thin", "")),
        ("<thin", False, ("", "<thin")),
        ("", True, ("", "")),
    ],
)
def test_thoughts(text: str, is_open: bool, wanted: tuple[str, str]) -> None:
    assert split([text], is_open=is_open) == wanted
    assert split(list(text), is_open=is_open) == wanted


@given(st.text(alphabet="<think>/ \na", max_size=60), st.lists(st.integers(0, 100)), st.booleans())
def test_thoughts_do_not_depend_on_how_they_are_cut(text: str, places: list[int], is_open: bool) -> None:
    assert split([text], is_open=is_open) == split(cut(text, places), is_open=is_open)
