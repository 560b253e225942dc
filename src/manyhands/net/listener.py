"""A listening socket that hands on the connections of members and drops the others, as admission.py says. No TLS of its own.

The ClientHello is looked at (MSG_PEEK) and stays in the kernel for the TLS library. A caller that has not sent it holds one
descriptor and a hundred bytes here, no task and no turn: no other caller waits for it.
"""

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import Callable

from manyhands.net.admission import (
    MAX_HELLO_BYTES,
    REFUSAL,
    NotAMember,
    Pending,
    PendingLimits,
    Tokens,
    server_name,
    source_of,
)

logger = logging.getLogger(__name__)

BACKLOG = 1024
ACCEPTS_A_TURN = 16  # then the rest of the event loop has its turn
RETRY_ACCEPT_S = 0.1  # out of descriptors with none pending to drop: wait for some to be freed
SWEEP_S = 0.25
# Descriptors that pending callers never take: links, files, the relay's tunnels.
RESERVED_DESCRIPTORS = 512
HELLO_S = 3.0  # for a ClientHello: one loss of TCP's SYN or of the hello itself, with room


def pending_limits(max_descriptors: int, patience_s: float) -> PendingLimits:
    """Bounds on callers that have proved nothing, where the process may have so many descriptors."""
    total = max(16, min(512, max_descriptors - RESERVED_DESCRIPTORS))
    return PendingLimits(total, total // 2, patience_s)


def descriptor_limit() -> int:
    """How many descriptors this process may open, raised as far as the system lets it."""
    if sys.platform == "win32":
        return 8192
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            pass  # a sandbox may forbid it: then what there is must do
    return wanted if soft == resource.RLIM_INFINITY else soft


class Listener:
    """Accepts on `listening`, which it owns, while `serve` runs; `admit` gets each connection that sent a valid token."""

    def __init__(
        self,
        listening: socket.socket,
        tokens: Tokens,
        admit: Callable[[socket.socket], None],
        limits: PendingLimits,
    ) -> None:
        self._listening, self._tokens, self._admit = listening, tokens, admit
        self.pending: Pending[socket.socket] = Pending(limits)
        self.num_refused = 0
        self._num_peeked: dict[socket.socket, int] = {}
        self._retry: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Listener pending={len(self.pending)} refused={self.num_refused}>"

    async def serve(self) -> None:
        """Accept until cancelled; then close the socket and every connection that was not handed on."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listening, self._accept)
        try:
            while True:
                await asyncio.sleep(SWEEP_S if len(self.pending) else 2 * SWEEP_S)
                self._sweep(loop.time())
        finally:
            self._pause(None)
            while (connection := self.pending.evict()) is not None:
                self._drop(connection, "this node stops listening")
            self._listening.close()

    def _sweep(self, now: float) -> None:
        """Drop what is overdue. A sweep that fails is logged: the next one goes on, as listening does."""
        try:
            for silent in self.pending.overdue(now):
                self._drop(silent, "no ClientHello in time")
        except Exception:
            logger.exception("pending connections could not be swept; trying again")

    # -- new connections ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Take what has come, a few at a time."""
        for _ in range(ACCEPTS_A_TURN):
            try:
                connection, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                if not self._make_room(exc):
                    return
                continue
            connection.setblocking(False)
            self._enter(connection, source_of(str(address[0])))

    def _enter(self, connection: socket.socket, source: str) -> None:
        loop = asyncio.get_running_loop()
        evicted = self.pending.enter(connection, source, loop.time())
        self._num_peeked[connection] = 0
        try:
            loop.add_reader(connection, self._look, connection)
        except (OSError, RuntimeError) as exc:
            self._drop(connection, f"it cannot be watched: {exc}")
        if evicted is not None:
            self._drop(evicted, "too many callers without a ClientHello")

    def _make_room(self, error: OSError) -> bool:
        """After a failed accept: whether to try again now. Out of descriptors, a pending caller gives its own."""
        is_full = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
        evicted = self.pending.evict() if is_full else None
        if evicted is not None:
            self._drop(evicted, "no descriptor is left")
            return True
        logger.warning("cannot accept: %s", error)
        self._pause(RETRY_ACCEPT_S)
        return False

    def _pause(self, seconds: float | None) -> None:
        """Accept nothing for so long; None: never again."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if seconds is not None:
            self._retry = loop.call_later(seconds, loop.add_reader, self._listening, self._accept)

    # -- their first bytes --------------------------------------------------------------------------------------------

    def _look(self, connection: socket.socket) -> None:
        """A pending connection can be read: hand it on, drop it, or wait for more."""
        try:
            first = connection.recv(MAX_HELLO_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._drop(connection, str(exc))
            return
        if len(first) <= self._num_peeked[connection]:  # it ended, or the system wakes us for nothing new
            self._drop(connection, "it closed the connection")
            return
        try:
            name = server_name(first)
            if isinstance(name, str):
                self._tokens.check(name)
        except NotAMember as exc:
            self._drop(connection, str(exc), len(first))
            return
        if isinstance(name, int):
            self._await_bytes(connection, len(first), name)
        else:
            try:
                self._forget(connection)
            except (OSError, RuntimeError) as exc:
                self._drop(connection, f"it cannot be handed on: {exc}")
                return
            self._admit(connection)

    def _await_bytes(self, connection: socket.socket, num_peeked: int, num_needed: int) -> None:
        """Be woken when so many bytes are there: those that were looked at are still unread."""
        self._num_peeked[connection] = num_peeked
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_needed)
        except OSError as exc:
            self._drop(connection, str(exc))

    def _forget(self, connection: socket.socket) -> None:
        self.pending.leave(connection)
        asyncio.get_running_loop().remove_reader(connection)
        if self._num_peeked.pop(connection, 0):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _drop(self, connection: socket.socket, why: str, num_unread: int = 0) -> None:
        """Close; a caller whose bytes were seen (`num_unread`) gets a TLS alert first, which unread bytes would cut off.

        Raises nothing: uvloop refuses (RuntimeError) to stop watching a descriptor that it takes for a transport's.
        """
        self.num_refused += 1
        logger.debug("refused a caller: %s", why)
        try:
            self._forget(connection)
            if num_unread:
                connection.recv(num_unread)
                connection.send(REFUSAL)
        except OSError:
            pass  # it is gone already
        except RuntimeError as exc:
            logger.warning("a refused connection could not be told: %s", exc)
        connection.close()
