"""Bodies of the directory that wait for one peer. Pure."""

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from manyhands.swarm.directory import Outgoing

MAX_QUEUED: Final = 64
MAX_QUEUED_BYTES: Final = 192 << 10  # 4 of the largest; of 256 peers that ask and do not read 48 MiB


class PeerQueue:
    """In order, the newest MAX_QUEUED, of MAX_QUEUED_BYTES together: older ones are dropped, as back-ends repeat themselves."""

    def __init__(self) -> None:
        self._waiting = deque["Outgoing"](maxlen=MAX_QUEUED)

    def put(self, item: "Outgoing") -> None:
        """Queue a body."""
        self._waiting.append(item)
        while sum(len(each.body) for each in self._waiting) > MAX_QUEUED_BYTES:
            self._waiting.popleft()

    def take(self) -> "Outgoing | None":
        """The next one; None: there is none."""
        return self._waiting.popleft() if self._waiting else None
