"""The one thread of a device: what is asked of it runs there in order, and the results come back to the event loop.

An Executor whose futures are the loop's own. ThreadPoolExecutor's have locks and are chained to the loop's; on a hop whose
caches are cold its two hand-overs took 340 us a step, these take 85 (bench/hop.py, 22 Nov).
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_Job = tuple[Callable[..., Any], tuple[Any, ...], "asyncio.Future[Any]"]

_here = threading.local()


class Unwanted(Exception):
    """Nothing waits for the result of what runs: its future was cancelled, or its thread is being shut down."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What a thread computes for: a device of so many threads."""

    num_threads: int


@contextmanager
def computing(num_threads: int) -> Iterator[None]:
    """The calling thread computes until the block ends, for a device of `num_threads` threads.

    A process whose loop's thread does lets its devices use that too, for steps that are short.
    """
    outer = current_scope()
    _here.scope = Scope(num_threads)
    try:
        yield
    finally:
        _here.scope = outer


def current_scope() -> Scope | None:
    """The scope of the calling thread; None if it does not compute for good."""
    return getattr(_here, "scope", None)


def check_is_wanted() -> None:
    """Long work calls it between its parts. Raises Unwanted if it runs on a OneThread and nothing waits for its result."""
    thread: OneThread | None = getattr(_here, "thread", None)
    if thread is not None and not thread.is_wanted:
        raise Unwanted


class OneThread(Executor):
    """A thread that runs inside `scope`. Its maker shuts it down."""

    def __init__(self, name: str, scope: AbstractContextManager[object]) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.is_closed = False
        self._num_given = self._num_done = 0  # one is the loop's to write, the other the thread's
        self._running: asyncio.Future[Any] | None = None  # of the job that runs
        self._thread = Thread(target=self._serve, args=(scope,), name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether it is open, and nothing runs there or waits to. To be asked on the loop's thread."""
        return not self.is_closed and self._num_done == self._num_given

    @property
    def is_wanted(self) -> bool:
        """Whether what runs there now is to go on. To be asked on that thread."""
        return not self.is_closed and (self._running is None or not self._running.cancelled())

    def submit(self, function: Callable[[*Ts], T], /, *args: *Ts) -> "asyncio.Future[T]":  # type: ignore[override]
        """Run `function` after what was submitted before; a result for the running loop. Raises RuntimeError once closed."""
        if self.is_closed:
            raise RuntimeError("the device is closed")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._num_given += 1
        self._jobs.put((function, args, done))
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """Let what has begun end, or reach its next `check_is_wanted`; cancel the rest; end the thread. May be repeated."""
        self.is_closed = True
        self._jobs.put(None)
        if wait:
            self._thread.join()

    def _serve(self, scope: AbstractContextManager[object]) -> None:
        _here.thread = self
        with scope:
            while self._do_next():  # a call each, so that no name keeps a job's tensors alive while there is none
                pass

    def _do_next(self) -> bool:
        job = self._jobs.get()
        if job is None:
            return False
        function, args, done = job
        self._running = done
        outcome = attempt(function, *args) if self.is_wanted else None
        self._running = None
        self._num_done += 1
        if outcome is None or isinstance(outcome[1], Unwanted):
            _tell(done, done.cancel)
        else:
            _tell(done, _settle, done, *outcome)
        del job, function, args, done, outcome  # an error's traceback leads here, too, and would lead to itself
        return True


def attempt(function: Callable[[*Ts], T], *args: *Ts) -> tuple[T | None, BaseException | None]:
    """What came of it. (A frame of its own: that of a caught error's traceback must not lead to its future.)"""
    try:
        return function(*args), None
    except StopIteration as error:  # which no future takes
        return None, RuntimeError(f"StopIteration: {error}")
    except BaseException as error:
        return None, error


def _tell(done: "asyncio.Future[Any]", *call: Any) -> None:
    try:
        done.get_loop().call_soon_threadsafe(*call)
    except RuntimeError:
        return  # the loop is closed: nothing waits


def _settle(done: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if done.done():
        return  # cancelled meanwhile
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
