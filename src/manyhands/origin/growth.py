"""How the lease of a running session grows: it begins with a part of what its request may need, and more is asked for in time.

ask ─ Extend ─► hops and standbys ─ Extended ─► extended: the lease has what all hops grant
"""

import asyncio
import contextlib
import logging
import math
from typing import Final

from manyhands.config import RequestConfig
from manyhands.origin.session import Session

logger = logging.getLogger(__name__)

LEASE_TOKENS: Final = 1024  # of an answer, for which a lease has room at first, and by which it grows
AHEAD: Final = 256  # positions before the end of a lease from which on more are asked for
RETRY_S: Final = 1.0  # between two looks whether hops that had no room have some


def first_lease(known: int, most: int) -> int:
    """Positions of the lease that a session begins with, of which `known` are known and `most` are needed in the end."""
    return min(most, known + LEASE_TOKENS)


class Growth:
    """Asks the hops of one session for leases of more positions, `most` in the end."""

    def __init__(self, session: Session, most: int) -> None:
        self._session, self._most = session, most
        self._asked, self._asked_at = (0, 0), -math.inf  # in which epoch, for how many positions; when

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
        if self.leased < self._most and known + AHEAD > self.leased:
            self._ask()

    def _ask(self) -> None:
        """Not again within RETRY_S, in one epoch."""
        route, now = self._session.route, asyncio.get_running_loop().time()
        asked = route.epoch, min(self._most, self.leased + LEASE_TOKENS)
        if asked != self._asked or now >= self._asked_at + RETRY_S:
            self._asked, self._asked_at = asked, now
            self._session.route.extend(asked[1])
            self._session.standbys.extend(asked[1])

    async def more(self, config: RequestConfig, late_s: float) -> bool:
        """Wait until the lease has grown; False if it has not within config.patience_s: no hop has room, or one has not.

        Raises HopLost, also where a hop does not answer within config.reopen_timeout_s and `late_s`, by which event loops
        are late; what ends the session.
        """
        session, loop, before = self._session, asyncio.get_running_loop(), self.leased
        began = loop.time()
        while self.leased == before:
            waited_s = loop.time() - began
            if waited_s > config.patience_s:
                full = [hop.offer.name for hop in session.route.hops if hop.granted <= before]
                logger.warning("session=%s ends at %d positions: %s have cache for no more", session.name, before, full)
                return False
            self._ask()
            if waited_s > config.reopen_timeout_s + late_s:
                for index in session.route.not_extended:
                    session.lose(index, f"did not answer Extend within {waited_s:.0f} s")
            with contextlib.suppress(TimeoutError):
                await session.next_result(RETRY_S)  # none is due: it is woken when the lease has grown
        return True
