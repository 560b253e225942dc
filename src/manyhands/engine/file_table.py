"""A table of embeddings that stays in the checkpoint's file: a token's row is read when it is asked for."""

import mmap
from collections.abc import Sequence

import numpy as np

from manyhands.core import Precision
from manyhands.engine.library import Array
from manyhands.engine.weights import Read, Stored, as_numbers, find, rows_held
from manyhands.errors import ModelError
from manyhands.program.ops import Weight


class FileTable:
    """The table that `weight` names. Where `read` gives a view of a file, no memory holds it, and the file stays mapped.

    Raises ModelError where it is missing or has another shape.
    """

    def __init__(self, weight: Weight, read: Read, precision: Precision, back_end: str) -> None:
        found, _ = find(weight, read)
        self._stored = found if found.order is None else as_numbers(found)
        self._precision, self._back_end = precision, back_end
        self._file = _mapping_of(self._stored.array)
        self._is_settled = False

    def rows(self, ids: Sequence[int]) -> Stored:
        """The rows of `ids`, as the table held at this precision has them; row 0 for ids that it lacks. Raises ModelError."""
        if self._file is not None:
            self._settle(self._file)
        num_rows = len(self._stored.array)
        chosen = np.array([number if number < num_rows else 0 for number in ids], np.int64)
        return rows_held(self._stored, chosen, self._precision, self._back_end)

    def _settle(self, file: mmap.mmap) -> None:
        """Check that the file is as long as it was: to read behind its end would end the process. At first let go of what was
        mapped to prove it."""
        if file.size() < len(file):
            raise ModelError(
                f"a file of the checkpoint was cut to {file.size()} bytes, of {len(file)}, since it was loaded: restore it and "
                "start this process anew"
            )
        if not self._is_settled:
            file.madvise(mmap.MADV_DONTNEED)
            file.madvise(mmap.MADV_RANDOM)
            self._is_settled = True


def _mapping_of(array: Array) -> mmap.mmap | None:
    """What `array` is a view of, if that is a file."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    return base if isinstance(base, mmap.mmap) else None
