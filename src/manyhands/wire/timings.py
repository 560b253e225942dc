"""Timings of a step as they travel: a hop adds its own to those that came, and only the origin reads them."""

import struct
from typing import Final, NamedTuple

TIMING: Final = struct.Struct("<2IH2B")
MAX_TIMINGS: Final = 63  # that travel; those of further hops are left out
_U32: Final = (1 << 32) - 1
_U16: Final = (1 << 16) - 1
_U8: Final = (1 << 8) - 1


class HopTiming(NamedTuple):
    """What one hop says of one step: how long it waited for the device and how long the device step took, in microseconds; the
    `rows` and `windows` of that device step, all sessions' together (no windows: parts of prompts were among them); and the
    `streams` that decode on the hop of late."""

    queue_us: int
    compute_us: int
    rows: int = 1
    windows: int = 1
    streams: int = 1


def written(queue_us: int, compute_us: int, rows: int = 1, windows: int = 1, streams: int = 1) -> bytes:
    """One HopTiming; what exceeds 71 minutes, 65,535 rows, 255 windows or streams counts as that."""
    try:
        return TIMING.pack(queue_us, compute_us, rows, windows, streams)
    except struct.error:
        most = _U32, _U32, _U16, _U8, _U8
        return TIMING.pack(*map(min, (queue_us, compute_us, rows, windows, streams), most))


def read_timings(timings: bytes) -> tuple[HopTiming, ...]:
    return tuple(map(HopTiming._make, TIMING.iter_unpack(timings)))
