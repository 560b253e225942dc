"""What the system's TCP knows of a connection: whether the peer's kernel acknowledges what was sent. Linux only."""

import asyncio
import socket
import struct
import sys

# struct tcp_info of linux/tcp.h, from tcpi_unacked (segments in flight) and tcpi_bytes_acked (Linux 4.1) on.
_UNACKED_AT, _BYTES_ACKED_AT, _INFO_BYTES = 24, 120, 128


def acknowledged(transport: asyncio.BaseTransport | None) -> tuple[int, bool] | None:
    """(bytes that the peer's kernel has acknowledged, whether some are sent and not acknowledged); None if unknown.

    A connection inside another's (TLS, a tunnel) is judged by the one that the system has.
    """
    connection = transport.get_extra_info("socket") if transport is not None and sys.platform == "linux" else None
    if connection is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        (unacked,) = struct.unpack_from("=I", info, _UNACKED_AT)
        (num_acked,) = struct.unpack_from("=Q", info, _BYTES_ACKED_AT)
    except (OSError, struct.error):  # closed meanwhile, not TCP, or an older kernel
        return None
    return num_acked, unacked > 0
