"""Whose sessions a node's are. Shared by all its spans: a session has one origin on the whole node. Pure."""

from typing import NamedTuple

from manyhands.core import NodeId, SessionId
from manyhands.errors import BadRequest


class _Held(NamedTuple):
    origin: NodeId
    places: int
    epoch: int  # the newest in which one of them was opened


class Owners:
    """The origin of every session that has a place, or is about to, on any span of this node, or that is its own.

    A session id is a capability of the origin that opened it: to others it is as if it were taken.
    """

    def __init__(self) -> None:
        self._held: dict[SessionId, _Held] = {}

    def __repr__(self) -> str:
        return f"<Owners of {len(self._held)} sessions>"

    def check(self, session: SessionId, origin: NodeId) -> None:
        """Raises BadRequest if the session belongs to another origin."""
        held = self._held.get(session)
        if held is not None and held.origin != origin:
            raise BadRequest("this session belongs to another node: open one of your own")

    def origins(self) -> list[NodeId]:
        """Whose sessions they are, one entry a session."""
        return [held.origin for held in self._held.values()]

    def hold(self, session: SessionId, origin: NodeId, epoch: int = 1, *, is_new: bool = True) -> None:
        """A place of the session, which `check` has admitted, is opened in `epoch`; one more of them if it `is_new`."""
        _, places, newest = self._held.get(session, _Held(origin, 0, 0))
        self._held[session] = _Held(origin, places + is_new, max(newest, epoch))

    def epoch_of(self, session: SessionId) -> int:
        """The newest in which a place of the session was opened here; 0 if it has none."""
        held = self._held.get(session)
        return held.epoch if held is not None else 0

    def release(self, session: SessionId) -> None:
        """One place fewer."""
        held = self._held[session]
        if held.places > 1:
            self._held[session] = held._replace(places=held.places - 1)
        else:
            del self._held[session]
