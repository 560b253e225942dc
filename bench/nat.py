"""What does a step there and back cost by each way to a peer: TLS, TLS through a relay, iroh's direct path?

Three processes on loopback with uvloop: this one, one that echoes, one that relays. Arms and sizes are interleaved in
groups; a figure is the median group's p50. Holds if a relay adds at most 500 us and iroh at most 1 ms to 8 KiB over TLS:
both are little beside the tens of milliseconds of a path that needs them. Run: python -m bench.nat [--quick]
"""

import asyncio
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.arrivals import arrivals
from bench.report import finish, measuring, spread
from manyhands.core import NodeAddr, NodeId, SessionId
from manyhands.net.iroh.transport import IrohTransport
from manyhands.net.relay.relay import RELAY_ALPN, Relay
from manyhands.net.relay.tunnel import Tunnels, relayed
from manyhands.net.tls import TlsTransport
from manyhands.net.transport import Link, Transport
from manyhands.wire.message import PROTOCOL_VERSION, Hello, Lane, Payload, Step, Token

ARMS = ("tls", "relay", "iroh")
SIZES = (64, 8192)
GROUPS, TRIPS = (3, 200) if "--quick" in sys.argv else (9, 600)
SECRET = bytes(32)  # loopback, for seconds: nothing to protect
TARGET = {"relay_adds_us_8192": 500, "iroh_adds_us_8192": 1000}


def hello(lane: Lane) -> Hello:
    return Hello(PROTOCOL_VERSION, lane, "bench", None, (), Token("00" * 16))


def step(size: int) -> Step:
    return Step(SessionId(bytes(16)), 0, 0, 7, 1, 0, 0, "hidden", None, Payload("bf16", size // 2, bytes(size)))


class Ways:
    """One node with every way in and out."""

    def __init__(self) -> None:
        key = Ed25519PrivateKey.generate()
        self.relay = Relay(secrets.token_bytes)
        self.tls = TlsTransport(key, SECRET, hello, guests={RELAY_ALPN: self.relay.leg})
        self.tunnels = Tunnels(key, SECRET, self.tls)
        self.iroh = IrohTransport(key, SECRET, hello)

    async def aclose(self) -> None:
        await self.tunnels.aclose()
        await self.tls.aclose()
        await self.iroh.aclose()


async def echo(source: Transport, tasks: asyncio.TaskGroup) -> None:
    while True:
        tasks.create_task(echo_link(await source.accept()))


async def echo_link(link: Link) -> None:
    await link.deliver(link.send)


async def serve(relay: NodeAddr | None) -> None:
    """Another process: relays, or echoes and waits at `relay`; until stdin ends."""
    ways = Ways()
    tls = await ways.tls.listen(NodeAddr("127.0.0.1", 0))
    iroh_port = 0
    if relay is not None:
        await ways.tunnels.listen(relayed(relay))
        iroh_port = (await ways.iroh.listen(NodeAddr("iroh%127.0.0.1", 0))).port
    print(tls.port, iroh_port, tls.node, flush=True)

    async def work() -> None:
        async with asyncio.TaskGroup() as tasks:
            for source in (ways.tls, ways.iroh):
                tasks.create_task(echo(source, tasks))

    echoing = asyncio.create_task(work())
    await asyncio.to_thread(sys.stdin.read)
    echoing.cancel()
    await ways.aclose()


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-m", "bench.nat", "serve", *arguments], stdin=-1, stdout=-1, text=True)


def told(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


async def p50_us(link: Link, message: Step) -> float:
    times = []
    async with arrivals(link) as arrived:
        for _ in range(TRIPS):
            arrived.clear()
            begin = time.perf_counter()
            link.send(message)
            await arrived.wait()
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


@asynccontextmanager
async def links(relay: NodeAddr, tls_port: int, iroh_port: int, node: NodeId) -> AsyncIterator[dict[str, Link]]:
    ways = Ways()
    yield {
        "tls": await ways.tls.dial(NodeAddr("127.0.0.1", tls_port, node), "data"),
        "relay": await ways.tunnels.dial(relayed(relay, node), "data"),
        "iroh": await ways.iroh.dial(NodeAddr("iroh%127.0.0.1", iroh_port, node), "data"),
    }
    await ways.aclose()


async def measure(relay: NodeAddr, tls_port: int, iroh_port: int, node: NodeId) -> dict[str, list[float]]:
    """By "arm_size": the p50 of each group, in microseconds."""
    found: dict[str, list[float]] = {f"{arm}_{size}": [] for size in SIZES for arm in ARMS}
    async with links(relay, tls_port, iroh_port, node) as by_arm:
        for link in by_arm.values():
            await p50_us(link, step(64))  # warm up
        for _ in range(GROUPS):
            for size in SIZES:
                for arm, link in by_arm.items():
                    with measuring(f"{arm} {size} B"):
                        found[f"{arm}_{size}"].append(await p50_us(link, step(size)))
        for link in by_arm.values():
            await link.aclose()
    return found


def main() -> int:
    with start("relay") as relaying:
        relay = NodeAddr("127.0.0.1", int(told(relaying)[0]))
        with start(str(relay)) as echoing:
            tls_port, iroh_port, node = told(echoing)
            found = uvloop.run(measure(relay, int(tls_port), int(iroh_port), NodeId(node)))
            assert echoing.stdin is not None and relaying.stdin is not None
            echoing.stdin.close()
        relaying.stdin.close()
    p50s = {f"{name}_p50_us": spread(groups, 0) for name, groups in found.items()}
    adds = {
        f"{arm}_adds_us_8192": p50s[f"{arm}_8192_p50_us"]["median"] - p50s["tls_8192_p50_us"]["median"]
        for arm in ARMS[1:]
    }
    return finish("nat", p50s | adds, TARGET, {name: adds[name] <= limit for name, limit in TARGET.items()})


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        uvloop.run(serve(None if sys.argv[2] == "relay" else NodeAddr.parse(sys.argv[2])))
        sys.exit(0)
    sys.exit(main())
