"""Memory for weights: pieces of large anonymous mappings, on huge pages where the system grants them.

What was not written takes no memory. A mapping is given back when the last array in it is gone.
"""

import contextlib
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

import numpy as np

from manyhands.checkpoint.verify import MAX_THREADS
from manyhands.engine.library import Array

HUGE: Final = 1 << 21  # bytes of a huge page, on x86-64 and most ARM systems
MAPPING: Final = 1 << 28  # bytes of a mapping, where one array needs no more
LINE: Final = 64


class Memory:
    """Arrays one behind the other, each at the beginning of a cache line. They are not zeroed twice: the system does it.
    Most of loading is spent on first writes to it, so threads share them (`fill`); they end when this is let go of.
    """

    def __init__(self) -> None:
        self._threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._others = ThreadPoolExecutor(max(1, self._threads - 1), "pack")
        self._left: Array = np.empty(0, np.uint8)

    def array(self, count: int, dtype: type) -> Array:
        """`count` zeros of a dtype. Raises MemoryError."""
        size = -(-count * np.dtype(dtype).itemsize // LINE) * LINE
        if size > self._left.nbytes:
            self._left = _mapping(max(size, MAPPING))
        taken, self._left = self._left[:size], self._left[size:]
        return taken.view(dtype)[:count]

    def fill(self, work: Callable[[], None], parts: int) -> None:
        """Call `work`, which takes parts until none is left, in this thread and others: at most `parts`, and one a core.

        Returns when all have; raises what one of them raised.
        """
        others = [self._others.submit(work) for _ in range(min(parts, self._threads) - 1)]
        try:
            work()
        finally:
            wait(others)
        for other in others:
            other.result()


def _mapping(size: int) -> Array:
    try:
        pages = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system gives no {size + HUGE} bytes for weights: {error.strerror}") from error
    with contextlib.suppress(AttributeError, OSError):  # systems without huge pages have neither
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(pages, np.uint8)
    start = -whole.ctypes.data % HUGE
    return whole[start : start + size]
