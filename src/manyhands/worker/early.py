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
EARLY_SESSIONS: Final = 16  # that an origin has at a time
# Of sessions of one link whose Open has not come either; the oldest are dropped. A link between hops serves many origins.
LINK_SESSIONS: Final = 256
LINK_BYTES: Final = EARLY_SESSIONS * EARLY_BYTES
NODE_BYTES: Final = 8 * LINK_BYTES  # of all links; the oldest session of the link with the most is dropped
MAX_ENDED: Final = 1024  # sessions of which late steps are known as such
# Sessions of one link of which steps were dropped for lack of room, so that their Opens are refused.
MAX_DROPPED: Final = 1024
STEP_BYTES, ID_BYTES = 1 << 10, 40  # of memory, for a step and for an id, beside the rows


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
        size = STEP_BYTES + ID_BYTES * len(ids) + 2 * len(step.timings)  # which the frame's body has once more
        size += len(payload.data) if payload is not None else 0
        self.is_short |= self.num_bytes + size > EARLY_BYTES
        if not self.is_short:
            self.steps.append((step, link))
            self.num_bytes += size


class HeldOfLink:
    """The early steps that came on one link, by session and hop: found by name, never looked for."""

    def __init__(self) -> None:
        self.sessions: dict[SessionId, dict[int, EarlySteps]] = {}
        self.dropped: dict[SessionId, None] = {}  # of which no more is kept
        self.num_bytes = 0

    def add(self, step: Step, link: Link) -> bool:
        """Keep `step`; False if its place has no room for it."""
        early = self.sessions.setdefault(step.session, {}).setdefault(step.hop, EarlySteps())
        self.num_bytes -= early.num_bytes
        early.add(step, link)
        self.num_bytes += early.num_bytes
        return not early.is_short

    def pop(self, session: SessionId) -> dict[int, EarlySteps]:
        """What is held of a session, by hop; nothing of it is here any more."""
        places = self.sessions.pop(session, {})
        self.num_bytes -= sum(early.num_bytes for early in places.values())
        return places

    def drop(self, session: SessionId) -> None:
        """There is no room for what is held of a session."""
        self.pop(session)
        _remember(self.dropped, session, MAX_DROPPED)


class Unopened:
    """The early steps of sessions whose Open has not come, by the link that they came on: at most LINK_SESSIONS and LINK_BYTES
    of each, and NODE_BYTES. The oldest sessions are dropped, and remembered as such."""

    def __init__(self) -> None:
        self._by_link: dict[Link, HeldOfLink] = {}
        self._num_bytes = 0  # of all links
        self._ended: dict[SessionId, None] = {}

    def hold(self, step: Step, link: Link) -> bool:
        """Keep `step`, unless it comes too late, not too early (False): its session has ended, or was repaired."""
        if step.epoch > 1 or step.session in self._ended:
            return False
        held = self._by_link.setdefault(link, HeldOfLink())
        before = held.num_bytes
        if step.session not in held.dropped:
            if not held.add(step, link):
                held.drop(step.session)
            while len(held.sessions) > LINK_SESSIONS or held.num_bytes > LINK_BYTES:
                held.drop(next(iter(held.sessions)))
            self._num_bytes += held.num_bytes - before
            while self._num_bytes > NODE_BYTES:
                self._drop_of_most()
        return True

    def take(self, message: Open) -> EarlySteps:
        """What the predecessor named in `message` has sent for its place, which is then held no longer: the Open has a lease.
        Empty for later epochs, for which nothing comes early."""
        taken, is_short = EarlySteps(), False
        for link, held in self._by_link.items():
            is_short |= link.peer == message.predecessor and message.session in held.dropped
            places = held.sessions.get(message.session, {})
            if (early := places.pop(message.hop, None)) is not None:
                held.num_bytes -= early.num_bytes
                self._num_bytes -= early.num_bytes
                taken = early if link.peer == message.predecessor else taken
                if not places:
                    del held.sessions[message.session]
        if message.epoch > 1:
            return EarlySteps()
        taken.is_short |= is_short
        return taken

    def end(self, session: SessionId) -> None:
        """Its origin has closed it, open here or not; some of its steps may be on their way."""
        for held in self._by_link.values():
            before = held.num_bytes
            held.pop(session)
            self._num_bytes += held.num_bytes - before
        _remember(self._ended, session, MAX_ENDED)

    def drop(self, link: Link) -> None:
        """The link is gone, and what came on it."""
        held = self._by_link.pop(link, None)
        if held is not None:
            self._num_bytes -= held.num_bytes

    def _drop_of_most(self) -> None:
        """Drop the oldest session of the link that holds the most."""
        held = max(self._by_link.values(), key=lambda each: each.num_bytes)
        self._num_bytes -= held.num_bytes
        held.drop(next(iter(held.sessions)))
        self._num_bytes += held.num_bytes


def _remember(known: dict[SessionId, None], one: SessionId, most: int) -> None:
    """Add `one`, which is the newest. Of more than `most` the oldest is forgotten."""
    known.pop(one, None)
    known[one] = None
    if len(known) > most:
        del known[next(iter(known))]
