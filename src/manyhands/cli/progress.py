"""What a command is doing now, on one line of the terminal that the next one replaces: within half a second of Enter.

    with doing("starting tales") as screen:          a line with a sign that turns, and seconds after the second one
        screen.say("waiting for node-1 and node-2")  the next line
        fetch(..., screen)                           a HashProgress: a bar, bytes, speed, what is left

Only on a terminal (stderr): logs and pipes get the command's own lines and nothing of this.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, TextIO

from manyhands.plain import one_line, size_of

TICK_S: Final = 0.1
SECONDS_AFTER_S: Final = 2.0  # what takes longer shows for how long it has
SIGNS: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
BAR_CELLS: Final = 24
TEXT_CELLS: Final = 30  # of the text that are kept where the terminal is narrow, before the bar is
ERASE: Final = "\r\x1b[2K"


@dataclass(slots=True)
class Phase:
    """What is being done since `began` (monotonic seconds). `total` None: not counted in bytes.

    `at_start`: bytes of `done` that were there when it began.
    """

    text: str
    began: float
    total: int | None = None
    done: int = 0
    at_start: int = 0

    def line(self, now: float, width: int) -> str:
        """As the terminal shows it, in at most `width` characters."""
        passed = now - self.began
        sign = SIGNS[int(passed / TICK_S) % len(SIGNS)]
        room = width - len(sign) - 2
        tails = self._tails(passed)
        tail = next((tail for tail in tails if len(tail) + min(len(self.text), TEXT_CELLS) <= room), tails[-1])
        room -= len(tail)
        text = self.text if len(self.text) <= room else f"{self.text[: max(0, room - 1)]}…"
        return f"{sign} {text}{tail}"[: max(0, width - 1)]

    def _tails(self, passed: float) -> list[str]:
        """What stands behind the text: the longest first, for terminals that are wide enough."""
        if self.total is None:
            return [f"  {passed:.0f} s" if passed >= SECONDS_AFTER_S else ""]
        amount = f"  {size_of(self.done)} of {size_of(self.total)}"
        drawn = f"  {bar(self.done, self.total)}{amount}"
        speed = (self.done - self.at_start) / passed if passed >= 1 else 0.0
        share = f"  {100 * self.done // max(1, self.total)} %"
        return [*([f"{drawn}  {size_of(int(speed))}/s"] if speed else []), drawn, amount, share]


def bar(done: int, total: int) -> str:
    """How much of it is done, as BAR_CELLS cells."""
    full = BAR_CELLS if total <= 0 else min(BAR_CELLS, BAR_CELLS * done // total)
    return "━" * full + "─" * (BAR_CELLS - full)


class Screen:
    """The line. Also a HashProgress. Threads may call it."""

    def __init__(self, out: TextIO, is_shown: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self.is_shown, self._clock = out, is_shown, clock
        self._lock = threading.RLock()  # a finalizer may log, and so erase the line, in the thread that holds it
        self._phase: Phase | None = None
        self._is_drawn = False

    def say(self, text: str) -> None:
        """What is done from now on."""
        self._set(Phase(one_line(text, 300), self._clock()))

    def start(self, name: str, total: int, done: int = 0) -> None:
        """As HashProgress.start; `done`: bytes that were there before."""
        self._set(Phase(one_line(name, 300), self._clock(), total, done, done))

    def advance(self, amount: int) -> None:
        with self._lock:
            if self._phase is not None:
                self._phase.done += amount

    def done(self) -> None:
        with self._lock:
            if self._phase is not None:
                self._phase = Phase(self._phase.text, self._clock())
        self.draw()

    def draw(self) -> None:
        """Show the line as it is now."""
        with self._lock:
            if self._phase is not None and self.is_shown:
                self._out.write(ERASE + self._phase.line(self._clock(), shutil.get_terminal_size().columns))
                self._out.flush()
                self._is_drawn = True

    def clear(self) -> None:
        """Take the line away, until the next tick: something else is about to be printed."""
        with self.away():
            pass

    @contextmanager
    def away(self) -> Iterator[None]:
        """Without the line while the block runs, which prints and calls nothing of this."""
        with self._lock:
            if self._is_drawn:
                self._out.write(ERASE)
                self._out.flush()
                self._is_drawn = False
            yield

    @contextmanager
    def instead(self, text: str) -> Iterator["Screen"]:
        """Say `text` while the block runs, and then what was said before."""
        before = self._phase
        self.say(text)
        try:
            yield self
        finally:
            with self._lock:
                self._phase = before
            self.clear()

    def end(self) -> None:
        """Nothing is shown any more, also of what is said later: a node moves layers long after it has started."""
        with self._lock:
            self._phase = None
        self.clear()
        self.is_shown = False

    def _set(self, phase: Phase) -> None:
        with self._lock:
            self._phase = phase
        self.draw()


_shown: list[Screen] = []  # those of this process, the one in use last


def clear_line() -> None:
    """Take the line away before something is printed."""
    for screen in _shown:
        screen.clear()


@contextmanager
def no_line() -> Iterator[None]:
    """The line is away while the block prints: of two lines that are printed at once the second could be drawn over."""
    with ExitStack() as stack:
        for screen in _shown:
            stack.enter_context(screen.away())
        yield


def end_lines() -> None:
    """Nothing is shown from now on: what the command was started for is said."""
    for screen in _shown:
        screen.end()


@contextmanager
def doing(text: str, out: TextIO | None = None) -> Iterator[Screen]:
    """Show what is being done while the block runs. Inside another such block its line says `text` meanwhile."""
    if _shown:
        with _shown[-1].instead(text) as screen:
            yield screen
        return
    stream = out or sys.stderr
    is_shown = stream.isatty() and os.environ.get("TERM") != "dumb"  # which cannot take a line away again
    screen = Screen(stream, is_shown)
    _shown.append(screen)
    ended = threading.Event()
    ticker = threading.Thread(target=_tick, args=(screen, ended), name="progress", daemon=True)
    try:
        screen.say(text)
        if is_shown:
            ticker.start()
        yield screen
    finally:
        ended.set()
        if ticker.ident is not None:
            ticker.join()
        _shown.remove(screen)
        screen.end()


def _tick(screen: Screen, ended: threading.Event) -> None:
    while screen.is_shown and not ended.wait(TICK_S):
        screen.draw()
