"""What a command does to its own process: plain log lines, no secrets among its arguments, memory that does not grow."""

import contextlib
import gc
import io
import logging
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from manyhands.cli.progress import no_line
from manyhands.plain import one_line

MAX_LINE_CHARS = 4000
TRIM_S = 30.0  # between two times that free pages of the C heap are given back
REST = 0.1  # of a core: a process that takes less has no stream that a full run of the collector would hold up
FULL_RUN_S = 120.0  # without a full run, at most
GARBAGE = 1000  # objects: a run that freed more is worth another one at the next look
NO_FULL_RUNS = 2**31 - 1  # a threshold that is not reached
# A ticket, a key of the gateway, and in arguments a code: every user of a machine can read those of every process.
SECRETS = "(mh1|mhk_)[A-Za-z0-9_-]{16,}"
M_ARENA_MAX = -8  # a parameter of mallopt(3), from glibc's malloc.h
_SECRETS = re.compile(rb"mh1[A-Za-z0-9_\s-]{16,}|" + SECRETS.encode() + rb"|(?<=\0--code[=\0])[^\0]+")


class PlainLines(logging.Formatter):
    """A record as people read it: its message as one printable line, and the traceback if there is one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message, MAX_LINE_CHARS)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        # Indented: the text of an error may have several lines, and none of them may look like another record.
        return "\n".join(f"  {one_line(line, MAX_LINE_CHARS)}" for line in super().formatException(ei).split("\n"))


class StderrHandler(logging.Handler):
    """Writes to stderr; the progress line (progress.py) is erased meanwhile."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with no_line():
                print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def log_plainly() -> None:
    """What is logged without a handler of its own (to stderr, from warnings on) comes as PlainLines from now on."""
    handler = StderrHandler(logging.WARNING)
    handler.setFormatter(PlainLines())
    logging.lastResort = handler


def forgive_streams() -> None:
    """Show letters that the terminal's encoding lacks as "?", and read bytes that are none in it as such letters: neither ends
    a command. Tables have lines and blocks, and texts of models any letter."""
    for stream in (sys.stdin, sys.stdout):
        with contextlib.suppress(io.UnsupportedOperation):  # of a stream that has been read from
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")


def hide_secrets(proc: Path = Path("/proc/self")) -> bool:
    """Overwrite tickets, keys and codes in the arguments that the system shows of this process; whether there were any.

    Linux keeps the arguments in the process's own memory, at arg_start (proc(5), stat), and shows what is there. They can
    be read until this has run, and they are in the history of the shell: MANYHANDS_TICKET and `join -` avoid both.
    """
    try:
        shown = (proc / "cmdline").read_bytes()
        if not _SECRETS.search(shown):
            return False
        start = int((proc / "stat").read_text(errors="replace").rpartition(")")[2].split()[45])
        with (proc / "mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            if memory.read(len(shown)) != shown:  # not where it is kept
                return False
            memory.seek(start)
            memory.write(_SECRETS.sub(lambda match: b"x" * len(match[0]), shown))
        return True
    except (OSError, ValueError, IndexError):  # another system, or one that does not let us
        return False


@contextmanager
def uncollected() -> Iterator[None]:
    """While modules are loaded: without the cyclic collector, for hardly anything that they make is garbage.

    It would walk all that is there again and again, a tenth of the time that a node takes to start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@asynccontextmanager
async def steady_memory() -> AsyncIterator[None]:
    """For a process that serves, while it does: short runs of the collector, and free pages of the C heap given back.

    Full runs come when the process is at rest or makes garbage (`FullRuns`) and not by themselves: with 200 streams open they
    held the event loop for 20 to 33 ms each, and found none.
    """
    import asyncio

    freeze_startup()
    usual = gc.get_threshold()
    gc.set_threshold(*usual[:2], NO_FULL_RUNS)
    trims = asyncio.create_task(_trim_forever())
    try:
        yield
    finally:
        trims.cancel()
        gc.set_threshold(*usual)


def freeze_startup() -> None:
    """Hide what exists now from the cyclic collector, and free what is garbage of it.

    A full run of Python's collector looks at every object, on whatever thread allocates: the libraries' 380,000 held the event
    loop for 0.2 to 0.5 s. `import_ahead` has hidden those, so this run takes some milliseconds. What is hidden and not part of
    a cycle is freed as ever; of an evicted model some 500 small objects stay.
    """
    gc.collect()
    gc.freeze()


def share_heap() -> None:
    """Have glibc serve all threads from one heap (mallopt(3)); with another C library nothing. To be called before threads.

    It makes up to eight heaps a core, for threads that allocate at the same time, and malloc_trim(3) gives back the end of the
    first one only. Of each other one up to 64 MB stay resident, twice the largest block that was ever freed: 13 MB of a second
    heap in which large grammars had been compiled, 0.2 MB of them in use.
    """
    import ctypes

    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None and sys.platform == "linux":
        mallopt(M_ARENA_MAX, 1)


def heap_trimmer() -> Callable[[int], int] | None:
    """glibc's malloc_trim(3), or None with another C library. It runs without the interpreter's lock.

    glibc gives back the end of its heap alone. Large bodies leave holes below what was allocated after them: 26 MB of a
    gateway's 186 MB after four minutes of bench.siege.
    """
    import ctypes

    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class FullRuns:
    """When a full run of the collector is due. Pure: times in seconds, `used_s` the process's CPU time so far."""

    def __init__(self, now: float, used_s: float) -> None:
        self._asked_at = self._ran_at = now
        self._used_s, self._num_freed = used_s, 0

    def are_due(self, now: float, used_s: float) -> bool:
        """Whether the process has rested since it was asked last, makes garbage, or has had no run for FULL_RUN_S."""
        has_rested = used_s - self._used_s < REST * (now - self._asked_at)
        self._asked_at, self._used_s = now, used_s
        return has_rested or self._num_freed > GARBAGE or now - self._ran_at >= FULL_RUN_S

    def ran(self, now: float, num_freed: int) -> None:
        """There was one, and it freed so many objects."""
        self._ran_at, self._num_freed = now, num_freed


async def _trim_forever() -> None:
    import asyncio

    trim, runs = heap_trimmer(), FullRuns(time.monotonic(), time.process_time())
    while True:
        await asyncio.sleep(TRIM_S)
        if runs.are_due(time.monotonic(), time.process_time()):
            runs.ran(time.monotonic(), gc.collect())
        if trim is not None:
            await asyncio.to_thread(trim, 0)
