"""Files of a model folder, which may be anything: a pipe that nothing writes to, an endless device, a terabyte of holes."""

import stat
from pathlib import Path
from typing import Final

from manyhands.errors import ModelError

MAX_SMALL_BYTES: Final = 256 << 20  # of a file of the tokenizer; the largest of the hub have some 35 MB
MAX_TABLE_BYTES: Final = 96 << 20  # of an index or a manifest; that of Kimi K3, of 497,052 tensors, has 74 MB


def file_size(path: Path) -> int:
    """Bytes of the file at `path`, or behind the link there. Raises OSError, ModelError for what is no file: to open a named
    pipe is to wait for who writes to it."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(f"{path} is no plain file: put the file itself in its place")
    return found.st_size


def read_small(path: Path, limit: int) -> bytes:
    """The bytes of the file at `path`. Raises OSError, ModelError for what is no file or has more than `limit` bytes."""
    if (size := file_size(path)) > limit:
        raise ModelError(f"{path} has {size} bytes; the limit is {limit}: fetch it again")
    return path.read_bytes()


def read_if_there(path: Path, limit: int) -> bytes | None:
    """As read_small; None if there is nothing at `path`. Raises ModelError also for what cannot be read."""
    try:
        return read_small(path, limit)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
