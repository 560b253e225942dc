"""Function calls in a model's text: which dialect its chat template teaches, and reading calls as they are written.

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>  any number, text may precede     (qwen, hermes)
    llama3    {"name": "f", "parameters": {...}}                        the whole message, or a list of them; perhaps after
                                                                       <|python_tag|>
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]      text may precede
    mistral11 [TOOL_CALLS]f[ARGS]{...}                                  any number, text may precede
    qwen3     <tool_call><function=f><parameter=k>v</parameter></function></tool_call>             (qwen3-coder, qwen3.5)
    harmony   <|channel|>commentary to=functions.f<|message|>{...}       a message of its own, see channels.py        (gpt-oss)
    glm       <tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>                 (glm-4.5 and later)

Sans-I/O. Arguments are passed on as they come, character by character, as the model wrote them; values between tags become
JSON by the function's schema (tagged.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from manyhands.text.calls import ARGS, CALL_ID, JsonCall, NamedCall
from manyhands.text.detokenize import overlap
from manyhands.text.reasoning import CHANNEL, template_of, variables_of
from manyhands.text.tagged import GLM_TAGS, QWEN3_TAGS, TaggedCall, Tags


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


@dataclass(frozen=True, slots=True)
class Dialect:
    """How calls are written. `marker` opens them ("": the message begins with one), `close` ends each ("": none)."""

    name: Literal["hermes", "llama3", "mistral", "mistral11", "qwen3", "glm", "harmony"]
    marker: str
    close: str
    arguments: str = ""  # the key of the arguments, where a call is an object
    skipped: str = ""  # what may stand between and around the objects
    begins: str = "{"  # with what a call begins behind its marker ("": with its name)
    after: Literal["start", "gap", "text"] = "gap"  # where the reader is after a call
    tags: Tags | None = None  # where values stand between tags

    @property
    def marks(self) -> frozenset[str]:
        """All the markers, which a tokenizer may have as special tokens."""
        inner = {ARGS, CALL_ID} if self.name == "mistral11" else set[str]()
        return frozenset({self.marker, self.close, *inner, *(self.tags.all if self.tags else ())} - {""})

    def new_call(self, functions: Mapping[str, Schema]) -> JsonCall | NamedCall | TaggedCall:
        """A reader of the next call."""
        if self.tags is not None:
            return TaggedCall(self.tags, functions)
        return NamedCall(functions) if self.name in ("mistral11", "harmony") else JsonCall()


HERMES = Dialect("hermes", "<tool_call>", "</tool_call>", "arguments")
LLAMA3 = Dialect("llama3", "", "", "parameters", ";,]", after="start")
MISTRAL = Dialect("mistral", "[TOOL_CALLS]", "", "arguments", "[,]")
MISTRAL11 = Dialect("mistral11", "[TOOL_CALLS]", "", begins="", after="text")
QWEN3 = Dialect("qwen3", "<tool_call>", "</tool_call>", begins="<function=", tags=QWEN3_TAGS)
GLM = Dialect("glm", "<tool_call>", "</tool_call>", begins="", after="text", tags=GLM_TAGS)
HARMONY = Dialect("harmony", CHANNEL, "", begins="", after="text")
PYTHON_TAG = "<|python_tag|>"
_SPACE = " \t\r\n"


def find_dialect(tokenizer: Any) -> Dialect | None:
    """The dialect of a model, by its chat template; None if it takes no tools, or writes calls as we cannot read."""
    template = template_of(tokenizer)
    if "tools" not in variables_of(tokenizer):
        return None
    if CHANNEL in template and "functions." in template:
        return HARMONY
    if HERMES.marker in template:
        return QWEN3 if "<function=" in template else GLM if "<arg_key>" in template else HERMES
    if MISTRAL.marker in template:
        return MISTRAL11 if ARGS in template else MISTRAL
    is_llama3 = "ipython" in template or PYTHON_TAG in template
    return LLAMA3 if is_llama3 and "<function=" not in template else None  # functionary has a form of its own


class ToolReader:
    """Takes pieces of a model's text, returns what they release. `functions`: the schema of the arguments of each that exists;
    calls of others are text.

    What may yet become a marker is held back, and so is white space, which a call that follows swallows.
    """

    def __init__(self, dialect: Dialect, functions: Mapping[str, Schema]) -> None:
        self._dialect, self._functions = dialect, functions
        self._state: Literal["start", "text", "gap", "call"] = "text" if dialect.marker else "start"
        self._held = ""
        self._call = dialect.new_call(functions)
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
        elif self.num_calls and not text.strip():
            text = ""
        return [Content(text)] if text else []

    def _in_start(self) -> Iterator[Piece]:
        """Only where a call is the whole message."""
        start = self._held.lstrip(_SPACE + self._dialect.skipped if self.num_calls else _SPACE)
        inner = start.removeprefix("[").lstrip(_SPACE)
        if start.startswith(PYTHON_TAG):
            self._opened, self._held = PYTHON_TAG, start[len(PYTHON_TAG) :]
        elif inner.startswith("{"):
            self._opened += start[: len(start) - len(inner)]
            self._begin(inner)
        elif inner and not PYTHON_TAG.startswith(start):
            self._state = "text"
        yield from ()

    def _in_text(self) -> Iterator[Piece]:
        marker = self._dialect.marker
        before, found, after = self._held.partition(marker) if marker else (self._held, "", "")
        if found:
            kept = before.rstrip()
            self._held, self._opened, self._state = after, before[len(kept) :] + marker, "gap"
        else:
            kept = before[: len(before) - overlap(before, marker)].rstrip() if marker else before
            self._held = before[len(kept) :]
        if kept:
            yield Content(kept)

    def _in_gap(self) -> Iterator[Piece]:
        """Between a marker and an object, between objects, or between an object and the end marker."""
        close, begins = self._dialect.close, self._dialect.begins
        rest = self._held.lstrip(_SPACE + self._dialect.skipped)
        if close and rest.startswith(close):
            self._held, self._state, self._opened = rest[len(close) :], "text", ""
        elif rest and close.startswith(rest):
            return
        elif rest and rest.startswith(begins):
            self._opened += self._held[: len(self._held) - len(rest)]
            self._begin(rest)
        elif rest and not begins.startswith(rest):
            self._state = "text"
            self._held = rest if self.num_calls else self._opened + self._held
            if self._opened and not self.num_calls:  # the marker itself is text now: step over it
                self._held = self._held[len(self._opened) :]
                yield Content(self._opened)
            self._opened = ""

    def _begin(self, held: str) -> None:
        self._held, self._state = held, "call"
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
