"""Machines by their names: looked up in a thread that neither Ctrl-C nor the process's end waits for.

The loops' own getaddrinfo cannot be given up: where the resolver does not answer, a command that was told to end stays for
as long as that one tries.
"""

import asyncio
import errno
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import Any, Final

from manyhands.aside import aside

Found = list[tuple[Any, ...]]  # as socket.getaddrinfo gives it

MAX_LOOKUPS: Final = 64  # under way, each with a thread: peers' records name hosts too


class Lookups:
    """The lookups of a process that are under way, also those that were given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.under_way = 0

    async def find(self, host: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> Found:
        """The addresses of `host`, as socket.getaddrinfo gives them: at once for what is an address itself.

        Deadline: the caller's. Raises OSError, also if MAX_LOOKUPS are under way; ValueError for what is no name.
        """
        if host.isascii():  # as bytes: of a str Python would first import, on the loop, what knows other letters
            with suppress(socket.gaierror):
                return list(socket.getaddrinfo(host.encode(), port, type=kind, flags=socket.AI_NUMERICHOST))
        return list(await aside(self._counted, partial(socket.getaddrinfo, host, port, type=kind)))

    def _counted(self, ask: "partial[Any]") -> Any:
        with self._lock:
            if self.under_way >= MAX_LOOKUPS:
                raise OSError(
                    errno.EAGAIN, f"{MAX_LOOKUPS} names are being looked up: is this machine's DNS reachable?"
                )
            self.under_way += 1
        try:
            return ask()
        finally:
            with self._lock:
                self.under_way -= 1


LOOKUPS: Final = Lookups()


async def connected(host: str, port: int) -> socket.socket:
    """A TCP connection to the first address of `host` that takes one. Deadline: the caller's. Raises OSError, ValueError."""
    reason: OSError | None = None
    for family, kind, _, _, name in await LOOKUPS.find(host, port):
        connection = socket.socket(family, kind)
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, name)
        except OSError as error:
            connection.close()
            reason = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    try:
        raise reason or OSError(errno.EADDRNOTAVAIL, "no address is known")
    finally:
        reason = None  # it leads to this frame, which would keep both
