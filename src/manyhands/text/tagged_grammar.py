"""Grammars of calls whose values stand between tags (tagged.py): bare texts, and JSON for all that is none.

A text is anything up to the next closing tag, so what a schema says of its length or pattern cannot be enforced: such a
schema is refused, and so is one that says more of an object than its properties.
"""

import json
from collections.abc import Mapping
from html import escape
from typing import Any, Final

from manyhands.errors import BadRequest
from manyhands.text.json_rule import Definitions
from manyhands.text.tagged import kinds_of
from manyhands.text.tags import Tags

Schema = Mapping[str, Any]
# What may be said of a value without changing which are allowed.
NOTES: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$schema", "$defs", "definitions"}
)
_KEY: Final = r"/[^<>\"\s]+/"
_NUMBER: Final = "/[1-9][0-9]{0,3}/"
_TYPES: Final = {"integer": "number"}  # that are not called as in schemas
_ALL: Final = frozenset({"string", "number", "boolean", "null", "object", "array"})
_TEXT: Final = NOTES | {"type"}
_OBJECT: Final = _TEXT | {"properties", "required", "additionalProperties"}


def tagged_rules(name: str, index: int, schema: Schema, tags: Tags, marks: Mapping[str, int]) -> str:
    """Rules for a call of one function, `call_{index}` their first. Raises BadRequest for what cannot be enforced."""
    writer = _Rules(tags, marks, f"{index}", schema)
    known, required = properties_of(name, schema)
    body = [writer.parameter(at, key, one, key in required) for at, (key, one) in enumerate(known.items())]
    if not known and schema.get("additionalProperties", True) is not False:
        body = [writer.anything()]
    written = f"{tags.begin}{name}{tags.name_end.replace('<', '')}{tags.head_end}"
    head = f" {_NUMBER} ".join(marked(part, marks) for part in written.split("{n}"))
    end = marked(f"{tags.ends[0]}{tags.line}", marks) if tags.begin else ""
    return f"call_{index}: {' '.join(filter(None, [head, *body, end]))}\n" + "".join(writer.rules)


def properties_of(name: str, schema: Schema) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The properties of an object, and which are required. Raises BadRequest where its schema says more of it."""
    known, required = schema.get("properties", {}), schema.get("required", [])
    if schema.keys() - _OBJECT or not isinstance(known, Mapping) or not isinstance(required, list):
        said = ", ".join(sorted(schema.keys() - _OBJECT)) or "properties, required"
        raise BadRequest(f"{name}: {said[:100]} of its arguments cannot be enforced in this model's dialect")
    if missing := [key for key in required if not isinstance(key, str) or key not in known]:
        raise BadRequest(f"{name}: required {missing[0]!r:.60} cannot be given, it is not among the properties")
    return known, frozenset(required)


class _Rules:
    """Collects the rules of one function."""

    def __init__(self, tags: Tags, marks: Mapping[str, int], prefix: str, root: Schema) -> None:
        self._tags, self._marks, self._prefix, self._root = tags, marks, prefix, root
        self._definitions = Definitions(root)
        self.rules: list[str] = []

    def parameter(self, at: int, key: str, schema: Any, is_required: bool) -> str:
        """One parameter, left out if it may be."""
        if not key.strip() or set(key) & set('<>"\n\r') or not isinstance(schema, Mapping | bool):
            raise BadRequest(f"{key!r:.60} cannot be a parameter between tags: rename it, and give it a schema")
        name = f"parameter_{self._prefix}_{at}"
        written = json.dumps(escape(key, quote=False) if self._tags.is_typed else key, ensure_ascii=False)
        self.rules.append(f"{name}: {self._open(written, schema)} {self._value(name, key, schema)}\n")
        return name if is_required else f"({name})?"

    def anything(self) -> str:
        """Any parameters, of any value."""
        name = f"free_{self._prefix}"
        self.rules.append(f"{name}: {self._open(_KEY, {})} {self._until_close(name)}\n")
        return f"({name})*"

    def _open(self, key: str, schema: Any) -> str:
        tags = self._tags
        begin, open_value = marked(tags.key_open, self._marks), marked(tags.value_open, self._marks)
        if not tags.is_typed:
            between = f"{tags.key_close}{tags.gap}{tags.value_open}"
            return f"{begin} {key} {marked(between, self._marks)}"
        kinds = sorted({_TYPES.get(kind, kind) for kind in kinds_of(schema, self._root)} or _ALL)
        types = " | ".join(json.dumps(f' type="{kind}"') for kind in kinds)
        return f"{begin} {key} {json.dumps(tags.key_close)} ({types}) {open_value}"

    def _value(self, name: str, key: str, schema: Any) -> str:
        kinds = kinds_of(schema, self._root)
        if "string" not in kinds and kinds:
            return f"{self._definitions.rule(schema)} {self._close()}"
        if isinstance(schema, Mapping) and isinstance(schema.get("enum"), list):
            return f"({' | '.join(self._bare(key, value) for value in schema['enum'])}) {self._close()}"
        if isinstance(schema, Mapping) and schema.keys() - _TEXT:
            said = ", ".join(sorted(schema.keys() - _TEXT))[:100]
            raise BadRequest(f"{key}: {said} of a text between tags cannot be enforced: leave it out, or not strict")
        return self._until_close(name)

    def _bare(self, key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        if not text or "<" in text or text != text.strip():
            raise BadRequest(f"{key}: {text!r:.60} cannot stand between tags: choose another value")
        return json.dumps(text, ensure_ascii=False)

    def _until_close(self, name: str) -> str:
        """A text, and the tag that ends it."""
        close = self._tags.value_close
        if any(mark in close for mark in self._marks):
            return f"TEXT {self._close()}"
        pad = "\n" if self._tags.is_padded else ""
        self.rules.append(f"{name}_text[lazy]: TEXT {json.dumps(pad + close)}\n")
        return f"{name}_text {marked(self._tags.line, self._marks)}".rstrip()

    def _close(self) -> str:
        pad = "\n" if self._tags.is_padded else ""
        return marked(f"{pad}{self._tags.value_close}{self._tags.line}", self._marks)


def marked(text: str, marks: Mapping[str, int]) -> str:
    """A literal in which marks are tokens if they are special."""
    for mark, token in marks.items():
        if mark in text:
            before, _, after = text.partition(mark)
            return " ".join(filter(None, [marked(before, marks), f"<[{token}]>", marked(after, marks)]))
    return json.dumps(text) if text else ""
