"""The address that others reach this machine at."""

import errno
import ipaddress
import socket

from manyhands.core import NodeAddr

LOOPBACK = "127.0.0.1"


def is_wildcard(addr: NodeAddr) -> bool:
    """Whether it stands for every address of this machine."""
    return addr.host in ("0.0.0.0", "::")


def reachable(bound: NodeAddr) -> NodeAddr:
    """The address to tell others. For a wildcard this machine's own: on its default route, else (a network that leads nowhere
    else) of its first interface, else loopback."""
    if not is_wildcard(bound):
        return bound
    return NodeAddr(on_default_route() or _without_route(), bound.port, bound.node)


def on_default_route() -> str | None:
    """This machine's address there; None if it has no such route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET: picks the interface, sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return None


def is_own(host: str) -> bool:
    """Whether this machine has the address `host` now."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL  # another: no descriptor is free
    return True


def _without_route() -> str:
    """Of an interface that is not loopback; one that has only given itself an address (169.254.0.0/16) comes last."""
    import ifaddr

    told = [
        ip.ip for adapter in ifaddr.get_adapters() for ip in adapter.ips if isinstance(ip.ip, str)
    ]  # tuples are IPv6
    found = [address for address in map(ipaddress.IPv4Address, told) if not address.is_loopback]
    return str(min(found, key=lambda address: address.is_link_local, default=LOOPBACK))
