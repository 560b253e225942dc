"""How much CPU time the callbacks of asyncio's own event loop take: one that takes long holds everything else up."""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Turns:
    """What was seen while `watching`: how many callbacks there were, and the longest. uvloop's cannot be watched."""

    def __init__(self) -> None:
        self.count = 0
        self.longest_s = 0.0
        self.longest = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take the thread's CPU time of every callback that runs in the block, on every loop of the process."""
        handle: Any = asyncio.events.Handle
        plain = handle._run

        def timed(self_: asyncio.Handle) -> None:
            began = time.thread_time()
            plain(self_)
            took_s = time.thread_time() - began
            self.count += 1
            if took_s > self.longest_s:
                self.longest_s, self.longest = took_s, _named(self_)[:400]

        handle._run = timed
        try:
            yield
        finally:
            handle._run = plain


def _named(handle: Any) -> str:
    """A callback in words. Of a task's first step asyncio shows an address alone: what it refers to is the task."""
    told = repr(handle)
    return f"{told} {gc.get_referents(handle._callback)}" if "TaskStepMethWrapper" in told else told
