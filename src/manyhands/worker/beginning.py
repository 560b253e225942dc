"""From where a place goes on: with a copy of what was parked, or with the cache that it has.

    Open(resume, resume_until) ─► fork                      Open of a later epoch (resume_until) ─► reached

Of a model with states not every position can be gone back to: a cache that changes on the device thread is asked there. Copies
wait for their turn there (copies.py), and hold nothing meanwhile: what is parked is looked up when it has come.
"""

from functools import partial
from typing import NamedTuple

from manyhands.engine.span import Cache, SpanRunner
from manyhands.wire.message import Open
from manyhands.worker.adopting import resumable
from manyhands.worker.engine import Engine
from manyhands.worker.opening import Opening
from manyhands.worker.parking import Parked, Parking
from manyhands.worker.places import Places
from manyhands.worker.session import HopSession


class Start(NamedTuple):
    """The cache that a new place begins with, None where it has its place already or begins with nothing; how many of the
    positions that the Open names are there to go on from; and what is parked of them, which may be the log alone."""

    cache: Cache | None
    cached: int
    parked: Parked | None


async def begun(engine: Engine, opening: Opening, parking: Parking, places: Places) -> Start:
    """What the place of `opening` begins with, of what is parked or served here. The model is loaded."""
    message = opening.message
    if (here := places.get(opening.place)) is not None:
        return Start(None, await _reached(engine, here, message.resume_until), None)
    if not _is_cached(parked := resumable(opening, parking, places.values())):
        return Start(None, 0, parked)
    del parked  # else it would keep its memory, though others may have its room by then

    def prepare() -> partial[Start]:
        assert engine.model is not None
        return partial(_forked, engine.model.runner, message, resumable(opening, parking, places.values()))

    return await engine.copy(message.origin, prepare)


def _is_cached(parked: Parked | None) -> bool:
    return parked is not None and parked.cache is not None


def _forked(runner: SpanRunner, message: Open, parked: Parked | None) -> Start:
    """With a cache that begins with what is parked; without one if nothing is left, or if it was dropped and forks share no
    memory."""
    if parked is None or (source := parked.cache) is None:
        return Start(None, 0, parked)
    most = min(message.resume_until, parked.positions, source.length, message.capacity)
    start = source.reachable(most) if parked.is_kept or runner.shares_blocks else 0
    cache = runner.fork(source, start, message.capacity, message.prompt_length) if start > 0 else None
    return Start(cache, start, parked)


async def _reached(engine: Engine, place: HopSession, until: int) -> int:
    """With none of a cache that has fewer: a step that was not due has rolled it back, or is about to; its rows may be wrong.

    Where states have to be asked that change on the device now, what waits is dropped: a new epoch begins.
    """
    assert engine.model is not None
    cache, changes_from = place.cache, engine.computes_from(place)

    def nearest() -> int:
        return cache.reachable(until) if until <= cache.length else 0

    if changes_from is None:
        return nearest()
    if not engine.model.runner.session_bytes:
        return nearest() if until <= changes_from else 0
    place.spoil()
    place.waiting.clear()
    reached = await engine.device.run(nearest)
    return 0 if place.is_closed else reached  # it may have ended meanwhile, with the link that it was opened over
