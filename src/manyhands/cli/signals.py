"""SIGINT, SIGTERM and SIGHUP of commands that serve until told to leave: the first asks them to, a second ends them at once."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Final, Self

import typer

from manyhands.aside import aside
from manyhands.cli.runfile import note_leaving

NUMBERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTE_S: Final = 1.0  # for the run file to take a word
INTERRUPTED: Final = 128 + signal.SIGINT  # as shells have it


class StopSignals:
    """Takes the signals while the block runs: the first sets `leave`, a second one `stop`; before `begin_serving` there
    is nothing to hand over, and the first sets `stop`. SIGHUP stays ignored where it is (nohup).

    `while_stdin`: the end of stdin sets `stop` too (the parent died). `node`: whose run file notes the first ("": none).
    """

    def __init__(self, *, while_stdin: bool = False, node: str = "") -> None:
        self.stop, self.leave = asyncio.Event(), asyncio.Event()
        self._node = node
        self._while_stdin, self._is_serving, self._is_interrupted = while_stdin, False, False
        is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._taken = [number for number in NUMBERS if number != signal.SIGHUP or not is_nohup]
        self._on_terminal = [fd for fd in (1, 2) if os.isatty(fd)]

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in self._taken:
            loop.add_signal_handler(number, self._on_signal, number)
        if self._while_stdin:
            loop.add_reader(sys.stdin.fileno(), self._on_stdin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in self._taken:
            loop.remove_signal_handler(number)
        if self._while_stdin:
            loop.remove_reader(sys.stdin.fileno())

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._forget_terminal()
        self._is_interrupted |= number == signal.SIGINT and not self._is_serving
        (self.leave if self._is_serving and not self.leave.is_set() else self.stop).set()

    def _forget_terminal(self) -> None:
        """It was closed, and a line written to it would fail: drop the rest."""
        null = os.open(os.devnull, os.O_WRONLY)
        for fd in self._on_terminal:
            os.dup2(null, fd)
        os.close(null)

    def _on_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            self.stop.set()

    def begin_serving(self) -> None:
        """It serves from now on: the first signal asks it to hand over. Call it before it is announced that it serves."""
        self._is_serving = True

    async def leaving(self) -> None:
        """Serve, and wait for the first signal."""
        self.begin_serving()
        await self.leave.wait()
        if self._node:
            with contextlib.suppress(TimeoutError):  # a disk that takes nothing holds no leave up
                await asyncio.wait_for(aside(note_leaving, self._node), NOTE_S)

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end, or until `stop` is set: then it is cancelled. Raises what it raises."""
        task = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait([task, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            if not task.done():
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def check_interrupted(self) -> None:
        """Raise typer.Exit, with the code of what is interrupted, if SIGINT came before `begin_serving`."""
        if self._is_interrupted:
            raise typer.Exit(INTERRUPTED)
