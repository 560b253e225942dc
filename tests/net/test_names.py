"""Connections to a name with several addresses, under the virtual clock: nothing goes over a network."""

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from manyhands.net.names import MAX_RACED, STAGGER_S, connected
from manyhands.testing.clock import VirtualClockLoop

T = TypeVar("T")
V6, V4 = [f"2001:db8::{number}" for number in range(1, 4)], [f"192.0.2.{number}" for number in range(1, 4)]


class Hosts(VirtualClockLoop):
    """Connects to `takes` after so many seconds, is refused by `refuses` after so many, and hears nothing of others."""

    takes: dict[str, float]
    refuses: dict[str, float]

    def __init__(self) -> None:
        super().__init__()
        self.takes, self.refuses = {}, {}
        self.tried: list[tuple[str, float]] = []
        self.sockets: list[socket.socket] = []

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        host = address[0]
        self.tried.append((host, self.time()))
        self.sockets.append(sock)
        if host in self.refuses:
            await asyncio.sleep(self.refuses[host])
            raise OSError(errno.ECONNREFUSED, f"Connect call failed {address}")
        await asyncio.sleep(self.takes.get(host, 130.0))
        if host not in self.takes:
            raise OSError(errno.ETIMEDOUT, f"Connect call failed {address}")


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives the addresses of every name."""

    def give(*hosts: str) -> None:
        kinds = [(socket.AF_INET6 if ":" in host else socket.AF_INET, host) for host in hosts]
        found = [(kind, socket.SOCK_STREAM, 6, "", (host, 4040)) for kind, host in kinds]

        def find(host: str, *arguments: Any, **more: Any) -> Any:
            if more.get("flags"):
                raise socket.gaierror(socket.EAI_NONAME, "no address")
            return found

        monkeypatch.setattr(socket, "getaddrinfo", find)

    return give


def play(scene: Callable[[Hosts], Coroutine[Any, Any, T]]) -> T:
    async def main() -> T:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Hosts)
        try:
            return await scene(loop)
        finally:
            await asyncio.sleep(0)  # those that were given up see it
            await asyncio.sleep(0)
            assert all(sock.fileno() == -1 for sock in loop.sockets), "one was left open"

    with asyncio.Runner(loop_factory=Hosts) as runner:
        return runner.run(main())


def test_where_ipv6_is_dropped_in_silence_ipv4_is_used_within_the_deadline(name: Callable[..., None]) -> None:
    name(*V6, *V4)

    async def scene(hosts: Hosts) -> None:
        hosts.takes = {V4[0]: 0.1, V6[2]: 60.0}
        async with asyncio.timeout(5):
            connection = await connected("node.example", 4040)
        assert connection.family == socket.AF_INET
        assert hosts.tried == [(V6[0], 0.0), (V4[0], STAGGER_S)]
        connection.close()

    play(scene)


def test_one_that_is_refused_makes_room_for_the_next_at_once(name: Callable[..., None]) -> None:
    name(V6[0], V4[0])

    async def scene(hosts: Hosts) -> None:
        hosts.refuses, hosts.takes = {V6[0]: 0.01}, {V4[0]: 0.1}
        (await connected("node.example", 4040)).close()
        assert hosts.tried == [(V6[0], 0.0), (V4[0], 0.01)]

    play(scene)


def test_of_two_that_connect_at_once_one_is_closed(name: Callable[..., None]) -> None:
    name(V6[0], V4[0])

    async def scene(hosts: Hosts) -> None:
        hosts.takes = {V6[0]: 1.0, V4[0]: 1.0 - STAGGER_S}
        (await connected("node.example", 4040)).close()
        assert len(hosts.sockets) == 2

    play(scene)


def test_a_connect_that_is_given_up_leaves_nothing(name: Callable[..., None]) -> None:
    name(*V6, *V4)

    async def scene(hosts: Hosts) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await connected("node.example", 4040)
        assert [host for host, _ in hosts.tried] == [V6[0], V4[0], V6[1], V4[1], V6[2], V4[2]]

    play(scene)


def test_if_all_fail_the_first_to_fail_is_told_with_its_address(name: Callable[..., None]) -> None:
    name(*V6, *V4)

    async def scene(hosts: Hosts) -> None:
        hosts.refuses = {V4[0]: 0.1, V4[1]: 0.1}
        with pytest.raises(ConnectionRefusedError, match=V4[0]):
            await connected("node.example", 4040)

    play(scene)


def test_so_many_addresses_of_a_name_are_tried(name: Callable[..., None]) -> None:
    many = [f"198.51.100.{number}" for number in range(4 * MAX_RACED)]
    name(*many)

    async def scene(hosts: Hosts) -> None:
        with pytest.raises(TimeoutError, match=many[0]):
            await connected("node.example", 4040)
        assert [host for host, _ in hosts.tried] == many[:MAX_RACED]

    play(scene)
