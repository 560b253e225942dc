"""Two machines that a cable joins, for tests: network namespaces with real processes, mDNS and TLS. Needs root and ip."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

START_S = 120.0
PLACES = {"desk": f"mh{os.getpid()}-desk", "nas": f"mh{os.getpid()}-nas"}


def ip(line: str) -> None:
    subprocess.run(["ip", *line.split()], check=True)


@pytest.fixture(scope="module")
def cable() -> Iterator[None]:
    """Two networks of their own: 192.168.77.1 and .2, joined by a cable."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip (apt-get install iproute2)")
    made = subprocess.run(["ip", "netns", "add", PLACES["desk"]], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        ip(f"netns add {PLACES['nas']}")
        ip(f"link add card netns {PLACES['desk']} type veth peer name card netns {PLACES['nas']}")
        for number, place in enumerate(PLACES.values(), 1):
            ip(f"-n {place} link set lo up")
            ip(f"-n {place} addr add 192.168.77.{number}/24 dev card")
            ip(f"-n {place} link set card up")
            ip(f"-n {place} route add default via 192.168.77.254")
        yield
    finally:
        for place in PLACES.values():
            subprocess.run(["ip", "netns", "del", place], check=False)


class Machine:
    """A home, and the commands that run with it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        self.node: subprocess.Popen[bytes] | None = None

    def command(self, *words: str) -> list[str]:
        return self.within(sys.executable, "-m", "manyhands.cli", *words)

    def within(self, *words: str) -> list[str]:
        """The words of a command that runs on this machine."""
        return ["ip", "netns", "exec", PLACES[self.home.name], *words]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "MANYHANDS_HOME": str(self.home), "MANYHANDS_TICKET": ""}

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(*words), env=self.environment, capture_output=True, text=True, timeout=START_S, input=""
        )

    def start(self, *words: str) -> None:
        with (self.home / "said").open("wb") as out:
            fixed = ["--json", "--threads", "1", "--name", self.home.name]
            self.node = subprocess.Popen(
                self.command(*words, *fixed), env=self.environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )

    def events(self) -> list[dict[str, Any]]:
        said = (self.home / "said").read_bytes()
        whole = said[: said.rfind(b"\n") + 1]  # it may be writing just now
        return [json.loads(line) for line in whole.splitlines() if line.endswith(b"}")]

    def until(self, is_so: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        assert self.node is not None
        deadline = time.monotonic() + START_S
        while not is_so(found := self.events()):
            assert self.node.poll() is None and time.monotonic() < deadline, (self.home / "said").read_text()
            time.sleep(0.1)
        return found

    def end(self) -> None:
        if self.node is not None:
            self.node.send_signal(signal.SIGINT)
            try:
                self.node.wait(30)
            except subprocess.TimeoutExpired:
                self.node.kill()
                self.node.wait()


def has(event: str) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda events: any(found["event"] == event for found in events)
