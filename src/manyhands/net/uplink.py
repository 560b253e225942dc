"""What this node's uplink carries, as seen on all its links: the most of the last minutes. Pure; time is an argument.

One link alone shows what the receiver takes, or its share of a busy uplink; the most that any showed is the nearest to what
the uplink carries. It ends after REMEMBER_S to twice that: an uplink that has become slower is noticed then.
"""

from typing import Final

from manyhands.net.liveness import LinkEvidence

REMEMBER_S: Final = 300.0
# A rate says what the way carries once slow start is over, after about so many bytes, and while so many go in a look; and what
# an uplink carries only where the peer is not on the local network, whose round trips are shorter.
PROVEN_BYTES: Final = 1 << 20
BUSY_BYTES: Final = 1 << 14
FAR_S: Final = 0.001


class Uplink:
    """Bytes per second; 0 while nothing has been seen."""

    def __init__(self) -> None:
        self._since = 0.0
        self._most = self._most_before = 0.0

    def __repr__(self) -> str:
        return f"<Uplink {max(self._most, self._most_before):.3g} B/s>"

    def observe(self, line: LinkEvidence, acked_before: int, now: float) -> None:
        """Note what a link shows now, of which `acked_before` bytes were acknowledged at the last look."""
        if line.uplink_Bps is None or line.num_acked is None or line.least_rtt_s < FAR_S:
            return
        if line.num_acked >= PROVEN_BYTES and line.num_acked - acked_before >= BUSY_BYTES:
            self._turn(now)
            self._most = max(self._most, line.uplink_Bps)

    def rate_Bps(self, now: float) -> float:
        self._turn(now)
        return max(self._most, self._most_before)

    def _turn(self, now: float) -> None:
        """Forget what is too old."""
        if now - self._since >= REMEMBER_S:
            is_recent = now - self._since < 2 * REMEMBER_S
            self._most_before, self._most, self._since = self._most if is_recent else 0.0, 0.0, now
