"""Whether a text is one JSON object: as json says, in bounded steps, and without making anything of it."""

import json
from random import Random

import pytest

from manyhands.text.whole_json import MAX_DEPTH, read_object


def is_object(text: str) -> bool:
    try:
        for _ in read_object(text):
            pass
    except ValueError:
        return False
    return True


def says_json(text: str) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


@pytest.mark.parametrize(
    "text",
    [
        *("{}", ' {"a": 1}\n', '{"a": [1, -2.5e3, true, null, {"b": "\\u00e9\\n"}], "c": {}}', '{"a": []}'),
        *("", "[]", "1", '"{}"', "{", "}", '{"a"}', '{"a": }', '{"a": 1,}', '{"a": [1,]}', '{"a": 01}', "{} {}", "{}x"),
        *('{"a": NaN}', '{"a": 1 2}', "{1: 2}", '{"a": "\t"}', '{"a": "\\x"}', '{"a": [}]', '{"a": "b}', "{,}"),
        *(
            '{"a": 1.}',
            '{"a": -}',
            '{"a": truex}',
            '{"a": tru',
            '{"a": 1e5, "b": 0}',
            '{"a": {"b": [[]]}}',
            '{"a":[{]}',
        ),
    ],
)
def test_it_is_what_json_says(text: str) -> None:
    assert is_object(text) == says_json(text)


def test_texts_that_are_nearly_json_are_judged_as_json_does() -> None:
    random, whole = Random(7), json.dumps({"a": [1, "b\n", {"c": None}], "d": -1.5e-7, "e": {"f": [[], {}]}})
    for _ in range(3000):
        text = list(whole)
        for _ in range(random.randint(1, 3)):
            at = random.randrange(len(text))
            text[at : at + random.randint(0, 1)] = random.choice('{}[],:"\\ 01.e-tn')
        assert is_object("".join(text)) == says_json("".join(text)), "".join(text)


def test_nesting_is_bounded() -> None:
    for depth, fits in ((MAX_DEPTH, True), (MAX_DEPTH + 1, False), (1 << 20, False)):
        assert is_object('{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}") == fits


@pytest.mark.parametrize("inner", ["[]," * 100_000 + "1", '"' + "\\n" * 200_000 + '"', '"' + "x" * 400_000 + '"'])
def test_a_long_one_is_read_in_steps(inner: str) -> None:
    assert sum(1 for _ in read_object('{"a":[' + inner + "]}")) >= 12
