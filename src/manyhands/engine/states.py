"""The states of a session: of convolutions and linear attention, which each position changes (native/states.c).

A session has the state behind its last position, and blocks of 32 positions: in each the state before its first position and
what changed it at each. Not all blocks are kept, so not every earlier position can be gone back to; the last MOST_BACK can.
"""

import mmap
from typing import Final

import numpy as np

from manyhands.engine import library
from manyhands.engine.layout import STATE_BLOCK
from manyhands.engine.library import Array, Plan
from manyhands.errors import StateGone

RECENT: Final = 4  # blocks up to the last position that are kept
SPREAD: Final = 3  # of those before, at equal distances
MARGIN: Final = 8  # positions before a session's mark at which others part from it, as templates end prompts
MOST_KEPT: Final = RECENT + SPREAD + 2  # with the one of the mark, and one that a step begins in
MOST_BACK: Final = (RECENT - 1) * STATE_BLOCK  # positions before the last one that can always be gone back to


def kept_blocks(end: int, mark: int) -> frozenset[int]:
    """The numbers of the blocks that a session of `end` positions keeps, if it has had them: those that a longer one keeps are
    among these or newer.

    `mark`: a position near which other sessions are likely to go on from this one, the end of its prompt.
    """
    last = (end - 1) // STATE_BLOCK
    step = 1
    while last // step > SPREAD:
        step *= 2
    recent = range(max(0, last - RECENT + 1), last + 1)
    marked = [(mark - MARGIN) // STATE_BLOCK] if MARGIN < mark <= end else []
    return frozenset([*recent, *marked, *range(step, last, step)])


class States:
    """The states of one session for one plan that has some. `mark` as in `kept_blocks`.

    Blocks that a fork has in common with its source are written by neither.
    """

    def __init__(self, plan: Plan, mark: int = 0) -> None:
        self._plan, self._mark = plan, mark
        self._blocks: dict[int, Array] = {}  # by number
        self._shared: set[int] = set()  # of them, those that another session may have too
        self._spare: Array | None = None  # dropped, for the next block
        self._end = 0  # what blocks hold is right up to here
        self._at: int | None = None  # the positions that `_now` is the state behind
        self._is_begun = False  # a step: what it makes of blocks from `_end` on is not known
        self._now = _memory(plan.now_bytes)
        self._table: Array = np.zeros(8, np.uintp)

    @property
    def num_bytes(self) -> int:
        """Of memory, shared or not."""
        num_blocks = len(self._blocks) + (self._spare is not None)
        return num_blocks * self._plan.state_bytes + self._plan.now_bytes

    def reachable(self, position: int) -> int:
        """The greatest position, at most this one, from which a step or a fork can begin; 0 always can."""
        position = min(position, self._end)
        if position == self._at or self._source(position) is not None:
            return position
        before = [number for number in self._blocks if (number + 1) * STATE_BLOCK <= position and self._holds(number)]
        return (max(before) + 1) * STATE_BLOCK if before else 0

    def begin(self, start: int, end: int) -> tuple[int, int, int, int]:
        """Positions [start, end) are about to be computed: (table, now, entries of the table, from) of a Segment.

        Raises StateGone, and changes nothing, where `start` cannot be gone back to.
        """
        source = -1 if start == self._at else self._source(min(start, self._end))
        if start > self._end or (source is None and start):
            raise StateGone(f"position {start} was left long ago: the nearest state is that of {self.reachable(start)}")
        first, kept = start // STATE_BLOCK, kept_blocks(end, self._mark)
        left = {n for n in self._blocks if n <= first and (n in kept or n in (first, source)) and self._holds(n)}
        for number in self._blocks.keys() - left:
            self._drop(number)
        if source is None:  # from nothing
            self._drop(0)
            self._blocks[0], source = _memory(self._plan.state_bytes), 0
        if first in self._shared:
            self._own(first)
        for number in range(-(-start // STATE_BLOCK), (end - 1) // STATE_BLOCK + 1):
            if number in kept and number not in self._blocks:
                self._blocks[number], self._spare = self._fresh(), None
        self._at, self._end, self._is_begun = None, start, True
        self._list(end)
        origin = source if source < 0 else source * STATE_BLOCK
        return library.address(self._table) or 0, library.address(self._now) or 0, len(self._table), origin

    def done(self, end: int) -> None:
        """The step that began is over: there are `end` positions."""
        self._at, self._end, self._is_begun = end, end, False

    def fork(self, positions: int, mark: int) -> "States":
        """States that go on from the first `positions` of these, which `reachable` has given."""
        fork = States(self._plan, mark)
        begun = positions // STATE_BLOCK
        for number, block in self._blocks.items():
            if number < begun:
                fork._blocks[number] = block
        self._shared |= fork._blocks.keys()
        fork._shared |= fork._blocks.keys()
        if begun in self._blocks and positions % STATE_BLOCK:
            fork._blocks[begun] = fork._fresh()
            fork._blocks[begun][:] = self._blocks[begun]
        if positions == self._at:
            fork._now[:] = self._now
            fork._at = positions
        fork._end = positions
        return fork

    def _source(self, position: int) -> int | None:
        """The block from which the state before `position`, at most the last one, can be had; None: it is gone."""
        number = position // STATE_BLOCK
        if self._holds(number):
            return number
        return number - 1 if position % STATE_BLOCK == 0 and self._holds(number - 1) else None

    def _holds(self, number: int) -> bool:
        """Whether the state before a block's first position is known."""
        return number in self._blocks and not (self._is_begun and number * STATE_BLOCK >= self._end)

    def _fresh(self) -> Array:
        return _memory(self._plan.state_bytes) if self._spare is None else self._spare

    def _own(self, number: int) -> None:
        copy = self._fresh()
        self._spare = None
        copy[:] = self._blocks[number]
        self._blocks[number] = copy
        self._shared.discard(number)

    def _drop(self, number: int) -> None:
        block = self._blocks.pop(number, None)
        if number not in self._shared and block is not None:
            self._spare = block
        self._shared.discard(number)

    def _list(self, end: int) -> None:
        """Where the blocks of positions before `end` lie, for the engine."""
        entries = -(-end // STATE_BLOCK)
        if entries > len(self._table):
            self._table = np.zeros(max(entries, len(self._table) * 3 // 2), np.uintp)
        self._table[:] = 0
        for number, block in self._blocks.items():
            self._table[number] = library.address(block)


def session_bytes(state_bytes: int, now_bytes: int) -> int:
    """What the states of a session take at most, whatever its length, of blocks and a last state of so many bytes."""
    return (MOST_KEPT + 1) * state_bytes + now_bytes


def _memory(num_bytes: int) -> Array:
    """Zeros in pages of their own: the system's again when they are dropped."""
    return np.frombuffer(mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
