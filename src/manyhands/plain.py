"""What lines of logs and terminals show: texts of peers, clients and models made fit for them, sizes, figures. Pure.

A terminal obeys control characters (ESC moves the cursor, renames the window, hides what was printed), a log ends its line
at a line break, and bidirectional overrides show a text in another order than it has. So no foreign text is printed raw.
"""

import math
import re
from typing import Final

LIMIT: Final = 255  # characters of a name
# C0 but tab and newline, DEL and C1, line and paragraph separators, bidirectional embeddings, overrides and isolates, lone
# surrogates. Joiners, spaces and marks stay: scripts need them.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: object, limit: int = LIMIT) -> str:
    """`text` as one line of at most `limit` printable characters: others become "?", and what is cut ends in "…"."""
    line = str(text)
    if len(line) > limit:
        line = line[: limit - 1] + "…"
    return line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)


def short_line(text: object, max_bytes: int = LIMIT) -> str:
    """`text` as `one_line`, in at most `max_bytes` bytes of UTF-8."""
    line = one_line(text, max_bytes)
    while len(line.encode()) > max_bytes:
        line = one_line(line, len(line) - 1)
    return line


def without_controls(text: str) -> str:
    """`text` of a model for a terminal: its lines, tabs and letters of every script, without what a terminal would obey."""
    return _CONTROL.sub("", text)


def figure_of(value: float) -> str:
    """What was measured or is expected, with the digits that matter: 1415, 245, 22.6, 2.7, 0.03; 0 is none."""
    if value == 0:
        return "0"
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 0.995 else 2}f}"


def counted(count: int, noun: str) -> str:
    """So many of something for people: 1 token, 2 tokens."""
    return f"{count} {noun}{'s' * (count != 1)}"


def size_of(num_bytes: float, *, is_limit: bool = False) -> str:
    """Bytes for people: 3.2 GB. `is_limit`: rounded up, so that what is shown is enough."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            digits = 1 if num_bytes < 10 * factor else 0
            shown = math.ceil(num_bytes / factor * 10**digits) / 10**digits if is_limit else num_bytes / factor
            return f"{shown:.{digits}f} {unit}"
    return f"{num_bytes:.0f} B"
