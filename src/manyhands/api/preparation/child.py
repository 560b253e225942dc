"""A process with streams whose start does not hold the event loop.

asyncio's own way forks on the loop's thread, which copies the page tables of all that a node has in memory: 8 ms of CPU time
for 500 MB, 35 to 70 ms of the loop on a busy machine. subprocess uses vfork, which copies nothing, here on a thread of its own.

Its stdin and stdout are a socket. uvloop closes the descriptor of a pipe twice, first by libuv and then by its file object; a
descriptor that a thread opened in between was closed under its owner, which ended up with another's connection.
"""

import asyncio
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

# A deadline counts CPU time: that a busy machine does not let a process run says nothing of its work. By the clock it is so
# much longer: a process that gets less of a CPU than that is as good as none.
STARVED = 6.0
_CPU_OF_ALL_THREADS = 2  # clock_getcpuclockid(3): the number of a process's clock is made of its id and this


class Child:
    """Started by `start`; its starter ends it. `stdin` and `stdout` are streams."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader
    ) -> None:
        self._process, self.stdin, self.stdout = process, stdin, stdout

    def __repr__(self) -> str:
        return f"<Child {self.pid} {'ended' if self.has_ended else 'alive'}>"

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> "Child":
        """Raises OSError. Cancelling ends what has been started, and takes as long as that."""
        making = asyncio.ensure_future(cls._make(command, environment))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await (await making).end()
            raise

    @classmethod
    async def _make(cls, command: Sequence[str], environment: Mapping[str, str]) -> "Child":
        loop = asyncio.get_running_loop()
        process, ours = await loop.run_in_executor(None, _start, command, environment)
        try:
            stdout, stdin = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            process.kill()
            await loop.run_in_executor(None, process.wait)
            raise
        return cls(process, stdin, stdout)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def cpu_s(self) -> float | None:
        """Seconds of CPU time that it has used. None where the system does not tell (not Linux), or it has ended."""
        try:
            return time.clock_gettime((~self.pid << 3) | _CPU_OF_ALL_THREADS)
        except OSError:
            return None

    async def end(self) -> None:
        """Kill it, and wait until it is gone. What it has not read will not be. Harmless when repeated."""
        self._process.kill()
        if not self.stdin.transport.is_closing():
            self.stdin.transport.abort()
        with suppress(ConnectionError):
            await self.stdout.read()  # to its end: then the pipe is closed
        await asyncio.get_running_loop().run_in_executor(None, self._process.wait)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """The process, and the other end of the socket that is its stdin and stdout."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno(), env=dict(environment)), ours
        except BaseException:
            ours.close()
            raise
