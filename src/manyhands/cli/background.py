"""`up -d`, `join -d` and `serve -d`: the command goes on in a process without a terminal, and returns once that serves.

Until then the new process says on this terminal what it does, as in the foreground, and in its log; afterwards in the log
alone (log_file.py). It is forked before anything is loaded: options are read once, and no secret is among new arguments.
"""

import contextlib
import json
import math
import os
import select
import signal
import sys
import threading
import time
from typing import Final, TextIO

import typer

from manyhands.cli.lines import fitted
from manyhands.cli.log_file import LateLines, LogFile, log_path
from manyhands.cli.progress import ERASE

START_S: Final = 600.0  # for a node to serve; a model may have to be fetched first
END_S: Final = 10.0  # for one that is interrupted before it serves; then it is said that it is waited for
DRAIN_S: Final = 2.0  # for the disk to take what was said
_SERVES, _IS_SLOW = b"1", b"0"
_ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM})


class Tee:
    """sys.stdout or sys.stderr of the process in the background: the terminal, until it is let go, and the log. `lines` are on
    their way to that."""

    encoding, errors = "utf-8", "replace"

    def __init__(self, terminal: TextIO, log: LogFile, lines: LateLines) -> None:
        self._terminal: TextIO | None = terminal
        self._log, self._lines = log, lines

    @property
    def terminal(self) -> TextIO | None:
        """The terminal alone, for what the log must not hold; None once it is let go."""
        return self._terminal

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"text is written here, not {type(text).__name__}")
        if self._terminal is not None:
            with contextlib.suppress(OSError, ValueError):  # a terminal that was closed meanwhile
                self._terminal.write(text)
        if not text.startswith(ERASE):  # the line of progress.py
            self._lines.write(text)
        return len(text)

    def flush(self) -> None:
        if self._terminal is not None:
            with contextlib.suppress(OSError, ValueError):
                self._terminal.flush()
        if not _is_in_loop():
            self._lines.drain(DRAIN_S)

    def isatty(self) -> bool:
        return self._terminal is not None and self._terminal.isatty()

    def fileno(self) -> int:
        return self._log.fileno()

    def let_go(self) -> None:
        self.flush()
        self._terminal = None


class Background:
    """The process in the background, seen from within."""

    def __init__(self, pipe: int, log: LogFile) -> None:
        self._pipe, self._log = pipe, log
        self._lock = threading.Lock()
        lines = LateLines(log.write)
        self._tees = [Tee(sys.stdout, log, lines), Tee(sys.stderr, log, lines)]
        sys.stdout, sys.stderr = self._tees
        self._deadline = threading.Timer(START_S, self._let_go, [_IS_SLOW])
        self._deadline.daemon = True
        self._deadline.start()

    def serves(self) -> None:
        """It serves: who started it may go, and the terminal is left alone from now on."""
        self._deadline.cancel()
        self._let_go(_SERVES)

    def _let_go(self, how: bytes) -> None:
        with self._lock:
            if self._pipe < 0:
                return
            for tee in self._tees:
                tee.let_go()
            self._log.on_new_file = _take_descriptors  # what libraries write there
            _take_descriptors(self._log.fileno())
            with contextlib.suppress(OSError):  # it is not waited for any more
                os.write(self._pipe, how)
            os.close(self._pipe)
            self._pipe = -1


def go_on_in_background(name: str, *, as_json: bool = False) -> Background:
    """Return in a new process, which is in the background; in this one wait until that serves, say so, and raise typer.Exit.

    Exit code 0 if it serves, 1 if it does not within START_S, else what the new process ended with, which has said why.
    Raises BadRequest if its log cannot be written.
    """
    log = LogFile(log_path(name))
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # until either process knows what to do with them
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.setsid()  # neither Ctrl-C nor the end of the terminal reaches it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        return Background(writing, log)
    os.close(writing)
    raise typer.Exit(_await(name, pid, reading, as_json))


def _await(name: str, pid: int, reading: int, as_json: bool) -> int:
    """The exit code. Ctrl-C and SIGTERM, before the new process serves, end that too, a second one at once; the end of the
    terminal does not."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        select.select([reading], [], [], START_S + END_S)
        how = os.read(reading, 1)
    except KeyboardInterrupt:
        _end(name, pid)
        raise
    if how == _SERVES:
        said = f"{name} runs in the background (process {pid}): manyhands status, manyhands logs, manyhands stop"
        facts = {"event": "background", "text": said, "name": name, "pid": pid, "log": str(log_path(name))}
        typer.echo(json.dumps(facts) if as_json else fitted(said, sys.stdout))
        return 0
    if how == _IS_SLOW:
        said = (
            f"{name} does not serve after {START_S:.0f} s; it goes on in the background (process {pid}): "
            "manyhands logs -f shows what it does, manyhands stop ends it"
        )
        typer.echo(fitted(said, sys.stderr), err=True)
        return 1
    code = _reap(pid, END_S)
    if code is not None and code < 0:
        typer.echo(f"manyhands: {name} was ended by {signal.Signals(-code).name} before it served", err=True)
    return code if code is not None and code > 0 else 1


def _end(name: str, pid: int) -> None:
    """Tell a child to end, and wait until it has: what it loads holds it up. Interrupted once more, kill it."""
    try:
        os.kill(pid, signal.SIGTERM)
        if _reap(pid, END_S) is None:
            said = f"{name} (process {pid}) ends when it has loaded what it loads now; Ctrl-C again ends it at once"
            typer.echo(fitted(said, sys.stderr), err=True)
            _reap(pid, math.inf)
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGKILL)
        _reap(pid, math.inf)


def _reap(pid: int, seconds: float) -> int | None:
    """The exit code of a child, once it has ended; None if it has not within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def _is_in_loop() -> bool:
    """Whether an event loop runs on this thread."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def _take_descriptors(fd: int) -> None:
    for number in (1, 2):
        os.dup2(fd, number)
