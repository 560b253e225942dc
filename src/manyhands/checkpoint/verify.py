"""Proves the bytes that a node computes with: the SHA-256 of every tensor as it lies in memory, while others pack it.

What a folder claims to be (manifest.py) may be older than its bytes: disks rot, files are changed with their time stamps kept.
So nothing is served before the very mapping that was packed has the hashes of the model's manifest. Hashing runs in
threads of its own, and loading takes about as long as the slower of the two (docs/models.md has times).
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.header import TensorEntry
from manyhands.checkpoint.manifest import Manifest, TensorDigest, check_part, check_small

MAX_THREADS: Final = 4  # with SHA instructions one hashes 1.6 GB/s: more than disks read

Add = Callable[[TensorEntry, NDArray[np.uint8]], None]  # a tensor and its bytes


def ignore(entry: TensorEntry, raw: NDArray[np.uint8]) -> None:
    """Checks nothing."""


@contextmanager
def verifying(folder: Path, manifest: Manifest | None) -> Iterator[Add]:
    """Within, tell each tensor of `folder` that is used; on leaving, all have the hashes of `manifest`, or it raises Damaged.

    config.json and the tokenizer's files are checked on entering. `manifest` None: nothing is checked (to measure).
    """
    if manifest is None:
        yield ignore
        return
    check_small(manifest, folder)
    under_way: list[Future[TensorDigest]] = []
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="verify") as pool:
        try:
            yield lambda entry, raw: under_way.append(pool.submit(_digest, entry, raw))
            check_part(manifest, [one.result() for one in under_way], folder)
        finally:
            pool.shutdown(cancel_futures=True)


def _digest(entry: TensorEntry, raw: NDArray[np.uint8]) -> TensorDigest:
    return TensorDigest(entry.name, entry.dtype, entry.shape, hashlib.sha256(raw.data).hexdigest())
