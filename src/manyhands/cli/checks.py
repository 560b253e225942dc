"""What `manyhands doctor` looks at: each check says what it found and, where that is not well, what to do about it.

A check reads and changes nothing. What it cannot even try is a warning with the reason; a ManyhandsError is its verdict.
"""

import asyncio
import importlib.util
import os
import shutil
import socket
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from manyhands.config_file import SECRETS, Settings
from manyhands.core import NodeAddr, NodeId
from manyhands.errors import ManyhandsError
from manyhands.member.home import TICKET, Running, starting_ticket
from manyhands.plain import size_of
from manyhands.refusals import installing
from manyhands.swarm.ticket import Ticket

Level = Literal["ok", "warn", "fail"]
DIAL_S = 5.0
MIN_DISK, GOOD_DISK = 500_000_000, 5_000_000_000
MIN_MEMORY, GOOD_MEMORY = 600_000_000, 2_000_000_000  # a process takes 0.5 GB before its first layer
GOOD_NOFILE = 1024  # links, relay tunnels and HTTP clients are files each
EARLIEST_S = 1_760_000_000.0  # October 2025: a clock before it was never set


@dataclass(frozen=True, slots=True)
class Check:
    """`remedy` is empty where `level` is ok, or where `said` is an error's line, which has it."""

    name: str
    level: Level
    said: str
    remedy: str = ""


def verdict(name: str, error: ManyhandsError, level: Level = "fail") -> Check:
    """An error as a check: its one line has the remedy in it."""
    return Check(name, level, str(error))


def check_config(settings: Settings) -> Iterator[Check]:
    if settings.file is None:
        yield Check("config", "ok", "no configuration file: defaults and environment")
        return
    of_file = [s for s in settings.all if s.source == str(settings.file)]
    secrets = [f"{s.section}.{s.key}" for s in of_file if s.value and (s.section, s.key) in SECRETS]
    if secrets and is_open(settings.file):
        what = f"{settings.file} holds {', '.join(secrets)} and other users can read it"
        yield Check("config", "fail", what, f"chmod 600 {settings.file}")
    else:
        yield Check("config", "ok", str(settings.file))


def check_keys(home: Path, settings: Settings) -> Iterator[Check]:
    """The node's key, and the files that are passwords."""
    from manyhands.api.auth import FILE, KeyRing
    from manyhands.swarm.identity import NodeKey

    path = Path(settings.node.key or home / "node.key")
    if path.exists():
        try:
            yield Check("node key", "ok", f"{path}, node {NodeKey.load_or_create(path).node_id[:16]}")
        except ManyhandsError as error:
            yield verdict("node key", error)
    else:
        yield Check("node key", "ok", f"none yet: {path} is made at the first start")
    for name, what in ((TICKET, "the swarm's secret"), (FILE, "the hashes of API keys")):
        if (home / name).exists() and is_open(home / name):
            yield Check("secrets", "fail", f"other users can read {home / name}, {what}", f"chmod 600 {home / name}")
    try:
        _ = KeyRing(home / FILE).keys
    except ManyhandsError as error:  # a gateway lets in its owner alone then
        yield verdict("secrets", error)


def is_open(path: Path) -> bool:
    """Whether group or others may read it."""
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def check_swarm(home: Path, settings: Settings, away: Collection[NodeId] = ()) -> Iterator[Check]:
    """The ticket, and whether a node answers at its addresses; those of nodes known to be `away` are left out."""
    try:
        ticket = starting_ticket(home, Ticket.parse(settings.swarm.ticket) if settings.swarm.ticket else None)
    except ManyhandsError as error:
        yield verdict("swarm", error)
        return
    if ticket is None:
        yield Check("swarm", "ok", "this machine belongs to none yet: `manyhands up MODEL` or `manyhands join`")
        return
    what = f"{ticket.name} {ticket.fingerprint}, directory by {ticket.directory}, scope {settings.swarm.scope}"
    yield Check("swarm", "ok", what)
    try:
        ticket.agree(settings.swarm.directory)
    except ManyhandsError as error:
        yield verdict("directory", error)
    yield from asyncio.run(_dial_all(ticket, away))


async def _dial_all(ticket: Ticket, away: Collection[NodeId]) -> list[Check]:
    """One check for each address, all dialled at once as a member would (own TLS key, swarm's secret)."""
    from manyhands.cli.connect import tls_node

    addrs = [addr for addr in ticket.addresses if "%" not in addr.host and addr.node not in away]
    async with tls_node(ticket, None, name="doctor") as node:
        return list(await asyncio.gather(*(_dial(node, addr) for addr in addrs)))


async def _dial(node: Any, addr: NodeAddr) -> Check:
    try:
        async with asyncio.timeout(DIAL_S):
            link = await node.pool.get(addr, "control")
        return Check("reach", "ok", f"{addr} answers: {link.hello.name}, node {link.peer[:16]}")
    except TimeoutError:
        return Check(
            "reach", "warn", f"{addr} does not answer within {DIAL_S:g} s", "is it up, and no firewall between?"
        )
    except ManyhandsError as error:
        said = str(error) if str(addr) in str(error) else f"{addr} cannot be reached ({error})"
        return Check("reach", "warn", said, "is it up, and is this the newest ticket?")


def check_ports(settings: Settings, running: list[Running]) -> Iterator[Check]:
    """Whether the addresses of the configuration can be listened at."""
    from manyhands.net.names import reason_of

    ours = {running_.listen.rpartition(":")[2] for running_ in running} | {r.api.rpartition(":")[2] for r in running}
    wanted = {"peers": settings.node.listen, "API": settings.api.listen or "127.0.0.1:8000"}
    for what, text in wanted.items():
        if not text or text == "off":
            continue
        addr = NodeAddr.parse(text)
        try:
            socket.create_server((addr.host, addr.port), family=_family(addr.host)).close()
            yield Check("port", "ok", f"{addr} is free for the {what}")
        except OSError as error:
            if str(addr.port) in ours:
                yield Check("port", "ok", f"{addr} is in use by the node that runs here")
            else:
                other = "name another address (--listen, --api), or stop what uses it"
                yield Check("port", "warn", f"{addr} cannot be listened at for the {what}: {reason_of(error)}", other)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def check_running(running: list[Running], tell: Any) -> Iterator[Check]:
    """What the nodes that run here say of the swarm; `tell(api)` is its view. Clocks that differ are among the complaints."""
    for member in running:
        if not member.api:
            yield Check("running", "ok", f"{member.name}, process {member.pid}, swarm {member.swarm}")
            continue
        try:
            view = tell(member.api)
            seen, complaints, warnings = len(view["nodes"]), view["complaints"], [*view["missing"], *view["warnings"]]
        except ManyhandsError as error:
            yield Check("running", "warn", f"{member.name} does not tell: {error}", "give a key: MANYHANDS_API_KEY")
            continue
        yield Check("running", "ok", f"{member.name}, process {member.pid}, sees {seen} nodes")
        yield from (Check("swarm", "fail", line, "as it says") for line in complaints)
        yield from (Check("swarm", "warn", line, "have one more machine join") for line in warnings)


def check_clock(home: Path, now: float, has_member: bool) -> Iterator[Check]:
    """Without a node to compare with, only whether time runs forward."""
    said = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    newest = max((path.stat().st_mtime for path in home.glob("*") if path.exists()), default=0.0)
    if now < EARLIEST_S:
        yield Check(
            "clock",
            "fail",
            f"it is {said}: the clock was never set",
            "set it, best by NTP: certificates look invalid until then",
        )
    elif newest > now + 60:
        yield Check(
            "clock", "warn", f"it is {said}, but {home} has a file from the future", "set the clock, best by NTP"
        )
    else:
        who = "members compare it" if has_member else "no node to compare with"
        yield Check("clock", "ok", f"{said}; {who}")


def check_disk(home: Path) -> Iterator[Check]:
    folder = next(path for path in (home, *home.parents) if path.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        why = "cannot be written" if folder.is_dir() else "is a file and no folder"
        yield Check("disk", "fail", f"{folder} {why}", "set MANYHANDS_HOME to a folder of yours")
        return
    free = shutil.disk_usage(folder).free
    level: Level = "fail" if free < MIN_DISK else "warn" if free < GOOD_DISK else "ok"
    yield Check(
        "disk",
        level,
        f"{size_of(free)} free at {folder}",
        "" if level == "ok" else "free some, or move MANYHANDS_HOME",
    )


def check_memory(available: int, physical: int) -> Iterator[Check]:
    """`available`: what may still be taken, control groups counted."""
    level: Level = "fail" if available < MIN_MEMORY else "warn" if available < GOOD_MEMORY else "ok"
    remedy = "" if level == "ok" else "stop other programs, or raise the container's limit"
    yield Check("memory", level, f"{size_of(available)} of {size_of(physical)} may be taken", remedy)


def check_files(limit: tuple[int, int]) -> Iterator[Check]:
    """`limit`: soft and hard limit of open files (RLIMIT_NOFILE); -1 is none."""
    soft, hard = limit
    if soft in range(GOOD_NOFILE):
        most = f"ulimit -n {4096 if hard < 0 else min(4096, hard)}, or LimitNOFILE= of its service"
        yield Check("open files", "warn", f"at most {soft} at once", most)
    else:
        yield Check("open files", "ok", f"at most {'any number' if soft < 0 else soft} at once")


def check_device(cores: int, load: float) -> Iterator[Check]:
    """What computes layers here, and which other devices there are (--device). Imports torch where it is installed."""
    from manyhands.engine.compile import ROW_TYPES
    from manyhands.engine.devices import gpu, torch_device
    from manyhands.worker.runner import back_end

    try:
        chosen = back_end()
    except ManyhandsError as error:
        yield verdict("device", error)
        return
    if torch_device() is not None:
        said = f"{chosen} computes in torch, in class E2"
    elif gpu() is not None:
        said = f"{chosen} computes, with the bits of the CPU"
    else:
        said = f"CPU, {cores} cores; the native engine ({chosen}) serves {', '.join(ROW_TYPES)}"
    yield Check("device", "ok", said)
    yield from _check_gpus()
    yield from _check_torch()
    if load > 2 * cores:
        yield Check(
            "load", "warn", f"{load:.1f} processes want {cores} cores", "steps will be late: give nodes fewer --threads"
        )


def _check_gpus() -> Iterator[Check]:
    """NVIDIA's GPUs, and whether the one that is named reproduces the golden digests."""
    from manyhands.engine.devices import gpu
    from manyhands.worker.gpu import found, open_gpu

    if importlib.util.find_spec("cuda") is None:
        yield Check("gpu", "ok", f"no --device cuda; for NVIDIA GPUs: {installing('cuda')}")
        return
    try:
        here = [f"{name} ({what}, {size_of(memory)})" for name, what, memory in found()]
        if (number := gpu()) is not None:
            open_gpu(number)
    except ManyhandsError as error:
        yield Check("gpu", "ok", str(error)) if gpu() is None else verdict("gpu", error)
        return
    yield Check("gpu", "ok", f"--device may be {', '.join(here)}" if here else "no NVIDIA GPU")


def _check_torch() -> Iterator[Check]:
    if importlib.util.find_spec("torch") is None:
        said = f"not installed: no --device mps or xpu ({installing('torch')})"
        yield Check("torch", "ok", said)
        return
    from manyhands.engine.devices import torch_device
    from manyhands.worker import torch_program

    found = torch_program.devices_here()
    named = [f"{one.name} ({one.what}, {_free(one.free_bytes)})" if one.what != "CPU" else one.name for one in found]
    yield Check("torch", "ok", f"--device may be {', '.join(named)}; no mps and no xpu has been tried")
    if (device := torch_device()) is not None:
        try:
            torch_program.open_device(device)
        except ManyhandsError as error:
            yield verdict("torch", error)


def _free(num_bytes: int | None) -> str:
    return "free memory unknown: give --memory" if num_bytes is None else f"{size_of(num_bytes)} free"


def check_engine() -> Iterator[Check]:
    """The native engine's back ends, each proven against the golden digests. Loads no torch."""
    from manyhands.engine import golden, library

    try:
        proven = {name: golden.failures(name) for name in library.supported()}
        chosen = golden.choose()
    except ManyhandsError as error:
        yield verdict("engine", error)
        return
    for name, wrong in proven.items():
        if wrong:
            said = f"{name} does not reproduce {', '.join(wrong)}: it is not used"
            yield Check("engine", "fail", said, "report this CPU with these words; set MANYHANDS_ENGINE to another")
    right = [name for name, wrong in proven.items() if not wrong]
    said = f"{', '.join(right)} reproduce the golden digests {golden.arithmetic()}; {chosen} is used first"
    yield Check("engine", "ok", said)


def check_models(home: Path) -> Iterator[Check]:
    """Folders that were fetched: what of them is here, and whether it is whole."""
    from manyhands.checkpoint.folder import read_entries
    from manyhands.checkpoint.manifest import read_manifest
    from manyhands.weights.catalogue import SHORT_NAMES
    from manyhands.weights.names import short_path

    folders = sorted(path for path in (home / "models").glob("*") if path.is_dir() and not path.name.startswith("."))
    for folder in folders:
        if folder.name in SHORT_NAMES and not short_path(SHORT_NAMES[folder.name], home).is_file():
            yield Check("model", "warn", f"{folder.name}: not whole yet", f"manyhands pull {folder.name}")
            continue
        try:
            held = len(read_entries(folder))
            whole = read_manifest(folder)
            total = held if whole is None else len(whole.tensors)
        except (ManyhandsError, OSError) as error:
            yield Check("model", "fail", f"{folder.name}: {error}", f"remove {folder}: it is fetched again when needed")
            continue
        what = "all of it" if held == total else f"{held} of {total} tensors, as asked for"
        yield Check("model", "ok", f"{folder.name}: {what}")
    if not folders:
        yield Check("model", "ok", "none fetched; tales comes with the package")


def check_iroh() -> Iterator[Check]:
    if importlib.util.find_spec("iroh") is None:
        yield Check(
            "iroh", "warn", "not installed: no hole punching", "pip install iroh; relays by members work without it"
        )
        return
    from manyhands.net.iroh.pipe import load

    try:
        load()
        yield Check("iroh", "ok", "can be loaded")
    except (ManyhandsError, ImportError, OSError) as error:
        yield Check("iroh", "warn", f"cannot be loaded ({error})", "relays by members work without it (docs/nat.md)")
