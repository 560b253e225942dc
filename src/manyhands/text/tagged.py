"""Calls whose values stand between tags, bare: read as they come, and made JSON by the function's schema. Sans-I/O.

A value that can only be a text streams; any other is read to its end, and is the JSON it looks like if the schema allows that,
else a text. What stands between a value and the next tag is no part of the call.
"""

import json
from collections.abc import Iterator, Mapping
from html import unescape
from typing import Any, Final

from manyhands.text.detokenize import overlap
from manyhands.text.tags import Tags

Schema = Mapping[str, Any]
_NAME: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
# Schemas, values and steps of references that are looked at for one value: a millisecond of the event loop. References that
# lead back multiply, and a request may bring 8,000 of them.
MAX_LOOKS: Final = 4096
MAX_SPACE: Final = 8  # characters between a name and what stands behind it
MAX_NAMED: Final = 520  # of a name and its namespace
_MAX_HEAD: Final = 256  # of what stands between a key and its value
_AT_ONCE: Final = 256  # characters: what is held is cut at each step, so a long text would be copied again and again
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}  # as some templates write them


class HeadedCall:
    """What calls share that begin with a name, not with JSON: the text of the arguments, and the name (calls.py says what a
    reader is). A subclass has a method for each state, which returns whether it got on."""

    def __init__(
        self, begin: str, name_end: str, functions: Mapping[str, Schema], *, has_namespace: bool = False
    ) -> None:
        self._begin, self._name_end, self._functions = begin, name_end, functions
        self._has_namespace = has_namespace
        self.raw = ""  # until the name is complete
        self.name: str | None = None
        self.is_done = self.is_told = False
        self._fresh: list[str] = []
        self._held = ""
        self._state = "name"

    def take(self) -> str:
        """The JSON of the arguments since the last time."""
        fresh = "".join(self._fresh)
        self._fresh.clear()
        return fresh

    def feed(self, text: str) -> int:
        """Read on; return how many characters belong to the call."""
        for at in range(0, len(text), _AT_ONCE):
            part = text[at : at + _AT_ONCE]
            self._held += part
            while not self.is_done and self._held and getattr(self, f"_in_{self._state}")():
                pass
            if self.is_done:
                return at + len(part) - len(self._held)
        return len(text)

    def _in_name(self) -> bool:
        """One character. A name that no function has is done without one: it is text."""
        char, self._held = self._held[0], self._held[1:]
        self.raw += char
        name, end = self.raw[len(self._begin) :], self._name_end
        if not name:
            return True
        if name.endswith(end) and (known := self._known(name.removesuffix(end).rstrip())) is not None:
            self.name, self._state = known, "between"
            self._fresh.append("{")
            if end == "<":  # it begins the next tag
                self._held = char + self._held
        elif not self._may_be_name(name):  # its last character may begin a marker
            self.is_done = True
            self.raw, self._held = self.raw[:-1], char + self._held
        return True

    def _may_be_name(self, name: str) -> bool:
        """Whether it begins one that a function has, perhaps with white space and the beginning of what ends names."""
        if self._has_namespace:
            said = name[: len(name) - overlap(name, self._name_end)]
            return len(said) <= MAX_NAMED and not set(said) - _NAME
        if name[-1] in _NAME and any(known.startswith(name) for known in self._functions):
            return True
        begun = name[: len(name) - overlap(name, self._name_end)].rstrip()
        return self._known(begun) is not None and len(name) <= len(begun) + MAX_SPACE

    def _known(self, said: str) -> str | None:
        """The function that a call names so."""
        name = said.rpartition(".")[2] if self._has_namespace else said
        return name if name in self._functions else None


class TaggedCall(HeadedCall):
    """Reads one call whose values stand between tags."""

    def __init__(self, tags: Tags, functions: Mapping[str, Schema]) -> None:
        super().__init__(tags.begin, tags.name_end, functions, has_namespace=tags.has_namespace)
        self._tags = tags
        self._seen: set[str] = set()
        self._part: list[str] = []  # of a key
        self._value = _Value("", frozenset(), is_padded=False)

    def _in_between(self) -> bool:
        """Before a key, or the end."""
        found = self._seek((self._tags.key_open, *self._tags.ends))
        if found == self._tags.key_open:
            self._state = "key"
        elif found is not None:
            self._end()
        return found is not None

    def _in_key(self) -> bool:
        close = self._tags.key_close
        part, found, after = self._held.partition(close)
        kept = 0 if found else overlap(part, close)
        self._part.append(part[: len(part) - kept])
        self._held = after if found else part[len(part) - kept :]
        if found:
            key = "".join(self._part)
            self._part.clear()
            self._begin_value(unescape(key) if self._tags.is_typed else key.strip())
            self._state = "open" if self._tags.value_open else "value"
        return bool(found)

    def _in_open(self) -> bool:
        """Between a key and its value."""
        if self._tags.is_typed:
            said, found, _ = self._held.partition(self._tags.value_open)
            if not found and len(said) < _MAX_HEAD:
                return False
            if ' type="string"' in said:
                self._value = _Value(self._value.key, frozenset({"string"}), is_padded=self._tags.is_padded)
        mark = self._seek((self._tags.value_open, *self._tags.ends))
        if mark == self._tags.value_open:
            self._state = "value"
        elif mark is not None:
            self._end()
        return mark is not None

    def _in_value(self) -> bool:
        close = self._tags.value_close
        value, found, after = self._held.partition(close)
        if found:
            self._tell(self._value.end(value))
            self._held, self._state = after, "between"
            return True
        safe = len(self._held) - overlap(self._held, close)
        self._tell(self._value.grow(self._held[:safe]))
        self._held = self._held[safe:]
        return False

    def _seek(self, marks: tuple[str, ...]) -> str | None:
        """Which mark comes first, stepping over it; None: none yet, and all that cannot become one is dropped."""
        places = [(place, mark) for mark in marks if (place := self._held.find(mark)) >= 0]
        if not places:
            kept = max(overlap(self._held, mark) for mark in marks)
            self._held = self._held[len(self._held) - kept :]
            return None
        place, mark = min(places)
        self._held = self._held[place + len(mark) :]
        return mark

    def _begin_value(self, key: str) -> None:
        assert self.name is not None
        parameters = self._functions[self.name]
        known = parameters.get("properties")
        schema = known.get(key) if isinstance(known, Mapping) else None
        self._value = _Value(key, kinds_of(schema, parameters), is_padded=self._tags.is_padded)

    def _tell(self, texts: Iterator[str]) -> None:
        """JSON of the value; the first one of a name counts."""
        key = self._value.key
        for text in texts:
            if self._value.is_new:
                self._value.is_new = False
                self._value.is_told = key not in self._seen
                if self._value.is_told:
                    self._fresh.append(f"{', ' if self._seen else ''}{dumped(key)}: ")
                    self._seen.add(key)
            if self._value.is_told:
                self._fresh.append(text)

    def _end(self) -> None:
        self.is_done = True
        self._fresh.append("}")


class _Value:
    """One value: told as it comes if it can only be a text, else at its end."""

    def __init__(self, key: str, kinds: frozenset[str], *, is_padded: bool) -> None:
        self.key, self._kinds, self._is_padded = key, kinds, is_padded
        self.is_new, self.is_told = True, False
        self._streams = kinds == {"string"}
        self._whole: list[str] = []  # of one that does not stream
        self._held = ""
        self._has_begun = False

    def grow(self, text: str) -> Iterator[str]:
        if not self._streams:
            self._whole.append(text)
            return
        self._held += text
        if not self._held:
            return
        if not self._has_begun:
            self._has_begun = True
            yield '"'
            self._held = self._held.removeprefix("\n") if self._is_padded else self._held
        kept = int(self._is_padded and self._held.endswith("\n"))
        safe, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        if safe:
            yield dumped(safe)[1:-1]

    def end(self, text: str) -> Iterator[str]:
        if not self._streams:
            yield json_of(self._unpadded("".join(self._whole) + text), self._kinds)
            return
        yield from self.grow(text)
        if not self._has_begun:
            yield '"'
        yield dumped(self._held.removesuffix("\n") if self._is_padded else self._held)[1:]

    def _unpadded(self, text: str) -> str:
        return text.removeprefix("\n").removesuffix("\n") if self._is_padded else text


def kinds_of(schema: Any, root: Schema) -> frozenset[str]:
    """The JSON types that `schema`, a part of `root`, allows; none if it does not say, within MAX_LOOKS."""
    kinds, todo, seen, left = set[str](), [schema], set[str](), MAX_LOOKS
    while todo:
        told, others, cost = _look(todo.pop(), root, left, seen)
        left -= cost
        if left < 0 or told is None:
            return frozenset()
        kinds |= told
        todo += others
    return frozenset(kinds)


def _look(schema: Any, root: Schema, left: int, seen: set[str]) -> tuple[set[str] | None, list[Any], int]:
    """The types that a schema names (None: it does not say), the schemas that say it in its place, and what to look cost, of
    `left`. `seen`: references that were followed, which say nothing new."""
    if not isinstance(schema, Mapping):
        return None, [], 1
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        return set(map(_kind, values[:left])) or None, [], 1 + len(values)
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {kind for kind in kinds[:left] if isinstance(kind, str)} or None, [], 1 + len(kinds)
    if isinstance(ref := schema.get("$ref"), str):
        cost = 1 + ref.count("/")
        is_new = ref not in seen and cost <= left
        seen.add(ref)
        return set(), [referred(ref, root)] if is_new else [], cost
    others: list[Any] = next((schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list)), [])
    return set() if others else None, others, 1 + len(others)


def referred(ref: str, root: Any) -> Any:
    """What a reference within the document points to; None for any other."""
    for word in ref.removeprefix("#/").split("/") if ref.startswith("#/") else ["\0"]:
        root = root.get(word) if isinstance(root, Mapping) else None
    return root


def json_of(text: str, kinds: frozenset[str]) -> str:
    """A bare value as JSON: what it looks like if that is allowed (no kinds: anything is), else a text."""
    looks = _PYTHON.get(text.strip(), text.strip())
    try:
        value = json.loads(looks, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return dumped(text)
    kind = _kind(value)
    if not kinds or (kind in kinds and kind != "string"):
        return looks
    is_whole = isinstance(value, float) and value.is_integer()
    is_number = (kind == "integer" and "number" in kinds) or (kind == "number" and "integer" in kinds and is_whole)
    return looks if is_number else dumped(text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case None:
            return "null"
        case list():
            return "array"
    return "object"


def dumped(text: str) -> str:
    """A text as JSON."""
    return json.dumps(text, ensure_ascii=False)
