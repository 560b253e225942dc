"""A fetch, or a read of a whole model, beside the event loop: it does not keep a process that is told to end.

A thread that waits for the hub cannot be stopped. So the process does not wait for it (aside.py). Where it does not wait, it
ends where it next reports its progress: what has arrived is journaled, locks are released, and pip is ended.
"""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from manyhands.aside import aside
from manyhands.checkpoint.manifest import CheckedProgress, HashProgress

T = TypeVar("T")

END_S: Final = 0.5  # that a cancelled read has to end in order; pip is looked at every 0.2 s


class _Cancelled(Exception):
    """The read that reports its progress is not wanted any more."""


async def read_aside(read: Callable[[HashProgress], T], progress: HashProgress) -> T:
    """What `read`, which blocks and reports its progress to what it is given, returns or raises.

    Cancelled, it ends `read` at its next report, waits END_S for that at most, and leaves it to itself then.
    """
    is_cancelled = False

    def check() -> None:
        if is_cancelled:
            raise _Cancelled

    call = asyncio.ensure_future(aside(read, CheckedProgress(check, progress)))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        is_cancelled = True
        await asyncio.wait([call], timeout=END_S)
        if not call.cancel() and not call.cancelled():
            call.exception()  # seen, so that asyncio does not log it
        raise
