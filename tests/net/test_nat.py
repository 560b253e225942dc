"""Two nodes behind masquerading NATs and a relay between them: a whole request, in network namespaces on this machine.

    a 10.11.0.2 ── nat-a 203.0.113.2 ──┐
                                       ├── pub 203.0.113.1, .5: the relay
    b 10.12.0.2 ── nat-b 203.0.113.6 ──┘

Each NAT lets out what its side began and nothing else in. Needs root, ip and nft; skipped elsewhere.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from manyhands import tales
from manyhands.testing.swarm import memory_swarm
from tests.net.nat_node import PARAMS, PROMPT

ROOT = Path(__file__).parents[2]
RELAY = "203.0.113.1:4040"
PORT = 4041
PLACES = ("pub", "nat-a", "nat-b", "a", "b")
# (place, address) at both ends of every cable.
CABLES = [
    (("pub", "203.0.113.1/30"), ("nat-a", "203.0.113.2/30")),
    (("pub", "203.0.113.5/30"), ("nat-b", "203.0.113.6/30")),
    (("nat-a", "10.11.0.1/24"), ("a", "10.11.0.2/24")),
    (("nat-b", "10.12.0.1/24"), ("b", "10.12.0.2/24")),
]
GATEWAYS = {"nat-a": "203.0.113.1", "nat-b": "203.0.113.5", "a": "10.11.0.1", "b": "10.12.0.1"}


def why_not() -> str | None:
    """Why this machine cannot have these networks, None if it can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    for tool, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(tool) is None:
            return f"needs {tool}: apt-get install {package}"
    probe = f"mh{os.getpid()}-probe"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no network namespaces here: {done.stderr.strip()}"
    nft = subprocess.run(["ip", "netns", "exec", probe, "nft", nat_rules("lo")], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return None if nft.returncode == 0 else f"no masquerading here: {nft.stderr.decode().strip()}"


def nat_rules(outside: str) -> str:
    """As a home router: masquerade what leaves, let in only what belongs to it, drop the rest without a word."""
    return f"""
        add table ip nat
        add chain ip nat post {{ type nat hook postrouting priority 100; }}
        add chain ip nat pre {{ type nat hook prerouting priority -100; }}
        add rule ip nat post oifname "{outside}" masquerade
        add table ip filter
        add chain ip filter forward {{ type filter hook forward priority 0; policy accept; }}
        add rule ip filter forward ct state established,related accept
        add rule ip filter forward ct status dnat accept
        add rule ip filter forward iifname "{outside}" drop
        add chain ip filter input {{ type filter hook input priority 0; policy accept; }}
        add rule ip filter input ct state established,related accept
        add rule ip filter input iifname "{outside}" drop
    """


class Networks:
    """The namespaces, named after this process."""

    def __init__(self) -> None:
        self._prefix = f"mh{os.getpid()}-"

    def name(self, place: str) -> str:
        return self._prefix + place

    def run(self, place: str, *command: str) -> None:
        subprocess.run(["ip", "netns", "exec", self.name(place), *command], check=True, capture_output=True, text=True)

    def build(self) -> None:
        for place in PLACES:
            subprocess.run(["ip", "netns", "add", self.name(place)], check=True)
            self.run(place, "ip", "link", "set", "lo", "up")
            self.run(place, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for number, ends in enumerate(CABLES):
            self._lay(number, ends)
        for place, gateway in GATEWAYS.items():
            self.run(place, "ip", "route", "add", "default", "via", gateway)
        for place, number in (("nat-a", 0), ("nat-b", 1)):
            self.run(place, "nft", nat_rules(f"c{number}e1"))

    def _lay(self, number: int, ends: tuple[tuple[str, str], tuple[str, str]]) -> None:
        (here, _), (there, _) = ends
        near, far = f"c{number}e0", f"c{number}e1"
        add = ["link", "add", near, "netns", self.name(here), "type", "veth", "peer", "name", far]
        subprocess.run(["ip", *add, "netns", self.name(there)], check=True)
        for (place, address), device in zip(ends, (near, far), strict=True):
            self.run(place, "ip", "addr", "add", address, "dev", device)
            self.run(place, "ip", "link", "set", device, "up")

    def forward_port(self) -> None:
        """What a user does in the router's settings: PORT on nat-a's outside goes to a."""
        self.run("nat-a", "nft", f"add rule ip nat pre iifname c0e1 tcp dport {PORT} dnat to 10.11.0.2:{PORT}")

    def remove(self) -> None:
        for place in PLACES:
            subprocess.run(["ip", "netns", "del", self.name(place)], check=False, capture_output=True)


def remove_stale() -> None:
    """Delete the namespaces of runs that were killed before they could: their processes ended with their stdin."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for name in (line.split()[0] for line in listed.splitlines()):
        match = re.fullmatch(r"mh(\d+)-[a-z-]+", name)
        if match is not None and not Path("/proc", match[1]).exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def networks() -> Iterator[Networks]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    remove_stale()
    networks = Networks()
    try:
        networks.build()
        yield networks
    finally:
        networks.remove()


class Process:
    """A nat_node in a namespace; says JSON lines."""

    def __init__(self, networks: Networks, place: str, **job: Any) -> None:
        command = ["ip", "netns", "exec", networks.name(place), sys.executable, "-m", "tests.net.nat_node"]
        self._popen = subprocess.Popen(
            [*command, json.dumps(job)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hears(self) -> dict[str, Any]:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, "the process ended"
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(self, how: str = "go") -> dict[str, Any]:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{how}\n")
        self._popen.stdin.flush()
        return self.hears()

    def stop(self) -> None:
        self._popen.kill()
        with suppress(OSError):
            self._popen.communicate()


@contextmanager
def processes(networks: Networks) -> Iterator[Process]:
    """The relay, hop a (layers 0-5) behind one NAT, hop b (6-11) and the origin behind the other; gives the origin."""
    book = {"hop-a": [f"10.11.0.2:{PORT}", f"203.0.113.2:{PORT}"], "hop-b": [f"10.12.0.2:{PORT}"]}
    everyone = {"relay": RELAY, "book": book}
    running: list[Process] = []
    try:
        running.append(Process(networks, "pub", role="relay", name="relay", listen="0.0.0.0:4040"))
        running[0].hears()
        for place, layers in (("a", "0-5"), ("b", "6-11")):
            job = {"role": "hop", "name": f"hop-{place}", "layers": layers, "listen": f"0.0.0.0:{PORT}"}
            running.append(Process(networks, place, **job, **everyone))
        for hop in running[1:]:
            assert "listening" in hop.hears()
            assert hop.hears() == {"waiting": f"relay%{RELAY}"}
        running.append(Process(networks, "b", role="origin", name="origin", ask=["hop-a", "hop-b"], **everyone))
        yield running[-1]
    finally:
        for process in running:
            process.stop()


def expected_ids() -> list[int]:
    async def main() -> list[int]:
        async with memory_swarm(Path(tales.model_path()), "0-5,6-11") as swarm:
            answer = await swarm.origin.complete(swarm.origin.request(PROMPT, PARAMS))
            return list(answer.token_ids)

    return asyncio.run(main())


@pytest.mark.slow
def test_a_request_crosses_two_nats_through_the_relay_and_a_running_one_moves_to_a_direct_path(
    networks: Networks,
) -> None:
    """hop-a is behind another NAT than the origin and hop-b, which share a LAN: one is relayed, the other direct."""
    ids = expected_ids()
    with processes(networks) as origin:
        first = origin.ask()
        assert first["ids"] == ids
        assert first["paths"] == {"hop-a control": "relay", "hop-a data": "relay"} | {
            "hop-b control": "direct",
            "hop-b data": "direct",
        }
        assert origin.ask("move") == {"session": ["relay", "relay", "direct", "direct"]}
        networks.forward_port()
        assert origin.hears() == {"ids": ids, "paths": ["direct"] * 4}
