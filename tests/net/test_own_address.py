"""What a machine tells others of its address, with and without a default route."""

import socket
from typing import Any

import ifaddr
import pytest

from manyhands.core import NodeAddr
from manyhands.net.own_address import is_own, reachable


def test_what_is_bound_to_one_address_is_told_as_it_is() -> None:
    assert reachable(NodeAddr("192.0.2.7", 7700)) == NodeAddr("192.0.2.7", 7700)


@pytest.mark.parametrize(
    ("interfaces", "told"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        ([], "127.0.0.1"),
        (["127.0.0.1", "10.9.0.1", "10.8.0.1"], "10.9.0.1"),
        (["127.0.0.1", "169.254.3.4"], "169.254.3.4"),
        (["169.254.3.4", "192.168.7.2"], "192.168.7.2"),
    ],
)
def test_without_a_default_route_it_is_that_of_an_interface(
    interfaces: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two laptops on one cable: others cannot call loopback."""

    class Unrouted(socket.socket):
        def connect(self, address: Any) -> None:
            raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "socket", Unrouted)
    ips = [ifaddr.IP(interface, 24, "eth0") for interface in interfaces]
    adapters = [ifaddr.Adapter("eth0", "eth0", [ifaddr.IP(("fe80::1", 0, 2), 64, "eth0"), *ips])]
    monkeypatch.setattr(ifaddr, "get_adapters", lambda: adapters)
    assert reachable(NodeAddr("0.0.0.0", 7700)) == NodeAddr(told, 7700)


@pytest.mark.parametrize(
    ("has_route", "told"), [(True, "2001:db8:1::5"), (False, "fd00::7")], ids=["on a route", "on a network of its own"]
)
def test_what_listens_to_ipv6_alone_is_told_at_such_an_address(
    has_route: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[::] takes no calls over IPv4, of which this machine has a route too."""

    class Routed(socket.socket):
        def connect(self, address: Any) -> None:
            if self.family == socket.AF_INET6 and not has_route:
                raise OSError("Network is unreachable")

        def getsockname(self) -> Any:
            return ("2001:db8:1::5" if self.family == socket.AF_INET6 else "192.168.7.2", 9)

    monkeypatch.setattr(socket, "socket", Routed)
    ips: list[Any] = ["192.168.7.2", ("::1", 0, 1), ("fe80::1", 0, 2), ("fd00::7", 0, 2)]
    adapters = [ifaddr.Adapter("eth0", "eth0", [ifaddr.IP(ip, 24, "eth0") for ip in ips])]
    monkeypatch.setattr(ifaddr, "get_adapters", lambda: adapters)
    assert reachable(NodeAddr("::", 7700)) == NodeAddr(told, 7700)
    assert reachable(NodeAddr("0.0.0.0", 7700)) == NodeAddr("192.168.7.2", 7700)


def test_an_address_is_this_machines_own_or_not() -> None:
    assert is_own("127.0.0.1")
    assert not is_own("198.51.100.1")  # TEST-NET-2
