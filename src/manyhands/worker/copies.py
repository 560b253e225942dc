"""When copies of caches, one for each Open with `resume`, run on a span's device. Pure, but for futures.

    Open(resume) ─ add ─► turns, of each origin ─ next ─► slot of the device ─► device, one before each step that waits

Steps wait while a copy runs, which takes as long as many steps: up to 130 MB of a model with states are copied.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from manyhands.core import NodeId
from manyhands.errors import ShardUnavailable
from manyhands.worker.execute import Device
from manyhands.worker.slot import CopySlot

T = TypeVar("T")
ENDED: Final = "these layers are not served here any more: try another node"


class Copies:
    """Copies of a span that wait. Origins take turns; after each copy a step runs, if one waits. `slot`: of the device, which
    other spans may have; `when_free` is called when it is this one's turn."""

    def __init__(self, slot: CopySlot, when_free: Callable[[], None]) -> None:
        self._slot, self._when_free = slot, when_free
        self._turns: dict[NodeId, dict[asyncio.Future[None], None]] = {}  # in the order in which they run
        self._has_run = False  # a copy has run since the last step
        self._has_ended = False

    def __repr__(self) -> str:
        return f"<Copies of {len(self._turns)} origins>"

    def add(self, origin: NodeId) -> "asyncio.Future[None]":
        """A future that is done once one more copy of `origin` may run. A caller that no longer wants the copy cancels it.

        It fails with ShardUnavailable after `end`.
        """
        turn = asyncio.get_running_loop().create_future()
        if self._has_ended:
            turn.set_exception(ShardUnavailable(ENDED))
            return turn
        self._turns.setdefault(origin, {})[turn] = None
        turn.add_done_callback(partial(self._forget, origin))
        return turn

    def next(self, *, steps_wait: bool) -> "asyncio.Future[None] | None":
        """The future of the copy that runs next, which has the device's slot until `is_over`; None if a step is due first, or
        another span's copy runs, or none waits."""
        if not self._turns or (self._has_run and steps_wait) or not self._slot.take(self._when_free):
            return None
        while self._turns:
            origin = next(iter(self._turns))
            mine = self._turns.pop(origin)
            turn = next(iter(mine))
            del mine[turn]
            if mine:
                self._turns[origin] = mine
            if not turn.done():
                self._has_run = True
                return turn
        self._slot.free()
        return None

    def is_over(self) -> None:
        """The copy that `next` gave has ended, however."""
        self._slot.free()

    def step_runs(self) -> None:
        """A step runs now."""
        self._has_run = False

    def end(self) -> None:
        """No copy runs any more: futures of those that wait fail with ShardUnavailable."""
        for mine in self._turns.values():
            for turn in mine:
                if not turn.done():
                    turn.set_exception(ShardUnavailable(ENDED))
        self._turns.clear()
        self._has_ended = True
        self._slot.leave(self._when_free)

    def _forget(self, origin: NodeId, turn: "asyncio.Future[None]") -> None:
        """A turn is over, or was cancelled: then nothing is kept of it, however long steps take."""
        mine = self._turns.get(origin, {})
        mine.pop(turn, None)
        if not mine:
            self._turns.pop(origin, None)
        if not self._turns:
            self._slot.leave(self._when_free)


async def copied(
    turn: "asyncio.Future[None]",
    device: Device,
    prepare: Callable[[], Callable[[], T]],
    over: Callable[["asyncio.Future[Any]"], None],
) -> T:
    """What the function that `prepare` gives returns, on `device`; it is asked for it once it is its `turn`.

    `over` is called with a future that is done, once the device is free of it, however that ends: a copy that is given up while
    it runs ends first.
    """
    try:
        await turn
        function = prepare()
    except BaseException:
        if not turn.cancelled():  # given up in the turn of the event loop in which it came
            over(turn)
        del turn  # an error leads here, and is not to lead to itself
        raise
    return await _running(device, function, over)


def _running(
    device: Device, function: Callable[[], T], over: Callable[["asyncio.Future[Any]"], None]
) -> "asyncio.Future[T]":
    running = device.run(function)
    running.add_done_callback(over)
    return asyncio.shield(running)
