"""Function calls in a model's text, read as they are written (dialects.py says how a model writes them).

Sans-I/O. Arguments are passed on as they come, character by character, as the model wrote them; values between tags become
JSON by the function's schema (tagged.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from manyhands.text.detokenize import overlap
from manyhands.text.dialects import PYTHON_TAG, Dialect

_SPACE = " \t\r\n"


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
Schema = Mapping[str, Any]


class ToolReader:
    """Takes pieces of a model's text, returns what they release. `functions`: the schema of the arguments of each that exists;
    calls of others are text.

    What may yet become a marker is held back, and so is white space, which a call that follows swallows.
    """

    def __init__(self, dialect: Dialect, functions: Mapping[str, Schema]) -> None:
        self._dialect, self._functions = dialect, functions
        self._state: Literal["start", "text", "gap", "call"]
        self._state = "gap" if dialect.is_begun else "text" if dialect.marker else "start"
        self._held = ""
        self._call = dialect.new_call(functions)
        self._swallowed: list[str] = []  # white space and marks before a call, should none follow
        self._is_list = False  # one of them is the bracket of a list, where a call is the whole message
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
        is_call = self._state == "call"
        begun = self._give_back() + (self._call.raw if is_call else "")
        text, self._held = begun + self._held, ""
        if self._dialect.is_put and (self._state == "gap" or (is_call and not self._call.is_told)):
            text = ""  # a head said that it is a call
        elif self._state == "start" and self.num_calls:
            text = text.strip(_SPACE + self._dialect.skipped)
        elif self._call.is_told if is_call else self.num_calls and (self._state == "gap" or not text.strip()):
            text = ""
        return [Content(text)] if text else []

    def _swallow(self, count: int) -> None:
        self._swallowed.append(self._held[:count])
        self._held = self._held[count:]

    def _give_back(self) -> str:
        swallowed = "".join(self._swallowed)
        self._swallowed.clear()
        return swallowed

    def _in_start(self) -> Iterator[Piece]:
        """Only where a call is the whole message."""
        rest = self._held.lstrip(_SPACE + self._dialect.skipped if self.num_calls else _SPACE)
        self._swallow(len(self._held) - len(rest))
        if rest.startswith("{"):
            self._begin()
        elif self._is_list or not PYTHON_TAG.startswith(rest[: len(PYTHON_TAG)]):
            if rest.startswith("[") and not self._is_list:
                self._is_list = True
                self._swallow(1)
            elif rest:
                self._state, self._held = "text", self._give_back() + rest
        elif len(rest) >= len(PYTHON_TAG):
            self._swallow(len(PYTHON_TAG))
        yield from ()

    def _in_text(self) -> Iterator[Piece]:
        marker = self._dialect.marker
        before, found, _ = self._held.partition(marker) if marker else (self._held, "", "")
        text = before if found or not marker else before[: len(before) - overlap(before, marker)]
        if kept := text.rstrip():
            yield Content(self._give_back() + kept)
            self._held = self._held[len(kept) :]
        self._swallow(len(text) - len(kept))
        if found:
            self._state = "gap"
            if self._dialect.is_put:
                self._held = self._held[len(marker) :]
            else:
                self._swallow(len(marker))

    def _in_gap(self) -> Iterator[Piece]:
        """Between a marker and an object, between objects, or between an object and the end marker."""
        close, end, begins = self._dialect.close, self._dialect.end, self._dialect.begins
        rest = self._held if self._dialect.is_begun else self._held.lstrip(_SPACE + self._dialect.skipped)
        if close and rest.startswith(close):
            self._held, self._state = rest[len(close) :], "text"
            self._swallowed.clear()
        elif self.num_calls and end and rest.startswith(end):
            self._held = rest[len(end) :]
        elif not rest:  # not looked at again, but for what may begin another marker
            self._swallow(len(self._held) - overlap(self._held, self._dialect.marker))
        elif close.startswith(rest) or (self.num_calls and end.startswith(rest)):
            return
        elif rest.startswith(begins):
            self._swallow(len(self._held) - len(rest))
            self._begin()
        elif not begins.startswith(rest):
            self._state = "text"
            swallowed = self._give_back()
            if self.num_calls:
                self._held = rest
            else:  # the marker itself is text now: step over it, but not over white space, as a call may follow
                kept = swallowed.rstrip()
                self._held = swallowed[len(kept) :] + self._held
                yield from [Content(kept)] if kept else []

    def _begin(self) -> None:
        self._state, self._is_list = "call", False
        self._call = self._dialect.new_call(self._functions)

    def _in_call(self) -> Iterator[Piece]:
        """Within an object. An unknown name makes it text, marker and all."""
        call = self._call
        used = call.feed(self._held)
        self._held = self._held[used:]
        if call.name is not None and not call.is_told:
            if call.name not in self._functions:
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
            self._state = self._dialect.after
            self._swallowed.clear()

    def _give_up(self) -> Iterator[Piece]:
        self._state = "text"
        if text := self._give_back() + self._call.raw:
            yield Content(text)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece."""
    out: list[Piece] = []
    for piece in pieces:
        if out and isinstance(piece, Content) and isinstance(out[-1], Content):
            out[-1] = Content(out[-1].text + piece.text)
        else:
            out.append(piece)
    return out
