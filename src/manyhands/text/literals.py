"""Calls whose arguments are literals, but not JSON's: read as they come, and made JSON. Sans-I/O.

    olmo3   f(k="v", l=[1, 2], o={"a": None})           as Python and JSON write them
    gemma4  call:f{k:<|"|>v<|"|>,l:[1,2],o:{a:None}}    bare keys, and texts between marks, in which nothing is escaped

Texts stream. What is no literal is a text; what has no key, and what stands between a value and the next comma, is dropped, so
that the arguments are JSON whatever the model writes.
"""

import re
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
        found = self._key_ends[assign].search(self._held)
        bare = self._held if found is None else self._held[: found.start()]
        self._part.append(_escaped(bare.translate(_AS_SPACE)))
        self._held = self._held[len(bare) :]
        if found is None:
            return False
        key = "".join(self._part).rstrip()
        self._part.clear()
        self._state = "between"
        if found[0] == assign:
            self._held = self._held[1:]
            self._key = key if len(self._opened) == 1 else self._key
            self._begin_item(f'"{key}": ')
        return True

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
        if not self._held:
            return False
        char = self._held[0]
        if self._ends.match(char):
            self._fresh.append("null")
            self._state = "between"
        elif char in "{[" or (char == "(" and self._notation.is_python):
            self._held = self._held[1:]
            self._fresh.append("{" if char == "{" else "[")
            self._opened.append(_CLOSES[char])
            self._is_first, self._state = True, "between"
        elif (began := self._begins_text()) is False:
            self._state = "scalar"
        elif began:
            self._fresh.append('"')
        else:
            return False
        return True

    def _in_scalar(self) -> bool:
        found = self._ends.search(self._held)
        bare = self._held if found is None else self._held[: found.start()]
        self._part.append(bare)
        self._held = self._held[len(bare) :]
        if found is None:
            return False
        text = "".join(self._part).rstrip(_SPACE)
        self._fresh.append(dumped(text) if self._kinds() == {"string"} else json_of(text, frozenset()))
        self._part.clear()
        self._state = "between"
        return True

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
            self._say(self._held[:slash])
            self._held = self._held[slash:]
            return self._read_escape()
        if place < 0:
            safe = len(self._held) - overlap(self._held, self._quote)
            self._say(self._held[:safe])
            self._held = self._held[safe:]
            return False
        self._say(self._held[:place])
        self._held = self._held[place + len(self._quote) :]
        if self._is_key:
            self._is_key, self._state = False, "key"
            self._part.append("")  # it has begun, empty as it may be
        else:
            self._fresh.append('"')
            self._state = "after"
        return True

    def _read_escape(self) -> bool:
        """One that is none is a backslash."""
        kind = self._held[1:2]
        length = _LENGTHS.get(kind, 2)
        if len(self._held) < length:
            return False
        digits = self._held[2:length]
        if kind in _ESCAPED:
            self._say(_ESCAPED[kind])
        elif length > 2 and _HEX.fullmatch(digits) and int(digits, 16) <= 0x10FFFF:
            number = int(digits, 16)  # half of a pair of surrogates stays an escape: its other half may follow
            self._say_json(f"\\u{number:04x}" if 0xD800 <= number < 0xE000 else _escaped(chr(number)))
        else:
            length = 1
            self._say("\\")
        self._held = self._held[length:]
        return True

    def _in_after(self) -> bool:
        """Behind a text."""
        found = self._ends.search(self._held)
        self._held = self._held[found.start() :] if found else ""
        self._state = "between" if found else "after"
        return found is not None

    def _say(self, text: str) -> None:
        if text:
            self._say_json(_escaped(text))

    def _say_json(self, text: str) -> None:
        (self._part if self._is_key else self._fresh).append(text)


def _escaped(text: str) -> str:
    """As a text of JSON has it, without quotes."""
    return dumped(text)[1:-1]
