"""Whose sessions a node's are. Shared by all its spans: a session has one origin on the whole node. Pure."""

from manyhands.core import NodeId, SessionId
from manyhands.errors import BadRequest


class Owners:
    """The origin of every session that has a place, or is about to, on any span of this node, or that is its own.

    A session id is a capability of the origin that opened it: to others it is as if it were taken.
    """

    def __init__(self) -> None:
        self._held: dict[SessionId, tuple[NodeId, int]] = {}  # origin and places

    def __repr__(self) -> str:
        return f"<Owners of {len(self._held)} sessions>"

    def check(self, session: SessionId, origin: NodeId) -> None:
        """Raises BadRequest if the session belongs to another origin."""
        owner, _ = self._held.get(session, (origin, 0))
        if owner != origin:
            raise BadRequest("this session belongs to another node: open one of your own")

    def origins(self) -> list[NodeId]:
        """Whose sessions they are, one entry a session."""
        return [origin for origin, _ in self._held.values()]

    def hold(self, session: SessionId, origin: NodeId) -> None:
        """One more place of the session, which `check` has admitted."""
        self._held[session] = (origin, self._held.get(session, (origin, 0))[1] + 1)

    def release(self, session: SessionId) -> None:
        """One place fewer."""
        owner, places = self._held[session]
        if places > 1:
            self._held[session] = (owner, places - 1)
        else:
            del self._held[session]
