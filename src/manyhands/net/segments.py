"""How large the segments of a TCP connection may be, where a link of the way may be narrower than this machine's own.

Routers say so by ICMP, which firewalls on the way may drop (RFC 2923): then small messages arrive, and full segments never do,
be it that of a TLS handshake. What leaves the local network is therefore cut as QUIC does it (RFC 9000 §14): to what every
IPv6 path carries. It costs 0.7 % of the bytes on the wire, in headers.
"""

import socket
from contextlib import suppress
from typing import Any, Final

# Of IPv6's least MTU, 1280, without the headers of IPv6 and TCP.
MAX_SEGMENT_BYTES: Final = 1220


def limit_segments(connection: socket.socket, name: Any) -> None:
    """Before `connection` is connected to the address `name`: limit both directions, unless no router is on the way."""
    if hasattr(socket, "TCP_MAXSEG") and not _is_on_link(connection.family, name):
        with suppress(OSError):  # a system that has it for the listening side only
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, MAX_SEGMENT_BYTES)


def _is_on_link(family: int, name: Any) -> bool:
    """Whether `name` is reached without a router: this machine, or one on a network of its own. Nothing is sent."""
    own = _source(family, name)
    if own is None or own == name[0]:
        return own is not None
    if family == socket.AF_INET6 and not name[0].startswith("::ffff:"):  # for which Linux does not heed SO_DONTROUTE
        here, there = (socket.inet_pton(family, host.partition("%")[0]) for host in (own, name[0]))
        return here[:8] == there[:8]
    # Where a default route has no router (PPP, WireGuard, a modem) all the world counts as a network of this machine's own.
    return _source(socket.AF_INET, ("192.0.2.1", 9)) is None


def _source(family: int, name: Any) -> str | None:
    """This machine's address on the way to `name`; None if there is a router on it, where the system says so."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_DONTROUTE, 1)
            probe.connect(name)
            return str(probe.getsockname()[0])
    except OSError:
        return None
