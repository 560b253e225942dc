"""A laptop that changes networks, in network namespaces: `up` and `join` as they are, told nothing but the ticket.

Of the network of test_nat.py: pub runs `up`, and the laptop has two networks of its own there, both routed. Needs root and ip.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.net.test_nat import Networks
from tests.net.test_nat_members import ASK, BODY, START_S, Resident, answer, networks

pytestmark = pytest.mark.nightly
__all__ = ["networks"]  # a fixture

NETWORKS = {"wifi": "10.21.0", "tether": "10.22.0"}
TEXT = {**BODY, "max_tokens": 900, "temperature": 0.7}


def lay(networks: Networks) -> None:
    """A cable for each network between pub and b, which is the laptop; the cable that b has is cut."""
    networks.run("b", "ip", "link", "set", "c3e1", "down")
    for name, net in NETWORKS.items():
        add = ["link", "add", name, "netns", networks.name("b"), "type", "veth", "peer", "name", name]
        subprocess.run(["ip", *add, "netns", networks.name("pub")], check=True)
        networks.run("pub", "ip", "addr", "add", f"{net}.1/24", "dev", name)
        networks.run("pub", "ip", "link", "set", name, "up")


def come(networks: Networks, name: str) -> None:
    net = NETWORKS[name]
    networks.run("b", "ip", "addr", "add", f"{net}.2/24", "dev", name)
    networks.run("b", "ip", "link", "set", name, "up")
    networks.run("b", "ip", "route", "add", "default", "via", f"{net}.1", "dev", name)


def go(networks: Networks, name: str) -> None:
    networks.run("b", "ip", "addr", "flush", "dev", name)
    networks.run("b", "ip", "link", "set", name, "down")


def asked(resident: Resident) -> "subprocess.Popen[str]":
    """A long answer of its API, under way."""
    url = resident.said("api")["api"] + "/api/infer"
    inside = ["ip", "netns", "exec", resident.networks.name(resident.place), sys.executable, "-c", ASK, url]
    return subprocess.Popen([*inside, json.dumps(TEXT)], stdout=subprocess.PIPE, text=True)


def result(asking: "subprocess.Popen[str]") -> str:
    said, _ = asking.communicate(timeout=150)
    return str(json.loads(said)["result"])


def addresses(resident: Resident, name: str) -> list[str]:
    nodes = resident.call("/api/swarm")["nodes"]
    return [addr for node in nodes if node["name"] == name for addr in node["addresses"]]


def test_a_laptop_on_another_network_serves_on_and_its_own_answers_are_the_same(
    networks: Networks, tmp_path: Path
) -> None:
    lay(networks)
    come(networks, "wifi")
    up = ["up", "tales", "--layers", "0-5", "--listen", "203.0.113.1:4050", "--api", "127.0.0.1:0"]
    running = [Resident(networks, "pub", tmp_path / "pub", "", *up)]
    try:
        ticket = running[0].said("invitation")["ticket"]
        joining = ["join", "--layers", "6-11", "--api", "127.0.0.1:0"]
        running.append(Resident(networks, "b", tmp_path / "laptop", ticket, *joining, name="laptop"))
        for resident in running:
            answer(resident)
        text = result(asked(running[0]))
        for old, new, asker in (("wifi", "tether", running[0]), ("tether", "wifi", running[1])):
            asking = asked(asker)
            time.sleep(0.5)
            go(networks, old)
            come(networks, new)
            assert result(asking) == text
            end = time.monotonic() + START_S
            while not any(addr.startswith(NETWORKS[new]) for addr in addresses(running[0], "laptop")):
                assert time.monotonic() < end
                time.sleep(0.1)
            assert result(asked(asker)) == text
    finally:
        for resident in running:
            resident.stop()
