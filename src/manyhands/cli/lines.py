"""Lines for people: broken between words where a terminal would break them within one, and as they are elsewhere."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from manyhands.plain import one_line

MIN_COLUMNS = 20
TICKET = re.compile("mh1[A-Za-z0-9_-]{16}")  # a line with one is copied whole: it stays one line


def fitted(text: str, out: TextIO, hang: int = 2) -> str:
    """`text`, its lines broken between words where `out` is a terminal that is narrower.

    The continuation of a broken line is indented by `hang` characters more than the line.
    """
    if (width := width_of(out)) is None:
        return text
    from textwrap import TextWrapper

    return "\n".join(_broken(line, width, TextWrapper, " " * hang) for line in text.split("\n"))


def _broken(line: str, width: int, wrapper: type, hang: str) -> str:
    if len(line) <= width or TICKET.search(line):
        return line
    indent = line[: len(line) - len(line.lstrip())] + hang
    broken: str = wrapper(
        width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    ).fill(line)
    return broken


class Flow:
    """Breaks the lines of a text that comes in pieces between words, at `width` characters; None: leaves it as it is."""

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._column, self._word = 0, ""

    def feed(self, piece: str) -> str:
        """What to print now: all but the last word, which the next piece may continue."""
        if self._width is None:
            return piece
        *words, self._word = re.split(r"(?<=\s)", self._word + piece)
        return "".join(self._placed(word, self._width) for word in words)

    def end(self) -> str:
        """The last word, still to be printed. Text fed afterwards begins a new line."""
        word, self._word = self._word, ""
        rest = word if self._width is None else self._placed(word, self._width)
        self._column = 0
        return rest

    def _placed(self, word: str, width: int) -> str:
        is_broken = self._column > 0 and self._column + len(word.rstrip()) >= width
        begins = 0 if is_broken else self._column
        self._column = 0 if word.endswith("\n") else begins + len(word)
        return "\n" * is_broken + word


def say(text: str) -> None:
    """Print a line of a command that serves. Where stdout takes none it is lost, and sessions are handed over all the same: its
    disk may be full, or its reader gone, as `tee` behind it is at once after Ctrl-C."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:
        pass  # what is left in the buffer comes with a later line, once there is room


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


def rows_within(
    width: int | None,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    num_first: int,
    *,
    of_numbers: bool = False,
) -> list[str]:
    """The headings, and a text for each row, in `columns`. Where a line would have more than `width` characters (None: they may
    be long) the columns behind the first `num_first` stand below their row, each with its heading; "-" is left out there."""
    lines = columns([headings, *rows], of_numbers=of_numbers)
    if width is None or max(map(len, lines)) <= width:
        return lines
    beginnings = [(*row[:num_first], "") for row in (headings, *rows)]
    first = [line.rstrip() for line in columns(beginnings, of_numbers=of_numbers)]
    found = [zip(headings[num_first:], row[num_first:], strict=True) for row in rows]
    below = [" · ".join(f"{heading} {cell}" for heading, cell in cells if cell != "-") for cells in found]
    return [first[0], *("\n    ".join(filter(None, pair)) for pair in zip(first[1:], below, strict=True))]


def width_of(out: TextIO) -> int | None:
    """How many characters a line may have; None where it is no terminal's."""
    return max(MIN_COLUMNS, shutil.get_terminal_size().columns) if out.isatty() else None
