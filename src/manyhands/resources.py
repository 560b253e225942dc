"""What this machine has: memory that may be used, cores. Reads /proc and the control groups of this process; on macOS it asks
`vm_stat`."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

VM_STAT_S: Final = 5.0  # for the command to answer


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that may still be taken: what the system has free, or less where a control group limits this process."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except FileNotFoundError:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            told = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True, timeout=VM_STAT_S).stdout
            free = min(free, free_of_vm_stat(told) or free)
    except (OSError, ValueError, LookupError):
        pass
    return max(0, min([free, *_cgroup_rooms(proc, cgroups)]))


def free_of_vm_stat(told: str) -> int:
    """Bytes that `vm_stat` of macOS tells of: of pages that are free or inactive; 0 if it tells of none."""
    size = re.search(r"page size of (\d+) bytes", told)
    kinds = re.findall(r"^Pages (free|inactive|speculative): +(\d+)\.$", told, re.MULTILINE)
    return int(size[1]) * sum(int(pages) for _, pages in kinds) if size else 0


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
