"""Who takes the places of hops that have no room for more positions: standbys that have it. Make before break."""

from collections.abc import Collection

from manyhands.core import NodeId, Span
from manyhands.origin.session import Session
from manyhands.origin.standby_search import Followers


class Relief:
    """Finds standbys with room for the hops of one session. `keeps`: it has standbys anyway. One that does not answer within
    `limit_s` is let go. Nothing here waits."""

    def __init__(self, session: Session, followers: Followers, limit_s: float, *, keeps: bool) -> None:
        self._session, self._followers, self._limit_s, self._keeps = session, followers, limit_s, keeps
        self._asked_at: dict[Span, float] = {}  # since when the present standby is asked for more room
        self._sought = set[Span]()

    def is_ready(self, spans: Collection[Span], excluded: Collection[NodeId], now: float) -> bool:
        """Whether the hops of `spans` all have standbys with room; else see to those that lack one."""
        standbys = self._session.standbys
        lacking = [span for span in spans if not standbys.has_room(span)]
        for span in lacking:
            if span not in standbys.by_span:
                self._asked_at.pop(span, None)
                self._sought.add(span)
                self._followers.look(span, excluded)
            elif now > self._asked_at.setdefault(span, now) + self._limit_s:
                standbys.found_full(span)
        return not lacking

    def let_go(self) -> None:
        """All hops have room: the standbys that were sought for want of it are not needed."""
        for span in [span for span in self._sought if not self._followers.looks_for(span)]:
            self._sought.discard(span)
            if not self._keeps and span in self._session.standbys.by_span:
                self._session.standbys.dismiss(span)
