"""What the system's TCP counts of a connection: whether, and how fast, the peer's kernel acknowledges bytes. Linux only."""

import asyncio
import socket
import struct
import sys
from typing import NamedTuple

# struct tcp_info of linux/tcp.h: tcpi_delivery_rate_app_limited is the lowest bit of byte 7; tcpi_unacked (segments in flight),
# tcpi_bytes_acked (Linux 4.1), tcpi_min_rtt (4.6, in us) and tcpi_delivery_rate (4.9) are at these bytes.
_FLAGS_AT, _UNACKED_AT, _BYTES_ACKED_AT, _MIN_RTT_AT, _RATE_AT, _INFO_BYTES = 7, 24, 120, 148, 160, 168


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
        return read_info(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES))
    except (OSError, struct.error):  # closed meanwhile, not TCP, or an older kernel
        return None


def read_info(info: bytes) -> Acknowledged:
    """What a tcp_info says. Raises struct.error if it is too short."""
    (unacked,) = struct.unpack_from("=I", info, _UNACKED_AT)
    (num_acked,) = struct.unpack_from("=Q", info, _BYTES_ACKED_AT)
    (rate,) = struct.unpack_from("=Q", info, _RATE_AT)
    (least_us,) = struct.unpack_from("=I", info, _MIN_RTT_AT)
    is_limited = info[_FLAGS_AT] & 1
    return Acknowledged(num_acked, unacked > 0, None if is_limited or not rate else float(rate), least_us / 1e6)
