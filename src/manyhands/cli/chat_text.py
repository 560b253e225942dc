"""What is typed and what is shown in a chat: commands and paragraphs. Pure: text in, decision out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import TextWrapper
from typing import Any, Final

from manyhands.plain import one_line
from manyhands.tales import ABOUT, NAME

COMMANDS: Final = {
    "help": "",
    "reset": "",
    "system": "TEXT",
    "model": "NAME",
    "save": "FILE",
    "stats": "",
    "exit": "",
}
HELP: Final = """\
/reset         forget the conversation
/system TEXT   what the model shall be; without TEXT: nothing said
/model NAME    go on with another model of the gateway; without NAME: which there are
/save FILE     write the conversation as Markdown
/stats         how the last answer came about: tokens, speed, route
/exit          leave; so does Ctrl-D. Ctrl-C stops an answer"""
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Said:
    """A line for the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A line for the program: one of COMMANDS, and what stood behind it."""

    name: str
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A line that is sent to no model; `why` says what is wrong with it."""

    why: str


def introduced(model: str) -> str:
    """A model's name, and what is to be known before it is asked."""
    return f"{one_line(model)}, which {ABOUT}" if model == NAME else one_line(model)


def parse(line: str) -> Said | Command | Mistake | None:
    """What a line is; None for an empty one. "//" begins a text that begins with a slash."""
    line = line.strip()
    if not line:
        return None
    if not line.startswith("/"):
        return Said(line)
    if line.startswith("//"):
        return Said(line[1:])
    name, _, argument = line[1:].partition(" ")
    if name not in COMMANDS:
        return Mistake(f"/{name} is no command: /help lists them, and // begins a text with a slash")
    if argument.strip() and not COMMANDS[name]:
        return Mistake(f"/{name} takes nothing behind it")
    if name == "save" and not argument.strip():
        return Mistake("/save needs a file: /save talk.md")
    return Command(name, argument.strip())


def waiting_for(job: Mapping[str, Any] | None) -> str:
    """What an answer waits for while no text comes, by the job as `GET /api/jobs/{id}` has it; None: not known yet."""
    if job is None or job["status"] not in ("queued", "running"):
        return "waiting for the gateway"
    if job["status"] == "queued":
        return "waiting for its turn: other answers are running"
    if not job["hops"]:
        return "looking for nodes that serve every layer"
    last = job["events"][-1] if job["events"] else None
    if last is None or last["kind"] != "shard_status":
        first = "waiting for the next word" if job["completion_tokens"] else f"reading the prompt{_read(job)}"
        return f"{first} on {', '.join(hop['name'] for hop in job['hops'])}"
    layers = {hop["name"]: hop["layers"] for hop in [*job["route"], *job["hops"]]}
    lost = [f"{name} (layers {layers[name]})" if name in layers else name for name in last["nodes"]]
    return f"waiting for {', '.join(lost) or 'a node'}, or another node with its layers"


def _read(job: Mapping[str, Any]) -> str:
    """How much of the prompt is read, where that is known."""
    done, size = job.get("prefilled_tokens", 0), job.get("prompt_tokens", 0)
    return f", {100 * done // size} % of {size} tokens," if 0 < done < size else ""


class Paragraphs:
    """Cuts a growing text where a paragraph ends: at an empty line that is not inside a fenced block."""

    def __init__(self) -> None:
        self.rest = ""  # of the paragraph that still grows

    def feed(self, text: str) -> list[str]:
        """The paragraphs that `text` completes, each without the empty line behind it."""
        self.rest += text
        done = []
        at = 0
        while (end := self.rest.find("\n\n", at)) >= 0:
            if _is_fenced(self.rest[:end]):
                at = end + 2
                continue
            if self.rest[:end].strip():
                done.append(self.rest[:end])
            self.rest, at = self.rest[end:].lstrip("\n"), 0
        return done


def _is_fenced(text: str) -> bool:
    """Whether `text` ends inside a fenced block (CommonMark: closed by the same sign, at least as often)."""
    fence = ""
    for match in _FENCE.finditer(text):
        if not fence:
            fence = match[1]
        elif match[1].startswith(fence):
            fence = ""
    return bool(fence)


def tail(text: str, width: int, height: int) -> str:
    """The end of `text` that fits into `height` lines of a terminal; for showing what still grows."""
    wrap = TextWrapper(width, expand_tabs=False, replace_whitespace=False, drop_whitespace=False)
    lines = [part for line in text.split("\n") for part in wrap.wrap(line) or [""]]
    return "\n".join(lines[-max(1, height) :])


def cut_off(tokens: int) -> str:
    """What to say below an answer that its limit ended."""
    return f"[cut off at {tokens} tokens, the limit of an answer here: ask it to go on, or set another with -n]"


def as_markdown(messages: list[dict[str, str]]) -> str:
    """A conversation for /save."""
    return "\n\n".join(f"**{message['role']}**\n\n{message['content'].strip()}" for message in messages) + "\n"
