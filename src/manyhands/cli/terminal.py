"""The modes of the terminal that stands at stdin (termios)."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_mode(name: str) -> Iterator[None]:
    """A local mode ("ECHO", "ISIG") is off within; afterwards the terminal is as it was, however the block ended."""
    import termios

    terminal = sys.stdin.fileno()
    before, changed = termios.tcgetattr(terminal), termios.tcgetattr(terminal)
    changed[3] &= ~getattr(termios, name)
    termios.tcsetattr(terminal, termios.TCSADRAIN, changed)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
