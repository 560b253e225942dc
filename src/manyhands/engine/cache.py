"""What a session keeps of a span: keys and values of every position, in blocks of 64 (native/kernels.h has their layout).

To roll back is to step from an earlier position: later positions are written again before they are read.
"""

import mmap
from typing import Final

import numpy as np

from manyhands.engine import library
from manyhands.engine.layout import Segment
from manyhands.engine.library import BLOCK, Array, Plan
from manyhands.program.ops import LatentAttention, Layer

WIDE, NARROW = 32, 16  # keys, and values, are padded to a multiple of so many numbers
FIRST_BLOCKS = 4  # of a cache that begins without memory: 256 positions

_CODES: Final = 32  # of a key or a value that share a scale of two bytes
_PAGES: Final = 1 << 16  # bytes from which memory is taken in pages


def bytes_per_position(layer: Layer, item: int, *, has_codes: bool = False) -> int:
    """Bytes that a layer caches for each position of a session, in numbers of `item` bytes or as codes of 8 bit."""
    op = layer.attention
    if isinstance(op, LatentAttention):  # values are the beginning of the keys
        return -(-(op.rank + op.rotary_width) // WIDE) * WIDE * item
    numbers = -(-op.width // WIDE) * WIDE + -(-op.value_width // NARROW) * NARROW
    scales = -(-op.width // _CODES) + -(-op.value_width // _CODES)
    return op.kv_heads * (numbers + 2 * scales if has_codes else numbers * item)


class SessionCache:
    """Memory of one session for one plan; zeros at first, of which only what was written is resident.

    Memory for `capacity` positions is there from the start; it grows by half, at least to what is asked for. `length` is the
    number of positions that are valid, kept by who steps.
    """

    def __init__(self, plan: Plan, capacity: int = 0) -> None:
        self.plan = plan
        self.length = 0
        self.blocks = -(-capacity // BLOCK)
        self._hold(_zeros(self.blocks * plan.block_bytes))

    def _hold(self, memory: Array) -> None:
        """Keep `memory` and its address, which every step gives to the engine."""
        self._bytes, self._address = memory, library.address(memory)

    @property
    def capacity(self) -> int:
        """Positions for which there is memory."""
        return self.blocks * BLOCK

    @property
    def num_bytes(self) -> int:
        return self._bytes.nbytes

    def reserve(self, positions: int) -> None:
        """Memory for the first `positions` positions; what was cached stays."""
        needed = -(-positions // BLOCK)
        if needed <= self.blocks:
            return
        blocks = max(needed, FIRST_BLOCKS, self.blocks * 3 // 2)
        grown = _zeros(blocks * self.plan.block_bytes)
        if self.blocks:
            self.plan.copy_cache(self._bytes, self.blocks, grown, blocks, self.blocks)
        self._hold(grown)
        self.blocks = blocks

    def take(self, source: "SessionCache", start: int, end: int) -> None:
        """Copy positions [start, end) of another cache of the plan; `start` is a multiple of 64. Both have memory for them."""
        first, keep = start // BLOCK, -(-end // BLOCK)
        self.plan.copy_cache(source._bytes, source.blocks, self._bytes, self.blocks, keep, first)
        self.length = end

    def segment(self, start: int, row: int, count: int) -> Segment:
        """Rows [row, row + count) of a step as the positions from `start` on. Reserves their memory."""
        if start + count > self.blocks * BLOCK:
            self.reserve(start + count)
        return Segment(self._address, self._bytes.nbytes, self.blocks, start, row, count)


def _zeros(num_bytes: int) -> Array:
    """Bytes in pages of their own: resident once they are written, and the system's again as soon as they are dropped.

    The C library's heap keeps what was freed, and clears it for the next cache, all of which is resident then.
    """
    if num_bytes < _PAGES:
        return np.zeros(num_bytes, np.uint8)
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
