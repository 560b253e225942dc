"""A blocking call beside the event loop, in a thread that keeps nothing from its end: neither Ctrl-C nor the process.

asyncio.to_thread is for calls that end soon: when the loop ends it waits for them, be it for the ten minutes that a gateway
without a word is given.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future, InvalidStateError
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def aside(function: Callable[..., T], *arguments: Any, **more: Any) -> T:
    """What `function` returns or raises. Cancelled, it is left to itself: its thread cannot be stopped."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(function, *arguments, **more))


@contextlib.asynccontextmanager
async def entered_aside(manager: contextlib.AbstractContextManager[T]) -> AsyncIterator[T]:
    """`manager`, which waits for the disk when it is entered and left, in threads that are waited for."""
    entering = asyncio.ensure_future(asyncio.to_thread(manager.__enter__))
    try:
        value = await asyncio.shield(entering)
    except asyncio.CancelledError:
        await asyncio.wait([entering])
        if not entering.cancelled() and entering.exception() is None:
            await asyncio.to_thread(manager.__exit__, None, None, None)
        raise
    try:
        yield value
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


class _Threads(Executor):
    """A daemon thread for each call."""

    def submit(self, function: Callable[P, T], /, *arguments: P.args, **more: P.kwargs) -> Future[T]:
        answer: Future[T] = Future()

        def run() -> None:
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                try:
                    answer.set_result(function(*arguments, **more))
                except Exception as error:  # handed to who asked
                    answer.set_exception(error)

        threading.Thread(target=run, name="aside", daemon=True).start()
        return answer


_THREADS: Final = _Threads()
