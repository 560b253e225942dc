"""Thoughts and answer: splits the text of models that think aloud between two markers. Sans-I/O.

Models whose answers are messages with heads are known here, and read by headed.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from manyhands.text.detokenize import overlap
from manyhands.text.template import find_variables

# Pairs that chat templates write; the first whose closing marker a template names is the model's.
_PAIRS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
CHANNEL, MESSAGE, START, END, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"
MORE = "<|eom|>"  # ends a message behind which the turn goes on, where heads name recipients
MODEL, END_BLOCK = "<|message_model|>", "<|end_message|>"
THOUGHT_BLOCK, TEXT_BLOCK, CALL_BLOCK = "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"
TEXT_CALL_BLOCK = "<|content_invoke_tool_text|>"
OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
Heads = Literal["channels", "recipients", "blocks", "sections"]
_HEADS: Mapping[Heads, tuple[str, ...]] = {
    "channels": (CHANNEL, MESSAGE, START, END, CONSTRAIN),
    "recipients": (MESSAGE, START, MORE),
    "blocks": (MODEL, END_BLOCK, THOUGHT_BLOCK, TEXT_BLOCK, CALL_BLOCK, TEXT_CALL_BLOCK),
    "sections": (OPEN, CLOSE, SEP),
}
# Variables by which templates are told whether to think: the usual one, and that of deepseek v3.1 and granite.
_SWITCHES = ("enable_thinking", "thinking")
_LEVELS = ("reasoning_effort", "reasoning_strength", "thinking_effort")  # by which they are told how long


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its thoughts. The ids are None where a marker is not one token."""

    opens: str
    closes: str
    open_id: int | None
    close_id: int | None
    switch: str | None  # the template's variable that turns it off
    heads: Heads | None = None  # the whole answer is messages, whose heads say this

    @property
    def marks(self) -> frozenset[str]:
        """All the markers, which a tokenizer may have as special tokens."""
        return frozenset((_first_mark(self.opens), self.closes) if self.heads is None else _HEADS[self.heads])


def find_thinking(tokenizer: Any) -> Thinking | None:
    """How the model of this tokenizer thinks, by its chat template; None if it does not."""
    template = template_of(tokenizer)
    switch = next((name for name in _SWITCHES if name in variables_of(tokenizer)), None)
    if (headed := _headed(template, switch)) is not None:
        return headed
    for opens, closes in _PAIRS:
        if closes in template:
            vocabulary: Mapping[str, int] = tokenizer.get_added_vocab()
            return Thinking(opens, closes, vocabulary.get(_first_mark(opens)), vocabulary.get(closes), switch)
    return None


def find_heads(tokenizer: Any) -> Heads | None:
    """What heads of messages say in answers of the model of this tokenizer; None if they have none."""
    headed = _headed(template_of(tokenizer), None)
    return headed.heads if headed is not None else None


def _headed(template: str, switch: str | None) -> Thinking | None:
    """How a model thinks whose answers are messages with heads."""
    if CHANNEL in template and MESSAGE in template:
        return Thinking(f"{CHANNEL}analysis{MESSAGE}", END, None, None, None, "channels")
    if "to=self" in template and MESSAGE in template:
        return Thinking(f" to=self{MESSAGE}", MORE, None, None, None, "recipients")
    if THOUGHT_BLOCK in template:
        return Thinking(THOUGHT_BLOCK, END_BLOCK, None, None, None, "blocks")
    if OPEN in template and CLOSE in template and "response" in template:
        return Thinking(f"{OPEN}think{SEP}", f"{CLOSE}think{SEP}", None, None, switch, "sections")
    return None


def find_level(tokenizer: Any) -> str | None:
    """The template's variable that says how long to think; None if it has none."""
    return next((name for name in _LEVELS if name in variables_of(tokenizer)), None)


def _first_mark(opens: str) -> str:
    """What of an opening marker can be a token: gemma 4 writes a word behind it."""
    return opens.removesuffix("thought")


def template_of(tokenizer: Any) -> str:
    """The chat template, all of them where there are several; "" if there is none."""
    return "\n".join(sources_of(tokenizer))


def sources_of(tokenizer: Any) -> list[str]:
    """The chat templates of a tokenizer; none if it has none."""
    template = tokenizer.chat_template or {}
    return [template] if isinstance(template, str) else list(map(str, template.values()))


def variables_of(tokenizer: Any) -> frozenset[str]:
    """The variables that the chat templates of a tokenizer take."""
    return frozenset[str]().union(*map(find_variables, sources_of(tokenizer)))


class ThoughtReader:
    """Takes pieces of text, returns (thought, answer) so far released. `is_open`: the prompt ended within a thought.

    A thought stands at the beginning, or nowhere. The marker that may be on its way is held back; the line breaks
    around markers belong to neither side.
    """

    def __init__(self, thinking: Thinking | None, *, is_open: bool) -> None:
        self._thinking = thinking
        self._state = "answer" if thinking is None else "thought" if is_open else "start"
        self._held = ""
        self._is_fresh = False  # right behind a marker: line breaks are dropped

    @property
    def is_thinking(self) -> bool:
        return self._state == "thought"

    def feed(self, text: str) -> tuple[str, str]:
        if self._state == "answer":  # of which nothing is held
            return "", self._trim(text)
        self._held += text
        if self._state == "start":
            self._begin()
        thought = self._read_thought() if self._state == "thought" else ""
        answer = self._trim(self._take(len(self._held))) if self._state == "answer" else ""
        return thought, answer

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the text."""
        rest = self._trim(self._take(len(self._held)))
        return (rest, "") if self._state == "thought" else ("", rest)

    def _begin(self) -> None:
        assert self._thinking is not None
        start = self._held.lstrip()
        if start.startswith(self._thinking.opens):
            self._held, self._state, self._is_fresh = start[len(self._thinking.opens) :], "thought", True
        elif not self._thinking.opens.startswith(start):
            self._state = "answer"

    def _read_thought(self) -> str:
        assert self._thinking is not None
        before, closes, after = self._held.partition(self._thinking.closes)
        if closes:
            thought = self._trim(before).rstrip()
            self._held, self._state, self._is_fresh = after, "answer", True
            return thought
        held = max(overlap(self._held, self._thinking.closes), len(self._held) - len(self._held.rstrip()))
        body = self._held[: len(self._held) - held]
        if overlap(self._held, self._thinking.closes):  # white space before the marker goes with it
            body = body.rstrip()
        return self._trim(self._take(len(body)))

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _trim(self, text: str) -> str:
        if self._is_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        return text
