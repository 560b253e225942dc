"""What does one 8 KiB Step cost, there and back, over a TLS link between two processes on loopback (uvloop)?

Arms, interleaved in groups: `link` (our Link: frames, counting, inbox) and `raw` (same TLS and loop, bytes echoed by
a bare BufferedProtocol), so that their difference is our own code. Holds if the median group's p50 of `link` is at most
150 us; meaningful on an idle machine only, so the load is reported too. Run: python -m bench.wire
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.arrivals import arrivals
from manyhands.core import NodeAddr, SessionId
from manyhands.net.certificate import client_context, server_context
from manyhands.net.tls import TlsTransport
from manyhands.net.transport import Link
from manyhands.wire.message import PROTOCOL_VERSION, Hello, Lane, Payload, Step, Token

TARGET_US = 150
SIZE = 8192
GROUPS = 9
TRIPS = 1000
SECRET = bytes(32)  # loopback, for seconds: nothing to protect
STEP = Step(SessionId(bytes(16)), 0, 0, 7, 1, 0, 0, "hidden", None, Payload("bf16", SIZE // 2, bytes(SIZE)))


def hello(lane: Lane) -> Hello:
    return Hello(PROTOCOL_VERSION, lane, "bench", None, (), Token("00" * 16))


class Raw(asyncio.BufferedProtocol):
    """Collects SIZE bytes, then calls `on_whole`."""

    def __init__(self, on_whole: Callable[["Raw"], None]) -> None:
        self._on_whole = on_whole
        self._buffer = memoryview(bytearray(SIZE))
        self._filled = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's does not inherit from asyncio.Transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled = (self._filled + nbytes) % SIZE
        if not self._filled:
            self._on_whole(self)

    def send(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


async def echo_links(transport: TlsTransport) -> None:
    link = await transport.accept()
    await link.deliver(link.send)


async def serve() -> None:
    """The second process: echo on both arms until stdin ends."""
    loop = asyncio.get_running_loop()
    key = Ed25519PrivateKey.generate()
    transport = TlsTransport(key, SECRET, hello)
    addr = await transport.listen(NodeAddr("127.0.0.1", 0))
    data = bytes(SIZE)
    server = await loop.create_server(
        lambda: Raw(lambda raw: raw.send(data)), "127.0.0.1", 0, ssl=server_context(key, SECRET)
    )
    print(addr.port, server.sockets[0].getsockname()[1], flush=True)
    echoing = asyncio.create_task(echo_links(transport))
    await loop.run_in_executor(None, sys.stdin.read)
    echoing.cancel()
    server.close()
    await transport.aclose()


async def group(trip: Callable[[], Awaitable[object]]) -> float:
    """The p50 of TRIPS round trips, in microseconds."""
    times = []
    for _ in range(TRIPS):
        begin = time.perf_counter()
        await trip()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def raw_trip(raw: Raw, whole: asyncio.Event) -> Callable[[], Awaitable[object]]:
    async def trip() -> None:
        whole.clear()
        raw.send(bytes(SIZE))
        await whole.wait()

    return trip


def link_trip(link: Link, arrived: asyncio.Event) -> Callable[[], Awaitable[object]]:
    async def trip() -> None:
        arrived.clear()
        link.send(STEP)
        await arrived.wait()

    return trip


async def measure(link_port: int, raw_port: int) -> dict[str, list[float]]:
    key = Ed25519PrivateKey.generate()
    transport = TlsTransport(key, SECRET, hello)
    link = await transport.dial(NodeAddr("127.0.0.1", link_port), "data")
    whole = asyncio.Event()
    _, raw = await asyncio.get_running_loop().create_connection(
        lambda: Raw(lambda _: whole.set()),
        "127.0.0.1",
        raw_port,
        ssl=client_context(key, SECRET),
        server_hostname="bench",
    )
    async with arrivals(link) as arrived:
        arms = {"link": link_trip(link, arrived), "raw": raw_trip(raw, whole)}
        for trip in arms.values():
            await group(trip)  # warm up
        p50s: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(GROUPS):
            for arm, trip in arms.items():
                p50s[arm].append(await group(trip))
    assert raw.transport is not None
    raw.transport.abort()
    await link.aclose()
    return p50s


def main() -> int:
    if sys.argv[1:] == ["serve"]:
        uvloop.run(serve())
        return 0
    load = os.getloadavg()[0]
    with subprocess.Popen([sys.executable, "-m", "bench.wire", "serve"], stdin=-1, stdout=-1, text=True) as peer:
        assert peer.stdin is not None and peer.stdout is not None
        link_port, raw_port = map(int, peer.stdout.readline().split())
        p50s = uvloop.run(measure(link_port, raw_port))
        peer.stdin.close()
    for arm, groups in p50s.items():
        print(f"{arm:5} p50 us by group: {' '.join(f'{p50:.0f}' for p50 in groups)}")
    figures = {f"{arm}_p50_us": round(statistics.median(groups), 1) for arm, groups in p50s.items()}
    best = {f"{arm}_best_us": round(min(groups), 1) for arm, groups in p50s.items()}
    holds = figures["link_p50_us"] <= TARGET_US
    print(json.dumps({**figures, **best, "target_us": TARGET_US, "load_1min": round(load, 2), "holds": holds}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
