"""A blocking call beside the event loop, in a thread that keeps nothing from its end: neither Ctrl-C nor the process.

asyncio.to_thread is for calls that end soon: when the loop ends it waits for them, be it for the ten minutes that a gateway
without a word is given.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

T = TypeVar("T")


async def aside(function: Callable[..., T], *arguments: Any, **more: Any) -> T:
    """What `function` returns or raises. Cancelled, it is left to itself: its thread cannot be stopped."""
    answer: Future[T] = Future()

    def run() -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
            try:
                answer.set_result(function(*arguments, **more))
            except Exception as error:  # handed to who asked
                answer.set_exception(error)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await asyncio.wrap_future(answer)
