"""The iroh binding: loaded when first needed, repaired, and one of its streams as an asyncio transport for a link.

The binding is loaded at the first listen or dial, never at import. An await on it costs about 150 us of thread
hand-over, so what is queued is written in one piece and read in large ones (reference/networking.md).
"""

import asyncio
import ctypes
import functools
import importlib.metadata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

from manyhands.core import EdgeHealth
from manyhands.errors import BadRequest
from manyhands.net.link import CLOSE_S, FramedLink
from manyhands.net.transport import note_rtt

READ_BYTES = 256 << 10
HIGH_WATER_BYTES = 256 << 10  # queued for writing before the link is told to wait
WATCH_S = 1.0  # how often a connection's path is looked at
SLOW_VERSIONS = ("1.0.0", "1.1.0", "1.2.0")  # of the binding, whose writes copy byte by byte in Python


@functools.cache
def load() -> ModuleType:
    """The binding, with its write path repaired. Raises BadRequest if it is not installed."""
    try:
        import iroh
        import iroh.iroh_ffi as ffi
    except ImportError as exc:
        raise BadRequest(
            f"iroh cannot be loaded ({exc}): pip install iroh, or use addresses of the form host:port"
        ) from exc
    if importlib.metadata.version("iroh") in SLOW_VERSIONS:
        ffi._UniffiRustBufferBuilder.write = write_block
    module: ModuleType = iroh
    return module


def write_block(builder: Any, value: bytes | bytearray | memoryview) -> None:
    """Replaces the binding's own `write`, which takes 3 ms for 8 KiB: it assigns every byte through ctypes."""
    data = bytes(value)
    with builder._reserve(len(data)):
        start = ctypes.cast(builder.rbuf.data, ctypes.c_void_p).value or 0
        ctypes.memmove(start + builder.rbuf.len, data, len(data))


def kind_of(paths: Iterable[Any]) -> str | None:
    """ "direct" or "relay" by the path that iroh has selected; None while it has none."""
    return next(("relay" if path.is_relay else "direct" for path in paths if path.is_selected), None)


class IrohPipe(asyncio.Transport):
    """One stream of a connection as an asyncio transport for `link`. `run` moves the bytes until the pipe is closed."""

    def __init__(self, connection: Any, stream: Any, link: FramedLink) -> None:
        super().__init__()
        self._connection, self._link = connection, link
        self._send, self._recv = stream.send(), stream.recv()
        self._queue: list[bytes | memoryview] = []
        self._num_queued = 0
        self._has_work = asyncio.Event()
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._end = asyncio.Event()
        self._is_closing = False
        self._lost: Exception | None = None

    # -- what the link calls ------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writelines([data])

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        if self._is_closing:
            return
        was_low = self._num_queued <= HIGH_WATER_BYTES
        for data in list_of_data:
            self._queue.append(data)
            self._num_queued += len(data)
        self._has_work.set()
        if was_low and self._num_queued > HIGH_WATER_BYTES:
            self._link.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self._num_queued

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Send what is queued, then end."""
        self._is_closing = True
        self._has_work.set()

    def abort(self) -> None:
        self._is_closing = True
        self._end.set()

    # -- the work -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read, write and watch until one of them ends; then the link ends and the connection is closed."""
        tasks = [asyncio.create_task(work) for work in (self._read(), self._write(), self._watch(), self._wait_end())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_closing = True
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    self._lost = self._lost or result
            self._connection.close(0, b"")
            self._link.connection_lost(self._lost)

    async def _wait_end(self) -> None:
        await self._end.wait()

    async def _read(self) -> None:
        """Until the peer finishes its stream."""
        while True:
            await self._may_read.wait()
            data = memoryview(await self._receive())
            if not data:
                return
            while data:
                buffer = self._link.get_buffer(len(data))
                num_bytes = min(len(buffer), len(data))
                buffer[:num_bytes] = data[:num_bytes]
                self._link.buffer_updated(num_bytes)
                data = data[num_bytes:]

    async def _receive(self) -> bytes:
        try:
            data: bytes = await self._recv.read(READ_BYTES)
        except load().IrohError as exc:
            raise ConnectionResetError(exc.message()) from exc
        return data

    async def _write(self) -> None:
        """Everything queued in one piece, as long as there is something; at the end of a closing pipe, finish."""
        while not (self._is_closing and not self._queue):
            await self._has_work.wait()
            self._has_work.clear()
            block = b"".join(self._queue)
            self._queue.clear()
            if block:
                await self._transmit(block)
            was_high = self._num_queued > HIGH_WATER_BYTES
            self._num_queued -= len(block)
            if was_high and self._num_queued <= HIGH_WATER_BYTES:
                self._link.resume_writing()
        with suppress(load().IrohError, TimeoutError):
            await self._send.finish()
            async with asyncio.timeout(CLOSE_S):
                await self._send.stopped()  # until the peer has read it all, or is gone

    async def _transmit(self, block: bytes) -> None:
        try:
            await self._send.write_all(block)
        except load().IrohError as exc:
            raise ConnectionResetError(exc.message()) from exc

    async def _watch(self) -> NoReturn:
        """Keep the path's kind in health, and a round trip where no pings run."""
        while True:
            note_paths(self._link.health, self._connection.paths())
            await asyncio.sleep(WATCH_S)


def note_paths(health: EdgeHealth, paths: Sequence[Any]) -> None:
    """Write the selected path's kind into `health`, and iroh's rtt while there is no other."""
    health.path_kind = kind_of(paths) or health.path_kind
    for path in paths:
        if path.is_selected and path.rtt_ms > 0 and health.rtt_s is None:
            note_rtt(health, path.rtt_ms / 1000)
