"""What this machine has: memory that may be used, cores. Reads /proc and the control groups of this process."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that may still be taken: what the system has free, or less where a control group limits this process."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    return max(0, min([free, *_cgroup_rooms(proc, cgroups)]))


def _cgroup_rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    """Bytes left in this process's control group and each above it (version 2), or in its memory group (version 1)."""
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text(errors="replace").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                groups = [cgroups / path.lstrip("/"), *(cgroups / path.lstrip("/")).parents]
                yield from (
                    room for group in groups if (room := _room(group, "memory.max", "memory.current")) is not None
                )
            elif "memory" in controllers.split(","):
                for group in (cgroups / "memory" / path.lstrip("/"), cgroups / "memory"):
                    room = _room(group, "memory.limit_in_bytes", "memory.usage_in_bytes")
                    yield from () if room is None else (room,)


def _room(group: Path, limit: str, usage: str) -> int | None:
    """Limit less usage; pages of files count as free. None where nothing limits."""
    try:
        most, used = int((group / limit).read_text()), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max": no limit
        return None
    return most - used + int(stat.get("inactive_file", 0))


def num_cores(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroups / "cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores
