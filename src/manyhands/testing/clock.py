"""Virtual time for asyncio: sleeping costs nothing, and takes exactly as long as it says.

When nothing is ready, `loop.time()` jumps to the next timer. It stands still while executor threads work, so real
computation takes no virtual time. Sockets are real: a timer may fire before bytes in the kernel arrive;
use memory transports. Code under test must take its time from `loop.time()`.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STUCK_S = 5.0  # real seconds without timer, thread or event, after which the test is told that nothing can happen


class _JumpingSelector(selectors.DefaultSelector):
    """Waits in virtual time, as told by `wait`."""

    def __init__(self) -> None:
        super().__init__()
        self.wait: Callable[[float | None], float | None] = lambda timeout: timeout
        self.jump: Callable[[float], None] = lambda seconds: None
        self.num_busy_threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.num_busy_threads:
            return super().select(None if timeout != 0 else 0)
        if timeout is None:
            return self._select_or_stuck()
        events = super().select(0)
        if not events:
            self.jump(max(timeout, 0.0))
        return events

    def _select_or_stuck(self) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(STUCK_S)
        if not events:
            raise RuntimeError("stuck: every task waits, no timer is set, no thread works")
        return events


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time starts at 0 and moves only by jumping to the next timer."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self._jumping = _JumpingSelector()
        self._jumping.jump = self._jump
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._virtual_s

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._jumping.num_busy_threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._jumping.num_busy_threads += 1  # joins its threads in a thread of its own
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._jumping.num_busy_threads -= 1

    def _jump(self, seconds: float) -> None:
        self._virtual_s += seconds

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._jumping.num_busy_threads -= 1


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run under a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
