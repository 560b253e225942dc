"""Files that are replaced whole or not at all, and files and folders that belong to one user of the machine alone."""

import contextlib
import os
from pathlib import Path

from manyhands.errors import BadRequest


def write_atomic(path: Path, raw: bytes, *, is_private: bool = False) -> None:
    """Replace `path` by `raw`, on disk before this returns; readers see the old bytes or the new. Raises OSError.

    A private file is readable by its owner only, at any time, and so is a folder that is made for it.
    """
    path.parent.mkdir(mode=0o700 if is_private else 0o777, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if is_private else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_private(path: Path, text: str) -> None:
    """As `write_atomic`, for a private file of $MANYHANDS_HOME. Raises BadRequest where it cannot be written."""
    try:
        write_atomic(path, text.encode(), is_private=True)
    except OSError as error:
        raise _not_written(path, error) from error


def private_folder(folder: Path) -> Path:
    """`folder`, made where it is not there, writable by its owner alone: no other user can put a link where a file is to be.
    Raises BadRequest if it is another user's."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = folder.stat()
        if stat.st_uid != os.geteuid() and os.geteuid() != 0:
            raise BadRequest(f"{folder} belongs to another user: set MANYHANDS_HOME to a folder of yours")
        if stat.st_mode & 0o022:
            folder.chmod(stat.st_mode & 0o7755)
    except OSError as error:
        raise _not_written(folder, error) from error
    return folder


def _not_written(path: Path, error: OSError) -> BadRequest:
    return BadRequest(f"{path} cannot be written ({error.strerror}): set MANYHANDS_HOME to a folder of yours")
