"""Slow, frozen or cut off: what the silence of a peer means. Pure: evidence in, verdict out; time is an argument.

Two things move at a peer that is well: its kernel acknowledges what was sent, and its event loop answers pings. What is seen
of both, and how late event loops have run lately, here and there, decides how long silence is borne:

    the kernel acknowledges nothing            cut off        SUSPECT_S
    it does, the loop does not answer          frozen, busy   SUSPECT_S, stretched by lateness up to PATIENCE_S
    the same, and nothing waits for the peer   loading, busy  PATIENCE_S
    another link of the pair was given up      the same       PROBE_S
    it acknowledges nothing, and called anew,  one of the     PROBE_S
        or this machine's network is another   two moved

Silence is measured on a clock that stands still while this process does not run (stalls.py), so a node that was starved,
stopped or suspended holds that against no peer.
"""

from collections import deque
from typing import Literal, NamedTuple

HEARTBEAT_S = 0.5  # between two pings of a link
# Where bytes come at every look, and ours get there, a ping tells only how late the peer is: every fourth beat is enough.
HEARD_BEATS = 4
SUSPECT_S = 3.0
# However busy machines are, a peer that answers within so long is not gone.
PATIENCE_S = 10.0
# Silence of the other links of a pair of which one was given up, or that is doubted: pings are on their way already.
PROBE_S = 1.0
MAX_STRETCH_S = PATIENCE_S - SUSPECT_S  # of a deadline (stretched_s)
TICK_S = 0.25  # between two looks at every link
# A freeze or a cut between machines that are not late is found within so long: a beat, a look, SUSPECT_S, a look.
FOUND_S = HEARTBEAT_S + SUSPECT_S + 2 * TICK_S
# A loop that was late by so much may be late by ten times as much: 0.7 s of lateness stretch SUSPECT_S to PATIENCE_S.
STRETCH = 10.0
ANSWERS = 64  # that lateness is judged by: half a minute and more
ROUNDING_S = 1e-6  # of sums of seconds

Verdict = Literal["alive", "cut", "frozen"]


class LinkEvidence(NamedTuple):
    """What a link measures of its connection. `num_acked` counts bytes that the peer's kernel has acknowledged,
    `has_unacked` whether some were sent that it has not; both None where the system does not say. While `is_reading` is
    false, this node takes nothing, so that it cannot have read the peer's messages. `uplink_Bps`: bytes a second that it
    carried when there was enough to send, None if that is not known; `least_rtt_s`: the shortest round trip of its
    packets, 0 if not known; `local_host`: the address of this machine that it goes from, None if not known."""

    num_received: int
    is_reading: bool = True
    num_acked: int | None = None
    has_unacked: bool | None = None
    uplink_Bps: float | None = None
    least_rtt_s: float = 0.0
    local_host: str | None = None


def patience_s(late_s: float) -> float:
    """How long the loop of a peer may be silent, on machines whose loops were late by `late_s`."""
    return min(PATIENCE_S, SUSPECT_S + STRETCH * late_s)


def stretched_s(limit_s: float, late_s: float) -> float:
    """A deadline of `limit_s` for an answer, on machines whose loops were late by `late_s`: up to MAX_STRETCH_S more."""
    return limit_s + patience_s(late_s) - SUSPECT_S


class Pulse:
    """What is known of one link's peer. Times are those of an awake clock (Stalls.awake_s), in seconds.

    `observe` is called a few times a second, `asked` when a ping is sent that waits for its answer, `answered` when it came.
    """

    def __init__(self, now: float) -> None:
        self._heard_at = self._moved_at = now
        self.asked_at: float | None = None  # when the ping was sent that waits for its answer
        self._line = LinkEvidence(0)
        self._is_well = False  # by the last look: bytes had come, and what was sent got there
        self._took_s: deque[float] = deque(maxlen=ANSWERS)

    def asked(self, now: float) -> None:
        self.asked_at = now

    def answered(self, now: float) -> None:
        if self.asked_at is not None:
            self._took_s.append(now - self.asked_at)
        self.asked_at = None
        self._heard_at = now

    @property
    def late_s(self) -> float:
        """How late the peer's loop has answered lately: the spread of its answers, not their length, which is the line's."""
        return max(self._took_s) - min(self._took_s) if self._took_s else 0.0

    def observe(self, line: LinkEvidence, now: float) -> None:
        """Note what the link measures now."""
        has_spoken = line.num_received != self._line.num_received
        has_moved = line.num_acked != self._line.num_acked or not line.has_unacked
        if has_spoken or not line.is_reading:
            self._heard_at = now
        if has_moved:
            self._moved_at = now
        self._is_well = has_spoken and has_moved
        self._line = line

    def beat_s(self, every_s: float) -> float:
        """How long after a beat the next is due: `every_s`, or more while the peer is heard and what is sent gets there.

        After one look without that the beat is due as ever, so what is gone is found as soon.
        """
        return HEARD_BEATS * every_s if self._is_well else every_s

    def judge(self, now: float, borne_s: float, *, is_doubted: bool = False) -> Verdict:
        """What the peer's silence means. `borne_s`: how long its loop may be silent (patience_s). `is_doubted`: since it was
        made, the peer has called anew or this machine has moved to another network."""
        if self.asked_at is None:
            return "alive"
        cut_s = PROBE_S if is_doubted else SUSPECT_S
        if self._line.has_unacked and now - max(self.asked_at, self._moved_at) >= cut_s - ROUNDING_S:
            return "cut"
        return "frozen" if self._quiet_s(now) >= borne_s - ROUNDING_S else "alive"

    def judge_suspect(self, now: float) -> Verdict:
        """The same where another link of the same pair was given up just now."""
        return "frozen" if self._quiet_s(now) >= PROBE_S - ROUNDING_S else "alive"

    def _quiet_s(self, now: float) -> float:
        """For how long a ping has waited and nothing has come; 0 while none waits."""
        return 0.0 if self.asked_at is None else now - max(self.asked_at, self._heard_at)
