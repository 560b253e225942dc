"""Function calls in a model's text: which dialect its chat template teaches, and reading calls as they are written.

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>  any number, text may precede     (qwen, hermes)
    llama3    {"name": "f", "parameters": {...}}                        the whole message, perhaps after <|python_tag|>
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]      text may precede

Sans-I/O. Arguments are passed on as they come, character by character, as the model wrote them.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from manyhands.text.detokenize import overlap
from manyhands.text.reasoning import template_of


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece = Content | CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class Dialect:
    """How calls are written. `marker` opens them ("": the message begins with one), `close` ends each ("": none)."""

    name: Literal["hermes", "llama3", "mistral"]
    marker: str
    close: str
    arguments: str  # the key of the arguments
    skipped: str  # what may stand between and around the objects


HERMES = Dialect("hermes", "<tool_call>", "</tool_call>", "arguments", "")
LLAMA3 = Dialect("llama3", "", "", "parameters", ";")
MISTRAL = Dialect("mistral", "[TOOL_CALLS]", "", "arguments", "[,]")
PYTHON_TAG = "<|python_tag|>"
_SPACE = " \t\r\n"


def find_dialect(tokenizer: Any) -> Dialect | None:
    """The dialect of a model, by its chat template; None if it takes no tools, or writes calls as we cannot read."""
    template = template_of(tokenizer)
    if "tools" not in template:
        return None
    if HERMES.marker in template:  # Qwen3-Coder and GLM put XML inside
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if MISTRAL.marker in template:
        return None if "[ARGS]" in template else MISTRAL
    return LLAMA3 if "ipython" in template or PYTHON_TAG in template else None


class ToolReader:
    """Takes pieces of a model's text, returns what they release. `names`: functions that exist; others are text.

    What may yet become a marker is held back, and so is white space, which a call that follows swallows.
    """

    def __init__(self, dialect: Dialect, names: Collection[str]) -> None:
        self._dialect, self._names = dialect, frozenset(names)
        self._state: Literal["start", "text", "gap", "call"] = "text" if dialect.marker else "start"
        self._held = ""
        self._call = _Call(dialect.arguments)
        self._opened = ""  # what has been swallowed of a marker, should no call follow
        self.num_calls = 0  # that are complete

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        out: list[Piece] = []
        while True:
            before = (self._state, len(self._held))
            out += getattr(self, f"_in_{self._state}")()
            if not self._held or before == (self._state, len(self._held)):
                return _joined(out)

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text. A call that is not complete stays so, or is text if it has no name."""
        text = self._held
        self._held = ""
        if self._state == "call" and not self._call.is_told:
            text = self._opened + self._call.raw + text
        elif self._state in ("call", "gap"):
            text = "" if self.num_calls or self._call.is_told else self._opened + text
        elif self._state == "start" and self.num_calls:
            text = text.strip(_SPACE + self._dialect.skipped)
        return [Content(text)] if text else []

    def _in_start(self) -> Iterator[Piece]:
        """Only where a call is the whole message."""
        start = self._held.lstrip(_SPACE + self._dialect.skipped if self.num_calls else _SPACE)
        if start.startswith(PYTHON_TAG):
            self._opened, self._held = PYTHON_TAG, start[len(PYTHON_TAG) :]
        elif start.startswith("{"):
            self._begin(start)
        elif start and not PYTHON_TAG.startswith(start):
            self._state = "text"
        yield from ()

    def _in_text(self) -> Iterator[Piece]:
        marker = self._dialect.marker
        before, found, after = self._held.partition(marker) if marker else (self._held, "", "")
        if found:
            self._held, self._opened, self._state = after, marker, "gap"
            kept = before.rstrip()
        else:
            kept = before[: len(before) - overlap(before, marker)].rstrip() if marker else before
            self._held = before[len(kept) :]
        if kept:
            yield Content(kept)

    def _in_gap(self) -> Iterator[Piece]:
        """Between a marker and an object, between objects, or between an object and the end marker."""
        close = self._dialect.close
        rest = self._held.lstrip(_SPACE + self._dialect.skipped)
        if rest.startswith("{"):
            self._begin(rest)
        elif close and rest.startswith(close):
            self._held, self._state, self._opened = rest[len(close) :], "text", ""
        elif rest and not (close and close.startswith(rest)):
            self._state = "text"
            self._held = rest if self.num_calls else self._opened + self._held
            if self._opened and not self.num_calls:  # the marker itself is text now: step over it
                self._held = self._held[len(self._opened) :]
                yield Content(self._opened)
            self._opened = ""

    def _begin(self, held: str) -> None:
        self._held, self._state = held, "call"
        self._call = _Call(self._dialect.arguments)

    def _in_call(self) -> Iterator[Piece]:
        """Within an object. An unknown name makes it text, marker and all."""
        call = self._call
        used = call.feed(self._held)
        self._held = self._held[used:]
        if call.name is not None and not call.is_told:
            if call.name not in self._names:
                yield from self._give_up()
                return
            call.is_told = True
            yield CallStart(self.num_calls, call.name)
        if call.is_done and not call.is_told:
            yield from self._give_up()
            return
        if call.is_told and (fresh := call.take()):
            yield CallArguments(self.num_calls, fresh)
        if call.is_done:
            self.num_calls += 1
            self._state = "gap" if self._dialect.marker else "start"
            self._opened = ""

    def _give_up(self) -> Iterator[Piece]:
        self._state = "text"
        yield Content(self._opened + self._call.raw)
        self._opened = ""


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece."""
    out: list[Piece] = []
    for piece in pieces:
        if out and isinstance(piece, Content) and isinstance(out[-1], Content):
            out[-1] = Content(out[-1].text + piece.text)
        else:
            out.append(piece)
    return out


class _Call:
    """Reads one JSON object {"name": ..., <arguments>: {...}} a character at a time; order and other keys are free."""

    def __init__(self, arguments_key: str) -> None:
        self._key_of_arguments = arguments_key
        self.raw = ""
        self.name: str | None = None
        self.is_done = False
        self.is_told = False
        self._depth = 0
        self._is_string = self._is_escaped = False
        self._key: str | None = None  # of the value being read; None while a key is read
        self._part: list[str] = []
        self._fresh: list[str] = []  # of the arguments, not taken yet
        self._has_arguments = False

    def take(self) -> str:
        """The text of the arguments since the last time."""
        fresh = "".join(self._fresh)
        self._fresh.clear()
        return fresh

    def feed(self, text: str) -> int:
        """Read on; return how many characters belong to the object."""
        for count, char in enumerate(text, 1):
            self._read(char)
            if self.is_done:
                self.raw += text[:count]
                return count
        self.raw += text
        return len(text)

    def _read(self, char: str) -> None:
        if self._is_string:
            self._is_string = self._is_escaped or char != '"'
            self._is_escaped = not self._is_escaped and char == "\\"
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
        is_streamed = self._key == self._key_of_arguments and (self._part or char) and not self._is_quoted(char)
        if is_streamed:
            self._fresh.append(char)
            self._has_arguments = True
        self._part.append(char)

    def _is_quoted(self, char: str) -> bool:
        """Whether the arguments are JSON within a string, as some models write them: read whole, at the end."""
        return (self._part[0] if self._part else char) == '"'

    def _end_value(self) -> None:
        value = "".join(self._part)
        if self._key == "name" and self.name is None:
            name = _load(value)
            self.name = name if isinstance(name, str) else None
        elif self._key == self._key_of_arguments and value.startswith('"'):
            self._fresh.append(str(_load(value)))
            self._has_arguments = True
        self._key = None
        self._part.clear()

    def _end(self) -> None:
        self.is_done = True
        if not self._has_arguments:
            self._fresh.append("{}")


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
