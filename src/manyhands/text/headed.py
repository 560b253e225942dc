"""Answers that are messages, each with a head that says whether it is a thought, the answer or a call. Sans-I/O.

channels.py (gpt-oss), recipients.py (Muse), blocks.py (Inkling) and sections.py (Kimi K3) say how. A call is passed on
behind a mark that no answer can hold, for a ToolReader: what looks like a call within an answer is none.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from manyhands.text.detokenize import overlap
from manyhands.text.reasoning import START

_MAX_HEAD: Final = 640  # characters; a name has at most 258 (calls.py), and may be doubled
_MAX_MARK: Final = 32  # characters of what ends one
Kind = Literal["thought", "answer"]
State = Literal["start", "head", Kind]


@dataclass(frozen=True, slots=True)
class Message:
    """What a head says of its message. `begun`: how a call begins, "" if it is none."""

    kind: Kind
    begun: str = ""


class HeadedReader:
    """Takes pieces of text, returns (thought, answer) so far released, as a ThoughtReader does. `functions` may be called."""

    _head_ends: ClassVar[tuple[str, ...]]
    _ends: ClassVar[tuple[str, ...]]  # what ends a message and belongs to no head
    _marks: ClassVar[tuple[str, ...]]  # all that ends one
    # A head begins so; any other text goes on with an answer that the prompt has begun.
    _begins: ClassVar[tuple[str, ...]]

    def __init__(self, functions: Collection[str], state: State = "start") -> None:
        self._functions = functions
        self._state = state
        self._held = ""
        self._shown = {"thought": False, "answer": False}  # whether a message of the kind was released
        self._is_call = False  # the message is one
        self._gap = ""  # goes before the next text of the message

    @property
    def is_thinking(self) -> bool:
        return self._state == "thought"

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        out = {"thought": "", "answer": ""}
        while self._held:
            before = (self._state, len(self._held))
            if self._state == "start":
                self._begin()
            elif self._state == "head":
                out["answer"] += self._read_head()
            else:
                out[self._state] += self._read_body()
            if before == (self._state, len(self._held)):
                break
        return out["thought"], out["answer"]

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the text. Of a head that is not complete nothing is shown."""
        rest, self._held = self._held, ""
        if self._state == "head" and self._is_head(rest):
            return "", ""
        kind: Kind = "thought" if self._state == "thought" else "answer"
        rest = self._spaced(kind, rest)
        return (rest, "") if kind == "thought" else ("", rest)

    def _begin(self) -> None:
        start = self._held.lstrip()
        if any(start.startswith(mark) for mark in self._begins):
            self._state = "head"
        elif not any(mark.startswith(start) for mark in self._begins):
            self._state = "answer"

    def _is_head(self, text: str) -> bool:
        rest = text.strip().removeprefix(START).removeprefix("assistant").lstrip()
        return "assistant".startswith(rest) or any(
            rest.startswith(mark) or mark.startswith(rest) for mark in self._begins
        )

    def _read_head(self) -> str:
        """A head that is complete begins a message; returns how a call begins."""
        found = first_of(self._held[: _MAX_HEAD + _MAX_MARK], self._head_ends)
        if found is None and len(self._held) < _MAX_HEAD + _MAX_MARK:
            return ""
        if found is None or found[0] > _MAX_HEAD:  # it is none
            head, self._held, self._state = self._held[:_MAX_HEAD], self._held[_MAX_HEAD:], "answer"
            return self._spaced("answer", head)
        place, mark = found
        head, self._held = self._held[:place], self._held[place + len(mark) :]
        said = self._said(head, mark)
        if said is not None:
            self._state, self._is_call = said.kind, bool(said.begun)
            self._gap = "\n\n" if self._shown[said.kind] and not said.begun else ""
        return said.begun if said is not None else ""

    def _said(self, head: str, mark: str) -> "Message | None":
        """What follows a head that `mark` ends; None: another head."""
        raise NotImplementedError

    def _read_body(self) -> str:
        """A message until its end, or to where one may begin."""
        kind: Kind = "thought" if self._state == "thought" else "answer"
        if (found := self._next_head()) is not None:
            end, head = found
            body, self._held, self._state = self._held[:end], self._held[head:], "head"
            return self._spaced(kind, body)
        cut = len(self._held) - self._kept()
        body, self._held = self._held[:cut], self._held[cut:]
        return self._spaced(kind, body)

    def _next_head(self) -> tuple[int, int] | None:
        """Where the message ends, and where the next head begins."""
        found = first_of(self._held, self._marks)
        return None if found is None else (found[0], found[0] + len(found[1]) * (found[1] in self._ends))

    def _kept(self) -> int:
        """How many of the last characters may become the end of the message."""
        return max(overlap(self._held, mark) for mark in self._marks)

    def _spaced(self, kind: Kind, text: str) -> str:
        if not text:
            return ""
        gap, self._gap = self._gap, ""
        self._shown[kind] |= not self._is_call
        return gap + text


def first_of(text: str, marks: Iterable[str]) -> tuple[int, str] | None:
    """Where the first of the marks stands, and which it is."""
    return min(((place, mark) for mark in marks if (place := text.find(mark)) >= 0), default=None)
