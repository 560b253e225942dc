"""Calls whose arguments are literals, but not JSON's: read as they come, and made JSON. Sans-I/O.

    olmo3   f(k="v", l=[1, 2], o={"a": None})           as Python and JSON write them
    gemma4  call:f{k:<|"|>v<|"|>,l:[1,2],o:{a:None}}    bare keys, and texts between marks, in which nothing is escaped

Texts stream. What is no literal is a text; what has no key, and what stands between a value and the next comma, is dropped, so
that the arguments are JSON whatever the model writes.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from manyhands.text.detokenize import overlap
from manyhands.text.tagged import HeadedCall, dumped, json_of, kinds_of

Schema = Mapping[str, Any]
_SPACE: Final = " \t\r\n"
_AS_SPACE: Final = str.maketrans("\t\r\n", "   ")
_CLOSES: Final = {"{": "}", "[": "]", "(": "]"}
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""} | {
    char: char for char in "\\'\"/"
}
_LENGTHS: Final = {"x": 4, "u": 6, "U": 10}  # of escapes that give a character's number
_HALF: Final = re.compile("[\ud800-\udfff]")
_HEX: Final = re.compile(r"[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class Notation:
    """How a dialect writes a call. `assign` stands behind a key of the call itself; within a value that is a colon."""

    begin: str
    open: str
    assign: str
    close: str
    comma: str
    quotes: tuple[str, ...]
    is_python: bool

    @property
    def marks(self) -> frozenset[str]:
        """The quotes that a tokenizer may have as special tokens."""
        return frozenset(quote for quote in self.quotes if len(quote) > 1)


PYTHON_NOTATION: Final = Notation("", "(", "=", ")", ", ", ('"', "'"), is_python=True)
GEMMA4_NOTATION: Final = Notation("call:", "{", ":", "}", ",", ('<|"|>',), is_python=False)


class LiteralCall(HeadedCall):
    """Reads one call (calls.py says what a reader is)."""

    def __init__(self, notation: Notation, functions: Mapping[str, Schema]) -> None:
        super().__init__(notation.begin, notation.open, functions)
        self._notation = notation
        self._opened = ["}"]  # what ends the lists and objects that the reader is in
        self._is_first = True  # in the innermost
        self._part: list[str] = []  # of a key, as JSON has it, or of a scalar
        self._key = ""  # of the call itself
        self._is_key = False  # whether the text that is read is one
        self._quote = ""
        ends = r",)\]}" if notation.is_python else r",\]}"
        self._ends = re.compile(f"[{ends}]")
        self._key_ends = {assign: re.compile(f"[{assign}{ends}]") for assign in (notation.assign, ":")}

    def _in_between(self) -> bool:
        """Before a key or an item, or the end."""
        self._held = self._held.lstrip(_SPACE + ",")
        if not self._held:
            return False
        if self._ends.match(self._held):
            self._held = self._held[1:]
            self._fresh.append(self._opened.pop())
            self._is_first, self.is_done = False, not self._opened
        elif self._opened[-1] == "}":
            self._state = "key"
        else:
            self._begin_item("")
        return True

    def _begin_item(self, key: str) -> None:
        self._fresh.append(f"{'' if self._is_first else ', '}{key}")
        self._is_first, self._state = False, "value"

    def _in_key(self) -> bool:
        """Up to what is behind a key; one without a value is dropped."""
        if not self._part and (began := self._begins_text()) is not False:
            self._is_key = True
            return began is not None
        assign = self._notation.assign if len(self._opened) == 1 else ":"
        bare, end = self._read_until(self._key_ends[assign])
        self._part.append(_escaped(bare.translate(_AS_SPACE)))
        if end:
            self._end_key(is_given=end == assign)
        return bool(end)

    def _end_key(self, *, is_given: bool) -> None:
        key = "".join(self._part).rstrip()
        self._part.clear()
        self._state = "between"
        if is_given:
            self._held = self._held[1:]
            self._key = key if len(self._opened) == 1 else self._key
            self._begin_item(f'"{key}": ')

    def _read_until(self, ends: re.Pattern[str]) -> tuple[str, str]:
        """What stands before the first of `ends`, stepping over it, and that one; "": not there yet."""
        found = ends.search(self._held)
        before = self._held[: found.start()] if found else self._held
        self._held = self._held[len(before) :]
        return before, found[0] if found else ""

    def _begins_text(self) -> bool | None:
        """Whether a text begins here, stepping over its quote; None: not known yet."""
        for quote in self._notation.quotes:
            if self._held.startswith(quote):
                self._held, self._quote, self._state = self._held[len(quote) :], quote, "text"
                return True
            if quote.startswith(self._held):
                return None
        return False

    def _in_value(self) -> bool:
        self._held = self._held.lstrip(_SPACE)
        char = self._held[:1]
        if not char:
            return False
        if self._ends.match(char):
            self._fresh.append("null")
            self._state = "between"
        elif char in "{[" or (char == "(" and self._notation.is_python):
            self._open(char)
        else:
            began = self._begins_text()
            self._fresh += ['"'] if began else []
            self._state = "scalar" if began is False else self._state
            return began is not None
        return True

    def _open(self, char: str) -> None:
        """A list or an object begins."""
        self._held = self._held[1:]
        self._fresh.append("{" if char == "{" else "[")
        self._opened.append(_CLOSES[char])
        self._is_first, self._state = True, "between"

    def _in_scalar(self) -> bool:
        bare, end = self._read_until(self._ends)
        self._part.append(bare)
        if end:
            text = "".join(self._part).rstrip(_SPACE)
            self._fresh.append(dumped(text) if self._kinds() == {"string"} else json_of(text, frozenset()))
            self._part.clear()
            self._state = "between"
        return bool(end)

    def _kinds(self) -> frozenset[str]:
        """What the schema allows a value of the call itself to be; within one it is not asked."""
        assert self.name is not None
        parameters = self._functions[self.name]
        known = parameters.get("properties")
        is_known = len(self._opened) == 1 and isinstance(known, Mapping)
        return kinds_of(known.get(self._key), parameters) if is_known and known else frozenset()

    def _in_text(self) -> bool:
        place = self._held.find(self._quote)
        slash = self._held.find("\\", 0, place if place >= 0 else None) if self._notation.is_python else -1
        if slash >= 0:
            self._say(slash)
            return self._read_escape()
        if place < 0:
            self._say(len(self._held) - overlap(self._held, self._quote))
            return False
        self._say(place)
        self._held = self._held[len(self._quote) :]
        self._end_text()
        return True

    def _end_text(self) -> None:
        if self._is_key:
            self._is_key, self._state = False, "key"
            self._part.append("")  # it has begun, empty as it may be
        else:
            self._fresh.append('"')
            self._state = "after"

    def _read_escape(self) -> bool:
        """One that is none is a backslash."""
        kind = self._held[1:2]
        length = _LENGTHS.get(kind, 2)
        if len(self._held) < length:
            return False
        said = _ESCAPED.get(kind) if length == 2 else _numbered(self._held[2:length])
        self._say_json(_escaped("\\") if said is None else _escaped(said))
        self._held = self._held[length if said is not None else 1 :]
        return True

    def _in_after(self) -> bool:
        """Behind a text."""
        _, end = self._read_until(self._ends)
        self._state = "between" if end else "after"
        return bool(end)

    def _say(self, count: int) -> None:
        """The next characters, of a text or a key."""
        if count:
            self._say_json(_escaped(self._held[:count]))
        self._held = self._held[count:]

    def _say_json(self, text: str) -> None:
        (self._part if self._is_key else self._fresh).append(text)


def _numbered(digits: str) -> str | None:
    """The character of a number; None if there is none."""
    number = int(digits, 16) if _HEX.fullmatch(digits) else sys.maxunicode + 1
    return chr(number) if number <= sys.maxunicode else None


def _escaped(text: str) -> str:
    """As a text of JSON has it, without quotes. Half of a pair of surrogates is an escape there: its other half may follow."""
    said = dumped(text)[1:-1]
    return said if said.isascii() else _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", said)
