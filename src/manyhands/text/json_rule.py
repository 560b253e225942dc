"""The rule of JSON by a schema, as llguidance takes it. Pure.

An object whose schema lists its properties, and says nothing of others, has no others. By the letter of JSON Schema it may, and
a model that may go on with names of its own often does, up to its limit; llama.cpp, Ollama and xgrammar read schemas so too.
What is allowed then is allowed by the schema as it was written.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from manyhands.errors import BadRequest

Schema = Mapping[str, Any]
# As json.dumps writes: no room for endless white space, and what models have read most of.
STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
COMPACT: Final = {**STYLE, "item_separator": ",", "key_separator": ":"}
MAX_COPIED: Final = 1 << 20  # letters of the rules of one function that each hold its definitions
_DEFINED: Final = ("$defs", "definitions")
_NAMED: Final = ("properties", "patternProperties", *_DEFINED)  # schemas by name
_LISTS: Final = ("anyOf", "allOf", "prefixItems", "items")
_SINGLE: Final = ("items", "additionalProperties")
_OTHERS: Final = frozenset({"additionalProperties", "patternProperties"})
_OF_OBJECTS: Final = _OTHERS | {"properties", "required", "minProperties", "maxProperties"}
_JOINED: Final = frozenset({"anyOf", "allOf", "$ref"})


class _Joined(Exception):
    """Several schemas say of one value what it may have: none of them lists all."""


def json_rule(schema: Schema, *, compact: bool = False) -> str:
    """JSON by a schema; `compact`: without spaces."""
    return _told(_closed_or_none(schema) or schema, compact=compact)


class Definitions:
    """What the references of a schema may point to, for rules of its parts: each that refers to something has a copy."""

    def __init__(self, root: Schema) -> None:
        self._own = {word: root[word] for word in _DEFINED if word in root}
        self._closed = _closed_or_none(self._own)
        self._letters = 0  # of rules with a copy

    def rule(self, schema: Schema) -> str:
        """As json_rule, of a part. Raises BadRequest where the copies become too long."""
        if not self._own or '"$ref"' not in json.dumps(schema):
            return json_rule(schema)
        inner = _closed_or_none(schema)
        if self._closed is None or inner is None:
            rule = _told({**self._own, **schema})
        else:
            rule = _told({**self._closed, **inner})
        self._letters += len(rule)
        if self._letters > MAX_COPIED:
            what = f"each parameter that refers to {' or '.join(self._own)} needs a copy, and these have more than {MAX_COPIED}"
            raise BadRequest(f"{what} characters: send fewer definitions, or not strict")
        return rule


def _told(schema: Schema, *, compact: bool = False) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": COMPACT if compact else STYLE})


def _closed_or_none(schema: Schema) -> Schema | None:
    """As _closed; None where several schemas are joined."""
    try:
        found: Schema = _closed(schema)
    except _Joined:
        return None
    return found


def _closed(schema: Any) -> Any:
    """`schema` with `additionalProperties: false` wherever properties are listed and it is not said. Raises _Joined."""
    if not isinstance(schema, Mapping):
        return schema
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    if "oneOf" in schema or several or (schema.keys() & _JOINED and schema.keys() & _OF_OBJECTS):
        raise _Joined
    inner = _over(schema, _closed)
    return {**inner, "additionalProperties": False} if _lists_all(schema) else inner


def _lists_all(schema: Schema) -> bool:
    known, required, least = (schema.get(word) for word in ("properties", "required", "minProperties"))
    if not known or not isinstance(known, Mapping) or schema.keys() & _OTHERS:
        return False
    if isinstance(required, list) and any(not isinstance(key, str) or key not in known for key in required):
        return False
    return not isinstance(least, int) or least <= len(known)


def _over(schema: Schema, change: Callable[[Any], Any]) -> dict[str, Any]:
    """`schema` with the schemas directly within it changed."""
    out = dict(schema)
    for word in _NAMED:
        if isinstance(named := out.get(word), Mapping):
            out[word] = {name: change(one) for name, one in named.items()}
    for word in _LISTS:
        if isinstance(several := out.get(word), list):
            out[word] = [change(one) for one in several]
    return out | {word: change(out[word]) for word in _SINGLE if isinstance(out.get(word), Mapping)}
