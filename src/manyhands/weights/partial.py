"""What has arrived of tensors that are not whole yet, so that a kill in the middle of large ones costs little.

Beside the journal of whole tensors (store.py) lies a list of prefixes. Nothing in it is believed: a prefix is hashed
again as a part of its tensor, and if the whole is wrong, no provider is blamed for it and it is fetched anew.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from manyhands.checkpoint.manifest import BLOCK_BYTES
from manyhands.files import write_atomic
from manyhands.weights.schedule import TensorJob

PARTIAL: Final = ".partial.json"
DISK: Final = "disk"  # the giver of what was there before


def save_partial(folder: Path, handle: BinaryIO, prefixes: Mapping[str, int]) -> None:
    """Bytes first, then the list: tensor to number of bytes. An empty list removes it. Raises OSError."""
    if not prefixes:
        (folder / PARTIAL).unlink(missing_ok=True)
        return
    handle.flush()
    os.fsync(handle.fileno())
    write_atomic(folder / PARTIAL, json.dumps(dict(prefixes)).encode())


def restore_partial(folder: Path, handle: BinaryIO, jobs: Iterable[TensorJob]) -> None:
    """Let each job go on behind its prefix."""
    prefixes = _read(folder / PARTIAL)
    for job in jobs:
        length = prefixes.get(job.entry.name)
        if type(length) is int and 0 < length <= len(job.entry):
            _adopt(job, handle, length)


def _read(path: Path) -> dict[str, Any]:
    try:
        prefixes = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}  # then everything is fetched from its start
    return prefixes if isinstance(prefixes, dict) else {}


def _adopt(job: TensorJob, handle: BinaryIO, length: int) -> None:
    handle.seek(job.entry.start)
    while job.done < length and (block := handle.read(min(length - job.done, BLOCK_BYTES))):
        job.sha256.update(block)
        job.add(DISK, block)
