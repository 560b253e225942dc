"""What a session keeps of a span: keys and values of every position, in blocks of 64 (native/kernels.h has their layout), and
the states of layers that have some instead (states.py), or the rings of what entries are made of (rings.py). Those of a GPU are
in cuda/span.py.

To roll back is to step from an earlier position: later positions are written again before they are read.
"""

from abc import ABC, abstractmethod
from typing import Final, Generic, Self, TypeVar

import numpy as np

from manyhands.engine import library
from manyhands.engine.compressed import block_bytes, index_bytes, ring_bytes
from manyhands.engine.layout import Segment
from manyhands.engine.library import BLOCK, Array, Plan
from manyhands.engine.rings import Rings
from manyhands.engine.states import (
    HOST,
    States,
    StateSizes,
    attention_states,
    convolution_states,
    pages,
    scan_states,
    session_bytes,
)
from manyhands.program.ops import (
    Attention,
    BlockIndex,
    CompressedAttention,
    Convolution,
    EntryIndex,
    Index,
    LatentAttention,
    Layer,
    LinearAttention,
    Pool,
    SelectiveScan,
)

B = TypeVar("B")

WIDE, NARROW = 32, 16  # keys, and values, are padded to a multiple of so many numbers
FIRST_BLOCKS: Final = 4  # for which a table has room at least: 256 positions

_CODES: Final = 32  # of a key or a value that share a scale of two bytes
_PAGES: Final = 1 << 16  # bytes: as many blocks as these hold are made at once


def bytes_per_position(layer: Layer, item: int, *, has_codes: bool = False) -> int:
    """Bytes that a layer caches for each position of a session, in numbers of `item` bytes or as codes of 8 bit."""
    return sum(_attention_bytes(op, layer, item, has_codes) for op in layer.attentions)


def _attention_bytes(
    op: Attention | LatentAttention | CompressedAttention, layer: Layer, item: int, has_codes: bool
) -> int:
    if isinstance(op, CompressedAttention):
        return -(-block_bytes(op, layer.compressed, item) // BLOCK)
    if isinstance(op, LatentAttention):  # values are the beginning of the keys
        return -(-(op.rank + op.rotary_width) // WIDE) * WIDE * item + _index_bytes(op, item)
    numbers = -(-op.width // WIDE) * WIDE + -(-op.value_width // NARROW) * NARROW
    scales = -(-op.width // _CODES) + -(-op.value_width // _CODES)
    index = _index_bytes(op, item)
    return op.kv_heads * (numbers + 2 * scales if has_codes else numbers * item) + index


def _index_bytes(op: Attention | LatentAttention, item: int) -> int:
    if isinstance(op.index, EntryIndex):
        return -(-index_bytes(op.index, op.rate, item) // BLOCK)
    return -(-op.index.width // WIDE) * WIDE * item if isinstance(op.index, Index | BlockIndex) else 0


def _sizes_of(op: Convolution | Pool | LinearAttention | SelectiveScan, item: int) -> StateSizes:
    if isinstance(op, Pool):
        return convolution_states(2 * op.width, op.rate, item)
    if isinstance(op, Convolution):
        return convolution_states(op.weight.outputs, op.length, item)
    if isinstance(op, SelectiveScan):
        return scan_states(op.width, op.columns)
    return attention_states(op.heads, op.kept_key_heads, op.width, op.value_width, by_channel=op.by_channel)


def state_bytes(layer: Layer, item: int) -> int:
    """Bytes that a layer's states, or rings, take of a session at most, where rows are numbers of `item` bytes."""
    sizes = [_sizes_of(op, item) for op in layer.recurrent]
    now = sum(size.now for size in sizes) + sum(ring_bytes(op, item) for op in layer.compressed)
    return session_bytes(sum(size.block for size in sizes), now)


class BlockCache(ABC, Generic[B]):
    """Blocks of 64 positions of one session for one plan, each made when its first position is written.

    `length` is the number of positions that are valid, kept by who steps. Blocks that a fork has in common with its source are
    written by neither: who steps into them gets copies first. A block's memory goes with the last cache that has it.
    """

    def __init__(self, block_bytes: int) -> None:
        self.length = 0
        self._block_bytes = block_bytes  # 0 of a plan that has none
        self._blocks: list[B] = []
        self._num_shared = 0  # of them, from the first on, another cache may have too

    @property
    def positions(self) -> int:
        """For which there is memory."""
        return len(self._blocks) * BLOCK

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the cache has, those it shares included."""
        return len(self._blocks) * self._block_bytes

    def reachable(self, position: int) -> int:
        """The greatest position, at most this one, from which a step or a fork can begin. It has been computed."""
        return position

    def fork(self, positions: int, capacity: int, mark: int = 0) -> Self:
        """A cache that begins with the first `positions` positions of this one, which `reachable` has given.

        They have whole blocks in common; of the block that is begun there is a copy. Raises ModelError where there is no room
        for it.
        """
        fork, whole = self._empty(capacity, positions, mark), positions // BLOCK
        begun = [self._copied(self._blocks[whole])] if positions % BLOCK else []
        fork._blocks, fork._num_shared, fork.length = self._blocks[:whole] + begun, whole, positions
        self._num_shared = max(self._num_shared, whole)
        fork._list(0)
        return fork

    def reserve(self, start: int, end: int) -> None:
        """Blocks of its own for positions [start, end), which a step writes; what lies before `start` stays.

        Raises ModelError where there is no room for all: a step from `start` or before it may follow.
        """
        if end > len(self._blocks) * BLOCK or start < self._num_shared * BLOCK:
            self._prepare(start, end)

    def _prepare(self, start: int, end: int) -> None:
        first = start // BLOCK
        if first < self._num_shared:
            begun = [self._copied(self._blocks[first])] if start % BLOCK else []
            self._blocks[first:] = begun
            self._num_shared, self.length = first, min(self.length, start)
        first = min(first, len(self._blocks))
        try:
            while len(self._blocks) * BLOCK < end:
                self._blocks.append(self._made())
        finally:
            self._list(first)

    @abstractmethod
    def _empty(self, capacity: int, positions: int, mark: int) -> Self:
        """A fork without blocks, of which `capacity` positions are expected."""

    @abstractmethod
    def _made(self) -> B:
        """A block of zeros."""

    @abstractmethod
    def _copied(self, block: B) -> B:
        """A block with the same in it."""

    @abstractmethod
    def _list(self, first: int) -> None:
        """Blocks from this one on are others than before, for who reads where they lie."""


class SessionCache(BlockCache[Array]):
    """Blocks in the host's memory, for the native engine, and states. `capacity` positions are expected; `mark`: see States."""

    def __init__(
        self, plan: Plan, capacity: int = 0, mark: int = 0, states: States[Array] | Rings | None = None
    ) -> None:
        super().__init__(plan.block_bytes)
        self.plan = plan
        self._states = states or _new_states(plan, mark)
        self._spare: list[Array] = []  # made with others, not used yet
        self._make_table(max(FIRST_BLOCKS, -(-capacity // BLOCK)))

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (0 if self._states is None else self._states.num_bytes)

    def reachable(self, position: int) -> int:
        return position if self._states is None else self._states.reachable(position)

    def segment(self, start: int, row: int, count: int) -> Segment:
        """Rows [row, row + count) of a step as the positions from `start` on. Makes the blocks that they need.

        Raises StateGone where there is no going back to `start`.
        """
        begun = None if self._states is None else self._states.begin(start, start + count)
        self.reserve(start, start + count)
        segment = Segment(self._address, len(self._blocks), start, row, count)
        if begun is not None:
            segment.states, segment.now = library.address(begun.table), begun.now
            segment.num_states, segment.from_ = len(begun.table), begun.origin
        return segment

    def done(self, end: int) -> None:
        """A step has computed up to position `end`."""
        self.length = end
        if self._states is not None:
            self._states.done(end)

    def _make_table(self, room: int) -> None:
        """Where the blocks lie, for the engine; its own address is given to every step."""
        self._table: Array = np.zeros(room, np.uintp)
        self._address = library.address(self._table)

    def _list(self, first: int) -> None:
        if len(self._blocks) > len(self._table):
            self._make_table(max(len(self._blocks), len(self._table) * 3 // 2))
            first = 0
        for number in range(first, len(self._blocks)):
            self._table[number] = library.address(self._blocks[number])

    def _empty(self, capacity: int, positions: int, mark: int) -> "SessionCache":
        return SessionCache(self.plan, capacity, mark, self._states and self._states.fork(positions, mark))

    def _made(self) -> Array:
        if not self._block_bytes:
            return _NOTHING
        if not self._spare:
            self._spare = _new_blocks(self._block_bytes, max(1, _PAGES // self._block_bytes))
        return self._spare.pop()

    def _copied(self, block: Array) -> Array:
        if not self._block_bytes:
            return _NOTHING
        (copy,) = _new_blocks(self._block_bytes, 1)
        copy[:] = block
        return copy


_NOTHING: Final[Array] = np.zeros(1, np.uint8)


def _new_states(plan: Plan, mark: int) -> States[Array] | Rings | None:
    if plan.state_bytes:
        return States(plan, HOST, mark)
    return Rings(plan) if plan.now_bytes else None


def _new_blocks(block_bytes: int, count: int) -> list[Array]:
    """Zeros that are the system's again when all of them are dropped. Raises ModelError."""
    return list(pages(count * block_bytes).reshape(count, block_bytes))
