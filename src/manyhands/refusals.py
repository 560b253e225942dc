"""What a machine refuses a process - a file, memory, a thread - in one line for people: what, the limit, the remedy."""

import errno
import os
import resource
import sys
from collections.abc import Iterator
from typing import Final

from manyhands.errors import ManyhandsError
from manyhands.plain import one_line

# Refused by a file or a disk, which names it; another OSError is a bug, and shows where.
OF_FILES: Final = {
    errno.EACCES: "fix its rights, or name another place",
    errno.EDQUOT: "make room, or name another place",
    errno.EFBIG: "raise the limit of this shell (ulimit -f), or name another place",
    errno.EIO: "the disk or its file system fails: see dmesg",
    errno.EISDIR: "",
    errno.ELOOP: "its links lead to each other: mend them",
    errno.ENAMETOOLONG: "name a shorter one",
    errno.ENOENT: "",
    errno.ENOSPC: "make room, or name another place",
    errno.ENOTDIR: "",
    errno.EPERM: "fix its rights, or name another place",
    errno.ENOTCONN: "its file system is gone: mount it again",
    errno.ESTALE: "its file system is gone: mount it again",
    errno.EROFS: "name another place",
}
OPEN_FILES: Final = (errno.EMFILE, errno.ENFILE)
NO_MEMORY: Final = ("cannot allocate memory", "failed to map segment")  # of a library that the loader gives up
NO_THREAD: Final = "can't start new thread"  # CPython's words


def refused(error: BaseException) -> str | None:
    """What the machine refused; None where `error` is something else, as a bug is. A limit of the process goes first."""
    if (limit := limit_reached(error)) is not None:
        return limit
    return next((line for each in _leaves(error) if (line := _of_file(each)) is not None), None)


def failure(error: Exception) -> str | None:
    """Why work failed that goes on beside other work, which is not to end with it; None where a part of `error` is a bug."""
    parts = list(_leaves(error))
    known = (ManyhandsError, OSError)
    if not all(isinstance(each, known) or limit_reached(each) is not None for each in parts):
        return None
    first = next((each for each in parts if isinstance(each, ManyhandsError)), parts[0])
    return one_line(first if isinstance(first, ManyhandsError) else refused(first) or first, 1000)


def limit_reached(error: BaseException) -> str | None:
    """The limit of the process that `error`, one of its group, or one that it came of ran into; None if there is none."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:  # an error and its group may be each other's context
            continue
        seen.add(id(each))
        if (line := _of_process(each)) is not None:
            return line
        waiting += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        waiting += [earlier for earlier in (each.__context__, each.__cause__) if earlier is not None]
    return None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for each in error.exceptions:
        yield from _leaves(each)


def _of_file(error: BaseException) -> str | None:
    if not isinstance(error, OSError) or error.errno not in OF_FILES:
        return None
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    remedy = OF_FILES[error.errno]
    return f"{where}{error.strerror}" + (f"; {remedy}" if remedy else "")


def _of_process(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in OPEN_FILES:
        return f"{error.strerror}: this process may have {_limit(resource.RLIMIT_NOFILE)} at once; raise it (ulimit -n)"
    if isinstance(error, RuntimeError) and NO_THREAD in str(error):
        return no_process()
    said = str(error)
    is_of_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
    is_of_loader = isinstance(error, ImportError) and any(words in said.lower() for words in NO_MEMORY)
    if not (isinstance(error, MemoryError) or is_of_memory or is_of_loader):
        return None
    most = _limit(resource.RLIMIT_AS)
    return (
        f"no memory{f' ({said})' if said else ''}: this process may have {most} bytes of addresses (ulimit -v); "
        "raise that, close other programs, or serve fewer layers"
    )


def no_process() -> str:
    """What to say where the system starts no further thread or process."""
    most = _limit(resource.RLIMIT_NPROC)
    return f"the system starts no further thread or process: this user may have {most} (ulimit -u, pids of the control group)"


def _limit(kind: int) -> str:
    soft = resource.getrlimit(kind)[0]
    return "any number of" if soft == resource.RLIM_INFINITY else str(soft)


def installing(extra: str) -> str:
    """The command that installs what an extra of manyhands names, beside the manyhands that runs: by its own Python, where pip
    finds it installed. The package index has another project of this name.
    """
    return f"{sys.executable} -m pip install 'manyhands[{extra}]'"
