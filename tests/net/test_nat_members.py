"""`up` and `join` themselves behind NATs: nothing is told them but the ticket; the network is that of test_nat.py.

    a 10.11.0.2 ── nat-a 203.0.113.2 ──┐
                                       ├── pub 203.0.113.1: `up`, and so the relay
    b 10.12.0.2 ── nat-b 203.0.113.6 ──┘

One NAT keeps the port of what goes out (masquerade), the other gives each connection a port of its own at random, as carriers'
and "symmetric" ones do. Both let in only what answers. Needs root, ip and nft.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.net.test_nat import PORT, Networks, nat_rules, remove_stale, why_not

pytestmark = pytest.mark.nightly

START_S = 120.0
PUB = "203.0.113.1"
BODY = {"model": "tales", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "seed": 1}
ASK = """
import json, sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], data=sys.argv[2].encode() or None, headers={"content-type": "application/json"})
try:
    print(urllib.request.urlopen(request, timeout=120).read().decode())
except urllib.error.HTTPError as error:
    sys.exit(f"{error}: {error.read().decode()}")
"""


@pytest.fixture
def networks() -> Iterator[Networks]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    remove_stale()
    networks = Networks()
    try:
        networks.build()
        yield networks
    finally:
        networks.remove()


class Resident:
    """A member in a namespace, with a home of its own."""

    def __init__(
        self, networks: Networks, place: str, home: Path, ticket: str, *arguments: str, name: str = ""
    ) -> None:
        self.networks, self.place, self.output = networks, place, home / "said.jsonl"
        home.mkdir()
        fixed = ["--name", name or place, "--threads", "1", "--json", "--while-stdin", "--scope", "public"]
        inside = ["ip", "netns", "exec", networks.name(place), sys.executable, "-m", "manyhands.cli"]
        environment = {**os.environ, "MANYHANDS_HOME": str(home), "MANYHANDS_TICKET": ticket}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*inside, *arguments, *fixed], stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment
            )

    def said(self, event: str) -> dict[str, Any]:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            said = self.output.read_text()
            whole = said[: said.rfind("\n") + 1]  # it may be writing just now
            lines = [line for line in whole.splitlines() if re.fullmatch(r"\{.*\}", line)]
            for line in lines:
                told: dict[str, Any] = json.loads(line)
                if told.get("event") == event:
                    return told
            assert self.process.poll() is None, self.output.read_text()[-800:]
            time.sleep(0.1)
        raise AssertionError(f"{self.place} did not say {event}: {self.output.read_text()[-800:]}")

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Of its own API, on its loopback."""
        url, data = self.said("api")["api"] + path, json.dumps(body) if body is not None else ""
        inside = ["ip", "netns", "exec", self.networks.name(self.place), sys.executable, "-c", ASK, url, data]
        done = subprocess.run(inside, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr[-800:]
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def paths(self) -> dict[str, str]:
        """How it reaches the others."""
        return {node["name"]: node["path"] for node in self.call("/api/swarm")["nodes"]}

    def stop(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


JOINING = {"a": ["--layers", "4-7"], "b": ["--layers", "8-11"]}


@contextmanager
def members(
    networks: Networks, tmp_path: Path, joining: dict[str, list[str]], *, are_forwarded: bool = False
) -> Iterator[tuple[Resident, Resident, Resident]]:
    """`up` in public with a third of the layers, and two that join from behind NATs with the others."""
    networks.run("nat-b", "nft", "flush ruleset")
    networks.run("nat-b", "nft", nat_rules("c1e1").replace("masquerade", "masquerade fully-random"))
    for place, device, address in (("a", "c0e1", "10.11.0.2"), ("b", "c1e1", "10.12.0.2")) if are_forwarded else ():
        forward = f"add rule ip nat pre iifname {device} tcp dport {PORT} dnat to {address}:{PORT}"
        networks.run(f"nat-{place}", "nft", forward)
    running: list[Resident] = []
    try:
        up = ["up", "tales", "--layers", "0-3", "--listen", f"{PUB}:4050", "--api", "127.0.0.1:0"]
        running.append(Resident(networks, "pub", tmp_path / "pub", "", *up))
        ticket = running[0].said("invitation")["ticket"]
        for place, arguments in joining.items():
            running.append(Resident(networks, place, tmp_path / place, ticket, "join", *arguments))
        for resident in running:
            resident.said("serving")
        yield running[0], running[1], running[2]
    finally:
        for resident in running:
            resident.stop()


def answer(resident: Resident) -> dict[str, Any]:
    """A completion once all layers are known there."""
    end = time.monotonic() + START_S
    while any(model["missing"] for model in resident.call("/api/swarm")["models"]):
        assert time.monotonic() < end, resident.call("/api/swarm")
        time.sleep(0.5)
    while not resident.call("/v1/models")["data"]:  # its part as an origin is loaded once all layers are held
        assert time.monotonic() < end, resident.output.read_text()[-800:]
        time.sleep(0.5)
    return resident.call("/api/infer", BODY)


def test_members_behind_two_kinds_of_nat_form_a_ring_by_way_of_the_public_one(
    networks: Networks, tmp_path: Path
) -> None:
    """What a and b send each other goes through the relay that `up` is; every member answers, with the same text."""
    with members(networks, tmp_path, JOINING) as (up, a, b):
        texts = {answer(resident)["result"] for resident in (up, a, b)}
        assert len(texts) == 1 and len(texts.pop()) > 20
        assert a.paths() == {"a": "self", "pub": "direct", "b": "relay"}
        assert b.paths() == {"b": "self", "pub": "direct", "a": "relay"}
        assert up.call("/api/jobs")["jobs"][0]["routing"]["is_star"] is False


def test_where_two_hops_cannot_meet_their_origin_makes_it_a_star(networks: Networks, tmp_path: Path) -> None:
    """Both have a port forwarded, so `up` dials them; the way between their networks is cut, and they know no relay (C-10)."""
    joining: dict[str, list[str]] = {}
    for place, outside in (("a", "203.0.113.2"), ("b", "203.0.113.6")):
        ways = ["--listen", f"0.0.0.0:{PORT}", "--advertise", f"{outside}:{PORT}", "--relay", f"{PUB}:1"]
        joining[place] = [*JOINING[place], *ways]
    cut = "add table ip cut; add chain ip cut between { type filter hook forward priority 0; policy drop; }"
    networks.run("pub", "nft", cut)
    with members(networks, tmp_path, joining, are_forwarded=True) as (up, _, _):
        told = answer(up)
        assert len(told["result"]) > 20
        assert up.call("/api/jobs")["jobs"][0]["routing"]["is_star"] is True
        assert answer(up)["result"] == told["result"]


def test_members_are_found_at_another_relay_once_theirs_is_gone(networks: Networks, tmp_path: Path) -> None:
    """`up`, the one member that their ticket names, is killed; what came since takes its layers and its calls."""
    with members(networks, tmp_path, JOINING) as (up, a, b):
        text = answer(a)["result"]
        came = ["join", "--layers", "0-3", "--listen", "203.0.113.5:4051", "--api", "127.0.0.1:0"]
        second = Resident(networks, "pub", tmp_path / "second", up.said("invitation")["ticket"], *came, name="second")
        try:
            second.said("serving")
            end = time.monotonic() + START_S
            while "second" not in a.paths() or "second" not in b.paths():
                assert time.monotonic() < end
                time.sleep(0.5)
            up.stop()
            end = time.monotonic() + START_S
            while a.paths().get("b") != "relay" or "pub" in a.paths():
                assert time.monotonic() < end, a.call("/api/swarm")
                time.sleep(0.5)
            assert answer(b)["result"] == answer(a)["result"] == text
        finally:
            second.stop()
