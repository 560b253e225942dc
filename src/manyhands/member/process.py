"""Whether a process that wrote a file still runs. Process ids are used again, so an id alone proves nothing."""

import os
from pathlib import Path

SLACK_S = 2.0  # between the kernel's clock of process starts and the file system's


def start_ticks(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Clock ticks from boot to a process's start; None if it is gone, a zombie, or the kernel does not tell (proc(5)).

    One that was killed is no zombie yet while threads of it are left: they hold its files, and so its locks.
    """
    try:
        stat = (proc / str(pid) / "stat").read_text(errors="replace")
        fields = stat.rpartition(")")[2].split()  # the name may hold anything
        is_over = fields[0] in "ZX" and len(os.listdir(proc / str(pid) / "task")) == 1  # the main thread's alone
        return None if is_over else int(fields[19])  # fields 3 and 22
    except (OSError, ValueError, IndexError):
        return None


def is_running(pid: int, began: int | None, written_at: float, proc: Path = Path("/proc")) -> bool:
    """Whether process `pid`, which wrote a file at `written_at` (unix seconds), still runs.

    `began`: what `start_ticks` said to it then. None: it did not tell; a process that began after the file was written is
    another one. Where the kernel does not tell (no /proc), a process of this id that is ours must do.
    """
    if pid <= 1:
        return False
    ticks = start_ticks(pid, proc)
    if ticks is None:
        return is_there(pid, proc)
    return began == ticks if began is not None else _unix_s(ticks, proc) <= written_at + SLACK_S


def is_there(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process has the id `pid`: no zombie or, where the kernel does not tell, one of ours."""
    return start_ticks(pid, proc) is not None or (not (proc / "stat").exists() and _is_ours(pid))


def _unix_s(ticks: int, proc: Path) -> float:
    booted = next(line for line in (proc / "stat").read_text().splitlines() if line.startswith("btime "))
    return int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


def _is_ours(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError, OverflowError):
        return False
    return True
