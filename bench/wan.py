"""Do 30 ms through the WAN emulator take 30 +/- 1 ms of real time?

Both arms, interleaved, over a memory link: `wan` (WanLink with 30 ms up) and `plain` (no emulator), on asyncio and on
uvloop. Holds if the median of `wan` minus the median of `plain` is within 1 ms on both loops. Run: python -m bench.wan
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import uvloop

from bench.arrivals import arrivals
from manyhands.core import NodeAddr, NodeId, SessionId
from manyhands.net.memory import MemoryNetwork
from manyhands.net.transport import Link
from manyhands.testing.wan import WanLink, WanProfile
from manyhands.wire.message import PROTOCOL_VERSION, Close, Hello, Lane, Token

DELAY_S = 0.030
TOLERANCE_S = 0.001
MESSAGES = 100
CLOSE = Close(SessionId(bytes(16)))


def hello(lane: Lane) -> Hello:
    return Hello(PROTOCOL_VERSION, lane, "bench", None, (), Token("00" * 16))


async def open_pair(port: int) -> tuple[Link, Link]:
    network = MemoryNetwork()
    near, far = network.transport(NodeId("aa" * 32), hello), network.transport(NodeId("bb" * 32), hello)
    addr = await far.listen(NodeAddr("host", port))
    return await near.dial(addr, "control"), await far.accept()


async def one_way(sender: Link, receiver: Link) -> float:
    async with arrivals(receiver) as arrived:
        begin = time.perf_counter()
        sender.send(CLOSE)
        await arrived.wait()
        return time.perf_counter() - begin


async def measure() -> dict[str, list[float]]:
    """Seconds one way, by arm."""
    plain, wan_inner = await open_pair(1), await open_pair(2)
    wan = WanLink(wan_inner[0], WanProfile(delay_s=DELAY_S)), wan_inner[1]
    times: dict[str, list[float]] = {"wan": [], "plain": []}
    for _ in range(MESSAGES):
        times["wan"].append(await one_way(*wan))
        times["plain"].append(await one_way(*plain))
        await asyncio.sleep(0.0037)  # so that sends do not fall on the clock's own ticks
    for link in (*wan, *plain):
        await link.aclose()
    return times


def figures_of(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> dict[str, float]:
    """Milliseconds: what the emulator adds at the median, and how late the worst of a hundred is."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        times = runner.run(measure())
    added = statistics.median(times["wan"]) - statistics.median(times["plain"])
    return {"added_ms": round(added * 1e3, 3), "worst_ms": round(max(times["wan"]) * 1e3, 3)}


def main() -> int:
    loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    figures = {name: figures_of(new_loop) for name, new_loop in loops.items()}
    holds = all(abs(loop["added_ms"] / 1e3 - DELAY_S) <= TOLERANCE_S for loop in figures.values())
    print(json.dumps({**figures, "load_1min": round(os.getloadavg()[0], 2), "holds": holds}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
