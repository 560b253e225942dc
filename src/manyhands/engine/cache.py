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
FIRST_BLOCKS: Final = 4  # for which a table has room at least: 256 positions

_CODES: Final = 32  # of a key or a value that share a scale of two bytes
_PAGES: Final = 1 << 16  # bytes: as many blocks as these hold are made at once


def bytes_per_position(layer: Layer, item: int, *, has_codes: bool = False) -> int:
    """Bytes that a layer caches for each position of a session, in numbers of `item` bytes or as codes of 8 bit."""
    op = layer.attention
    if isinstance(op, LatentAttention):  # values are the beginning of the keys
        return -(-(op.rank + op.rotary_width) // WIDE) * WIDE * item
    numbers = -(-op.width // WIDE) * WIDE + -(-op.value_width // NARROW) * NARROW
    scales = -(-op.width // _CODES) + -(-op.value_width // _CODES)
    return op.kv_heads * (numbers + 2 * scales if has_codes else numbers * item)


class SessionCache:
    """Blocks of one session for one plan, each made when its first position is written. `capacity` positions are expected.

    `length` is the number of positions that are valid, kept by who steps. Blocks that a fork has in common with its source are
    written by neither: who steps into them gets copies first.
    """

    def __init__(self, plan: Plan, capacity: int = 0) -> None:
        self.plan = plan
        self.length = 0
        self._block_bytes = plan.block_bytes or 1  # of a plan that caches nothing
        self._blocks: list[Array] = []
        self._spare: list[Array] = []  # made with others, not used yet
        self._num_shared = 0  # of them, from the first on, another cache may have too
        self._make_table(max(FIRST_BLOCKS, -(-capacity // BLOCK)))

    def _make_table(self, room: int) -> None:
        """Where the blocks lie, for the engine; its own address is given to every step."""
        self._table: Array = np.zeros(room, np.uintp)
        self._address = library.address(self._table)
        self._list(0)

    def _list(self, first: int) -> None:
        for number in range(first, len(self._blocks)):
            self._table[number] = library.address(self._blocks[number])

    @property
    def positions(self) -> int:
        """For which there is memory."""
        return len(self._blocks) * BLOCK

    @property
    def num_bytes(self) -> int:
        """Of memory, shared or not."""
        return len(self._blocks) * self._block_bytes

    def fork(self, positions: int, capacity: int) -> "SessionCache":
        """A cache that begins with the first `positions` positions of this one, which has them.

        They have whole blocks in common; of the block that is begun there is a copy.
        """
        fork, whole = SessionCache(self.plan, capacity), positions // BLOCK
        fork._blocks, fork._num_shared, fork.length = self._blocks[:whole], whole, positions
        self._num_shared = max(self._num_shared, whole)
        if positions % BLOCK:
            fork._blocks.append(self._copied(whole))
        if len(fork._blocks) > len(fork._table):
            fork._make_table(len(fork._blocks))
        fork._list(0)
        return fork

    def segment(self, start: int, row: int, count: int) -> Segment:
        """Rows [row, row + count) of a step as the positions from `start` on. Makes the blocks that they need."""
        end = start + count
        if end > len(self._blocks) * BLOCK or start < self._num_shared * BLOCK:
            self._prepare(start, end)
        return Segment(self._address, len(self._blocks), start, row, count)

    def _prepare(self, start: int, end: int) -> None:
        """Blocks of its own for positions [start, end). What lies behind `start` is valid no more."""
        first = start // BLOCK
        if first < self._num_shared:
            begun = [self._copied(first)] if start % BLOCK else []
            self._blocks[first:] = begun
            self._num_shared = first
        first = min(first, len(self._blocks))
        while len(self._blocks) * BLOCK < end:
            if not self._spare:
                self._spare = _new_blocks(self._block_bytes, max(1, _PAGES // self._block_bytes))
            self._blocks.append(self._spare.pop())
        if len(self._blocks) > len(self._table):
            self._make_table(max(len(self._blocks), len(self._table) * 3 // 2))
        self._list(first)

    def _copied(self, number: int) -> Array:
        (copy,) = _new_blocks(self._block_bytes, 1)
        copy[:] = self._blocks[number]
        return copy


def _new_blocks(block_bytes: int, count: int) -> list[Array]:
    """Zeros in pages of their own: resident once they are written, and the system's again when all of them are dropped.

    The C library's heap keeps what was freed, and clears it for the next cache, all of which is resident then.
    """
    pages = mmap.mmap(-1, count * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return list(np.frombuffer(pages, np.uint8).reshape(count, block_bytes))
