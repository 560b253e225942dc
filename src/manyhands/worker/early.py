"""Steps that come before the session they belong to is open here: kept for its Open, within bounds. No I/O.

An origin sends the first rows of a prompt right behind its Opens (origin/first_rows.py). Those go over another link than the
Open, and a hop that has its place sends rows on to one that may not have it yet.
"""

from typing import Final

from manyhands.core import SessionId
from manyhands.net.transport import Link
from manyhands.wire.message import Open, Step

# Of memory for one session, whose hops are not open. Its origin sends half as much at most until all have answered: a hop may
# send it on in several steps.
EARLY_BYTES: Final = 512 << 10
# Sessions of one link whose Open has not come either; the oldest is dropped. An origin has no more of them at a time.
EARLY_SESSIONS: Final = 16
STEP_BYTES, ID_BYTES = 1 << 10, 40  # of memory for a step and for an id, beside the rows


class EarlySteps:
    """The early steps of one session on one hop, in order: at most EARLY_BYTES, what comes beyond is dropped."""

    def __init__(self) -> None:
        self.steps: list[tuple[Step, Link]] = []
        self._left = EARLY_BYTES

    def add(self, step: Step, link: Link) -> None:
        ids, payload = step.ids or (), step.payload
        self._left -= STEP_BYTES + ID_BYTES * len(ids) + (len(payload.data) if payload is not None else 0)
        if self._left >= 0:
            self.steps.append((step, link))


class Unopened:
    """The early steps of sessions whose Open has not come, by the link that they came on: at most EARLY_SESSIONS of each."""

    def __init__(self) -> None:
        self._by_link: dict[Link, dict[tuple[SessionId, int], EarlySteps]] = {}

    def hold(self, step: Step, link: Link) -> bool:
        """Keep `step`, unless it is of a session that was repaired: then it comes too late, not too early (False)."""
        if step.epoch > 1:
            return False
        sessions, name = self._by_link.setdefault(link, {}), (step.session, step.hop)
        if name not in sessions and len(sessions) >= EARLY_SESSIONS:
            del sessions[next(iter(sessions))]
        sessions.setdefault(name, EarlySteps()).add(step, link)
        return True

    def take(self, message: Open) -> EarlySteps:
        """What the predecessor that `message` names has sent for its place."""
        name = message.session, message.hop
        found = [(link.peer, sessions.pop(name)) for link, sessions in self._by_link.items() if name in sessions]
        return next((early for peer, early in found if peer == message.predecessor), EarlySteps())

    def drop(self, link: Link) -> None:
        """The link is gone, and what came on it."""
        self._by_link.pop(link, None)
