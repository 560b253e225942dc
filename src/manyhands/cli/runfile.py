"""$MANYHANDS_HOME/run/NAME.pid: the process of a node that runs here ("PID START", and "leaving" once it was told to), and
whether it still is that process."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from manyhands.errors import BadRequest, NotFound
from manyhands.files import lock, read_plain
from manyhands.member.process import is_running, start_ticks

MAX_BYTES = 1 << 10  # of such a file
LEAVING = b" leaving"


@contextlib.contextmanager
def run_file(name: str, key: Path) -> Iterator[None]:
    """While the block runs, the file of `name` holds this process's id, and the key file `key`, which exists, is locked.

    Raises BadRequest if another node has the name or the key.
    """
    from manyhands.files import alone, private_folder, removed, write_private

    path = run_path(name)
    with open(key, "rb") as held:
        with alone(private_folder(path.parent)):  # two that start at once do not both find it free
            check_not_running(name)
            try:
                lock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadRequest(
                    f"a node with the key {key} runs here already ({nodes_here()}): stop it, or start this one with "
                    "--name NAME --key FILE"
                ) from None
            ticks = start_ticks(os.getpid())
            write_private(path, str(os.getpid()) if ticks is None else f"{os.getpid()} {ticks}", is_durable=False)
        try:
            yield
        finally:
            removed(path)


def note_leaving(name: str) -> None:
    """Note that the node of this name, which runs, was told to leave: the next signal ends it. What cannot be noted is not."""
    with contextlib.suppress(OSError), open(run_path(name), "r+b", buffering=0) as file:
        file.seek(0, os.SEEK_END)
        file.write(LEAVING)


def is_leaving(path: Path) -> bool:
    """Whether the node of this file was told to leave."""
    try:
        return read_plain(path, MAX_BYTES).endswith(LEAVING)
    except (OSError, BadRequest):
        return False


def check_not_running(name: str) -> None:
    """Raise BadRequest if a node of this name runs on this machine already, in another process."""
    if (pid := running_pid(run_path(name))) not in (None, os.getpid()):
        raise BadRequest(
            f"{name} runs here already (process {pid}): `manyhands status` shows it, `manyhands stop {name}` ends it; "
            "for a second node on this machine give --name NAME --key FILE"
        )


def run_path(name: str) -> Path:
    """The file of a node. Raises BadRequest for a name that a node cannot have."""
    from manyhands.config import home_from_env
    from manyhands.member.home import check_name

    return home_from_env() / "run" / f"{check_name(name)}.pid"


def running_names() -> list[str]:
    """The nodes that run on this machine."""
    from manyhands.config import home_from_env

    found = sorted((home_from_env() / "run").glob("*.pid"))
    return [path.stem for path in found if running_pid(path) is not None]


def nodes_here() -> str:
    """Which nodes run on this machine, in a few words."""
    names = running_names()
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}" if names else "none does"


def only_node() -> str:
    """The one node that runs on this machine. Raises NotFound if there is none, or more than one."""
    names = running_names()
    if len(names) != 1:
        raise NotFound(f"which node? {nodes_here()}" if names else "no node runs here")
    return names[0]


def running_pid(path: Path, proc: Path = Path("/proc")) -> int | None:
    """The process that wrote `path`, if it still runs; None else."""
    try:
        pid, *began = [int(word) for word in read_plain(path, MAX_BYTES).removesuffix(LEAVING).split()]
        written_at = path.stat().st_mtime
    except (OSError, ValueError, BadRequest):
        return None
    if len(began) > 1:
        return None
    return pid if is_running(pid, began[0] if began else None, written_at, proc) else None
