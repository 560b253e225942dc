"""manyhands.api.http.encode: the same JSON as json's, in pieces of a bounded size."""

import json
from typing import Any

import pytest

from manyhands.api.http.encode import PIECE_BYTES, JsonRows, JsonText, pieces


def rows(*items: Any) -> JsonRows:
    out = JsonRows()
    for item in items:
        out.append(item)
    return out


@pytest.mark.parametrize("items", [[], [1], [1, "ä\n", {"a": [None]}], list(range(20_000)), ["x" * 9000] * 40])
def test_rows_are_an_array(items: list[Any]) -> None:
    said = list(pieces({"a": rows(*items), "b": 2}, b"data: ", b"\n\n"))
    text = b"".join(said)
    assert text.startswith(b"data: {") and text.endswith(b"}\n\n")
    assert json.loads(text[6:]) == {"a": items, "b": 2}
    longest = max((len(json.dumps(item)) for item in items), default=0)
    assert max(map(len, said)) <= PIECE_BYTES + longest + 10


@pytest.mark.parametrize("text", ["", 'ä\n"\\\x00', "\x00" * 100_000, "🤚" * 100_000])
def test_a_text_of_any_length(text: str) -> None:
    grown = JsonText(text)
    grown.add(" more")
    said = list(pieces([grown]))
    assert json.loads(b"".join(said)) == [text + " more"]
    assert max(map(len, said)) <= 7 * PIECE_BYTES, "a control character is six bytes of JSON"


def test_what_is_added_meanwhile_is_in_what_has_not_been_asked_for() -> None:
    grown = rows(1)
    said = pieces({"a": grown})
    grown.append(2)
    assert json.loads(b"".join(said)) == {"a": [1, 2]}


def test_other_things_are_no_json() -> None:
    with pytest.raises(TypeError, match="object is no JSON"):
        b"".join(pieces({"a": object()}))
