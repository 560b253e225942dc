"""Containerfile is built and compose.yaml's three nodes run, where podman can be had: each in a network namespace of its own.

No registry is asked and the build fetches nothing: the base comes from debootstrap (or is the image that MANYHANDS_BASE
names), and pip fetches the dependencies on this machine into a folder that the build sees. Needs root, ip, podman and
debootstrap (apt-get install podman debootstrap iproute2); elsewhere it is skipped and says what is missing.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.test_containers import services

pytestmark = pytest.mark.nightly
ROOT: Final = Path(__file__).parents[1]
MARK: Final = f"mh{os.getpid()}"
IMAGE: Final = f"localhost/manyhands-test:{MARK}"
NEEDS: Final = ("podman", "ip", "runc")
# Low enough that a container is allowed them where this machine is one itself.
LIMITS: Final = ("--ulimit=nofile=1024:4096", "--ulimit=nproc=1024:4096")
PODMAN: Final = ("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs")
DEBIAN: Final = "bookworm"  # has Python 3.11, for which the wheels are fetched here
START_S: Final = 120.0


def run(*command: str, timeout_s: float = 1800.0) -> str:
    """What a command printed. Fails with everything that it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with python3 and venv."""
    if os.geteuid() != 0 or not all(map(shutil.which, NEEDS)):
        pytest.skip("NOT RUN: needs root and podman, runc, ip (apt-get install podman runc iproute2)")
    if sys.version_info[:2] != (3, 11):
        pytest.skip(f"NOT RUN: needs Python 3.11, as in Debian {DEBIAN}")
    if named := os.environ.get("MANYHANDS_BASE"):
        yield named
        return
    if shutil.which("debootstrap") is None:
        pytest.skip("NOT RUN: name an image with python3 and venv in MANYHANDS_BASE, or apt-get install debootstrap")
    folder = tmp_path_factory.mktemp("base")
    release = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv", DEBIAN, str(folder / "root")]
    made = subprocess.run(release, capture_output=True, text=True, timeout=1800)
    if made.returncode:
        pytest.skip(f"NOT RUN: debootstrap: {made.stdout[-300:]}{made.stderr[-300:]}")
    run("tar", "-C", str(folder / "root"), "-cf", str(folder / "root.tar"), ".")
    shutil.rmtree(folder / "root")
    name = f"localhost/manyhands-base:{MARK}"
    run(*PODMAN, "import", str(folder / "root.tar"), name)
    (folder / "root.tar").unlink()
    yield name
    run(*PODMAN, "rmi", "--force", name)


@pytest.fixture(scope="module")
def image(base: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What Containerfile builds on that base."""
    wheels = tmp_path_factory.mktemp("wheels")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    wanted = [*project["dependencies"], "setuptools>=68", "ziglang>=0.11"]
    run(sys.executable, "-m", "pip", "wheel", "-q", "-w", str(wheels), "-c", str(ROOT / "requirements.lock"), *wanted)
    (wheels / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    seen = ["--volume", f"{wheels}:/wheels:ro", "--volume", f"{wheels}/pip.conf:/etc/pip.conf:ro"]
    alone = ["--isolation", "chroot", "--layers=false", "--force-rm"]
    what = ["--build-arg", f"BASE={base}", "--file", str(ROOT / "Containerfile"), "--tag", IMAGE, str(ROOT)]
    run(*PODMAN, "build", *alone, *seen, *what)
    yield IMAGE
    run(*PODMAN, "rmi", "--force", IMAGE)


@contextmanager
def network(names: list[str]) -> Iterator[dict[str, str]]:
    """A network namespace and an address of 10.77.0.0/24 for each name, on one bridge."""
    addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
    bridge = f"{MARK}b"
    run("ip", "link", "add", bridge, "type", "bridge")
    try:
        run("ip", "link", "set", bridge, "up")
        for number, (name, address) in enumerate(addresses.items(), 1):
            place, wire = f"{MARK}-{name}", f"{MARK}w{number}"
            run("ip", "netns", "add", place)
            run("ip", "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", place)
            run("ip", "link", "set", wire, "master", bridge, "up")
            run("ip", "-n", place, "addr", "add", f"{address}/24", "dev", "eth0")
            for card in ("lo", "eth0"):
                run("ip", "-n", place, "link", "set", card, "up")
        yield addresses
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", f"{MARK}-{name}"], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def start(name: str, service: dict[str, Any], image: str, addresses: dict[str, str]) -> None:
    """`podman run` as compose does it: of a service its host name, entry point, command and volumes."""
    entry = service.get("entrypoint")
    command = service["command"]
    words = shlex.split(command) if isinstance(command, str) else command
    first = [] if entry is None else ["--entrypoint", entry[0]]
    given = [f"--add-host={other}:{address}" for other, address in addresses.items()]
    given += [f"--volume={MARK}-{volume}" for volume in service.get("volumes", ())]
    named = ["--name", f"{MARK}-{name}", "--hostname", service["hostname"]]
    where = ["--network", f"ns:/run/netns/{MARK}-{name}"]
    run(*PODMAN, "run", "--detach", *named, *where, *LIMITS, *given, *first, image, *(entry or [])[1:], *words)


def within(name: str, *words: str) -> str:
    return run(*PODMAN, "exec", f"{MARK}-{name}", *words, timeout_s=START_S)


def until_whole(name: str) -> dict[str, Any]:
    """What a node sees of the swarm, once each layer is served."""
    deadline = time.monotonic() + START_S
    while True:
        told = subprocess.run([*PODMAN, "exec", f"{MARK}-{name}", "manyhands", "status", "--json"], capture_output=True)
        seen: dict[str, Any] = json.loads(told.stdout) if told.returncode == 0 else {}
        if (models := seen.get("models")) and not any(model["missing"] for model in models):
            return seen
        assert time.monotonic() < deadline, run(*PODMAN, "logs", f"{MARK}-{name}") + told.stderr.decode()
        time.sleep(1.0)


def test_three_containers_answer_as_one_process_does(image: str) -> None:
    """The nodes of compose.yaml find each other by the founder's ticket, and their text is that of `local`."""
    nodes = services()
    asked = ("-p", "Once upon a time", "-n", "24", "--seed", "7")
    try:
        with network(list(nodes)) as addresses:
            for name, service in nodes.items():
                start(name, service, image, addresses)
            seen = until_whole("node-1")
            assert sorted(node["name"] for node in seen["nodes"]) == sorted(nodes)
            assert within("node-1", "id", "-u").strip() == "1000"
            text = within("node-1", "manyhands", "infer", "tales", *asked)
            alone = run(sys.executable, "-m", "manyhands.cli", "local", "tales", "--nodes", "1", *asked)
            assert text.strip() and text == alone
            for name in nodes:
                began = time.monotonic()
                run(*PODMAN, "stop", "--time", "30", f"{MARK}-{name}")
                assert time.monotonic() - began < 29, f"{name} did not leave when it was told to"
    finally:
        for name in nodes:
            subprocess.run([*PODMAN, "rm", "--force", "--volumes", f"{MARK}-{name}"], capture_output=True)
        subprocess.run([*PODMAN, "volume", "rm", "--force", f"{MARK}-founder"], capture_output=True)
