"""$MANYHANDS_HOME/logs/NAME.log: what a node in the background says, each line with its time; never more than MOST_BYTES twice.

A full file becomes NAME.log.1, over the one before, and a new one is begun. Tickets and keys are not written.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from manyhands.cli.process import SECRETS
from manyhands.config import home_from_env
from manyhands.errors import BadRequest
from manyhands.plain import one_line

MOST_BYTES: Final = 1 << 20
LINE_CHARS: Final = 4000
JSON_TIME: Final = '{"time": '  # as lines of --log-json begin (api/log.py)
JSON_CHARS: Final = 1 << 16  # of such a line, which is none any more where it is cut: its message is
MOST_WAITING: Final = 1 << 20
FOLLOW_S: Final = 0.2
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SECRETS: Final = re.compile(SECRETS)


def log_path(name: str) -> Path:
    """The log of a node. Raises BadRequest for a name that could leave the folder."""
    from manyhands.cli.runfile import run_path

    return home_from_env() / "logs" / f"{run_path(name).stem}.log"


def older(path: Path) -> Path:
    """What was written before `path` was begun."""
    return path.with_name(f"{path.name}.1")


def log_line(text: str, now: float) -> str:
    """A line as it is written: its time, unless it is of JSON and has one, printable, without secrets."""
    has_time = text.startswith(JSON_TIME)
    most = JSON_CHARS if has_time else LINE_CHARS
    shown = _SECRETS.sub(lambda match: f"{match[1]}...", one_line(_COLOURS.sub("", text), most))
    if has_time:
        return f"{shown}\n"
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}  {shown}\n"


class LogFile:
    """The file while its process runs. Threads may write. What the disk does not take is lost, and the node goes on."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.time) -> None:
        """Raises BadRequest if it cannot be opened."""
        self.path, self._most, self._clock = path, most_bytes, clock
        self._lock = threading.Lock()
        self._rest = ""  # of a line that has not ended
        self._fd = self._open()
        self.on_new_file: Callable[[int], object] = lambda fd: None  # gets the descriptor of each further file

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> None:
        """Add the lines of `text`; one that has no end yet waits for it, up to LINE_CHARS."""
        with self._lock, contextlib.suppress(OSError):
            *lines, self._rest = (self._rest + text).split("\n")
            if len(self._rest) > LINE_CHARS:
                lines, self._rest = [*lines, self._rest], ""
            data = "".join(log_line(line, self._clock()) for line in lines if line.strip()).encode("utf-8", "replace")
            if data and os.fstat(self._fd).st_size + len(data) > self._most:
                self._begin_anew()
            os.write(self._fd, data)

    def _open(self) -> int:
        from manyhands.files import private_folder

        try:
            private_folder(self.path.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            return os.open(self.path, flags, 0o600)
        except OSError as error:
            raise BadRequest(
                f"{self.path} cannot be written ({error.strerror}): set MANYHANDS_HOME to a folder of yours"
            ) from error

    def _begin_anew(self) -> None:
        self.path.replace(older(self.path))
        before, self._fd = self._fd, self._open()
        os.close(before)
        self.on_new_file(self._fd)


class LateLines:
    """Lines for `write`, which waits for a disk: a thread hands them on, in order, so that an event loop does not wait. Those
    that come while MOST_WAITING characters wait are dropped, and how many is written once the disk takes some again."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._changed = threading.Condition()
        self._rest = ""  # of a line that has not ended
        self._texts: list[str] = []  # whole lines
        self._num_chars = self._num_dropped = 0  # that wait; lines
        self._thread: threading.Thread | None = None
        self._is_writing = False

    def write(self, text: str) -> None:
        """Add the lines of `text`; one that has no end yet waits for it, up to LINE_CHARS. Waits for nothing."""
        with self._changed:
            head, end, self._rest = (self._rest + text).rpartition("\n")
            if len(self._rest) > LINE_CHARS:
                end, self._rest = f"{end}{self._rest}\n", ""
            if not (lines := head + end):
                return
            if self._num_chars + len(lines) > MOST_WAITING:
                self._num_dropped += lines.count("\n")
                return
            self._texts.append(lines)
            self._num_chars += len(lines)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, limit_s: float) -> None:
        """Wait until all is written, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._texts or self._is_writing), limit_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._texts)
                text, num_dropped = "".join(self._texts), self._num_dropped
                self._texts, self._num_chars, self._num_dropped, self._is_writing = [], 0, 0, True
            if num_dropped:
                text += f"{num_dropped} lines are left out: the disk was too slow for them\n"
            self._write(text)


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines that were written, from the file before too; none if there is no log."""
    lines: list[str] = []
    for each in (path, older(path)):
        if len(lines) < count:
            with contextlib.suppress(FileNotFoundError):
                lines = [*each.read_text("utf-8", "replace").splitlines(), *lines]
    return lines[-count:] if count else []


def follow(path: Path, goes_on: Callable[[], bool], sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """The lines written from now on, until `goes_on` says no and all are given; a file that is begun anew is followed too."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open(encoding="utf-8", errors="replace"))
        file.seek(0, os.SEEK_END)
        while True:
            # Asked before reading: what it said before it ended, or before it began the next file, is read still.
            is_last, is_old = not goes_on(), _is_other(path, file.fileno())
            while line := file.readline():
                yield line.rstrip("\n")
            if is_old:
                file = stack.enter_context(path.open(encoding="utf-8", errors="replace"))
            elif is_last:
                return
            else:
                sleep(FOLLOW_S)


def _is_other(path: Path, fd: int) -> bool:
    try:
        return path.stat().st_ino != os.fstat(fd).st_ino
    except FileNotFoundError:  # between two files
        return False
