"""Lines for people: broken between words where a terminal would break them within one, and as they are elsewhere."""

import shutil
from collections.abc import Sequence
from typing import TextIO

from manyhands.plain import one_line

MIN_COLUMNS = 20
INDENT = "  "  # of what stands below the first line
TICKET = "mh1"  # a line with one is copied whole: it stays one line


def fitted(text: str, out: TextIO) -> str:
    """`text`, its lines broken between words where `out` is a terminal that is narrower."""
    if not out.isatty():
        return text
    from textwrap import TextWrapper

    width = max(MIN_COLUMNS, shutil.get_terminal_size().columns)
    return "\n".join(_broken(line, width, TextWrapper) for line in text.split("\n"))


def _broken(line: str, width: int, wrapper: type) -> str:
    if len(line) <= width or TICKET in line:
        return line
    indent = line[: len(line) - len(line.lstrip())] + INDENT
    broken: str = wrapper(
        width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    ).fill(line)
    return broken


def error_line(error: object, out: TextIO) -> str:
    """What a command says of an error, in one sentence."""
    return fitted(f"manyhands: {one_line(error, 4000)}", out)


def columns(rows: Sequence[Sequence[str]], *, of_numbers: bool = False) -> list[str]:
    """A line for each row: columns to the left, the last as long as it likes; `of_numbers`: all but the first to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    widths[-1] *= of_numbers
    just = str.rjust if of_numbers else str.ljust
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(just(cell, width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
