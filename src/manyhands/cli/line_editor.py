"""Lines typed at a terminal, with the editing and the history of the standard library's readline.

A line is read in a thread, so that connections are served meanwhile. Ctrl-C empties the line: at the prompt the terminal sends
it as a character, no signal.
"""

import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from manyhands.aside import aside
from manyhands.cli.terminal import without_interrupt

PROMPT: Final = "> "
KEPT: Final = 1000  # lines of history that are read back
Ask = Callable[[], Awaitable[str]]  # the next line; raises EOFError at the end


def line_editor(history: Path | None) -> Ask:
    """How to ask the terminal for the next line. history: the file, private to its owner, where lines are kept, or None."""
    has_editing = _prepare(history)

    async def ask() -> str:
        with without_interrupt() if has_editing else contextlib.nullcontext():
            line = await aside(input, PROMPT)
        if history is not None and line.strip():
            with history.open("a") as file:
                file.write(f"{' '.join(line.splitlines())}\n")
        return line

    return ask


def _prepare(history: Path | None) -> bool:
    """Earlier lines for the arrow keys; whether this Python has an editor."""
    if history is not None:
        history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(history, os.O_CREAT | os.O_APPEND, 0o600))  # what was typed is private
    try:
        import readline
    except ImportError:
        return False
    has_libedit = "libedit" in (readline.__doc__ or "")
    if has_libedit:
        readline.parse_and_bind("setty -d -isig")  # it has settings of its own for the prompt
        readline.parse_and_bind("bind ^C em-kill-line")
    else:
        readline.parse_and_bind(r'"\C-c": kill-whole-line')
        readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted paragraph is one line
    for line in history.read_text(errors="replace").splitlines()[-KEPT:] if history is not None else ():
        readline.add_history(line)
    return True
