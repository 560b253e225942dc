"""Virtual time for asyncio: sleeping costs nothing, and takes exactly as long as it says.

When nothing is ready, `loop.time()` jumps to the next timer. It stands still while executor threads work, so real
computation takes no virtual time. Sockets are real: a timer may fire before bytes in the kernel arrive;
use memory transports. Code under test must take its time from `loop.time()`.

What does not end is an error that names the tasks which wait, and where: heartbeats alone would go on for ever.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STUCK_S = 5.0  # real seconds without timer, thread or event, after which the test is told that nothing can happen
THREAD_S = 600.0  # real seconds within which one of the threads that work must end
LIMIT_S: Final = 4 * 3600.0  # virtual seconds that a run may take
MAX_TURNS: Final = 1_000_000  # of the event loop that a run may take; those while threads work do not count
_FAREWELL: Final = 0.1  # of both limits, once one is reached, for the tasks that are cancelled then
_MAX_NAMED: Final = 20  # tasks


class NothingEnds(RuntimeError):
    """A run under virtual time went beyond a limit."""


class _JumpingSelector(selectors.DefaultSelector):
    """Waits in virtual time: where nothing is ready, tells `jump` to the next timer, or `give_up`."""

    def __init__(self, max_turns: int) -> None:
        super().__init__()
        self.jump: Callable[[float], None] = lambda seconds: None
        self.give_up: Callable[[str], None] = lambda reason: None  # raises
        self.turns_left = max_turns
        self._num_busy_threads = 0
        self._begun_or_ended_s = 0.0  # when a thread did so last, of the real clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._num_busy_threads:
            return self._select_beside_threads(timeout)
        self.turns_left -= 1
        if self.turns_left < 0:
            self.give_up("too many turns of the event loop")
        if timeout is None:
            return self._select_or_stuck()
        events = super().select(0)
        if not events:
            self.jump(max(timeout, 0.0))
        return events

    def thread_begins(self) -> None:
        self._num_busy_threads += 1
        self._begun_or_ended_s = time.monotonic()

    def thread_ends(self) -> None:
        self._num_busy_threads -= 1
        self._begun_or_ended_s = time.monotonic()

    def _select_beside_threads(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        left_s = self._begun_or_ended_s + THREAD_S - time.monotonic()
        events = super().select(0 if timeout == 0 else max(left_s, 0.0))
        if not events and left_s <= 0:
            self._begun_or_ended_s = time.monotonic()  # as long again for the tasks that are cancelled
            self.give_up(f"no thread of {self._num_busy_threads} has ended for {THREAD_S:g} real s")
        return events

    def _select_or_stuck(self) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(STUCK_S)
        if not events:
            self.give_up("every task waits, no timer is set, no thread works")
        return events


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time starts at 0 and moves only by jumping to the next timer.

    Raises NothingEnds beyond `limit_s` of that time, beyond `max_turns` of the loop, and where nothing can happen.
    """

    def __init__(self, limit_s: float = LIMIT_S, max_turns: int = MAX_TURNS) -> None:
        self._virtual_s, self._limit_s, self._limits = 0.0, limit_s, (limit_s, max_turns)
        self._jumping = _JumpingSelector(max_turns)
        self._jumping.jump, self._jumping.give_up = self._jump, self._give_up
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._virtual_s

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._jumping.thread_begins()
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._jumping.thread_begins()  # joins its threads in a thread of its own
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._jumping.thread_ends()

    def _jump(self, seconds: float) -> None:
        if self._virtual_s + seconds > self._limit_s:
            self._give_up("too long")
        self._virtual_s += seconds

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._jumping.thread_ends()

    def _give_up(self, reason: str) -> None:
        """Raise NothingEnds, out of the loop; tasks that are cancelled behind it have a part of both limits more."""
        limit_s, max_turns = self._limits
        self._limit_s = self._virtual_s + limit_s * _FAREWELL
        self._jumping.turns_left = int(max_turns * _FAREWELL)
        what = f"at {self._virtual_s:g} virtual s (limits: {limit_s:g} s, {max_turns} turns of the event loop)"
        raise NothingEnds(f"stuck: {reason}, {what}. {waiting_tasks(self)}")


def waiting_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """The tasks of a loop that have not ended, and the line at which each waits; the first few by name."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name()))
    named = [f"{task.get_name()} in {_place(task)}" for task in tasks[:_MAX_NAMED]]
    more = [f"{len(tasks) - _MAX_NAMED} more"] if len(tasks) > _MAX_NAMED else []
    return f"{len(tasks)} tasks wait: " + "; ".join(named + more)


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task waits, and the innermost function that it awaits: "main (test_x.py:9) > until (waiting.py:19)"."""
    awaited: Any = task.get_coro()
    frames = []
    while awaited is not None and (frame := getattr(awaited, "cr_frame", None)) is not None:
        frames.append(frame)
        awaited = awaited.cr_await
    told = [f"{f.f_code.co_qualname} ({Path(f.f_code.co_filename).name}:{f.f_lineno})" for f in frames]
    return " > ".join(dict.fromkeys([*told[:1], *told[-1:]])) or "nothing"


def run_virtual(main: Coroutine[Any, Any, T], limit_s: float = LIMIT_S, max_turns: int = MAX_TURNS) -> T:
    """asyncio.run under a virtual clock. Raises NothingEnds for what has not ended after `limit_s` virtual seconds, or after
    `max_turns` of the event loop."""
    with asyncio.Runner(loop_factory=partial(VirtualClockLoop, limit_s, max_turns)) as runner:
        return runner.run(main)
