"""Lines that are typed at a terminal: edited, remembered, and read while the loop goes on."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import GUARD_S

pytest.importorskip("readline", reason="NOT RUN: this Python has no line editor")
TYPIST = """
import asyncio, fcntl, pathlib, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # as a shell does: Ctrl-C sends this process its signal
from manyhands.cli.line_editor import line_editor

async def main():
    before = termios.tcgetattr(0)
    ask, turns = line_editor(pathlib.Path(sys.argv[1]) if sys.argv[1] else None), 0
    async def count():
        nonlocal turns
        while True:
            turns += 1
            if turns == 3:
                print("goes on", flush=True)  # the loop, while a line is waited for
            await asyncio.sleep(0.001)
    counting = asyncio.ensure_future(count())
    while True:
        turns, line = 0, ""
        try:
            line = await ask()
        except EOFError:
            break
        print(f"<{line}>", flush=True)
        if line == "leave":
            waiting = asyncio.ensure_future(ask())
            while termios.tcgetattr(0)[3] & termios.ICANON:  # until it is the editor's
                await asyncio.sleep(0.001)
            waiting.cancel()
            await asyncio.wait([waiting])
            break
    print("same" if termios.tcgetattr(0) == before else "changed", flush=True)
asyncio.run(main())
"""


class Typist:
    """A terminal in which TYPIST runs."""

    def __init__(self, terminal: int) -> None:
        self._terminal, self._seen = terminal, ""

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def see(self, *texts: str) -> None:
        """Wait until the terminal has shown each of them, in any order, and forget what stood before the last."""
        until = time.monotonic() + GUARD_S
        while not all(text in self._seen for text in texts):
            ready, _, _ = select.select([self._terminal], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{texts!r} were not shown, but {self._seen!r}"
            self._seen += os.read(self._terminal, 4096).decode(errors="replace")
        self._seen = self._seen[max(self._seen.index(text) + len(text) for text in texts) :]


@contextmanager
def terminal(history: Path | str) -> Iterator[Typist]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TYPIST, str(history)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(theirs)
    try:
        yield Typist(ours)
        assert process.wait(GUARD_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_lines_are_edited_and_remembered(tmp_path: Path) -> None:
    file = tmp_path / "home" / "lines"
    with terminal(file) as typist:
        typist.see("goes on", ">")
        typist.type("wrold\x02\x02\x02\x02\x04\x06\n")  # back, delete, forward
        typist.see("<wold>")
        typist.see(">")  # from here on keys are the editor's, Ctrl-C too
        typist.type("never sent\x03kept\n")  # Ctrl-C empties the line
        typist.see("<kept>")
        typist.see(">")
        typist.type("\x04")
        typist.see("same")
    assert file.read_text() == "wold\nkept\n"
    assert file.stat().st_mode & 0o777 == 0o600
    with terminal(file) as typist:
        typist.see(">")
        typist.type("\x10\x10!\n")  # up, up
        typist.see("<wold!>")
        typist.see(">")
        typist.type("\x04")
        typist.see("same")


def test_nothing_is_written_without_a_history(tmp_path: Path) -> None:
    with terminal("") as typist:
        typist.see(">")
        for keys in ("x\n", "\x10\n"):
            typist.type(keys)
            typist.see("<x>")
            typist.see(">")
        typist.type("\x04")
        typist.see("same")


def test_the_terminal_is_as_it_was_when_a_read_is_cancelled(tmp_path: Path) -> None:
    with terminal("") as typist:
        typist.see(">")
        typist.type("leave\n")
        typist.see("<leave>")
        typist.see("same")
