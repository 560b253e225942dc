"""Grammars of calls whose arguments are literals (literals.py): pairs in the order of the schema, or sorted as Gemma's are.

Python's values are JSON, held to any schema. Gemma's notation is written out from the schema, as far as it says types, values,
properties and items; a schema that says more of a text, a list or an object is refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from manyhands.errors import BadRequest
from manyhands.text.json_rule import Definitions
from manyhands.text.literals import Notation
from manyhands.text.tagged import referred
from manyhands.text.tagged_grammar import NOTES, marked, properties_of

Schema = Mapping[str, Any]
MAX_DEPTH: Final = 32  # of schemas in each other
_KEY: Final = r"[^\s:=,(){}\[\]<>\"'|\\\/]+"
_SCALARS: Final = ("integer", "number", "boolean", "null")


def literal_rules(name: str, index: int, schema: Schema, notation: Notation, marks: Mapping[str, int]) -> str:
    """Rules for a call of one function, `call_{index}` their first. Raises BadRequest for what cannot be enforced."""
    writer = _Rules(name, index, schema, notation, marks)
    head = json.dumps(f"{notation.begin}{name}{notation.open}")
    body = [head, writer.pairs(schema, notation.assign, 0), json.dumps(notation.close)]
    return f"call_{index}: {' '.join(filter(None, body))}\n" + "".join(
        f"{rule}: {text}\n" for rule, text in writer.rules()
    )


class _Rules:
    """Collects the rules of one function."""

    def __init__(self, name: str, index: int, root: Schema, notation: Notation, marks: Mapping[str, int]) -> None:
        self._name, self._index, self._root, self._notation, self._marks = name, index, root, notation, marks
        self._definitions = Definitions(root)
        self._known: dict[str, str] = {}  # rules by their text
        self._referred: dict[str, str] = {}  # rules by what refers to them
        self._bodies: dict[str, str] = {}

    def rules(self) -> list[tuple[str, str]]:
        return [(name, text) for text, name in self._known.items()] + list(self._bodies.items())

    def pairs(self, schema: Schema, assign: str, depth: int) -> str:
        """What stands in an object, or the call itself; "" for nothing."""
        known, required = properties_of(self._name, schema)
        if not known:
            return self._anything(assign) if schema.get("additionalProperties", True) is not False else ""
        order = sorted(known, key=lambda key: str(key).lower()) if not self._notation.is_python else list(known)
        said = [f"{self._key(key, assign)} {self.value(known[key], depth + 1)}" for key in order]
        return self._listed([self._rule(pair) for pair in said], [key in required for key in order])

    def _listed(self, pairs: Sequence[str], required: Sequence[bool]) -> str:
        """Pairs with commas between them, of which some may be left out."""
        comma = json.dumps(self._notation.comma)
        first = rest = ""
        for pair, is_required in zip(reversed(pairs), reversed(required), strict=True):
            alone = f"{pair} {rest}".strip()
            first = self._rule(alone if is_required or not first else f"{alone} | {first}")
            rest = self._rule((f"{comma} {pair}" if is_required else f"({comma} {pair})?") + f" {rest}".rstrip())
        return first if any(required) else f"({first})?"

    def _key(self, key: Any, assign: str) -> str:
        if not re.fullmatch(_KEY, key):
            raise BadRequest(f"{key!r:.60} cannot be a parameter in this model's dialect: rename it")
        return json.dumps(f"{key}{assign}", ensure_ascii=False)

    def value(self, schema: Any, depth: int) -> str:
        """A value by its schema."""
        if depth > MAX_DEPTH:
            self._refuse(f"a schema of more than {MAX_DEPTH} in each other")
        if not isinstance(schema, Mapping | bool):
            self._refuse(f"{type(schema).__name__} as a schema")
        if self._notation.is_python:
            if isinstance(schema, bool):
                return self._rule(f"%json {json.dumps(schema)}")
            return self._rule(self._definitions.rule(schema))
        if isinstance(schema, bool):
            return self._any() if schema else self._refuse("false as a schema")
        if isinstance(ref := schema.get("$ref"), str):
            self._check(schema, {"$ref"})
            return self._reference(ref, depth)
        return self._described(schema, depth)

    def _described(self, schema: Schema, depth: int) -> str:
        """A value by what a schema says of it."""
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
            self._check(schema, {"enum", "const", "type"})
            if not values:
                self._refuse("an empty enum")
            return self._rule(" | ".join(marked(self._literal(value, 0), self._marks) for value in values))
        for word in ("anyOf", "oneOf"):
            if isinstance(others := schema.get(word), list) and others:
                self._check(schema, {word})
                return self._rule(" | ".join(self.value(other, depth + 1) for other in others))
        if not schema.keys() - NOTES:
            return self._any()
        kinds = schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type")]
        if not kinds:
            self._refuse("type")
        return self._rule(" | ".join(self._kind(kind, schema, depth) for kind in kinds))

    def _kind(self, kind: Any, schema: Schema, depth: int) -> str:
        if kind == "string":
            self._check(schema, {"type"})
            return self._text()
        if kind == "array":
            self._check(schema, {"type", "items"})
            item = self.value(schema.get("items", True), depth + 1)
            return self._rule(f'"[" ({item} ("," {item})*)? "]"')
        if kind == "object":
            return self._rule(" ".join(filter(None, ['"{"', self.pairs(schema, ":", depth), '"}"'])))
        if kind not in _SCALARS:
            return self._refuse(str(kind))
        said = {key: value for key, value in schema.items() if key not in NOTES}
        return self._rule(f"%json {json.dumps({**said, 'type': kind})}")

    def _check(self, schema: Schema, words: set[str]) -> None:
        if others := schema.keys() - NOTES - words:
            self._refuse(", ".join(sorted(others)))

    def _refuse(self, said: str) -> NoReturn:
        raise BadRequest(
            f"{self._name}: {said[:100]} cannot be enforced in this model's dialect: leave it out, or not strict"
        )

    def _reference(self, ref: str, depth: int) -> str:
        if ref not in self._referred:
            name = self._referred[ref] = f"referred_{self._index}_{len(self._referred)}"
            self._bodies[name] = self.value(referred(ref, self._root), depth + 1)
        return self._referred[ref]

    def _literal(self, value: Any, depth: int) -> str:
        """A value as a text."""
        quote = self._notation.quotes[0]
        if depth > MAX_DEPTH or (isinstance(value, str) and quote in value):
            self._refuse(repr(value)[:60])
        match value:
            case str():
                return f"{quote}{value}{quote}"
            case list():
                return f"[{','.join(self._literal(item, depth + 1) for item in value)}]"
            case dict():
                pairs = [f"{key}:{self._literal(item, depth + 1)}" for key, item in value.items()]
                return f"{{{','.join(pairs)}}}"
        return json.dumps(value)

    def _anything(self, assign: str) -> str:
        """Any pairs."""
        value = self.value(True, 0)
        pair = self._rule(f"/{_KEY}/ {json.dumps(assign)} {value}")
        return f"({pair} ({json.dumps(self._notation.comma)} {pair})*)?"

    def _any(self) -> str:
        name = f"any_{self._index}"
        if name not in self._bodies:
            pair = f'/{_KEY}/ ":" {name}'
            scalar = self._rule('%json {"type": ["number", "boolean", "null"]}')
            items, pairs = f'"[" ({name} ("," {name})*)? "]"', f'"{{" ({pair} ("," {pair})*)? "}}"'
            self._bodies[name] = f"{self._text()} | {scalar} | {items} | {pairs}"
        return name

    def _text(self) -> str:
        quote = self._notation.quotes[0]
        if quote in self._marks:
            return self._rule(f"{marked(quote, self._marks)} TEXT {marked(quote, self._marks)}")
        self._bodies[f"text_{self._index}[lazy]"] = f"TEXT {json.dumps(quote)}"
        return self._rule(f"{json.dumps(quote)} text_{self._index}")

    def _rule(self, text: str) -> str:
        """The name of a rule with this text."""
        return self._known.setdefault(text, f"literal_{self._index}_{len(self._known)}")
