"""How many bytes of the directory a node takes from others: so many of each, and so many of all. Pure.

    each    BURST_BYTES at once, BYTES_PER_S
    all     ALL_BURST_BYTES at once, ALL_BYTES_PER_S; while these are spent, each still has PART_BURST_BYTES, PART_BYTES_PER_S

A part is what a neighbour sends in a swarm of some hundred nodes. So 256 links, of a member that makes keys, that all send what
they can are taken 1 MiB/s from, 3,600 signatures of 0.1 ms, and leave every other link its part.
"""

from dataclasses import dataclass
from typing import Final

from manyhands.core import NodeId

# 60 signatures to check a second, 6 ms; or a comparison of 4,096 keys in 2.5 s, where a neighbour asks for one in five.
BURST_BYTES: Final = 512 << 10
BYTES_PER_S: Final = 16 << 10
ALL_BURST_BYTES: Final = 4 << 20
ALL_BYTES_PER_S: Final = 512 << 10
PART_BURST_BYTES: Final = 16 << 10
PART_BYTES_PER_S: Final = 2 << 10


@dataclass(slots=True)
class _Budget:
    """`bytes_per_s` are added up to `most`."""

    most: int
    bytes_per_s: int
    left: float
    since: float

    def fill(self, now: float) -> None:
        self.left = min(self.most, self.left + max(0.0, now - self.since) * self.bytes_per_s)
        self.since = now


class Allowance:
    """What is left of the bytes of each sender and of all."""

    def __init__(self) -> None:
        self._all = _Budget(ALL_BURST_BYTES, ALL_BYTES_PER_S, ALL_BURST_BYTES, 0.0)
        self._of: dict[NodeId, tuple[_Budget, _Budget]] = {}  # of a sender all that it may send, and its part

    def take(self, node: NodeId, size: int, now: float) -> bool:
        """Whether `size` bytes of `node` are within what is left; they count then."""
        if node not in self._of:
            own = _Budget(BURST_BYTES, BYTES_PER_S, BURST_BYTES, now)
            self._of[node] = own, _Budget(PART_BURST_BYTES, PART_BYTES_PER_S, PART_BURST_BYTES, now)
        own, part = self._of[node]
        for budget in (own, part, self._all):
            budget.fill(now)
        paying = part if size <= part.left else self._all
        if size > min(own.left, paying.left):
            return False
        own.left -= size
        paying.left -= size
        return True

    def charge(self, node: NodeId, size: int) -> None:
        """What `node`, of which something was taken, was answered: also where that is more than it has left."""
        self._of[node][0].left -= size

    def forget(self, node: NodeId) -> None:
        """It has no link any more."""
        self._of.pop(node, None)
