"""The address that others reach this machine at."""

import socket

from manyhands.core import NodeAddr


def reachable(bound: NodeAddr) -> NodeAddr:
    """The address to tell others: for a wildcard, this machine's own on its default route, else loopback."""
    if bound.host not in ("0.0.0.0", "::"):
        return bound
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET: picks the interface, sends nothing
            return NodeAddr(probe.getsockname()[0], bound.port, bound.node)
        except OSError:
            return NodeAddr("127.0.0.1", bound.port, bound.node)
