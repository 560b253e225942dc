"""What a node of the DHT takes from others: so many messages and records a second from each sender, and from all. Pure."""

from dataclasses import dataclass
from typing import Final

from manyhands.core import NodeId

MAX_PER_SECOND: Final = 200  # messages and records taken from one sender
# From all senders, 0.1 s of signatures; while that is spent, each sender still has its first few, of 256 links 0.2 s.
MAX_IN_ALL: Final = 1000
FAIR_PER_SECOND: Final = 8


@dataclass(slots=True)
class Counts:
    """Since the start. refused: bytes or records that mean nothing; stray: answers without a question; flooded: over a cap."""

    refused: int = 0
    stray: int = 0
    flooded: int = 0
    unanswered: int = 0


class SenderCap:
    """Counts what each sender has sent in the present second; what is over the cap grows `counts.flooded`."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._spent: dict[NodeId, int] = {}
        self._in_all = 0
        self._began_s = 0.0

    def tick(self, now: float) -> None:
        """Begin a new second if the present one is over."""
        if now - self._began_s >= 1.0:
            self._began_s = now
            self._spent.clear()
            self._in_all = 0

    def take(self, node: NodeId) -> bool:
        """Count one message or record of `node`. Returns whether it is within the caps."""
        spent = self._spent[node] = self._spent.get(node, 0) + 1
        is_taken = spent <= FAIR_PER_SECOND or (spent <= MAX_PER_SECOND and self._in_all < MAX_IN_ALL)
        self._in_all += is_taken
        self._counts.flooded += not is_taken
        return is_taken
