"""Function calls and thoughts in text, however it is cut."""

import itertools
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.text import tagged as tagged_calls
from manyhands.text.dialects import (
    COMMAND,
    DEEPSEEK,
    DEEPSEEK31,
    GEMMA4,
    GLM,
    GLM4,
    GRANITE,
    HERMES,
    HUNYUAN,
    KIMI,
    KIMI3,
    LLAMA3,
    MINIMAX,
    MISTRAL,
    MISTRAL11,
    OLMO3,
    PHI4,
    QWEN3,
    SEED,
    Dialect,
    find_dialect,
)
from manyhands.text.history import write_calls
from manyhands.text.reasoning import Thinking, ThoughtReader
from manyhands.text.tagged import MAX_LOOKS, kinds_of
from manyhands.text.tools import CallArguments, CallStart, Content, Piece, ToolReader

CALL = '{"name": "f", "arguments": {"a": [1, {"b": "}\\"{"}], "c": "\\u00e9 </tool_call>"}}'
ARGUMENTS = json.loads(CALL)["arguments"]
A_JSON, C_TEXT = json.dumps(ARGUMENTS["a"]), ARGUMENTS["c"]
WRAPPED = {
    HERMES: f"<tool_call>\n{CALL}\n</tool_call>",
    LLAMA3: CALL.replace('"arguments"', '"parameters"', 1),
    MISTRAL: f"[TOOL_CALLS][{CALL}]",
    MISTRAL11: f"[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{json.dumps(ARGUMENTS)}",
    QWEN3: f"<tool_call>\n<function=f>\n<parameter=a>\n{A_JSON}\n</parameter>\n<parameter=c>\n{C_TEXT}\n</parameter>\n"
    "</function>\n</tool_call>",
    SEED: f"<seed:tool_call>\n<function=f>\n<parameter=a>{A_JSON}</parameter>\n<parameter=c>{C_TEXT}</parameter>\n"
    "</function>\n</seed:tool_call>",
    MINIMAX: f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{A_JSON}</parameter>\n'
    f'<parameter name="c">{C_TEXT}</parameter>\n</invoke>\n</minimax:tool_call>',
    GLM: f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{A_JSON}</arg_value>\n<arg_key>c</arg_key>\n"
    f"<arg_value>{C_TEXT}</arg_value>\n</tool_call>",
    GEMMA4: '<|tool_call>call:f{a:[1,{b:<|"|>}"{<|"|>}],c:<|"|>é </tool_call><|"|>}<tool_call|>',
    OLMO3: f"<function_calls>f(a={A_JSON}, c={json.dumps(C_TEXT)})</function_calls>",
    GLM4: f"f\n{json.dumps(ARGUMENTS)}",
    DEEPSEEK: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    f"{json.dumps(ARGUMENTS)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    DEEPSEEK31: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    f"{json.dumps(ARGUMENTS)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    KIMI: "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    f"{json.dumps(ARGUMENTS)}<|tool_call_end|><|tool_calls_section_end|>",
    GRANITE: f"<|tool_call|>[{CALL}]",
    PHI4: f"<|tool_call|>[{CALL}]<|/tool_call|>",
    HUNYUAN: f"<tool_calls>[{CALL}]</tool_calls>",
    COMMAND: f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "f", '
    f'"parameters": {json.dumps(ARGUMENTS)}}}\n]<|END_ACTION|>',
}
SCHEMA: dict[str, Any] = {"properties": {"a": {"type": "array"}, "c": {"type": "string"}, "n": {"type": "integer"}}}
FUNCTIONS = {"f": SCHEMA, "g": dict[str, Any]()}
ALL = list(WRAPPED)
TAGGED = [dialect for dialect in ALL if dialect.tags is not None]
LITERAL = [GEMMA4, OLMO3]


def read(dialect: Dialect, parts: list[str]) -> tuple[str, list[tuple[str, str]], ToolReader]:
    """Content, calls (name, arguments) and the reader."""
    reader = ToolReader(dialect, FUNCTIONS)
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


@pytest.mark.parametrize("dialect", [d for d in ALL if d.forms], ids=lambda d: d.name)
def test_names_as_long_as_a_request_may_give_are_read(dialect: Dialect) -> None:
    """A tool's and its namespace's: beyond 64 characters a call was told as text, where it was enforced too."""
    name = f"{'n' * 128}__{'t' * 128}"
    text = write_calls(dialect, [(name, "{}")]).removeprefix(dialect.marker if dialect.is_begun else "")
    pieces = ToolReader(dialect, {name: {}}).feed(text)
    assert pieces[:2] == [CallStart(0, name), CallArguments(0, "{}")]


@pytest.mark.parametrize("dialect", WRAPPED, ids=lambda d: d.name)
@given(places=st.lists(st.integers(0, 10_000)))
def test_a_call_is_read_however_it_is_cut(dialect: Dialect, places: list[int]) -> None:
    content, calls, reader = read(dialect, cut(WRAPPED[dialect], places))
    assert content == "" and reader.num_calls == 1
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", ARGUMENTS)]


@pytest.mark.parametrize("dialect", [d for d in ALL if d.forms], ids=lambda d: d.name)
@given(places=st.lists(st.integers(0, 10_000)))
def test_marks_within_arguments_are_text(dialect: Dialect, places: list[int]) -> None:
    arguments = json.dumps({"c": f"}}]\n```{''.join(sorted(dialect.marks))}", "a": [{}]}, ensure_ascii=False)
    content, calls, _ = read(dialect, cut(write_calls(dialect, [("f", arguments)]), places))
    assert (content, calls) == ("", [("f", arguments)])


@pytest.mark.parametrize("dialect", [d for d in ALL if d is not LLAMA3], ids=lambda d: d.name)
@given(places=st.lists(st.integers(0, 10_000)))
def test_text_before_a_call_is_content(dialect: Dialect, places: list[int]) -> None:
    mark = dialect.marker if dialect.is_begun else ""
    content, calls, _ = read(dialect, cut(f"I look <it> up.\n\n{mark}{WRAPPED[dialect]}", places))
    assert content == "I look <it> up." and len(calls) == 1


def test_several_calls() -> None:
    two = f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n"
    assert [name for name, _ in read(HERMES, [two])[1]] == ["f", "f"]
    assert len(read(MISTRAL, [f"[TOOL_CALLS][{CALL}, {CALL}]"])[1]) == 2
    assert len(read(LLAMA3, [f"<|python_tag|>{WRAPPED[LLAMA3]}; {WRAPPED[LLAMA3]}"])[1]) == 2
    for text in (
        f"[{WRAPPED[LLAMA3]}, {WRAPPED[LLAMA3]}]",
        f"<|python_tag|> [ {WRAPPED[LLAMA3]}\n,{WRAPPED[LLAMA3]} ]\n",
    ):
        content, calls, _ = read(LLAMA3, list(text))
        assert content == "" and [json.loads(arguments) for _, arguments in calls] == [ARGUMENTS] * 2
    for dialect in (MISTRAL11, *TAGGED, *LITERAL):
        content, calls, _ = read(dialect, [f"So.\n{WRAPPED[dialect]}\n{WRAPPED[dialect]}\n"])
        assert content == "So." and [json.loads(arguments) for _, arguments in calls] == [ARGUMENTS] * 2


@given(places=st.lists(st.integers(0, 10_000)))
def test_calls_of_glm4_are_messages(places: list[int]) -> None:
    """Its prompt ends with the mark of the first; an answer begins with a line break."""
    two = f"{WRAPPED[GLM4]}<|assistant|>g\n{{}}"
    for before, wanted in (("", ""), ("\nSo.\n<|assistant|>", "\nSo."), ("f is<|assistant|>", "f is")):
        content, calls, _ = read(GLM4, cut(before + two, places))
        assert content == wanted and [name for name, _ in calls] == ["f", "g"]
    for text in (f"\n{WRAPPED[GLM4]}", "f\n[1]", "<|assistant|>\nf\n{}", "f<|assistant|>"):
        assert read(GLM4, cut(text, places))[:2] == (text, [])


def test_arguments_come_before_the_call_is_complete() -> None:
    reader = ToolReader(HERMES, FUNCTIONS)
    assert reader.feed('<tool_call>{"name": "f", "arguments": {"a"') == [CallStart(0, "f"), CallArguments(0, '{"a"')]
    assert reader.feed(": 1") == [CallArguments(0, ": 1")]


def test_other_orders_and_forms() -> None:
    late = '<tool_call>{"arguments": {"a": 1}, "id": {"x": [1]}, "name": "f"}</tool_call>'
    assert read(HERMES, [late])[1] == [("f", '{"a": 1}')]
    assert read(HERMES, ['<tool_call>{"name": "f"}</tool_call>'])[1] == [("f", "{}")]
    quoted = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read(HERMES, [quoted])[1] == [("f", '{"a": 1}')]


@pytest.mark.parametrize("dialect", [HERMES, LLAMA3, MISTRAL], ids=lambda d: d.name)
@pytest.mark.parametrize("other", ["arguments", "parameters"])
@given(places=st.lists(st.integers(0, 10_000)))
def test_arguments_are_read_by_either_name(dialect: Dialect, other: str, places: list[int]) -> None:
    """Models mix up what families call them: none may be lost."""
    inner = '{"name": "f", "OTHER": null, "OTHER": {"parameters": 1, "arguments": "x"}}'.replace("OTHER", other)
    wrapped = WRAPPED[dialect].replace(CALL, inner).replace(WRAPPED[LLAMA3], inner)
    _, ((name, arguments),), _ = read(dialect, cut(wrapped, places))
    assert (name, json.loads(arguments)) == ("f", {"parameters": 1, "arguments": "x"})
    _, calls, _ = read(dialect, [wrapped.replace('{"parameters": 1, "arguments": "x"}', "null")])
    assert calls == [("f", "{}")]


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
        "[TOOL_CALLS]unknown[ARGS]{}",
        "[TOOL_CALLS]f[ARGS] is not an object",
        "[TOOL_CALLS]f is [ARGS]{}",
        "[TOOL_CALLS]f[CALL_ID]1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>unknown\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.unknown:0<|tool_call_argument_begin|>{}",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f<|tool_call_argument_begin|>{}",
        '<|tool_call|>[{"name": "unknown"}]',
        "<|START_ACTION|>[\n]",
        "<tool_call>\n<function=unknown>\n</function></tool_call>",
        "<tool_call><function=f",
        "<tool_call><func",
        "<tool_call>unknown\n</tool_call>",
        "<tool_call>f         \n</tool_call>",
        '<minimax:tool_call><invoke name="unknown"></invoke></minimax:tool_call>',
        '<minimax:tool_call><invoke name="f" ></invoke></minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="f"',
        "<seed:tool_call><function=f",
        "<|tool_call>call:unknown{}<tool_call|>",
        "<|tool_call>call:f(a=1)<tool_call|>",
        "<function_calls>unknown()</function_calls>",
        "<function_calls>f{}</function_calls>",
        "<function_calls>f",
        '<tool_calls>[{"name": "unknown"}]',
        "<tool_call>f or not</tool_call>",
        "{}",
        "[1, 2]",
        "[{}, {}]",
        '[{"name": "unknown", "parameters": {}}]',
        "[ {",
        "[",
        "",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    """Nothing is lost of what the model said."""
    for dialect in ALL:
        for before in ("", " \n ", "The tag \n "):
            for parts in ([before + text], list(before + text)):
                assert read(dialect, parts)[:2] == (before + text, [])


MARKS = sorted({mark for dialect in ALL for mark in dialect.marks} | {"<function=", *'{}"f> ac:', "\n"})
HOSTILE = st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=30).map("".join)
CUTS = st.lists(st.integers(0, 400))


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
@given(HOSTILE, CUTS)
def test_any_text_is_read_the_same_however_it_is_cut(dialect: Dialect, text: str, places: list[int]) -> None:
    assert read(dialect, [text])[:2] == read(dialect, cut(text, places))[:2]


@pytest.mark.parametrize(
    ("dialect", "text", "content", "count"),
    [
        (HERMES, f"<tool_call>\n<tool_call>{CALL}</tool_call>", "<tool_call>", 1),
        (HERMES, "<tool_call>\n<tool_call>\n", "<tool_call>\n<tool_call>\n", 0),
        (KIMI3, f"{KIMI3.marker}\n\t{KIMI3.marker}", "", 0),
        (KIMI3, f"{KIMI3.marker}\n\ttext", "\n\ttext", 0),
        (MISTRAL, f"[TOOL_CALLS][[TOOL_CALLS]{CALL}", "[TOOL_CALLS][", 1),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_mark_that_begins_no_call_hides_none_however_the_text_is_cut(
    dialect: Dialect, text: str, content: str, count: int
) -> None:
    """White space between two marks was text or not, by where it was cut; and [ was swallowed that began another mark."""
    for parts in ([text], list(text)):
        told, calls, _ = read(dialect, parts)
        assert (told, len(calls)) == (content, count)


@pytest.mark.parametrize("dialect", TAGGED, ids=lambda d: d.name)
@given(HOSTILE, st.text(max_size=30), CUTS)
def test_arguments_between_tags_are_json_whatever_stands_there(
    dialect: Dialect, between: str, value: str, places: list[int]
) -> None:
    _, calls, reader = read(dialect, cut(tagged(dialect, {"c": value + between, "n": between}), places))
    assert calls and calls[0][0] == "f"
    for _, arguments in calls[: reader.num_calls]:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("dialect", TAGGED, ids=lambda d: d.name)
@given(st.text().filter(lambda text: "</" not in text), CUTS)
def test_a_text_between_tags_is_what_was_written(dialect: Dialect, value: str, places: list[int]) -> None:
    _, calls, _ = read(dialect, cut(tagged(dialect, {"c": value}), places))
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", {"c": value})]


def tagged(dialect: Dialect, values: dict[str, str], *names: str) -> str:
    """Calls as the templates write them, each with the same arguments."""
    tags = dialect.tags
    assert tags is not None
    pad = "\n" if tags.is_padded else ""
    between = f"{tags.key_close}{tags.gap}{tags.value_open}"
    pairs = "".join(f"{tags.key_open}{k}{between}{v}{pad}{tags.value_close}\n" for k, v in values.items())
    end = f"{tags.ends[0]}\n" if tags.begin else ""
    calls = [f"{tags.begin}{name}{tags.name_end.replace('<', '')}\n{pairs}{end}" for name in names or ("f",)]
    inside = calls if dialect.between is None else ["".join(calls)]
    return "\n".join(f"{dialect.marker}{dialect.lead}{each}{dialect.close}" for each in inside)


def test_what_is_written_between_tags_is_as_the_families_write_it() -> None:
    for dialect in TAGGED:
        assert tagged(dialect, {"a": A_JSON, "c": C_TEXT}) == WRAPPED[dialect]


def test_a_text_between_tags_streams_and_all_else_is_read_whole() -> None:
    reader = ToolReader(QWEN3, FUNCTIONS)
    assert reader.feed("<tool_call><function=f><parameter=c>\nab") == [CallStart(0, "f"), CallArguments(0, '{"c": "ab')]
    assert reader.feed('"c') == [CallArguments(0, '\\"c')]
    assert reader.feed("\n") == reader.feed("</para") == []
    assert reader.feed("meter><parameter=n>\n1") == [CallArguments(0, '"')]
    assert reader.feed("2\n</parameter></function>") == [CallArguments(0, ', "n": 12}')]
    assert reader.feed("\n</tool_call>\n") == reader.finish() == [] and reader.num_calls == 1


@pytest.mark.parametrize(
    "schema, text, wanted",
    [
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "3.0", 3.0),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "number"}, " 12 ", 12),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "integer"]}, '"12"', '"12"'),
        ({"type": "string"}, "true", "true"),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {}]}, "[1]", [1]),
        ({"$ref": "#/$defs/count"}, "7", 7),
        ({"$ref": "http://x/y"}, "7", 7),
        ({"$ref": "#/properties/v"}, "7", 7),
        (None, "plain", "plain"),
        (None, "NaN", "NaN"),
        (None, "[" * 5000, "[" * 5000),
        ({"type": 5}, "9" * 5000, "9" * 5000),
    ],
)
def test_a_value_between_tags_becomes_what_its_schema_says(schema: Any, text: str, wanted: Any) -> None:
    properties = {} if schema is None else {"v": schema}
    reader = ToolReader(GLM, {"f": {"properties": properties, "$defs": {"count": {"type": "integer"}}}})
    pieces = [p for char in tagged(GLM, {"v": text}) for p in reader.feed(char)]
    made = "".join(p.text for p in pieces if isinstance(p, CallArguments))
    assert json.loads(made) == {"v": wanted} and type(json.loads(made)["v"]) is type(wanted)


@pytest.mark.parametrize(
    "dialect, text, wanted",
    [
        (OLMO3, "a='it\\'s', b=\"\\\"\\n\"", {"a": "it's", "b": '"\n'}),
        (
            OLMO3,
            r"""a="\u00e9\x41\U0001f600\ud83d\ude00\d\u12zz\
.", b='\0'""",
            {"a": "éA😀😀\\d\\u12zz.", "b": "\0"},
        ),
        (OLMO3, 'a="x\ny\t"', {"a": "x\ny\t"}),
        (OLMO3, "a=(1, 2), b=[], c={}, d=()", {"a": [1, 2], "b": [], "c": {}, "d": []}),
        (OLMO3, "a={'k': {'l': [True, None]}, \"m n\":1.5}", {"a": {"k": {"l": [True, None]}, "m n": 1.5}}),
        (OLMO3, "a=true, b = null,\n d=-1e3", {"a": True, "b": None, "d": -1000.0}),
        (OLMO3, "a=someone, b=1_000", {"a": "someone", "b": "1_000"}),
        (OLMO3, "1, 'two', a=3, [4]", {"a": 3}),
        (OLMO3, "a=, b=1,", {"a": None, "b": 1}),
        (OLMO3, "a='x' 'y', b=1", {"a": "x", "b": 1}),
        (OLMO3, "a={'x'}, b={1: 2}", {"a": {}, "b": {"1": 2}}),
        (OLMO3, "c=12, n=12", {"c": "12", "n": 12}),
        (GEMMA4, 'a:<|"|>x\\n,}"<|<|"|>,n:-1.5', {"a": 'x\\n,}"<|', "n": -1.5}),
        (GEMMA4, 'o:{a:[{b:<|"|><|"|>}],<|"|>c d<|"|>:true}', {"o": {"a": [{"b": ""}], "c d": True}}),
        (GEMMA4, "a:None,b:null,d:word (it), c:007", {"a": None, "b": None, "d": "word (it)", "c": "007"}),
        (GEMMA4, " a : 1 , b : [ 1 , 2 ] ", {"a": 1, "b": [1, 2]}),
        (GEMMA4, "a:]", {"a": None}),
    ],
)
@given(places=CUTS)
def test_literals_become_json(dialect: Dialect, text: str, wanted: Any, places: list[int]) -> None:
    notation = dialect.notation
    assert notation is not None
    whole = f"{dialect.marker}{notation.begin}f{notation.open}{text}{notation.close}{dialect.close}"
    _, calls, _ = read(dialect, cut(whole, places))
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", wanted)]


@pytest.mark.parametrize("dialect", LITERAL, ids=lambda d: d.name)
@given(HOSTILE | st.text("=:,(){}[]\"'\\ux1 \na", max_size=40), CUTS)
def test_arguments_of_literals_are_json_whatever_stands_there(dialect: Dialect, text: str, places: list[int]) -> None:
    notation = dialect.notation
    assert notation is not None
    whole = f"{dialect.marker}{notation.begin}f{notation.open}{text}"
    content, calls, reader = read(dialect, cut(whole, places))
    assert (content, calls) == read(dialect, [whole])[:2] and calls[0][0] == "f"
    for _, arguments in calls[: reader.num_calls]:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("dialect", LITERAL, ids=lambda d: d.name)
def test_a_text_among_literals_streams(dialect: Dialect) -> None:
    notation = dialect.notation
    assert notation is not None
    quote = notation.quotes[0]
    reader = ToolReader(dialect, FUNCTIONS)
    begun = f"{dialect.marker}{notation.begin}f{notation.open}c{notation.assign}{quote}ab"
    assert reader.feed(begun) == [CallStart(0, "f"), CallArguments(0, '{"c": "ab')]
    assert reader.feed("c\n") == [CallArguments(0, "c\\n")]
    assert reader.feed(f"{quote}{notation.close}{dialect.close}") == [CallArguments(0, '"}')]


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_white_space_is_not_looked_at_again(dialect: Dialect) -> None:
    """20,000 spaces before a call took a second: each looked at all before it."""
    for before in ("", "x", "[", dialect.marker):
        reader = ToolReader(dialect, FUNCTIONS)
        reader.feed(before)
        reader.feed("  ")
        assert not reader._held.startswith(" ")


def test_a_long_call_is_read_in_linear_time() -> None:
    """By what is copied: 256 characters at a step. A million of them at once took minutes."""
    items = ",".join(["1"] * 100_000)
    _, ((_, arguments),), _ = read(OLMO3, [f"<function_calls>f(a=[{items}])</function_calls>"])
    assert len(json.loads(arguments)["a"]) == 100_000


@pytest.mark.parametrize(
    ("dialect", "begun"),
    [
        (HERMES, '<tool_call>{"arguments": {"c": "'),
        (MINIMAX, '<minimax:tool_call><invoke name="f">\n<parameter name="'),
        (MINIMAX, '<minimax:tool_call><invoke name="f">\n<parameter name="a">'),
    ],
    ids=("object", "key", "value"),
)
def test_what_has_been_read_of_a_call_is_not_copied_again(dialect: Dialect, begun: str) -> None:
    """Behind two megabytes each piece of four characters took half a millisecond of the event loop."""
    reader = ToolReader(dialect, FUNCTIONS)
    reader.feed(begun + "xyz " * (1 << 19))
    began = time.process_time()
    for _ in range(2000):
        reader.feed("xyz ")
    assert time.process_time() - began < 0.15


def test_of_what_a_value_may_be_so_much_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty references to themselves were followed 8,421 times, 8,000 for ever, on the event loop of a gateway."""
    looked: list[str] = []
    referred = tagged_calls.referred

    def counted(ref: str, root: Any) -> Any:
        looked.append(ref)
        return referred(ref, root)

    monkeypatch.setattr(tagged_calls, "referred", counted)
    back = {"x": {"anyOf": [{"$ref": "#/x"}] * 20}}
    assert kinds_of({"$ref": "#/x"}, back) == frozenset() and len(looked) == 1
    folded: dict[str, Any] = {str(i): {"anyOf": [{"$ref": f"#/{i + 1}"}] * 15} for i in range(9)}
    assert kinds_of({"$ref": "#/0"}, {**folded, "9": {"type": "integer"}}) == {"integer"} and len(looked) == 11
    assert kinds_of({"enum": ["a"] * (MAX_LOOKS - 1)}, {}) == {"string"}
    long = {"type": ["string"] * MAX_LOOKS}
    for far in (
        {"enum": ["a"] * MAX_LOOKS},
        long,
        {"oneOf": [{"type": "string"}] * MAX_LOOKS},
        {"$ref": "#" + "/a" * 5000},
    ):
        assert kinds_of(far, {}) == frozenset()
    root = {"$defs": {"a": {"type": ["string", "null"]}, "b": {"oneOf": [{"$ref": "#/$defs/a"}, {"enum": [1, 2.5]}]}}}
    assert kinds_of({"anyOf": [{"$ref": "#/$defs/b"}, {"const": True}]}, root) == {
        "string",
        "null",
        "integer",
        "number",
        "boolean",
    }
    assert kinds_of({"anyOf": [{"type": "string"}, {"anyOf": []}]}, root) == frozenset(), "one of them says nothing"


def test_hostile_ends_of_a_tagged_call() -> None:
    """A tag that is missing or comes twice costs a value, never the JSON."""
    for text, wanted in (
        ("<tool_call>f\n<arg_key>a</arg_key></tool_call>", {}),
        ("<tool_call>f</tool_call>", {}),
        (
            tagged(GLM, {"c": "x"}).replace("</tool_call>", "<arg_key>c</arg_key><arg_value>y</arg_value></tool_call>"),
            {"c": "x"},
        ),
    ):
        assert [json.loads(arguments) for _, arguments in read(GLM, list(text))[1]] == [wanted]
    for text in (
        '<minimax:tool_call><invoke name="f"></minimax:tool_call>',
        '<minimax:tool_call><invoke name="f"> junk </invoke> tail',
    ):
        assert [json.loads(arguments) for _, arguments in read(MINIMAX, list(text))[1]] == [{}]
    for text in ("<tool_call><function=f></tool_call>", "<tool_call><function=f> junk </function> tail"):
        assert [json.loads(arguments) for _, arguments in read(QWEN3, list(text))[1]] == [{}]


@pytest.mark.parametrize(
    "template, wanted",
    [
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{% if tools %}<tool_call><function=name>{% endif %}", QWEN3),
        ("{% if tools %}<tool_call>name<arg_key>{% endif %}", GLM),
        ("{% if tools %}<seed:tool_call><function=name>{% endif %}", SEED),
        ("{% if tools %}<minimax:tool_call>{% endif %}", MINIMAX),
        ("{% if tools %}<tool_calls>[{% endif %}", HUNYUAN),
        ("{% if tools %}<|tool_call>call:{% endif %}", GEMMA4),
        ("{% if tools %}<function_calls>{% endif %}", OLMO3),
        ("{% if tools %}<|observation|>{{ messages[0].metadata }}{% endif %}", GLM4),
        ("<|observation|>{{ messages[0].metadata }}", None),  # glm-4-9b-chat: tools of a message
        ("{% if tools %}[TOOL_CALLS][{% endif %}", MISTRAL),
        ("{% if tools %}[TOOL_CALLS]name[ARGS]{% endif %}", MISTRAL11),
        ("{% if tools %}ipython{% endif %}", LLAMA3),
        ("<｜tool▁calls▁begin｜>```json", DEEPSEEK),  # it takes none, and is told of them in the system message
        ("<｜tool▁calls▁begin｜>", DEEPSEEK31),
        ("<|tool|>{{ messages[0].tools }}<|/tool|>", PHI4),  # it takes them of the system message
        ("{% if tools %}<|tool_calls_section_begin|>{% endif %}", KIMI),
        ("{% if tools %}<|tool_call|>{% endif %}", GRANITE),
        ("{% if tools %}<|START_ACTION|>{% endif %}", COMMAND),
        ("{% if tools %}<|python_tag|><function=name>{% endif %}", None),  # functionary: not read
        ("{% if xml_tools %}# Tools\n<tool_call>{% endif %}", None),  # smollm3: it would not be told of them
        ("{% if tools %}something else{% endif %}", None),
        ("<tool_call>", None),
    ],
)
def test_a_dialect_is_known_by_its_template(template: str, wanted: Dialect | None) -> None:
    assert find_dialect(SimpleNamespace(chat_template=template)) is wanted


THINKING = Thinking("<think>", "</think>", None, None, None)


def split(parts: list[str], *, is_open: bool, thinking: Thinking = THINKING) -> tuple[str, str]:
    reader = ThoughtReader(thinking, is_open=is_open)
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


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("<|channel>thought\nhm\n<channel|>Yes.", ("hm", "Yes.")),
        ("<|channel>thought\n<channel|>Yes.", ("", "Yes.")),
        ("<|channel>other", ("", "<|channel>other")),
    ],
)
def test_thoughts_of_gemma(text: str, wanted: tuple[str, str]) -> None:
    thinking = Thinking("<|channel>thought", "<channel|>", None, None, None)
    assert thinking.marks == {"<|channel>", "<channel|>"}
    assert split([text], is_open=False, thinking=thinking) == wanted
    assert split(list(text), is_open=False, thinking=thinking) == wanted


@given(st.text(alphabet="<think>/ \na", max_size=60), st.lists(st.integers(0, 100)), st.booleans())
def test_thoughts_do_not_depend_on_how_they_are_cut(text: str, places: list[int], is_open: bool) -> None:
    assert split([text], is_open=is_open) == split(cut(text, places), is_open=is_open)


def test_arguments_within_a_string_are_text_that_can_be_sent() -> None:
    """Half of a pair of surrogates, which JSON can write and UTF-8 cannot, ended the answer with a 500."""
    said = '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800x\\"}"}</tool_call>'
    pieces = ToolReader(HERMES, {"f": {}}).feed(said)
    assert pieces == [CallStart(0, "f"), CallArguments(0, '{"a": "?x"}')]
