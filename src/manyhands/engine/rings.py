"""What entries are made of, of a session's last positions (native/compressed.c): as much as a step needs that begins at any
of the last MOST_BACK.

Of earlier positions blocks of the cache have what an entry needs that begins behind a block. So a step can begin where entries
of all layers begin, at every multiple of the plan's `apart` positions, far back too; and where the last one began.
"""

from typing import Final, NamedTuple

import numpy as np

from manyhands.engine.library import Array, Plan
from manyhands.engine.states import HOST, MOST_BACK, Begun
from manyhands.errors import StateGone

_NO_BLOCKS: Final[Array] = np.zeros(0, np.uintp)


class _Held(NamedTuple):
    """Rings that hold positions [base, end), as far as positions up to `most` have not taken their places."""

    rings: Array
    base: int
    most: int

    def has(self, position: int) -> bool:
        return max(self.base, self.most - MOST_BACK) <= position

    def copy(self, rings: Array | None = None) -> "_Held":
        rings = HOST.made(self.rings.nbytes) if rings is None else rings
        HOST.copy(rings, self.rings)
        return self._replace(rings=rings)


class Rings:
    """Those of one session for one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._now: _Held | None = None
        self._before: tuple[int, _Held] | None = None  # where a long step began, and what there was then
        self._end = 0  # positions that were computed

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that they have."""
        return sum(held is not None for held in (self._now, self._before)) * self._plan.now_bytes

    def reachable(self, position: int) -> int:
        """The greatest position, at most this one, from which a step or a fork can begin."""
        position = min(position, self._end)
        return position if self._held(position) else position // self._plan.apart * self._plan.apart

    def begin(self, start: int, end: int) -> Begun:
        """Positions [start, end) are about to be computed.

        Raises StateGone where `start` cannot be gone back to, ModelError where the memory has no room; nothing has changed
        then.
        """
        if (nearest := self.reachable(start)) < start:
            raise StateGone(f"position {start} was left long ago: the nearest to go on from is {nearest}")
        now = self._held(start)
        rings = HOST.made(self._plan.now_bytes) if self._now is None else self._now.rings
        self._before, self._end = None if now is None else self._left(start, end, now), start
        if now is not None and now.rings is not rings:
            HOST.copy(rings, now.rings)
        now = now or _Held(rings, start, start)
        self._now = _Held(rings, now.base, max(now.most, end))
        return Begun(_NO_BLOCKS, HOST.address(rings), -1)

    def done(self, end: int) -> None:
        """The step that began is over: there are `end` positions."""
        self._end = end

    def fork(self, positions: int, mark: int) -> "Rings":
        """Rings that go on from the first `positions` of these, which `reachable` has given. Raises ModelError where the
        memory has no room."""
        fork, held = Rings(self._plan), self._held(positions)
        fork._end = positions
        if held is not None and positions % self._plan.apart:
            fork._now = held.copy()
        return fork

    def _left(self, start: int, end: int, now: _Held) -> tuple[int, _Held] | None:
        """What is there before a step that leaves too little of it to begin again, in the memory of what was left before."""
        if self._before is not None and self._before[0] == start:
            return self._before
        if start % self._plan.apart == 0 or max(now.most, end) - start <= MOST_BACK:
            return None
        return start, now.copy(None if self._before is None else self._before[1].rings)

    def _held(self, position: int) -> _Held | None:
        """The rings from which a step can begin at a position, if there are such."""
        if self._now is not None and self._now.has(position):
            return self._now
        return self._before[1] if self._before is not None and self._before[0] == position else None
