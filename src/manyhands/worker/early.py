"""Steps that come before the session they belong to is open here: kept for its Open, within bounds. No I/O.

An origin sends the first rows of a prompt right behind its Opens (origin/first_rows.py). Those go over another link than the
Open, and a hop that has its place sends rows on to one that may not have it yet.
"""

from typing import Final, TypeVar

from manyhands.core import SessionId
from manyhands.net.transport import Link
from manyhands.wire.message import Open, Step

T = TypeVar("T")

# Of memory for one session, whose hops are not open. Its origin sends half as much at most until all have answered: a hop may
# send it on in several steps.
EARLY_BYTES: Final = 512 << 10
EARLY_SESSIONS: Final = 16  # that an origin has at a time
# Of sessions of one link whose Open has not come either; the oldest are dropped. A link between hops serves many origins.
LINK_SESSIONS: Final = 256
LINK_BYTES: Final = EARLY_SESSIONS * EARLY_BYTES
MAX_ENDED: Final = 1024  # sessions of which late steps are known as such
MAX_DROPPED: Final = 4096  # places whose steps were dropped for lack of room, so that their Opens are refused
STEP_BYTES, ID_BYTES = 1 << 10, 40  # of memory, for a step and for an id, beside the rows
Place = tuple[SessionId, int]  # a session and the hop that its steps are for


class EarlySteps:
    """The early steps of one session on one hop, in order: at most EARLY_BYTES, what comes beyond is dropped.

    `is_short`: some were dropped. What is here is of no use then: its origin does not send them again.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Step, Link]] = []
        self.num_bytes = 0
        self.is_short = False

    def add(self, step: Step, link: Link) -> None:
        ids, payload = step.ids or (), step.payload
        size = STEP_BYTES + ID_BYTES * len(ids) + (len(payload.data) if payload is not None else 0)
        self.is_short |= self.num_bytes + size > EARLY_BYTES
        if not self.is_short:
            self.steps.append((step, link))
            self.num_bytes += size


class Unopened:
    """The early steps of sessions whose Open has not come, by the link that they came on: at most LINK_SESSIONS and LINK_BYTES
    of each. The oldest are dropped, and remembered as such."""

    def __init__(self) -> None:
        self._by_link: dict[Link, dict[Place, EarlySteps]] = {}
        self._ended: dict[SessionId, None] = {}
        self._dropped: dict[Place, None] = {}

    def hold(self, step: Step, link: Link) -> bool:
        """Keep `step`, unless it comes too late, not too early (False): its session has ended, or was repaired."""
        if step.epoch > 1 or step.session in self._ended:
            return False
        sessions, name = self._by_link.setdefault(link, {}), (step.session, step.hop)
        if name in self._dropped:
            return True
        sessions.setdefault(name, EarlySteps()).add(step, link)
        while len(sessions) > LINK_SESSIONS or sum(each.num_bytes for each in sessions.values()) > LINK_BYTES:
            oldest = next(iter(sessions))
            del sessions[oldest]
            _remember(self._dropped, oldest, MAX_DROPPED)
        return True

    def take(self, message: Open) -> EarlySteps:
        """What the predecessor that `message` names has sent for its place. Nothing comes early for a later epoch."""
        name = message.session, message.hop
        found = [(link.peer, sessions.pop(name)) for link, sessions in self._by_link.items() if name in sessions]
        if message.epoch > 1:
            return EarlySteps()
        early = next((early for peer, early in found if peer == message.predecessor), EarlySteps())
        early.is_short |= name in self._dropped
        return early

    def end(self, session: SessionId) -> None:
        """Its origin has closed it; some of its steps may be on their way."""
        for sessions in self._by_link.values():
            for name in [name for name in sessions if name[0] == session]:
                del sessions[name]
        _remember(self._ended, session, MAX_ENDED)

    def drop(self, link: Link) -> None:
        """The link is gone, and what came on it."""
        self._by_link.pop(link, None)


def _remember(known: dict[T, None], one: T, most: int) -> None:
    """Add `one`; of more than `most` the oldest is forgotten."""
    known[one] = None
    if len(known) > most:
        del known[next(iter(known))]
