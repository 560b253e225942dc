"""The address that others reach this machine at."""

import errno
import ipaddress
import socket

from manyhands.core import NodeAddr

LOOPBACK, LOOPBACK_6 = "127.0.0.1", "::1"
# For documentation: to connect to one picks the interface, and sends nothing.
_FAR, _FAR_6 = ("192.0.2.1", 9), ("2001:db8::1", 9)


def is_wildcard(addr: NodeAddr) -> bool:
    """Whether it stands for every address of this machine."""
    return addr.host in ("0.0.0.0", "::")


def reachable(bound: NodeAddr) -> NodeAddr:
    """The address to tell others. For a wildcard this machine's own: on its default route, else (a network that leads nowhere
    else) of its first interface, else loopback."""
    if not is_wildcard(bound):
        return bound
    is_v6 = ":" in bound.host  # and takes no calls over IPv4
    return NodeAddr(on_default_route(is_v6=is_v6) or _without_route(is_v6=is_v6), bound.port, bound.node)


def on_default_route(*, is_v6: bool = False) -> str | None:
    """This machine's address there, of IPv6 or IPv4; None if it has no such route. Raises OSError if no descriptor is free."""
    try:
        probe = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_DGRAM)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            return None
        raise
    with probe:
        try:
            probe.connect(_FAR_6 if is_v6 else _FAR)
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


def _without_route(*, is_v6: bool) -> str:
    """Of an interface that is not loopback; one that has only given itself an address (169.254.0.0/16) comes last. Of IPv6 each
    interface has such a one, which says nothing without its name: it does not count."""
    import ifaddr

    ips = [ip.ip for adapter in ifaddr.get_adapters() for ip in adapter.ips]  # tuples are IPv6
    told = [ip for ip in ips if isinstance(ip, str)]
    if is_v6:
        told = [ip[0] for ip in ips if not isinstance(ip, str) and not ipaddress.IPv6Address(ip[0]).is_link_local]
    found = [address for address in map(ipaddress.ip_address, told) if not address.is_loopback]
    return str(min(found, key=lambda address: address.is_link_local, default=LOOPBACK_6 if is_v6 else LOOPBACK))
