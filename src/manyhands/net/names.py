"""Machines by their names: looked up in a thread that neither Ctrl-C nor the process's end waits for.

The loops' own getaddrinfo cannot be given up: where the resolver does not answer, a command that was told to end stays for
as long as that one tries.
"""

import asyncio
import errno
import os
import socket
import threading
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import Any, Final

from manyhands.aside import aside
from manyhands.net.segments import limit_segments

Found = list[tuple[Any, ...]]  # as socket.getaddrinfo gives it

MAX_LOOKUPS: Final = 64  # under way, each with a thread: peers' records name hosts too
MAX_RACED: Final = 16  # addresses of a name that are tried
STAGGER_S: Final = 0.25  # between two of them (RFC 8305 §5)


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
    """A TCP connection to the first address of `host` that takes one; they are raced, and the slower ones are closed.

    Deadline: the caller's. Raises OSError, that of the first to fail if all do; ValueError.
    """
    won: socket.socket | OSError | None = None
    try:
        won = await _raced(_by_turns(await LOOKUPS.find(host, port))[:MAX_RACED])
        if isinstance(won, OSError):
            raise won
        return won
    finally:
        won = None  # an error leads to this frame, which would keep both


def _by_turns(found: Found) -> Found:
    """Families in turn, that of the first address first (RFC 8305 §4): one whose packets are dropped delays by one turn."""
    turns: Counter[int] = Counter()

    def turn(way: tuple[Any, ...]) -> int:
        turns[way[0]] += 1
        return turns[way[0]]

    return sorted(found, key=turn)


async def _raced(ways: Found) -> "socket.socket | OSError":
    """A connection by the first way that has one. The next is tried after STAGGER_S, at once when one has failed."""
    waiting, running = deque(ways), set[asyncio.Task["socket.socket | OSError"]]()
    first: OSError | None = None
    try:
        while waiting or running:
            if waiting:
                family, kind, _, _, name = waiting.popleft()
                running.add(asyncio.create_task(_by_one_way(family, kind, name)))
            done, _ = await asyncio.wait(
                running, timeout=STAGGER_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                running.remove(task)
                result = task.result()
                if not isinstance(result, OSError):
                    return result
                first = first or result
        return first or OSError(errno.EADDRNOTAVAIL, "no address is known")
    finally:
        for task in running:  # not waited for: to be cancelled meanwhile would lose the connection that won
            task.cancel()
            task.add_done_callback(_close)


async def _by_one_way(family: int, kind: int, name: Any) -> "socket.socket | OSError":
    """A connection, or why there is none: an error that is raised would lead to frames that keep it."""
    connection: socket.socket | None = None
    try:
        connection = socket.socket(family, kind)
        connection.setblocking(False)
        limit_segments(connection, name)
        await asyncio.get_running_loop().sock_connect(connection, name)
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, OSError):
            return error
        raise
    return connection


def _close(task: "asyncio.Task[socket.socket | OSError]") -> None:
    """A way that had a connection too, though later."""
    if not task.cancelled() and isinstance(late := task.result(), socket.socket):
        late.close()


def reason_of(error: OSError) -> str:
    """Why a connection failed, or an address cannot be listened at, as the system words it. Python's own texts repeat the
    address in place of the reason, or behind it."""
    said = error.strerror or str(error)
    repeats = said.startswith("Connect call failed") or "while attempting to bind" in said
    return os.strerror(error.errno) if error.errno and repeats else said
