"""What the links of one transport share: turns of the event loop, and memory."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from manyhands.core import NodeId
from manyhands.net.turn import Turn

logger = logging.getLogger(__name__)

# Frames under way, and messages not yet taken: of 256 links 1 MiB each, as much as an origin puts into a step.
RECEIVED_BYTES: Final = 256 << 20
# Not yet sent: as much as two data links may leave (unread.py).
UNSENT_BYTES: Final = 1 << 30


class Sharer(Protocol):
    """What a budget knows of a link."""

    @property
    def peer(self) -> NodeId: ...

    def num_received(self) -> int:
        """Bytes of memory for what came and was not taken."""

    def num_unsent(self) -> int:
        """Bytes that wait to be sent."""

    def abort(self, reason: str) -> None: ...


class Budget:
    """Bytes that links hold, at most `limit` together. Beyond it the peer with the most loses the link with its most.

    `measure` tells what a link holds now: less, perhaps, than when `note` was last called for it.
    """

    def __init__(self, limit: int, measure: Callable[[Sharer], int]) -> None:
        self.limit, self._measure = limit, measure
        self.total = 0
        self._held: dict[Sharer, int] = {}

    def __repr__(self) -> str:
        return f"<Budget {self.total} of {self.limit} bytes, {len(self._held)} links>"

    def share(self, link: Sharer, num_bytes: int) -> None:
        """`link` holds `num_bytes` now; the link that has to go is closed, which may be this one."""
        surplus = self.note(link, num_bytes)
        if surplus is not None:
            why = f"the links of this node hold more than {self.limit} bytes, and those of this peer the most"
            logger.warning("peer=%s: %s", surplus.peer, why)
            surplus.abort(why)

    def note(self, link: Sharer, num_bytes: int) -> Sharer | None:
        """As `share`, but the link that has to go is returned, not closed, and counts no more."""
        self._set(link, num_bytes)
        if self.total <= self.limit:
            return None
        for each in list(self._held):
            self._set(each, self._measure(each))
        if self.total <= self.limit:
            return None
        of_peer: Counter[NodeId] = Counter()
        for each, held in self._held.items():
            of_peer[each.peer] += held
        surplus = max(self._held, key=lambda each: (of_peer[each.peer], self._held[each]))
        self._set(surplus, 0)
        return surplus

    def _set(self, link: Sharer, num_bytes: int) -> None:
        self.total += num_bytes - self._held.pop(link, 0)
        if num_bytes:
            self._held[link] = num_bytes


@dataclass(frozen=True, slots=True)
class Shares:
    """Made once for a transport."""

    turn: Turn = field(default_factory=Turn)
    received: Budget = field(default_factory=lambda: Budget(RECEIVED_BYTES, lambda link: link.num_received()))
    unsent: Budget = field(default_factory=lambda: Budget(UNSENT_BYTES, lambda link: link.num_unsent()))
