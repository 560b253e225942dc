"""Prompts as steps: their rows, embedded, in chunks; and the first of them, which leaves before the hops have answered.

Opens ─ FirstRows.send ─► hop 0 ...          all Opened ─ loop.py: Generation ─ prefill_parts, embedded ─► the rest

A session that waits for its hops waits for a round trip; its first rows use it.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from manyhands.config import RequestConfig
from manyhands.origin.ends_batch import EndsBatcher
from manyhands.origin.session import Session
from manyhands.origin.standby import Standby
from manyhands.wire.message import Ids, Payload

Part = tuple[int, Sequence[int]]  # the position of the first id, and the ids


def prefill_parts(session: Session, config: RequestConfig, start: int, ids: Sequence[int]) -> Iterator[Part]:
    """`ids`, the first of them at position `start`, in prefill-sized steps."""
    chunk = session.route.chunk_rows(len(ids), config)
    return ((start + at, ids[at : at + chunk]) for at in range(0, len(ids), chunk))


async def embedded(
    session: Session, ends: EndsBatcher | None, position: int, ids: Sequence[int]
) -> tuple[Ids | None, Payload | None]:
    """What one step carries to hop 0: hidden rows, or the ids where that embeds them (no `ends`)."""
    if ends is None:
        return tuple(ids), None
    return None, await ends.turn(None, lambda _: ids, None, partial(session.route.as_sent, position=position))


async def feed_first(
    session: Session,
    ends: EndsBatcher | None,
    config: RequestConfig,
    standby: Standby,
    known: Sequence[int],
    until: int,
) -> None:
    """Send the standby of the first hop what it lacks of `known`, committed ids from position 0 on, up to `until`."""
    start, standby.fed = standby.fed, until
    for position, ids in prefill_parts(session, config, start, known[start:until]):
        rows = await embedded(session, ends, position, ids)
        session.standbys.feed_first(standby, position, len(ids), *rows)


class Prefill:
    """What is known as a route begins, or changes: it follows to hop 0 as there is room, so that a long prompt takes no more
    memory here than two steps for each credit."""

    def __init__(self, session: Session, ends: EndsBatcher | None, config: RequestConfig) -> None:
        self._session, self._ends, self._config = session, ends, config
        self._parts: Iterator[Part] = iter(())
        self._reply_from = 0

    @property
    def is_sent(self) -> bool:
        """Whether all of it has left."""
        return not self._session.returns.more_follows

    def begin(self, start: int, ids: Sequence[int], reply_from: int) -> None:
        """Send `ids` from position `start` on, and nothing else; the rows from `reply_from` on are to come back."""
        self._parts, self._reply_from = prefill_parts(self._session, self._config, start, ids), reply_from
        self._session.returns.more_follows = True

    def drop(self) -> None:
        """What has not left is guessed wrong."""
        self._parts, self._session.returns.more_follows = iter(()), False

    async def send(self, committed: int) -> None:
        """Send what there is room for; the session is woken once there is more. Raises what has ended the session.

        After a loss nothing is sent: a repair begins anew.
        """
        session = self._session
        while not self.is_sent and not session.losses and session.route.hops[0].has_room():
            if (part := next(self._parts, None)) is None:
                session.returns.more_follows = False
                return
            session.send(
                part[0], len(part[1]), self._reply_from, *await embedded(session, self._ends, *part), committed
            )


class FirstRows:
    """The first rows of one request's `prompt`: as many as one step carries and hops hold of a session that is not open."""

    def __init__(self, prompt: Sequence[int], ends: EndsBatcher | None, config: RequestConfig) -> None:
        self._prompt, self._ends, self._config = prompt, ends, config

    async def send(self, session: Session) -> range:
        """Send them, from where the session expects to begin; their positions. Raises what has ended the session meanwhile."""
        start, route = session.begins_at, session.route
        left = len(self._prompt) - start
        most = route.first_rows(left, self._config)
        if most < 1:
            return range(0)
        ids, last = self._prompt[start : start + most], len(self._prompt) - 1
        session.send(start, len(ids), last, *await embedded(session, self._ends, start, ids), len(self._prompt))
        return range(start, start + len(ids))


async def sent_first(session: Session) -> range:
    """The positions of the first rows, once they are sent; none if they are not sent apart."""
    return await session.first if session.first is not None else range(0)


def behind(first: range, session: Session, start: int) -> int:
    """The hops have answered, and begin at `start`: from where on the prompt is to be sent. First rows that were sent from
    elsewhere, as a hop was expected to have more cached, do not count: that hop drops them. Nor do those of a route that was
    changed since."""
    return first.stop if first and first.start == start and session.route.epoch == 1 else start
