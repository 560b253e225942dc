"""What the uplink carries: from what the kernel says of connections, and remembered for some minutes."""

import asyncio
import os
import shutil
import struct
import subprocess
import sys
from typing import Any, cast

import pytest

from manyhands.net.kernel import read_info
from manyhands.net.liveness import LinkEvidence
from manyhands.net.uplink import BUSY_BYTES, FAR_S, PROVEN_BYTES, REMEMBER_S, Uplink
from manyhands.net.watch import Watch
from manyhands.testing.clock import run_virtual

# 3 MB over a loopback of 20 Mbit/s in a network of its own.
TRIAL = """
import socket, threading
from manyhands.net.kernel import read_info
listening = socket.create_server(("127.0.0.1", 0))
out = socket.create_connection(listening.getsockname())
into, _ = listening.accept()
def take():
    while into.recv(1 << 16):
        pass
threading.Thread(target=take, daemon=True).start()
rates = []
for _ in range(30):
    out.sendall(bytes(100_000))
    state = read_info(out.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 168))
    rates += [state.rate_Bps] if state.num_acked > 1 << 20 and state.rate_Bps else []
print(max(rates), state.least_rtt_s)
"""


def tcp_info(*, is_limited: bool = False) -> bytes:
    info = bytearray(168)
    info[7] = is_limited
    struct.pack_into("=I", info, 24, 3)
    struct.pack_into("=Q", info, 120, 7 << 33)
    struct.pack_into("=I", info, 148, 20_000)
    struct.pack_into("=Q", info, 160, 2_500_000)
    return bytes(info)


def test_what_the_kernel_says_is_read() -> None:
    assert read_info(tcp_info()) == (7 << 33, True, 2.5e6, 0.02)
    assert read_info(tcp_info(is_limited=True)).rate_Bps is None
    with pytest.raises(struct.error):
        read_info(tcp_info()[:160])


def seen(rate_Bps: float | None, num_acked: int = 2 * PROVEN_BYTES, rtt_s: float = 0.02) -> LinkEvidence:
    return LinkEvidence(0, True, num_acked, False, rate_Bps, rtt_s)


def test_a_rate_counts_where_enough_goes_over_a_way_that_is_far() -> None:
    for line, before in (
        (seen(2e6, PROVEN_BYTES - 1), 0),
        (seen(2e6), 2 * PROVEN_BYTES - BUSY_BYTES + 1),
        (seen(2e6, rtt_s=0.0003), 0),
        (seen(None), 0),
        (LinkEvidence(0), 0),
    ):
        uplink = Uplink()
        uplink.observe(line, before, 1.0)
        assert uplink.rate_Bps(1.0) == 0.0
    uplink.observe(seen(2e6), 0, 1.0)
    assert uplink.rate_Bps(1.0) == 2e6


def test_the_most_of_the_last_minutes_counts() -> None:
    uplink = Uplink()
    assert uplink.rate_Bps(0.0) == 0.0
    for at, rate in ((1.0, 5e6), (2.0, 1e6), (3.0, None)):
        uplink.observe(seen(rate), 0, at)
    assert uplink.rate_Bps(REMEMBER_S) == 5e6
    uplink.observe(seen(2e6), 0, REMEMBER_S + 1)
    assert uplink.rate_Bps(2 * REMEMBER_S - 1) == 5e6
    assert uplink.rate_Bps(2 * REMEMBER_S + 1) == 2e6
    assert uplink.rate_Bps(9 * REMEMBER_S) == 0.0


def test_a_watch_takes_what_its_links_show() -> None:
    class Busy:
        peer, lane, is_closed = "a" * 64, "data", False
        evidence = seen(None)

        def line(self) -> LinkEvidence:
            return self.evidence

        def ping(self) -> asyncio.Future[float]:
            answered: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            answered.set_result(0.01)
            return answered

    async def body() -> None:
        watch, link = Watch(lambda: ()), Busy()
        watch.add(cast(Any, link))
        running = asyncio.create_task(watch.run())
        await asyncio.sleep(2)
        assert watch.uplink_Bps() == 0.0
        link.evidence = seen(1.5e6, 3 * PROVEN_BYTES)
        await asyncio.sleep(2)
        assert watch.uplink_Bps() == 1.5e6
        link.is_closed = True
        await running

    run_virtual(body())


def test_the_kernel_measures_what_a_line_of_20_mbit_carries() -> None:
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "tc"))):
        pytest.skip("needs root, unshare, ip and tc")
    net = "ip link set lo up mtu 1500 && tc qdisc add dev lo root tbf rate 20mbit burst 20kb latency 400ms && exec "
    command = ["unshare", "-n", "sh", "-c", f'{net} "$0" -c "$1"', sys.executable, TRIAL]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if "qdisc" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no network of its own here: {done.stderr[:80]}")
    rate, least_rtt_s = done.stdout.split()
    assert 1.2e6 < float(rate) < 3.2e6, done.stderr
    assert float(least_rtt_s) < FAR_S, "loopback is near: it says nothing of the uplink"
