"""How many of a device's compute threads one operation gets.

torch's threads sleep when they have had nothing to do for a moment (GOMP_SPINCOUNT: nodes that share a machine would fight
otherwise), and to share an operation costs some microseconds even when they do not. So a step of few rows runs on one thread,
except for its products. No count changes a bit (manyhands.model.prove shows it).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Weights of a product from which sharing it is faster, read from memory (bf16, 1 to 32 rows): 50 us on one thread ...
_SHARED_WEIGHTS = 1 << 18
# ... fewer in proportion from so many rows of input on, where computing takes longer than reading.
_READ_ROWS = 32
# Multiplications of an attention (query rows x keys x width) from which sharing it is faster.
_SHARED_SCORES = 1 << 21
# Fewer rows of a matrix for each thread, and some of oneDNN's kernels let threads share the sums themselves.
_ROWS_EACH = 128

_device = threading.local()


def available() -> int:
    """The threads of the device that this thread computes for."""
    return getattr(_device, "count", None) or torch.get_num_threads()


def give(count: int) -> None:
    """Let the device that this thread computes for have `count` threads. torch keeps to one outside of `using`: most
    operations are small, and to change its number takes a hop 20 us."""
    _device.count = count
    torch.set_num_threads(1)


@contextmanager
def given(count: int) -> Iterator[None]:
    """`give`, until the block ends."""
    before, outer = torch.get_num_threads(), getattr(_device, "count", None)
    give(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _device.count = outer


def for_product(count: int, num_rows: int, num_columns: int) -> int:
    """Threads for the product of `count` rows of input with a matrix [num_rows, num_columns]."""
    if num_rows * num_columns * max(count, _READ_ROWS) < _SHARED_WEIGHTS * _READ_ROWS:
        return 1
    return max(1, min(available(), num_rows // _ROWS_EACH))


def for_attention(num_rows: int, num_keys: int, width: int) -> int:
    """Threads for attention of `num_rows` query rows (of all heads) over `num_keys` keys of `width`."""
    return available() if num_rows * num_keys * width >= _SHARED_SCORES else 1


class using:  # contextlib would cost 10 us, a hundred times a step
    """`count` threads for the operations inside; `available` stays what it was."""

    __slots__ = ("_before", "_count", "_outer")

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._before, self._outer = torch.get_num_threads(), getattr(_device, "count", None)
        if self._count != self._before:
            _device.count = self._outer or self._before
            torch.set_num_threads(self._count)

    def __exit__(self, *_: object) -> None:
        if self._count != self._before:
            torch.set_num_threads(self._before)
            _device.count = self._outer
