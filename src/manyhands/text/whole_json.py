"""Whether a text that a model wrote is one JSON object, found out in bounded steps; nothing is made of it. Pure.

Arguments of calls are objects in some APIs. A model may write megabytes of them, which `json.loads` reads in one turn.
"""

import re
from collections.abc import Generator, Iterator
from typing import Final

MAX_DEPTH: Final = 512  # of lists and objects in each other; a client's own parser has a limit as well
TOKENS_A_STEP: Final = 1024
CHARS_A_STEP: Final = 1 << 14  # of one string
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_TEXT: Final = re.compile(rf'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{{4}})){{0,{CHARS_A_STEP}}}')
_SCALAR: Final = re.compile(
    r"-?(?:0|[1-9][0-9]{0,999})(?:\.[0-9]{1,999})?(?:[eE][-+]?[0-9]{1,9})?(?![0-9.eE])|true|false|null"
)
_CLOSES: Final = {"{": "}", "[": "]"}


def read_object(text: str) -> Iterator[None]:
    """Read on by a bounded step for each item. Raises ValueError where `text` is no JSON object, or nested deeper than
    MAX_DEPTH."""
    if not text.lstrip(" \t\n\r").startswith("{"):
        raise ValueError("no object")
    opened: list[str] = []  # brackets
    at, wanted, tokens = 0, "value", 0  # wanted: value, item (or "]"), key, name (a key or "}"), colon, next
    while opened or wanted != "next":
        if (tokens := tokens + 1) % TOKENS_A_STEP == 0:
            yield
        at = _end(_SPACE, text, at)
        char = text[at : at + 1]
        if char == '"' and wanted in ("value", "item", "key", "name"):
            at = yield from _string(text, at + 1)
            wanted = "next" if wanted in ("value", "item") else "colon"
            continue
        if wanted in ("value", "item") and char and char in "{[" and len(opened) < MAX_DEPTH:
            opened.append(char)
            wanted = "name" if char == "{" else "item"
        elif wanted in ("next", "item", "name") and opened and char == _CLOSES[opened[-1]]:
            opened.pop()
            wanted = "next"
        elif wanted == "next" and char == ",":
            wanted = "key" if opened[-1] == "{" else "value"
        elif wanted == "colon" and char == ":":
            wanted = "value"
        elif wanted in ("value", "item"):
            at = _end(_SCALAR, text, at) - 1
            wanted = "next"
        else:
            raise ValueError(f"no JSON at character {at}")
        at += 1
    if _end(_SPACE, text, at) != len(text):
        raise ValueError(f"more than one value at character {at}")


def _string(text: str, at: int) -> Generator[None, None, int]:
    """Read to the end of a string; returns where it is over."""
    while text[at : at + 1] != '"':
        end = _end(_TEXT, text, at)
        if end == at:
            raise ValueError(f"no string at character {at}")
        if end - at >= CHARS_A_STEP:
            yield
        at = end
    return at + 1


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    if found is None:
        raise ValueError(f"no JSON at character {at}")
    return found.end()
