"""Keys and values of the sessions on one span, and the plan of one device step.

A session's cache is reserved whole when it is opened (a lease) and written at absolute positions, so a repeated step is
harmless and a step that starts earlier is a rollback: validity is the length, not the content. Memory is taken from the
system lazily (zero pages) as positions are written.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from manyhands.core import Span

# 512: the key block of torch's CPU flash kernel; shorter views change bits (runtime.md §3).
KEY_BLOCK = 512
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer caches per position: heads and widths. Values are stored as wide as keys (flash needs it)."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return max(self.key_dim, self.value_dim)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.heads * self.width * self.dtype.itemsize


class ShardCache:
    """Keys and values of one session for the layers of a span; [1, heads, capacity, width] each.

    `length` is the number of valid positions. Content beyond it is stale but finite. Owned by the session that reserved it.
    """

    def __init__(self, shapes: dict[int, LayerShape], capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.span = Span(min(shapes), max(shapes) + 1) if shapes else None
        rows = -(-capacity // KEY_BLOCK) * KEY_BLOCK
        self.keys = {layer: _zeros(shape, rows) for layer, shape in shapes.items()}
        self.values = {layer: _zeros(shape, rows) for layer, shape in shapes.items()}
        self._layers = array("q", bytes(32 * (max(shapes, default=-1) + 1)))
        for layer, shape in shapes.items():
            pointers = self.keys[layer].data_ptr(), self.values[layer].data_ptr()
            self._layers[4 * layer : 4 * layer + 4] = array("q", [*pointers, shape.heads, shape.width])

    def table(self) -> tuple[int, int, int]:
        """For the kernel: the address of (keys, values, heads, width) of every layer, their number, positions of each."""
        address, count = self._layers.buffer_info()
        return address, count // 4, -(-self.capacity // KEY_BLOCK) * KEY_BLOCK


def _zeros(shape: LayerShape, rows: int) -> Tensor:
    # calloc through numpy: pages are not touched until written, unlike torch.zeros.
    count = shape.heads * rows * shape.width * shape.dtype.itemsize
    raw = torch.from_numpy(np.zeros(count, dtype=np.uint8))
    return raw.view(shape.dtype).view(1, shape.heads, rows, shape.width)


@dataclass(slots=True)
class ShardSegment:
    """Rows [row, row + count) of a device step: positions [start, start + count) of one session."""

    cache: ShardCache
    start: int
    row: int
    count: int


@dataclass(slots=True)
class CacheProbe:
    """Stands in for a StepPlan once, at load time: records what each layer caches."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)


@dataclass(slots=True)
class StepPlan:
    """One device step: segments of different sessions, side by side in one tensor [rows, hidden]."""

    segments: list[ShardSegment]
    masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = field(default_factory=dict)
    num_rows: int = 0  # of all segments; known with the table
    _table: "array[int] | None" = None
    _once: dict[int, tuple[object, Any]] = field(default_factory=dict)

    def table(self) -> int:
        """For the kernel: the address of what it reads of the segments, which stay as they are from the first call on."""
        if self._table is None:
            numbers: list[int] = []
            for s in self.segments:  # not a comprehension: with cold caches each costs a hop 5 us
                numbers += (*s.cache.table(), s.start, s.row, s.count)
                self.num_rows += s.count
            self._table = array("q", numbers)
        return self._table.buffer_info()[0]

    def once(self, key: object, make: Callable[[], T]) -> T:
        """make(), called once in this step for the object `key`, which its layers share."""
        if id(key) not in self._once:
            self._once[id(key)] = key, make()
        made: T = self._once[id(key)][1]
        return made
