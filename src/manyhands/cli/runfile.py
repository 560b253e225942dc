"""$MANYHANDS_HOME/run/NAME.pid: the process of a node that runs here ("PID START"), and whether it still is that process."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from manyhands.errors import BadRequest

SLACK_S = 2.0  # between the kernel's clock of process starts and the file system's


@contextlib.contextmanager
def run_file(name: str) -> Iterator[None]:
    """While the block runs, the file of `name` holds this process's id. Raises BadRequest if another node has the name."""
    path = run_path(name)
    pid = running_pid(path)
    if pid not in (None, os.getpid()):
        raise BadRequest(f"a node named {name} runs here already (process {pid}): give another --name")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    ticks = _start_ticks(os.getpid())
    path.write_text(str(os.getpid()) if ticks is None else f"{os.getpid()} {ticks}")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def run_path(name: str) -> Path:
    """The file of a node. Raises BadRequest for a name that could leave the folder."""
    from manyhands.config import home_from_env

    if "/" in name or "\0" in name or name in ("", ".", ".."):
        raise BadRequest(f"{name!r:.80} cannot name a node")
    return home_from_env() / "run" / f"{name}.pid"


def running_pid(path: Path, proc: Path = Path("/proc")) -> int | None:
    """The process that wrote `path`, if it still runs; None else.

    Process ids are used again, so the file also tells when its writer began. A file without that: a process that began
    after it was written is another one. Where the kernel does not tell (no /proc), one that exists and is ours must do.
    """
    try:
        pid, *began = [int(word) for word in path.read_text().split()]
        written_at = path.stat().st_mtime
    except (OSError, ValueError):
        return None
    if pid <= 1:
        return None
    ticks = _start_ticks(pid, proc)
    if ticks is None:
        return None if (proc / "stat").exists() or not _exists(pid) else pid
    if began:
        return pid if began == [ticks] else None
    return pid if _unix_s(ticks, proc) <= written_at + SLACK_S else None


def _start_ticks(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Clock ticks from boot to a process's start; None if it is gone, a zombie, or the kernel does not tell (proc(5))."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()  # the name may hold anything
        return None if fields[0] in "ZX" else int(fields[19])  # fields 3 and 22
    except (OSError, ValueError, IndexError):
        return None


def _unix_s(ticks: int, proc: Path) -> float:
    booted = next(line for line in (proc / "stat").read_text().splitlines() if line.startswith("btime "))
    return int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError, OverflowError):
        return False
    return True
