"""Grammars as constraints: what they allow, and that it depends on the ids alone."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core import SamplingParams
from manyhands.errors import BadRequest
from manyhands.origin.sampler import Sampler
from manyhands.origin.speculate import verify
from manyhands.plain import size_of
from manyhands.testing.tiny import EOS, make_tiny
from manyhands.text import grammar as grammars_module
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
)
from manyhands.text.grammar import (
    MAX_COMPILED_BYTES,
    Function,
    Grammar,
    Grammars,
    answer_grammar,
    behind_thought,
    calls_grammar,
    check_grammar,
    compile_matcher,
    json_grammar,
    strict_grammar,
)
from manyhands.text.heap import heap_bytes
from manyhands.text.history import write_calls
from manyhands.text.kept_grammars import KEPT_S, MAX_KEPT, MAX_KEPT_BYTES, MAX_KEPT_LETTERS, KeptGrammars
from manyhands.text.reasoning import Thinking
from manyhands.text.tokenizer import load_tokenizer
from manyhands.text.tools import CallArguments, CallStart, ToolReader
from tests.text.test_tools import tagged

VOCAB = 264
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = make_tiny("llama", tmp_path_factory.mktemp("grammar") / "m", layers=1)
    return Grammars(load_tokenizer(folder), VOCAB, frozenset([EOS]))


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether every byte is allowed in turn, and the end after the last."""
    ids = list(text.encode())
    for length, token in enumerate([*ids, EOS]):
        allowed = grammar.allowed(ids[:length])
        if allowed is not None and not allowed[token]:
            return False
    return True


def test_json(grammars: Grammars) -> None:
    free, bound = grammars.compile(json_grammar(None)), grammars.compile(json_grammar(SCHEMA))
    assert accepts(free, '{"x": [1, null, "é"]}') and not accepts(free, "[1]") and not accepts(free, '{"x": 1')
    assert accepts(bound, '{"a": -12}') and not accepts(bound, '{"a": "1"}') and not accepts(bound, "{}")


@pytest.mark.parametrize(
    "schema", [{"type": "nope"}, {"$ref": "#/gone"}, {"not": {}}, {"type": "string", "pattern": "("}]
)
def test_what_cannot_be_enforced_is_refused(schema: dict[str, object], grammars: Grammars) -> None:
    with pytest.raises(BadRequest, match="cannot be enforced"):
        grammars.compile(json_grammar(schema))


_A, _B = ({"properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab")
_NESTED = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, "$defs": {"a": _A}}


@pytest.mark.parametrize(
    ("schema", "listed", "others"),
    [
        (_A, '{"a": 1}', '{"a": 1, "b": 2}'),
        (_NESTED, '[null, {"a": 1}]', '[null, {"a": 1, "b": 2}]'),
        ({"allOf": [_A]}, '{"a": 1}', '{"a": 1, "b": 2}'),
        ({"properties": {"properties": {"type": "integer"}}}, '{"properties": 1}', '{"properties": 1, "a": 1}'),
    ],
)
def test_an_object_has_the_properties_that_are_listed(
    schema: dict[str, Any], listed: str, others: str, grammars: Grammars
) -> None:
    """Where the schema does not say that it may have others."""
    grammar = grammars.compile(json_grammar(schema))
    assert accepts(grammar, listed) and not accepts(grammar, others)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({**_A, "additionalProperties": True}, '{"a": 1, "b": "x"}'),
        ({**_A, "additionalProperties": {"type": "boolean"}}, '{"a": 1, "b": true}'),
        ({**_A, "patternProperties": {"^b$": {"const": 2}}}, '{"a": 1, "b": 2}'),
        ({"properties": _A["properties"], "required": ["a", "b"]}, '{"a": 1, "b": 2}'),
        ({**_A, "minProperties": 2}, '{"a": 1, "b": 2}'),
        ({"type": "object", "properties": {}}, '{"b": 2}'),
        ({"allOf": [_A, _B]}, '{"a": 1, "b": 2}'),
        ({**_A, "anyOf": [_B, {"type": "object"}]}, '{"a": 1, "b": 2}'),
        ({"$defs": {"a": _A}, "$ref": "#/$defs/a", **_B}, '{"a": 1, "b": 2}'),
        ({"$defs": {"a": _A}, "allOf": [{"$ref": "#/$defs/a"}, _B]}, '{"a": 1, "b": 2}'),
        ({"const": {"properties": {"a": 1}}}, '{"properties": {"a": 1}}'),
    ],
)
def test_an_object_that_may_or_must_have_others_has_them(schema: dict[str, Any], text: str, grammars: Grammars) -> None:
    assert accepts(grammars.compile(json_grammar(schema)), text)


def test_what_excludes_each_other_is_not_made_to(grammars: Grammars) -> None:
    """Two objects that both may have all names: an answer could be both, which oneOf forbids."""
    with pytest.raises(BadRequest, match="cannot be enforced"):
        grammars.compile(json_grammar({"oneOf": [{**_A, "required": []}, _B]}))


@given(walk=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 60)), max_size=25))
@settings(deadline=None)
def test_the_answer_depends_on_the_ids_alone(walk: list[tuple[int, int]], grammars: Grammars) -> None:
    """Forwards, back, off the path and on again: as a fresh grammar would say."""
    texts = [b'{"a": 123456789}', b'{"a": -1}', b'{"a": 12']
    used = grammars.compile(json_grammar(SCHEMA))
    for which, length in walk:
        ids = list(texts[which % 3][:length])
        fresh = grammars.compile(json_grammar(SCHEMA)).allowed(ids)
        said = used.allowed(ids)
        assert said is not None and fresh is not None and (said == fresh).all()


def test_drafts_do_not_change_what_is_drawn(grammars: Grammars) -> None:
    """Windows with right and wrong drafts commit what decoding one by one does."""
    rng = np.random.Generator(np.random.Philox(5))
    rows = rng.standard_normal((40, VOCAB)).astype(np.float32)
    rows[:, EOS] -= 2
    params = SamplingParams(temperature=1.0, seed=9)

    def write(drafted: int) -> list[int]:

        sampler = Sampler(params, VOCAB, frozenset([EOS]), grammars.compile(json_grammar(None)))
        ids: list[int] = [1]
        while ids[-1] != EOS and len(ids) < 30:
            right = alone[len(ids) : len(ids) + drafted]
            drafts = [*right[:-1], 7] if len(ids) % 3 == 0 and right else right
            window = rows[len(ids) : len(ids) + 1 + len(drafts)]
            ids += [d.token for d in verify(sampler, window, ids, drafts, 1)]
        return ids[:30]

    alone: list[int] = []
    alone = write(0)
    assert alone[1] == ord("{")
    for drafted in (1, 3, 6):
        assert write(drafted)[: len(alone)] == alone


LITERAL = [GEMMA4, OLMO3]
TAGGED = [QWEN3, SEED, MINIMAX, GLM]
ALL = [
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL11,
    *TAGGED,
    *LITERAL,
    GLM4,
    DEEPSEEK,
    DEEPSEEK31,
    KIMI,
    GRANITE,
    PHI4,
    HUNYUAN,
    COMMAND,
]
FUNCTIONS = [Function("f", SCHEMA, is_strict=True), Function("g", {"type": "object"})]


def written(dialect: Dialect, arguments: str, *names: str) -> str:
    """Calls of functions with the same arguments, as a model is taught to write them."""
    if dialect.notation is not None:
        return literal(dialect, json.loads(arguments), *names)
    if dialect.tags is None:
        said = write_calls(dialect, [(name, arguments) for name in names or ("f",)])
        return said.removeprefix(dialect.marker) if dialect.is_begun else said
    return tagged(dialect, {key: json.dumps(value) for key, value in json.loads(arguments).items()}, *names)


def literal(dialect: Dialect, values: dict[str, object], *names: str) -> str:
    """Calls as Gemma 4's template and OLMo 3's write them."""
    names = names or ("f",)
    if dialect is GEMMA4:
        said = gemma(values)
        return "".join(f"<|tool_call>call:{name}{said}<tool_call|>" for name in names)
    said = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
    return f"<function_calls>{chr(10).join(f'{name}({said})' for name in names)}</function_calls>"


def gemma(value: object) -> str:
    match value:
        case dict():
            return f"{{{','.join(f'{key}:{gemma(value[key])}' for key in sorted(value, key=str.lower))}}}"
        case list():
            return f"[{','.join(map(gemma, value))}]"
        case str():
            return f'<|"|>{value}<|"|>'
    return json.dumps(value)


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_calls(dialect: Dialect, grammars: Grammars) -> None:
    forced = grammars.compile(calls_grammar(dialect, FUNCTIONS, {}, parallel=False))
    good, bad = written(dialect, '{"a": 1}'), written(dialect, '{"a": "x"}')
    assert accepts(forced, good) and accepts(forced, written(dialect, '{"z": []}', "g"))
    for text in (bad, "hello", "", good + " ", written(dialect, "{}", "h")):
        assert not accepts(forced, text)
    free = grammars.compile(strict_grammar(dialect, FUNCTIONS, {}))
    before = "\n" if dialect.is_begun else ""
    assert accepts(free, good) and accepts(free, before + "hello") and accepts(free, "") and not accepts(free, bad)
    if dialect is LLAMA3:  # a list of calls is read too
        assert not accepts(free, f"[{bad}]")
    else:
        before, mark = (f"{before}I will.\n", dialect.marker if dialect.is_begun else "")
        assert accepts(free, before + mark + good) and not accepts(free, before + mark + bad)


@pytest.mark.parametrize("dialect", [d for d in ALL if d is not LLAMA3], ids=lambda d: d.name)
def test_calls_or_an_answer_in_json(dialect: Dialect, grammars: Grammars) -> None:
    """What programs ask for that give tools and a format of the last answer at once."""
    schema = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    for wanted, answer in ((schema, '{"b": 2}'), (None, '{"x": []}')):
        made = grammars.compile(answer_grammar(dialect, FUNCTIONS, {}, wanted, parallel=False))
        assert accepts(made, answer) and accepts(made, written(dialect, '{"a": 1}'))
        for text in ("hello", "", answer + written(dialect, '{"a": 1}'), written(dialect, '{"a": "x"}')):
            assert not accepts(made, text)
    assert not accepts(grammars.compile(answer_grammar(dialect, FUNCTIONS, {}, schema, parallel=False)), '{"x": []}')
    with pytest.raises(BadRequest, match="tool_choice none or required"):
        answer_grammar(LLAMA3, FUNCTIONS, {}, schema, parallel=False)


@pytest.mark.parametrize("dialect", [d for d in ALL if d is not LLAMA3], ids=lambda d: d.name)
def test_several_calls(dialect: Dialect, grammars: Grammars) -> None:
    """What the grammar lets through is what the reader makes calls of."""
    two = written(dialect, '{"a": 1}', "f", "g")
    assert accepts(grammars.compile(calls_grammar(dialect, FUNCTIONS, {}, parallel=True)), two)
    assert not accepts(grammars.compile(calls_grammar(dialect, FUNCTIONS, {}, parallel=False)), two)
    assert accepts(grammars.compile(strict_grammar(dialect, FUNCTIONS, {})), two)
    pieces = ToolReader(dialect, {"f": SCHEMA, "g": {}}).feed(two)
    assert [p.name for p in pieces if isinstance(p, CallStart)] == ["f", "g"]
    assert "".join(p.text for p in pieces if isinstance(p, CallArguments)) == '{"a": 1}{"a": 1}'


MANY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "where": {"type": "string", "description": "free"},
        "unit": {"enum": ["c", "f", 3]},
        "deep": {"type": "boolean"},
        "list": {"$ref": "#/$defs/list"},
        "maybe": {"type": ["string", "null"]},
    },
    "required": ["where", "unit"],
    "additionalProperties": False,
    "$defs": {"list": {"type": "array", "items": {"type": "integer"}}},
}
VALUES = [{"where": 'a\n"b" <i>', "unit": "c"}, {"where": "", "unit": 3, "deep": True, "list": [1, 2], "maybe": "x"}]


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dialect", TAGGED, ids=lambda d: d.name)
def test_values_between_tags(dialect: Dialect, values: dict[str, object], grammars: Grammars) -> None:
    """What the grammar lets through is what the reader makes JSON of."""
    forced = grammars.compile(calls_grammar(dialect, [Function("f", MANY)], {}, parallel=False))
    text = written(dialect, json.dumps(values))
    for value in values.values():
        if isinstance(value, str):
            text = text.replace(json.dumps(value), value, 1)
    assert accepts(forced, text)
    for wrong in (
        text.replace("where", "here"),
        text.replace("c\n<", "d\n<").replace(">c<", ">d<").replace("true", "yes"),
    ):
        assert wrong == text or not accepts(forced, wrong)
    assert not accepts(forced, written(dialect, '{"unit": 3}')) and not accepts(forced, written(dialect, '{"z": 3}'))
    reader = ToolReader(dialect, {"f": MANY})
    made = "".join(p.text for p in reader.feed(text) if isinstance(p, CallArguments))
    assert json.loads(made) == values


DEEP: dict[str, Any] = {
    "type": "object",
    "properties": {
        **MANY["properties"],
        "tree": {"$ref": "#/$defs/tree"},
        "any": {},
        "one": {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "array", "items": {"const": {"x": ["y"]}}}]},
    },
    "required": ["where", "unit"],
    "$defs": {
        **MANY["$defs"],
        "tree": {
            "type": "object",
            "properties": {"B": {"$ref": "#/$defs/tree"}, "a": {"type": "string"}},
            "required": ["a"],
        },
    },
}
DEEP_VALUES = [
    *VALUES,
    {
        "any": {"k": [1, None, "x", {"l": True}]},
        "one": 3,
        "tree": {"B": {"a": ""}, "a": "1"},
        "unit": "f",
        "where": "é",
    },
    {"any": "", "one": [{"x": ["y"]}], "unit": "c", "where": "x"},
]


@pytest.mark.parametrize("values", DEEP_VALUES)
@pytest.mark.parametrize("dialect", LITERAL, ids=lambda d: d.name)
def test_values_of_literals(dialect: Dialect, values: dict[str, object], grammars: Grammars) -> None:
    """What the grammar lets through is what the reader makes JSON of."""
    forced = grammars.compile(calls_grammar(dialect, [Function("f", DEEP)], {}, parallel=False))
    order = [key for key in DEEP["properties"] if key in values]
    text = literal(dialect, {key: values[key] for key in order})
    assert accepts(forced, text)
    for wrong in (
        {key: value for key, value in values.items() if key != "where"},
        {**values, "unit": "d"},
        {**values, "one": 2},
        {**values, "tree": {"B": {"a": "x"}}},
        {**values, "z": 1},
        {**values, "where": 5},
    ):
        assert not accepts(forced, literal(dialect, {key: wrong[key] for key in [*order, *wrong] if key in wrong}))
    reader = ToolReader(dialect, {"f": DEEP})
    made = "".join(p.text for p in reader.feed(text) if isinstance(p, CallArguments))
    assert json.loads(made) == values


def test_any_of_some_literals_may_be_left_out(grammars: Grammars) -> None:
    for required in ([], ["b"], ["a", "c"]):
        schema = {"properties": {key: {"type": "integer"} for key in "abc"}, "required": required}
        for dialect in LITERAL:
            forced = grammars.compile(calls_grammar(dialect, [Function("f", schema)], {}, parallel=False))
            for number in range(8):
                values: dict[str, object] = {key: 1 for place, key in enumerate("abc") if number >> place & 1}
                assert accepts(forced, literal(dialect, values)) == (set(required) <= set(values)), values
    nothing = {"properties": {}, "additionalProperties": False}
    forced = grammars.compile(calls_grammar(OLMO3, [Function("f", nothing)], {}, parallel=False))
    assert accepts(forced, "<function_calls>f()</function_calls>") and not accepts(forced, literal(OLMO3, {"a": 1}))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "x"}}},
        {"properties": {"a": {"enum": ['<|"|>']}}},
        {"properties": {"a:b": {"type": "string"}}},
        {"properties": {"a": {"not": {}}}},
        {"properties": {"a": {"type": "array", "minItems": 1}}},
        {"properties": {"a": {"type": "object", "minProperties": 1}}},
        {"properties": {"a": {"type": "integer", "not": {}}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}], "minLength": 1}}},
        {"properties": {"a": {"$ref": "#/gone"}}},
        {"properties": {"a": {"type": "word"}}},
        {"properties": {"a": False}},
        {"properties": {"a": {"enum": []}}},
        {"properties": {"a": {"enum": [1], "maximum": 0}}},
        {"properties": {"a": {"$ref": "#/properties/b", "minimum": 1}, "b": {"type": "integer"}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}], "type": "integer"}}},
        {"properties": {"a": {"type": []}}},
        {"minProperties": 1},
        {"required": ["a"]},
    ],
)
def test_what_cannot_be_enforced_in_gemmas_notation_is_refused(schema: dict[str, object], grammars: Grammars) -> None:
    with pytest.raises(BadRequest, match="cannot"):
        grammars.compile(calls_grammar(GEMMA4, [Function("f", schema)], {}, parallel=False))


def test_a_schema_that_is_too_deep_is_refused() -> None:
    deep: dict[str, object] = {"type": "string"}
    for _ in range(1000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(BadRequest, match="more than 32 in each other"):
        calls_grammar(GEMMA4, [Function("f", {"properties": {"a": deep}})], {}, parallel=False)


def test_gemmas_marks_are_tokens(grammars: Grammars) -> None:
    marks = {"<|tool_call>": 258, "<tool_call|>": 259, '<|"|>': 260}
    function = Function("f", DEEP, is_strict=True)
    forced = grammars.compile(calls_grammar(GEMMA4, [function], marks, parallel=True))
    free = grammars.compile(strict_grammar(GEMMA4, [function], marks))
    call = [258, *b"call:f{unit:", 260, *b"c", 260, *b",where:", 260, *b'a"<|', 260, *b"}", 259]
    for grammar, ids in ((forced, [*call, *call, EOS]), (free, [*b"So.", *call, EOS])):
        for length, token in enumerate(ids):
            allowed = grammar.allowed(ids[:length])
            assert allowed is not None and allowed[token], length
    allowed = forced.allowed([])
    assert allowed is not None and list(np.flatnonzero(allowed)) == [258]


@pytest.mark.parametrize("dialect", TAGGED, ids=lambda d: d.name)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "x"}}},
        {"properties": {"a": {"type": "string", "maxLength": 3}}},
        {"properties": {"a>b": {"type": "string"}}},
        {"properties": {'a"b': {"type": "string"}}},
        {"properties": {"a": {"enum": ["<"]}}},
        {"properties": {"a": {"not": {}}}},
        {"properties": {"a": {"type": "integer", "not": {}}}},
        {"minProperties": 1},
        {"properties": []},
        {"required": 5},
        {"required": ["a"]},
        {"required": [[]]},
    ],
)
def test_what_cannot_be_enforced_between_tags_is_refused(
    dialect: Dialect, schema: dict[str, object], grammars: Grammars
) -> None:
    with pytest.raises(BadRequest, match="cannot"):
        grammars.compile(calls_grammar(dialect, [Function("f", schema)], {}, parallel=False))


_WORDS = (
    "type",
    "enum",
    "const",
    "properties",
    "required",
    "anyOf",
    "$ref",
    "$defs",
    "items",
    "additionalProperties",
    "a",
)
_KINDS = ("string", "integer", "object", "array", "null", "#", "#/properties/a", "a")
_SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 1) | st.sampled_from(_KINDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_WORDS), inner, max_size=4),
    max_leaves=10,
)


@given(dialect=st.sampled_from(TAGGED + LITERAL), schema=st.dictionaries(st.sampled_from(_WORDS), _SCHEMAS, max_size=4))
@settings(deadline=None, max_examples=40)
def test_any_schema_is_enforced_or_refused(dialect: Dialect, schema: dict[str, object], grammars: Grammars) -> None:
    try:
        grammar = grammars.compile(calls_grammar(dialect, [Function("f", schema)], {}, parallel=False))
    except BadRequest as error:
        assert "\n" not in str(error)
    else:
        allowed = grammar.allowed([])
        assert allowed is not None and list(np.flatnonzero(allowed)) == [ord("<")]
    list(ToolReader(dialect, {"f": schema}).feed(written(dialect, '{"a": 1}')))


def test_special_tags_are_tokens(grammars: Grammars) -> None:
    """GLM's tags may be tokens of their own: then no text can hold one."""
    marks = {
        "<tool_call>": 258,
        "</tool_call>": 259,
        "<arg_key>": 260,
        "</arg_key>": 261,
        "<arg_value>": 262,
        "</arg_value>": 263,
    }
    grammar = grammars.compile(calls_grammar(GLM, [Function("f", MANY)], marks, parallel=False))
    ids = [258, *b"f\n", 260, *b"where", 261, 10, 262, *b"x", 263, 10]
    for length in range(len(ids)):
        allowed = grammar.allowed(ids[:length])
        assert allowed is not None and allowed[ids[length]], length
        assert length > 13 or not allowed[EOS]


def test_special_markers_are_tokens(grammars: Grammars) -> None:
    forced = grammars.compile(calls_grammar(MISTRAL, FUNCTIONS, {"[TOOL_CALLS]": 263}, parallel=False))
    allowed = forced.allowed([])
    assert allowed is not None and list(np.flatnonzero(allowed)) == [263]


def test_a_thought_is_free(grammars: Grammars) -> None:
    thinking = Thinking("<|tool|>", "<|end|>", 263, 262, None)
    closed = grammars.compile(json_grammar(None), thinking, is_open=False)
    first = closed.allowed([])
    assert first is not None and set(np.flatnonzero(first)) == {ord("{"), 263}
    assert closed.allowed([263, 1, 2]) is None
    after = closed.allowed([263, 1, 2, 262])
    assert after is not None and list(np.flatnonzero(after)) == [ord("{")]
    opened = grammars.compile(json_grammar(None), thinking, is_open=True)
    assert opened.allowed([]) is None and opened.allowed([1]) is None


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_behind_a_thought_that_no_token_ends(dialect: Dialect, grammars: Grammars) -> None:
    bound = grammars.compile(behind_thought(json_grammar(SCHEMA), "</think>"))
    call = grammars.compile(behind_thought(calls_grammar(dialect, FUNCTIONS, {}, parallel=False), "</think>"))
    strict = grammars.compile(behind_thought(strict_grammar(dialect, FUNCTIONS, {}), "</think>"))
    for thought in ("</think>", 'hm {"a": "x"} </thin\n</think>\n\n'):
        assert accepts(bound, thought + '{"a": 1}') and not accepts(bound, thought + '{"a": "x"}')
        for made in (call, strict):
            assert accepts(made, thought + written(dialect, '{"a": 1}'))
            assert not accepts(made, thought + written(dialect, '{"a": "x"}'))
    assert not accepts(bound, '{"a": 1}') and accepts(strict, "hm</think>\nSo.")


class _Never:
    def allowed(self, output: Sequence[int]) -> None:
        return None

    def copy(self) -> "_Never":
        return self


def test_a_grammar_must_be_able_to_end() -> None:
    for params in (SamplingParams(ignore_eos=True), SamplingParams(deterministic=True)):
        with pytest.raises(BadRequest, match="grammar"):
            Sampler(params, VOCAB, frozenset([EOS]), _Never())


def test_a_tokenizer_without_a_table(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="takes no grammars"):
        Grammars(object(), VOCAB, frozenset([EOS])).compile(json_grammar(None))


def test_what_compiling_may_cost_is_bounded(grammars: Grammars) -> None:
    """F14: 1.2 kB of patterns under one allOf took 13.7 s of a core."""
    patterns = [{"pattern": f"^.*{chr(97 + i)}.{{{i + 3}}}.*$"} for i in range(20)]
    with pytest.raises(BadRequest, match="cannot be enforced"):
        grammars.compile(json_grammar({"type": "string", "allOf": patterns}))


@pytest.mark.parametrize("dialect", [QWEN3, KIMI3, OLMO3], ids=lambda d: d.name)
def test_only_parameters_that_refer_to_definitions_have_a_copy(dialect: Dialect) -> None:
    """Each of 2,000 had one of 4,000: 128 kB were 115 MB of grammar and 20 s, 8 kB held the event loop for 70 ms."""
    known = {f"p{i}": {"type": "integer"} for i in range(2000)}
    schema = {"type": "object", "properties": known, "$defs": {f"d{i}": {"type": "null"} for i in range(4000)}}
    assert len(calls_grammar(dialect, [Function("f", schema)], {}, parallel=False)) < 1 << 20
    referring = {**schema, "properties": {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(2000)}}
    began = time.process_time()
    with pytest.raises(BadRequest, match=r"that refers to \$defs needs a copy.*: send fewer definitions"):
        calls_grammar(dialect, [Function("f", referring)], {}, parallel=False)
    assert time.process_time() - began < 1


def test_a_parameter_that_refers_to_a_definition_is_held_to_it(grammars: Grammars) -> None:
    defs = {"a": {"type": "object", "properties": {"b": {"type": "integer"}}}, "c": {"oneOf": [{"type": "null"}]}}
    for others in ({}, {"c": {"oneOf": [{"type": "null"}]}}):  # which says of no object what it may have
        schema = {"properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"], "$defs": {"a": defs["a"], **others}}
        grammar = grammars.compile(calls_grammar(OLMO3, [Function("f", schema)], {}, parallel=False))
        assert accepts(grammar, '<function_calls>f(x={"b": 1})</function_calls>')
        assert not accepts(grammar, '<function_calls>f(x={"b": "1"})</function_calls>')
        assert accepts(grammar, '<function_calls>f(x={"b": 1, "d": 2})</function_calls>') == bool(others)


@pytest.mark.parametrize("dialect", [HERMES, QWEN3, GEMMA4], ids=lambda d: d.name)
def test_a_long_list_of_required_properties_is_gone_through_once(dialect: Dialect) -> None:
    """Each of 8,000 was looked for among a new list of them all."""
    names = [f"p{i}" for i in range(8000)]
    schema = {"type": "object", "properties": {key: {"type": "integer"} for key in names}, "required": names}
    began = time.process_time()
    calls_grammar(dialect, [Function("f", schema)], {}, parallel=False)
    assert time.process_time() - began < 0.2


def test_a_schema_that_leads_to_itself_is_refused_in_words(grammars: Grammars) -> None:
    with pytest.raises(BadRequest, match=r"no text can satisfy it.*\$ref"):
        grammars.compile(json_grammar({"$ref": "#"}))


def test_a_grammar_is_compiled_once_and_each_copy_is_its_own(grammars: Grammars) -> None:
    text = json_grammar({"const": "only this"})
    assert grammars.size(text) is None and grammars.copy(text) is None
    first, second = grammars.compile(text), grammars.copy(text)
    assert second is not None and accepts(first, '"only this"') and accepts(second, '"only this"')


def test_what_is_kept_compiled_is_bounded_in_number_and_letters(grammars: Grammars) -> None:
    """A grammar of 115,000 letters takes 23 MB: 32 of them were kept for good, for each model."""
    kept = KeptGrammars()
    matcher = compile_matcher(grammars.table, json_grammar(None))
    for number in range(2 * MAX_KEPT):
        kept.add("model", str(number), matcher)
        kept.find("model", "0")
    assert len(kept) == MAX_KEPT and kept.find("model", "0") is matcher and kept.size("model", "1") is None
    kept.add("model", "x" * (MAX_KEPT_LETTERS - 1), matcher)
    assert kept.num_letters <= MAX_KEPT_LETTERS and kept.size("model", "x" * (MAX_KEPT_LETTERS - 1)) == 0
    kept.add("another", "0", matcher)
    assert kept.num_letters == MAX_KEPT_LETTERS and kept.size("another", "0") == 0 and kept.find("third", "0") is None
    kept.add("model", "y" * (MAX_KEPT_LETTERS + 1), matcher)
    assert kept.num_letters == MAX_KEPT_LETTERS and len(kept) == 2


def test_what_is_kept_compiled_is_bounded_in_bytes(grammars: Grammars) -> None:
    """A multiple of 100,003 is 41 letters and 22 MB: 32 of them were 700 MB."""
    kept = KeptGrammars()
    matcher = compile_matcher(grammars.table, json_grammar(None))
    for number in range(4):
        kept.add("model", str(number), matcher, MAX_KEPT_BYTES // 3)
    assert len(kept) == 3 and kept.size("model", "0") is None and kept.num_bytes <= MAX_KEPT_BYTES
    kept.add("model", "large", matcher, MAX_KEPT_BYTES + 1)
    assert kept.size("model", "large") is None and len(kept) == 3


@pytest.mark.skipif(heap_bytes() == 0, reason="another C library than glibc")
def test_what_is_kept_counts_what_it_takes(grammars: Grammars) -> None:
    kept = KeptGrammars()
    mine = Grammars(grammars._tokenizer, grammars._vocab_size, grammars._eos_ids, kept)
    assert mine.table is not None
    mine.compile(json_grammar({"type": "integer", "multipleOf": 10_007}))
    assert 1 << 20 < kept.num_bytes < 8 << 20


def test_what_other_threads_give_back_meanwhile_is_no_room(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's weights, say: the bound of all was switched off for as long as that grammar was kept."""
    kept, heap = KeptGrammars(), iter([9 << 30, 1 << 30])
    mine = Grammars(grammars._tokenizer, grammars._vocab_size, grammars._eos_ids, kept)
    assert mine.table is not None
    monkeypatch.setattr(grammars_module, "heap_bytes", lambda: next(heap))
    mine.compile(json_grammar(None))
    assert len(kept) == 1 and kept.num_bytes == 0


COSTLY: dict[str, Any] = {
    "a list of numbers": {"const": [number / 2 for number in range(4000)]},
    "a multiple": {"type": "integer", "multipleOf": 100_003},
    "a long text": {"const": "xy" * 50_000},
    "optional letters": {"type": "string", "pattern": f"^{'a?b?' * 2000}$"},
}


@pytest.mark.skipif(heap_bytes() == 0, reason="another C library than glibc")
@pytest.mark.parametrize("name", COSTLY)
def test_a_grammar_of_many_bytes_is_refused(name: str) -> None:
    """Each running request holds its own: with the largest 340 MB; and a mask took 44 ms."""
    with pytest.raises(
        BadRequest,
        match=f"compiled; at most {size_of(MAX_COMPILED_BYTES, is_limit=True)}: send fewer",
    ):
        check_grammar(json_grammar(COSTLY[name]))


def test_a_grammar_that_takes_long_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 patterns of names of properties, of which each two are compared: 10 s, in the process and then in the gateway."""
    names = {f"^p{number}_[a-z]+$": {"type": "string"} for number in range(60)}
    grammar = json_grammar({"type": "object", "patternProperties": names, "additionalProperties": False})
    check_grammar(grammar)
    monkeypatch.setattr(grammars_module, "MAX_COMPILE_S", 0.0005)
    with pytest.raises(BadRequest, match=r"it takes [\d.]+ s to compile; at most 0\.0005: send fewer"):
        check_grammar(grammar)


def test_what_agents_send_is_not_too_costly() -> None:
    """Sixty tools of ten parameters, and an object of 2,000 properties."""
    kinds: list[Any] = [
        {"type": "string", "description": "What to say of it, in a sentence."},
        {"type": "integer", "minimum": 0, "maximum": 100_000},
        {"type": "array", "items": {"enum": ["one", "two", "three"]}},
        {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "number"}}},
    ]
    properties = {f"parameter_{number}": kinds[number % 4] for number in range(10)}
    functions = [Function(f"tool_{number}", {"type": "object", "properties": properties}) for number in range(60)]
    check_grammar(calls_grammar(HERMES, functions, {}, parallel=True))
    check_grammar(json_grammar({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}}))


def test_what_is_not_asked_for_again_is_dropped(grammars: Grammars) -> None:
    now = 1000.0
    kept = KeptGrammars(lambda: now)
    assert kept.expire() is None
    matcher = compile_matcher(grammars.table, json_grammar(None))
    kept.add("model", "used", matcher)
    kept.add("model", "left", matcher)
    now += KEPT_S / 2
    assert kept.find("model", "used") is matcher and kept.expire() == KEPT_S / 2
    now += KEPT_S / 2
    assert kept.expire() == KEPT_S / 2 and kept.size("model", "used") is not None and kept.size("model", "left") is None
    now += KEPT_S / 2
    assert kept.expire() is None and len(kept) == 0
