"""The places that sessions have on one span. Pure."""

from collections.abc import Collection

from manyhands.core import ORIGIN_HOP, NodeId, SessionId
from manyhands.wire.message import Open
from manyhands.worker.leases import Place
from manyhands.worker.session import HopSession


class Places(dict[Place, HopSession]):
    """A session may have several places here: adjacent or not, after a repair that this node took part in twice. Changed by
    `put` and `remove`, which keep the index by hop."""

    def __init__(self) -> None:
        super().__init__()
        self._by_hop: dict[tuple[SessionId, int], HopSession] = {}

    def put(self, place: Place, session: HopSession) -> None:
        """`session` has `place`, as the hop of its newest Open, and is found by it."""
        self._forget_hop(session)
        self[place] = self._by_hop[place[0], session.opened.hop] = session
        if session.is_last:
            self._by_hop[place[0], ORIGIN_HOP] = session

    def remove(self, place: Place) -> None:
        """Nothing has `place` any more."""
        self._forget_hop(self.pop(place))

    def find(self, session_id: SessionId, hop: int, epoch: int) -> HopSession | None:
        """The place of hop `hop` in this epoch of the session (ORIGIN_HOP: of the last hop)."""
        found = self._by_hop.get((session_id, hop))
        return found if found is not None and found.opened.epoch == epoch else None

    def owned(self, session_id: SessionId, origin: NodeId) -> list[tuple[Place, HopSession]]:
        """All places of a session, if `origin` has opened it."""
        return [(p, s) for p, s in self.items() if p[0] == session_id and s.origin.peer == origin]

    def outlived(self, message: Open, origin: NodeId, opening: Collection[Place]) -> list[tuple[Place, HopSession]]:
        """Places of `message`'s session in older epochs that share layers with the new one, as no route has both; but for those
        that are being opened anew."""

        def is_outlived(place: Place, session: HopSession) -> bool:
            shares = place[1].start < message.span.end and message.span.start < place[1].end
            return shares and session.opened.epoch < message.epoch and place not in opening

        return [found for found in self.owned(message.session, origin) if is_outlived(*found)]

    def _forget_hop(self, session: HopSession) -> None:
        for key in [k for k, s in self._by_hop.items() if s is session]:
            del self._by_hop[key]
