"""The settings of the terminal that stands at stdin (termios)."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any


def without_echo() -> contextlib.AbstractContextManager[None]:
    """What is typed is not shown within."""
    import termios

    def change(settings: list[Any]) -> None:
        settings[3] &= ~termios.ECHO

    return _changed(change)


def without_interrupt() -> contextlib.AbstractContextManager[None]:
    """Ctrl-C is a character within and sends no signal.

    The key is taken away and not the mode ISIG: GNU readline switches that mode on at each prompt.
    """
    import termios

    def change(settings: list[Any]) -> None:
        settings[6][termios.VINTR] = os.fpathconf(sys.stdin.fileno(), "PC_VDISABLE").to_bytes(1, "little")

    return _changed(change)


@contextlib.contextmanager
def _changed(change: Callable[[list[Any]], None]) -> Iterator[None]:
    """The terminal's settings are changed within; afterwards they are as before, however the block ended."""
    import termios

    terminal = sys.stdin.fileno()
    before, changed = termios.tcgetattr(terminal), termios.tcgetattr(terminal)
    change(changed)
    termios.tcsetattr(terminal, termios.TCSADRAIN, changed)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
