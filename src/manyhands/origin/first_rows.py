"""Prompts as steps: their rows, embedded, in chunks; and the first of them, which leaves before the hops have answered.

Opens ─ FirstRows.send ─► hop 0 ...          all Opened ─ loop.py: Generation ─ embedded ─► the rest

A session that waits for its hops waits for a round trip; its first rows use it.
"""

from collections.abc import AsyncGenerator, Sequence
from functools import partial

from manyhands.config import RequestConfig
from manyhands.origin.ends_batch import EndsBatcher
from manyhands.origin.session import Session
from manyhands.route.chunks import first_rows
from manyhands.wire.message import Payload

Part = tuple[int, Sequence[int], Payload | None]


async def embedded(
    session: Session, ends: EndsBatcher | None, config: RequestConfig, start: int, ids: Sequence[int]
) -> AsyncGenerator[Part, None]:
    """(position, ids, hidden rows) of prefill-sized steps for `ids` at `start`; no rows where hop 0 embeds them (no `ends`)."""
    chunk = session.route.chunk_rows(len(ids), config)
    for at in range(0, len(ids), chunk):
        yield await _part(session, ends, start + at, ids[at : at + chunk])


async def _part(session: Session, ends: EndsBatcher | None, position: int, ids: Sequence[int]) -> Part:
    if ends is None:
        return position, ids, None
    as_sent = partial(session.route.as_sent, position=position)
    return position, ids, await ends.turn(None, lambda _: ids, None, as_sent)


class FirstRows:
    """The first rows of one request's `prompt`: as many as one step carries and hops hold of a session that is not open."""

    def __init__(self, prompt: Sequence[int], ends: EndsBatcher | None, config: RequestConfig) -> None:
        self._prompt, self._ends, self._config = prompt, ends, config

    async def send(self, session: Session) -> range:
        """Send them, from where the session expects to begin; their positions. Raises what has ended the session meanwhile."""
        start, route = session.begins_at, session.route
        left = len(self._prompt) - start
        most = first_rows(left, route.chunk_rows(left, self._config), route.row_bytes)
        if most < 1:
            return range(0)
        position, ids, payload = await _part(session, self._ends, start, self._prompt[start : start + most])
        last = len(self._prompt) - 1
        session.send(position, len(ids), last, None if payload is not None else tuple(ids), payload, len(self._prompt))
        return range(position, position + len(ids))


async def sent_first(session: Session) -> range:
    """The positions of the first rows, once they are sent; none if they are not sent apart."""
    return await session.first if session.first is not None else range(0)


def behind(first: range, session: Session, start: int) -> int:
    """The hops have answered, and begin at `start`: from where on the prompt is to be sent. First rows that were sent from
    elsewhere, as a hop was expected to have more cached, do not count: that hop drops them. Nor do those of a route that was
    changed since."""
    return first.stop if first and first.start == start and session.route.epoch == 1 else start
