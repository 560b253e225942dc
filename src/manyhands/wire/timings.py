"""Timings of a step as they travel: a hop adds its own to those that came, and only the origin reads them."""

import struct
from typing import Final

from manyhands.wire.message import HopTiming

TIMING: Final = struct.Struct("<2I")
MAX_TIMINGS: Final = 63  # that travel; those of further hops are left out
_U32: Final = (1 << 32) - 1


def written(queue_us: int, compute_us: int) -> bytes:
    """One timing; what exceeds 71 minutes counts as that."""
    return TIMING.pack(min(queue_us, _U32), min(compute_us, _U32))


def read_timings(timings: bytes) -> tuple[HopTiming, ...]:
    return tuple(map(HopTiming._make, TIMING.iter_unpack(timings)))
