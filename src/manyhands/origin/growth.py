"""How the lease of a running session grows: it begins with a part of what its request may need, and more is asked for in time.

ask ─ Extend ─► hops and standbys ─ Extended ─► extended: the lease has what all hops grant
"""

import asyncio
import contextlib
import logging
import math
from typing import Final

from manyhands.config import RequestConfig
from manyhands.origin.pace import Pace, replay_s
from manyhands.origin.repair import RepairExecutor
from manyhands.origin.room import ANSWER_S, RoomWait
from manyhands.origin.session import Session

logger = logging.getLogger(__name__)

LEASE_TOKENS: Final = 1024  # of an answer, for which a lease has room at first, and by which it grows
AHEAD: Final = 256  # positions before the end of a lease from which on more are asked for


def first_lease(known: int, most: int) -> int:
    """Positions of the lease that a session begins with, of which `known` are known and `most` are needed in the end."""
    return min(most, known + LEASE_TOKENS)


class Growth:
    """Asks the hops of one session for leases of more positions, `most` in the end."""

    def __init__(self, session: Session, most: int, healer: RepairExecutor) -> None:
        self._session, self._most, self._healer = session, most, healer
        self._asked = 0, 0  # in which epoch, for how many positions
        self._first_asked_at = self._asked_at = -math.inf
        self._wait = RoomWait(self.leased)

    @property
    def leased(self) -> int:
        """Positions that all hops have leased."""
        return min(self._most, self._session.route.lease.capacity)

    @property
    def sendable(self) -> int:
        """How many ids may be sent: those that the lease holds, and not the last one of all, after which nothing is drawn."""
        return min(self.leased, self._most - 1)

    def look_ahead(self, known: int) -> None:
        """`known` positions are known, or guessed: ask for more if the end of the lease is near."""
        if known <= self.leased:
            self._healer.relief.let_go()
        if self.leased < self._most and known + AHEAD > self.leased:
            self._ask()

    def _ask(self) -> None:
        """Not again within ANSWER_S, in one epoch."""
        route, now = self._session.route, asyncio.get_running_loop().time()
        asked = route.epoch, min(self._most, self.leased + LEASE_TOKENS)
        if asked != self._asked:
            self._first_asked_at, self._asked_at = now, -math.inf
        if now >= self._asked_at + ANSWER_S:
            self._asked, self._asked_at = asked, now
            self._session.route.extend(asked[1])
            self._session.standbys.extend(asked[1])

    async def more(self, config: RequestConfig, pace: Pace, committed: int) -> bool:
        """Wait until the lease has grown; False if it does not within config.patience_s, some of which new positions buy back
        (room.py): no hop has room, or one has not, and no other can take its place.

        Raises HopLost where others can, and where a hop does not answer within config.reopen_timeout_s and by what event loops
        are late; what ends the session.
        """
        session, loop, before = self._session, asyncio.get_running_loop(), self.leased
        began, cost_s = loop.time(), replay_s(committed, pace.usual_s)
        self._wait.begin(before, pace.row_s)
        try:
            while self.leased == before:
                waited_s, late_s = loop.time() - began, self._healer.route_late_s()
                if self._wait.is_over(waited_s, config.patience_s):
                    full = [session.route.hops[index].offer.name for index in session.route.full]
                    logger.warning(
                        "session=%s ends at %d positions: %s have cache for no more", session.name, before, full
                    )
                    return False
                self._ask()
                if waited_s > config.reopen_timeout_s + late_s:
                    for index in session.route.not_extended:
                        session.lose(index, f"did not answer Extend within {waited_s:.0f} s")
                asked_s, patience_s = loop.time() - self._first_asked_at, config.patience_s
                if self._wait.replaces(waited_s, asked_s, replay_s=cost_s, late_s=late_s, patience_s=patience_s):
                    self._healer.relieve(session.route.full, committed)
                with contextlib.suppress(TimeoutError):
                    await session.next_result(ANSWER_S)  # none is due: it is woken when the lease has grown
            return True
        finally:
            self._wait.end(loop.time() - began)
