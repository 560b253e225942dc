"""Files that are replaced whole or not at all, and files and folders that belong to one user of the machine alone."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from stat import S_ISREG
from typing import IO, Final

from manyhands.errors import BadRequest, DiskFull, ManyhandsError

UNSUPPORTED: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # by a file system


def read_plain(path: Path, most: int) -> bytes:
    """The bytes of the file at `path`. Raises OSError; BadRequest, before anything is read, for more than `most` bytes and for
    what is no file: a named pipe is waited for, and /dev/zero has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not S_ISREG(found.st_mode):
            raise BadRequest(f"{path} cannot be read: it is no plain file: put the file itself in its place")
        if found.st_size > most:
            raise BadRequest(
                f"{path} has {found.st_size} bytes; at most {most} are read: put a shorter one in its place"
            )
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, raw: bytes, *, is_private: bool = False, is_durable: bool = True) -> None:
    """Replace `path` by `raw`; readers see the old bytes or the new. Raises OSError.

    A durable file is on disk before this returns, which takes a slow disk a second: not on a loop that others wait for. A
    private one is readable by its owner only, at any time, and so is a folder that is made for it.
    """
    path.parent.mkdir(mode=0o700 if is_private else 0o777, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if is_private else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_private(path: Path, text: str, *, is_durable: bool = True) -> None:
    """As `write_atomic`, for a private file of $MANYHANDS_HOME. Raises BadRequest where it cannot be written,
    DiskFull where the disk is full."""
    try:
        write_atomic(path, text.encode(), is_private=True, is_durable=is_durable)
    except OSError as error:
        raise not_written(path, error) from error


def private_folder(folder: Path) -> Path:
    """`folder`, made where it is not there, writable by its owner alone: no other user can put a link where a file is to be.
    Raises BadRequest if it is another user's, DiskFull."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = folder.stat()
        if stat.st_uid != os.geteuid() and os.geteuid() != 0:
            raise BadRequest(f"{folder} belongs to another user: set MANYHANDS_HOME to a folder of yours")
        if stat.st_mode & 0o022:
            folder.chmod(stat.st_mode & 0o7755)
    except OSError as error:
        raise not_written(folder, error) from error
    return folder


def removed(path: Path) -> None:
    """Remove a file that is of no use any more, and leave it where that cannot be: its disk may be gone by now."""
    with contextlib.suppress(OSError):
        path.unlink()


def is_full(error: OSError) -> bool:
    """Whether a disk, or the user's part of it, has no room left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def not_written(path: Path, error: OSError) -> ManyhandsError:
    """The error to raise for a file of $MANYHANDS_HOME that cannot be written."""
    why = f"{path} cannot be written ({error.strerror or error})"
    if is_full(error):
        return DiskFull(f"{why}: make room, or set MANYHANDS_HOME to a folder of another disk")
    return BadRequest(f"{why}: set MANYHANDS_HOME to a folder of yours")


def lock(file: int | IO[bytes], how: int) -> None:
    """flock(2), and nothing on a file system without locks (some of networks), where two processes are not told apart.
    Raises BlockingIOError where another holds it and `how` does not wait."""
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other process, and no other thread, is in such a block of this folder meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def put_new(draft: Path, path: Path) -> None:
    """Give `draft` the name `path` unless a file has it. Raises FileExistsError. Both names are there after it, or one.

    By a hard link, which never replaces; on a file system without them (FAT, some of networks) by looking first.
    """
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.EPERM, errno.EMLINK):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        draft.rename(path)


def own_home(env: Mapping[str, str]) -> Path:
    """Where state lives: $MANYHANDS_HOME, else ~/.manyhands. A ~ counts: no shell reads what systemd and containers set.
    Raises BadRequest for a ~ where HOME is unset and the user has no entry among the system's users, or there is no such user.
    """
    named = env.get("MANYHANDS_HOME") or "~/.manyhands"
    try:
        return Path(named).expanduser()
    except RuntimeError:
        raise BadRequest(
            f"{named}: no home folder of that user (uid {os.geteuid()}) is known here: set MANYHANDS_HOME to a folder of yours"
        ) from None


def this_folder() -> Path:
    """The folder that the command runs in. Raises BadRequest where it is gone."""
    try:
        return Path.cwd()
    except OSError as error:
        raise BadRequest(f"the folder that this runs in is gone ({error.strerror}): cd to another one") from error


def expanded(path: str) -> Path:
    """`path` with the home folder in place of ~, and as it is where that is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
