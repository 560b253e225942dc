"""The states of a session: of convolutions and linear attention, which each position changes (native/states.c).

A session has the state behind its last position, and blocks of 32 positions: in each the state before its first position and
what changed it at each. Not all blocks are kept, so not every earlier position can be gone back to; the last MOST_BACK can.
"""

import mmap
from collections.abc import Collection
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from manyhands.engine import library
from manyhands.engine.layout import STATE_BLOCK
from manyhands.engine.library import Array
from manyhands.errors import ModelError, StateGone

B = TypeVar("B")

DELTA_RULE, DELTA_SUM, DELTA_BY_CHANNEL, DELTA_SCAN = range(4)  # forms of linear attention (native/kernels.h)
TILE: Final = 32  # columns of a head's state that lie together
_LINE: Final = 64  # bytes: what an operation keeps begins at multiples
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


class StateMemory(Protocol[B]):
    """Where the states of sessions lie: in the host's memory (HOST), or on a device."""

    def made(self, num_bytes: int) -> B:
        """Zeros. Raises ModelError where there is no room."""
        ...

    def copy(self, target: B, source: B) -> None:
        """Copy all bytes of `source` into `target`."""
        ...

    def address(self, block: B) -> int:
        """Where the engine finds it."""
        ...


class WithStates(Protocol):
    """A plan whose sessions have states."""

    @property
    def state_bytes(self) -> int:
        """Bytes of a block of states."""
        ...

    @property
    def now_bytes(self) -> int:
        """Bytes of the state behind the last position."""
        ...


class Begun(NamedTuple):
    """Where the states of positions that are about to be computed lie (Segment in native/plan.h)."""

    table: Array  # uintp: of each block up to the last position's its address; 0: not kept
    now: int  # the address of the state behind the last position
    origin: (
        int  # the first position of the block from which the state before `start` is computed; -1: `now` is that state
    )


class States(Generic[B]):
    """The states of one session for one plan that has some. `mark` as in `kept_blocks`.

    Blocks that a fork has in common with its source are written by neither.
    """

    def __init__(self, plan: WithStates, memory: StateMemory[B], mark: int = 0) -> None:
        self._plan, self._memory, self._mark = plan, memory, mark
        self._blocks: dict[int, B] = {}  # by number
        self._shared: set[int] = set()  # of them, those that another session may have too
        self._spare: B | None = None  # dropped, for the next block
        self._end = 0  # what blocks hold is right up to here
        self._at: int | None = None  # the positions that `_now` is the state behind
        self._unknown: set[int] = set()  # numbers of blocks that a step which has not ended is to fill
        self._now: B | None = None  # made by the first step, where the device is
        self._table: Array = np.zeros(8, np.uintp)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the states have, shared blocks included."""
        num_blocks = len(self._blocks) + (self._spare is not None)
        return num_blocks * self._plan.state_bytes + (self._now is not None) * self._plan.now_bytes

    def reachable(self, position: int) -> int:
        """The greatest position, at most this one, from which a step or a fork can begin; 0 always can."""
        position = min(position, self._end)
        if position == self._at or self._source(position) is not None:
            return position
        before = [number for number in self._blocks if (number + 1) * STATE_BLOCK <= position and self._holds(number)]
        return (max(before) + 1) * STATE_BLOCK if before else 0

    def check(self, start: int) -> None:
        """Raises StateGone where `start` cannot be gone back to."""
        if (nearest := self.reachable(start)) < start:
            raise StateGone(f"position {start} was left long ago: the nearest state is that of {nearest}")

    def begin(self, start: int, end: int) -> Begun:
        """Positions [start, end) are about to be computed.

        Raises StateGone where `start` cannot be gone back to, ModelError where the memory has no room; nothing has changed
        then.
        """
        self.check(start)
        now = self._now = self._memory.made(self._plan.now_bytes) if self._now is None else self._now
        is_now, source = start == self._at, self._source(start)
        first, kept = start // STATE_BLOCK, kept_blocks(end, self._mark)
        stays = {n for n in self._blocks if n <= first and (n in kept or n in (first, source)) and self._holds(n)}
        new = [n for n in range(-(-start // STATE_BLOCK), (end - 1) // STATE_BLOCK + 1) if n in kept and n not in stays]
        if source is None:  # from nothing
            self._spare = None  # freed first: with the block of zeros there are MOST_KEPT + 1 blocks at most
            zeros = self._memory.made(self._plan.state_bytes)
            new = [number for number in new if number]
            self._exchange(stays, None, new)
            self._blocks[0], source = zeros, 0
        else:  # its block stays also where `_now` is that state: a step that fails loses `_now`
            self._exchange(stays, first if first in self._shared & stays else None, new)
        self._at, self._end, self._unknown = None, start, set(new)
        self._list(end)
        origin = -1 if is_now else source * STATE_BLOCK
        return Begun(self._table, self._memory.address(now), origin)

    def done(self, end: int) -> None:
        """The step that began is over: there are `end` positions."""
        self._at, self._end, self._unknown = end, end, set()

    def fork(self, positions: int, mark: int) -> "States[B]":
        """States that go on from the first `positions` of these, which `reachable` has given. Raises ModelError where the
        memory has no room."""
        fork = States(self._plan, self._memory, mark)
        begun = positions // STATE_BLOCK
        fork._blocks = {number: block for number, block in self._blocks.items() if number < begun}
        fork._shared = set(fork._blocks)
        if self._holds(begun) and positions and (positions % STATE_BLOCK or begun - 1 not in fork._blocks):
            fork._blocks[begun] = self._memory.made(self._plan.state_bytes)
            self._memory.copy(fork._blocks[begun], self._blocks[begun])
        if positions == self._at and self._now is not None:
            fork._now = self._memory.made(self._plan.now_bytes)
            self._memory.copy(fork._now, self._now)
            fork._at = positions
        fork._end = positions
        self._shared |= fork._shared
        return fork

    def _source(self, position: int) -> int | None:
        """The block from which the state before `position`, at most the last one, can be had; None: it is gone."""
        number = position // STATE_BLOCK
        if self._holds(number):
            return number
        return number - 1 if position % STATE_BLOCK == 0 and self._holds(number - 1) else None

    def _holds(self, number: int) -> bool:
        """Whether the state before a block's first position is known."""
        return number in self._blocks and number not in self._unknown

    def _exchange(self, stays: Collection[int], owned: int | None, new: Collection[int]) -> None:
        """Drop the blocks that are not in `stays`, replace the shared block `owned` by a copy, and add blocks `new`.

        Memory of dropped blocks that no other session shares is used first. Raises ModelError where there is no room;
        nothing has changed then.
        """
        going = self._blocks.keys() - stays
        free = [self._blocks[number] for number in sorted(going - self._shared)]
        free += [] if self._spare is None else [self._spare]
        while len(free) < len(new) + (owned is not None):
            free.append(self._memory.made(self._plan.state_bytes))
        for number in going:
            del self._blocks[number]
        if owned is not None:
            self._memory.copy(free[-1], self._blocks[owned])
            self._blocks[owned] = free.pop()
        self._shared -= going | {owned}
        for number in new:
            self._blocks[number] = free.pop()
        self._spare = free.pop() if free else None

    def _list(self, end: int) -> None:
        """Where the blocks of positions before `end` lie, for the engine."""
        entries = -(-end // STATE_BLOCK)
        if entries > len(self._table):
            self._table = np.zeros(max(entries, len(self._table) * 3 // 2), np.uintp)
        self._table[:] = 0
        for number, block in self._blocks.items():
            self._table[number] = self._memory.address(block)


class StateSizes(NamedTuple):
    """Bytes that an operation takes of a block, and of the state behind the last position (native/states.c)."""

    block: int
    now: int


def convolution_states(columns: int, taps: int, item: int) -> StateSizes:
    """What a convolution of `taps` taps keeps, over rows of `columns` numbers of `item` bytes."""
    row = columns * item
    return StateSizes(_lines((taps - 1 + STATE_BLOCK) * row), _lines((taps - 1) * row))


def attention_states(
    heads: int, key_heads: int, width: int, value_width: int, *, by_channel: bool = False
) -> StateSizes:
    """Of linear attention: keys of `width` numbers, values of `value_width`, all in fp32; decays of heads, or of each number of
    their keys."""
    state = heads * -(-value_width // TILE) * TILE * width * 4
    inputs = key_heads * width + heads * (value_width + (width if by_channel else 1) + 1)
    return StateSizes(_lines(state + STATE_BLOCK * inputs * 4), _lines(state))


def scan_states(width: int, columns: int) -> StateSizes:
    """Of a selective scan of `columns` columns whose states have `width` numbers, all in fp32."""
    state = -(-columns // TILE) * TILE * width * 4
    return StateSizes(_lines(state + STATE_BLOCK * (width + 2 * columns) * 4), _lines(state))


def delta_form(is_sum: bool, by_channel: bool) -> int:
    """The form of linear attention."""
    return DELTA_BY_CHANNEL if by_channel else DELTA_SUM if is_sum else DELTA_RULE


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


def session_bytes(state_bytes: int, now_bytes: int) -> int:
    """What the states of a session take at most, whatever its length, of blocks and a last state of so many bytes; without
    blocks its rings, twice (rings.py)."""
    return (MOST_KEPT + 1) * state_bytes + now_bytes * (1 if state_bytes else 2)


def pages(num_bytes: int) -> Array:
    """Zeros in pages of their own: resident once they are written, and the system's again when the array is dropped. Raises
    ModelError where the system has no room.

    The C library's heap keeps what was freed, and clears it for the next array, all of which is resident then.
    """
    try:
        mapped = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ModelError(
            f"the system gives no {num_bytes} bytes for a session's cache ({error.strerror}): give the node less cache "
            "(--memory, --cache-tokens), or end what else uses the memory"
        ) from error
    return np.frombuffer(mapped, np.uint8)


class _Host:
    """StateMemory in `pages`."""

    def made(self, num_bytes: int) -> Array:
        return pages(num_bytes)

    def copy(self, target: Array, source: Array) -> None:
        target[:] = source

    def address(self, block: Array) -> int:
        return library.address(block) or 0


HOST: Final = _Host()
