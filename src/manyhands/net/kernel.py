"""What the system knows of a connection: its address here; on Linux whether, and how fast, the peer acknowledges bytes."""

import asyncio
import socket
import struct
import sys
from typing import NamedTuple

# Of struct tcp_info (linux/tcp.h): byte 7, whose lowest bit is tcpi_delivery_rate_app_limited; at byte 24 tcpi_unacked, the
# segments in flight; tcpi_bytes_acked (120, Linux 4.1), tcpi_min_rtt (148, 4.6, in us), tcpi_delivery_rate (160, 4.9).
_INFO = struct.Struct("=7xB16xI92xQ20xI8xQ")


class Acknowledged(NamedTuple):
    """Bytes that the peer's kernel has acknowledged; whether some are sent and not acknowledged; how many bytes a second it
    acknowledged of late, None if there was not enough to send to tell; and the shortest round trip in seconds."""

    num_acked: int
    has_unacked: bool
    rate_Bps: float | None
    least_rtt_s: float


def acknowledged(transport: asyncio.BaseTransport | None) -> Acknowledged | None:
    """None if unknown.

    A connection inside another's (TLS, a tunnel) is judged by the one that the system has.
    """
    connection = transport.get_extra_info("socket") if transport is not None and sys.platform == "linux" else None
    if connection is None:
        return None
    try:
        return read_info(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    except (OSError, struct.error):  # closed meanwhile, not TCP, or an older kernel
        return None


def local_host(transport: asyncio.BaseTransport | None) -> str | None:
    """The address of this machine that the connection goes from; None if it has none."""
    name = transport.get_extra_info("sockname") if transport is not None else None
    return name[0] if isinstance(name, tuple) else None


def read_info(info: bytes) -> Acknowledged:
    """What a tcp_info says. Raises struct.error if it is too short."""
    flags, unacked, num_acked, least_us, rate = _INFO.unpack_from(info)
    is_limited = flags & 1
    return Acknowledged(num_acked, unacked > 0, None if is_limited or not rate else float(rate), least_us / 1e6)
