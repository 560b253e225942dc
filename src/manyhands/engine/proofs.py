"""Notes that a back end has reproduced golden digests here: a process of the same user then need not compute them again.

A note is named by a hash of all that it holds for: one boot of one machine, one build of the library, a back end, and the
digests. It stands in a file of $MANYHANDS_HOME that no other user can write; who can forge it can also replace the node's
key there. Where the system names no boot (it is not Linux), or the file is not ours alone, each process proves for itself.
"""

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from manyhands.config import home_from_env
from manyhands.errors import ManyhandsError
from manyhands.files import private_folder, write_private

FILE: Final = "engine_proofs"
MAX_NOTES: Final = 32  # the newest; more than back ends times groups, for two builds
NOTE_CHARS: Final = 64
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
CPU: Final = Path("/proc/cpuinfo")
CPU_BYTES: Final = 4096  # of its first processor: who made it, its microcode, its flags
VARYING: Final = (b"cpu MHz", b"bogomips")


def machine() -> bytes | None:
    """What tells this boot of this machine from others; None where the system does not say."""
    try:
        with CPU.open("rb", buffering=0) as file:
            first = file.read(CPU_BYTES).partition(b"\n\n")[0]
        return BOOT.read_bytes() + b"\n".join(line for line in first.splitlines() if not line.startswith(VARYING))
    except OSError:
        return None


def note(parts: Iterable[bytes]) -> str:
    """The name of a proof that depends on `parts`."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def is_noted(name: str) -> bool:
    """Whether this user's processes have proven it."""
    return name in _notes(home_from_env() / FILE)


def keep(name: str) -> None:
    """Note a proof, where a file of this user's alone can be written."""
    path = home_from_env() / FILE
    with contextlib.suppress(ManyhandsError):
        private_folder(path.parent)
        write_private(path, "\n".join(list(dict.fromkeys([*_notes(path), name]))[-MAX_NOTES:]))


def _notes(path: Path) -> list[str]:
    """The lines of a file that this user owns and no other may write; none of any other file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            of_file = os.fstat(file.fileno())
            is_ours = stat.S_ISREG(of_file.st_mode) and of_file.st_uid == os.geteuid() and not of_file.st_mode & 0o022
            return file.read(MAX_NOTES * (NOTE_CHARS + 1)).decode(errors="replace").split("\n") if is_ours else []
    except OSError:
        return []
