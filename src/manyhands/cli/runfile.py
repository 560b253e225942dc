"""$MANYHANDS_HOME/run/NAME.pid: the process of a node that runs here ("PID START"), and whether it still is that process."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from manyhands.errors import BadRequest
from manyhands.member.process import is_running, start_ticks


@contextlib.contextmanager
def run_file(name: str) -> Iterator[None]:
    """While the block runs, the file of `name` holds this process's id. Raises BadRequest if another node has the name."""
    path = run_path(name)
    pid = running_pid(path)
    if pid not in (None, os.getpid()):
        raise BadRequest(f"a node named {name} runs here already (process {pid}): give another --name")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    ticks = start_ticks(os.getpid())
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
    """The process that wrote `path`, if it still runs; None else."""
    try:
        pid, *began = [int(word) for word in path.read_text().split()]
        written_at = path.stat().st_mtime
    except (OSError, ValueError):
        return None
    if len(began) > 1:
        return None
    return pid if is_running(pid, began[0] if began else None, written_at, proc) else None
