"""What a person should mend in a swarm: clocks that are off, keys that two nodes use. Pure."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from manyhands.core import NodeId
from manyhands.plain import one_line
from manyhands.swarm.record import Record
from manyhands.swarm.record_store import MAX_NOTES, Forks

MAX_SKEW_S = 150.0  # between clocks before it is told: words of others reach a node up to 100 s late (DHT)
JUMP_S = 1.0  # more than a clock is set by while it is held to others' (NTP)


class ClockJumps:
    """When this machine's clock was set, or it slept, for which its monotonic one stands still: what others had said before
    is older by an unknown time, and cannot be compared with the clock of now."""

    def __init__(self, clock: Callable[[], float], unix_clock: Callable[[], float]) -> None:
        self._clock, self._unix_clock = clock, unix_clock
        self._ahead_s, self._jumped_at = unix_clock() - clock(), -math.inf

    def since_s(self) -> float:
        """Seconds since it last did so, by the monotonic clock. To be asked now and then."""
        now = self._clock()
        before_s, self._ahead_s = self._ahead_s, self._unix_clock() - now
        if abs(self._ahead_s - before_s) > JUMP_S:
            self._jumped_at = now
        return now - self._jumped_at


def skews_of(records: Iterable[Record], unix_now: float) -> dict[str, float]:
    """Node, as people are told of it -> seconds that its clock is ahead of `unix_now`, of fresh records, where that is much."""
    off = ((f"{one_line(r.name, 64)} ({r.node[:16]})", r.spoken_at - unix_now) for r in records)
    return dict(islice(((node, seconds) for node, seconds in off if abs(seconds) > MAX_SKEW_S), MAX_NOTES))


def complaints(skews: Mapping[str, float], forks: Forks) -> list[str]:
    """What a person should mend, a line each. Clocks that are off harm no directory, but mislead readers of logs."""
    lines = []
    if len(skews) >= 2 and max(skews.values()) - min(skews.values()) < MAX_SKEW_S:
        off = statistics.median(skews.values())
        where = "behind" if off > 0 else "ahead of"
        lines.append(f"this machine's clock is {_about(off)} {where} that of {len(skews)} nodes: set it, best by NTP")
    else:
        for node, off in skews.items():
            where = "ahead of" if off > 0 else "behind"
            lines.append(f"the clock of node {node} is {_about(off)} {where} this machine's: set one of them by NTP")
    for node, homes in forks.items():
        first, second = (", ".join(str(addr) for addr in home) or "an unknown address" for home in homes)
        lines.append(
            f"two nodes use the key {node[:16]}, at {first} and {second}: move node.key away on one and start it again"
        )
    return lines


def _about(seconds: float) -> str:
    """Without a number, which would differ from record to record: the line is told once."""
    units = {365 * 86400: "years", 86400: "days", 3600: "hours"}
    return next((name for size, name in units.items() if abs(seconds) >= size), "minutes")


def other_kinds(nodes: Mapping[NodeId, str], ours: str) -> list[str]:
    """A line for each node that keeps another directory than `ours`."""
    return [
        f"node {node[:16]} keeps the directory by {theirs}, this one by {ours}: start that node anew with the ticket "
        "that `manyhands up` prints here"
        for node, theirs in nodes.items()
    ]
