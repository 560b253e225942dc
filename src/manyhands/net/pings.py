"""How many Pings and Pongs a peer may send on one link. Pure: times are arguments.

They are taken where they arrive, before anything that waits, and fill no queue that would pause reading.
"""

from typing import Final

# A peer pings a link twice a second (liveness.py: HEARTBEAT_S) and answers as often. More come at once where this node did not
# read for a while; those of two minutes are taken together.
BURST: Final = 512
PER_S: Final = 16.0
# Pings of one read that are answered, the first ones: a peer waits for one answer at a time.
ANSWERED: Final = 8


class PingBudget:
    """What is left of BURST, which grows by PER_S."""

    def __init__(self, now: float) -> None:
        self._left, self._since = float(BURST), now

    def __repr__(self) -> str:
        return f"<PingBudget {self._left:.0f} of {BURST}>"

    def take(self, count: int, now: float) -> bool:
        """Count `count` more; whether they are within the bound."""
        self._left = min(float(BURST), self._left + (now - self._since) * PER_S) - count
        self._since = now
        return self._left >= 0
