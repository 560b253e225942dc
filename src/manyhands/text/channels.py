"""Answers that are messages in channels, as gpt-oss writes them: thoughts, the answer and calls, each with a head. Sans-I/O.

    <|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final<|message|>the answer
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

A head may also begin with its recipient. What is said in `commentary` without one is part of the answer. A call is passed on as
its name, ARGS and its object behind CHANNEL, for a ToolReader.
"""

import re
from collections.abc import Collection
from typing import ClassVar, Final, Literal

from manyhands.text.calls import ARGS
from manyhands.text.detokenize import overlap
from manyhands.text.reasoning import CHANNEL, END, MESSAGE, START

_RECIPIENT: Final = re.compile(r"to=(functions\.)?([\w-]+)")
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
_MAX_HEAD: Final = 512  # characters; a name has at most 258 (calls.py)
Kind = Literal["thought", "answer"]


class ChannelReader:
    """Takes pieces of text, returns (thought, answer) so far released, as a ThoughtReader does.

    `functions` may be called; what is said to others is text, and to tools of the model's own a thought.
    """

    _end: ClassVar = END  # of a message
    _marks: ClassVar[tuple[str, ...]] = (END, START, CHANNEL)  # any of them ends one
    # A head begins so; any other text goes on with an answer that the prompt has begun.
    _begins: ClassVar[tuple[str, ...]] = (CHANNEL, START, "to=")

    def __init__(self, functions: Collection[str]) -> None:
        self._functions = functions
        self._state: Literal["start", "head", "thought", "answer"] = "start"
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
        return not rest or any(rest.startswith(mark) or mark.startswith(rest) for mark in self._begins)

    def _read_head(self) -> str:
        """A head that is complete begins a message; returns how a call begins."""
        head, found, after = self._held.partition(MESSAGE)
        if not found and len(self._held) > _MAX_HEAD:  # it is none
            self._state, self._held = "answer", ""
            return self._spaced("answer", head)
        if not found:
            return ""
        self._held = after
        kind, begun = self._said(head)
        self._state, self._is_call = kind, bool(begun)
        self._gap = "\n\n" if self._shown[kind] and not begun else ""
        return begun

    def _said(self, head: str) -> tuple[Kind, str]:
        """What follows a head, and how a call begins, "" if it is none."""
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        if recipient is not None and recipient[2] in self._functions:
            return "answer", f"{CHANNEL}{recipient[2]}{ARGS}"
        is_analysis = channel is not None and channel[1] == "analysis"
        is_thought = is_analysis if recipient is None else recipient[1] is None
        return "thought" if is_thought else "answer", ""

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
        places = [place for mark in self._marks if (place := self._held.find(mark)) >= 0]
        if not places:
            return None
        place = min(places)
        return place, place + len(self._end) * self._held.startswith(self._end, place)

    def _kept(self) -> int:
        """How many of the last characters may become the end of the message."""
        return max(overlap(self._held, mark) for mark in self._marks)

    def _spaced(self, kind: Kind, text: str) -> str:
        if not text:
            return ""
        gap, self._gap = self._gap, ""
        self._shown[kind] |= not self._is_call
        return gap + text
