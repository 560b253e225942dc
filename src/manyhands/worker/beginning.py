"""From where a place goes on: with a copy of what was parked, or with the cache that it has.

    Open(resume, resume_until) ─► fork                      Open of a later epoch (resume_until) ─► reached

Caches are asked on the device thread, where they change: of a model with states not every position can be gone back to. Copies
wait for their turn there (copies.py).
"""

from manyhands.engine.span import Cache
from manyhands.wire.message import Open
from manyhands.worker.engine import Engine
from manyhands.worker.parking import Parked
from manyhands.worker.session import HopSession


async def begun(
    engine: Engine, message: Open, here: HopSession | None, parked: Parked | None
) -> tuple[Cache | None, int]:
    """The cache that a new place begins with, None where the place is `here` or begins with nothing; and how many of the
    positions that the Open names are there to go on from."""
    if here is not None:
        return None, await _reached(engine, here, message.resume_until)
    cache = None if parked is None else await _fork(engine, parked, message)
    return cache, 0 if cache is None else cache.length


async def _fork(engine: Engine, parked: Parked, message: Open) -> Cache | None:
    """A cache that begins with what is parked. None if nothing is left, or if it was dropped and forks share no memory."""
    assert engine.model is not None
    runner, source = engine.model.runner, parked.cache
    if source is None:
        return None

    def forked() -> Cache | None:
        most = min(message.resume_until, parked.positions, source.length, message.capacity)
        start = source.reachable(most) if parked.is_kept or runner.shares_blocks else 0
        return runner.fork(source, start, message.capacity, message.prompt_length) if start > 0 else None

    return await engine.copy(message.origin, forked)


async def _reached(engine: Engine, place: HopSession, until: int) -> int:
    """With none of a cache that has fewer: a step that was not due has rolled it back, and its rows may be wrong.

    Where states have to be asked, what waits is dropped: a new epoch begins.
    """
    assert engine.model is not None
    cache = place.cache

    def nearest() -> int:
        return cache.reachable(until) if until <= cache.length else 0

    if not engine.model.runner.session_bytes:
        return nearest()
    place.spoil()
    place.waiting.clear()
    reached = await engine.device.run(nearest)
    return 0 if place.is_closed else reached  # it may have ended meanwhile, with the link that it was opened over
