"""One function call at a time, read a character at a time: a JSON object, or a name before one. Sans-I/O.

A reader has `name` (once it is read), `raw` (what was swallowed, should it be text after all), `is_told` (its user's own note),
`is_done`, `feed` and `take`. One that is done without a name was no call.
"""

import json
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, Final

ARGS: Final = "[ARGS]"
_ARGUMENTS: Final = frozenset({"arguments", "parameters", "args"})
_NAMES: Final = frozenset({"name", "tool_name"})
# What may stand for a part of a form. No part is long, so no head is: a tool and its namespace have names of 128 characters.
_PARTS: Final = {"{name}": r"(?P<name>[\w-]{1,258})", "{n}": r"\d{1,9}", "{id}": r"[^\[]{0,64}"}
_SPACE: Final = r"\s{0,8}"


class _Call:
    """What both kinds of calls share: the text of the arguments, and where in their JSON the reader is."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = self.is_told = False
        self._fresh: list[str] = []  # of the arguments, not taken yet
        self._depth = 0
        self._is_string = self._is_escaped = False

    def take(self) -> str:
        """The text of the arguments since the last time."""
        fresh = "".join(self._fresh)
        self._fresh.clear()
        return fresh

    def _read_string(self, char: str) -> None:
        """A character within a string, which it may end."""
        self._is_string = self._is_escaped or char != '"'
        self._is_escaped = not self._is_escaped and char == "\\"


class JsonCall(_Call):
    """Reads one JSON object {"name": ..., "arguments": {...}} a character at a time; order and other keys are free.

    Models that are taught "arguments" write "parameters" now and then, and the other way round: the first of the two counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._key: str | None = None  # of the value being read; None while a key is read
        self._part: list[str] = []
        self._has_arguments = False
        self._swallowed: list[str] = []

    @property
    def raw(self) -> str:
        return "".join(self._swallowed)

    def feed(self, text: str) -> int:
        """Read on; return how many characters belong to the object."""
        for count, char in enumerate(text, 1):
            self._read(char)
            if self.is_done:
                self._swallowed.append(text[:count])
                return count
        self._swallowed.append(text)
        return len(text)

    def _read(self, char: str) -> None:
        if self._is_string:
            self._read_string(char)
            self._keep(char)
        elif char == '"':
            self._is_string = True
            self._keep(char)
        elif char in "{[":
            self._depth += 1
            if self._depth > 1:
                self._keep(char)
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()
                self._end()
            else:
                self._keep(char)
        elif self._depth == 1 and char in ":, \t\r\n":
            self._separate(char)
        else:
            self._keep(char)

    def _separate(self, char: str) -> None:
        if char == ":" and self._key is None:
            self._key = str(_load("".join(self._part)))
            self._part.clear()
        elif char == ",":
            self._end_value()

    def _keep(self, char: str) -> None:
        if self._is_arguments and (self._part[0] if self._part else char) not in '"n':
            self._fresh.append(char)
        self._part.append(char)

    @property
    def _is_arguments(self) -> bool:
        """Whether the value that is read is the arguments. JSON within a string, as some models write them, and null are read
        whole, at the end."""
        return self._key in _ARGUMENTS and not self._has_arguments

    def _end_value(self) -> None:
        value = "".join(self._part)
        if self._key in _NAMES and self.name is None:
            name = _load(value)
            self.name = name if isinstance(name, str) else None
        elif self._is_arguments and value != "null":
            if value.startswith('"'):
                said = str(_load(value))
                self._fresh.append(said.encode(errors="replace").decode())  # half of a pair of surrogates is no text
            self._has_arguments = True
        self._key = None
        self._part.clear()

    def _end(self) -> None:
        self.is_done = True
        if not self._has_arguments:
            self._fresh.append("{}")


class NamedCall(_Call):
    """Reads a head with the name and the object of the arguments, which is passed on as it comes. `forms` of heads: see
    dialects.py; how much white space stands in them is free."""

    def __init__(self, forms: Sequence[str], functions: Collection[str]) -> None:
        super().__init__()
        self.raw = ""
        self._forms, self._functions = forms, functions

    def feed(self, text: str) -> int:
        """Read on; return how many characters belong to the call."""
        for count, char in enumerate(text, 1):
            if self.name is None:
                self._read_head(char)
            else:
                self._read(char)
            if self.is_done:
                return count if self.name is not None else count - 1
        return len(text)

    def _read_head(self, char: str) -> None:
        """A head that cannot become one of ours is done without a name: it is text, but for `char`, which may begin a mark."""
        heads = [whole.fullmatch(self.raw) for whole, _ in map(_head_of, self._forms)] if char == "{" else []
        self.name = next((head["name"] for head in heads if head and head["name"] in self._functions), None)
        if self.name is not None:
            self._read(char)
        else:
            self.is_done = not any(begun.fullmatch(self.raw + char) for _, begun in map(_head_of, self._forms))
            self.raw += "" if self.is_done else char

    def _read(self, char: str) -> None:
        self._fresh.append(char)
        if self._is_string:
            self._read_string(char)
        elif char == '"':
            self._is_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_done = self._depth == 0


@lru_cache(maxsize=32)
def _head_of(form: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What a head of this form looks like, whole and begun."""
    found = re.findall(r"\{\w+\}|\s+|.", form)
    parts = [_SPACE if part.isspace() else _PARTS.get(part) or re.escape(part) for part in found] + [_SPACE]
    begun = ""
    for part in reversed(parts):
        begun = f"(?:{part}{begun})?"
    return re.compile("".join(parts)), re.compile(begun)


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
