"""Arrays that stay in files of the checkpoint: how an operation is given some of them, and what is checked before it reads."""

import mmap
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import ModelError


class TableParts(NamedTuple):
    """Arrays that C is given as one: where each lies, and its bytes. They may be views of files."""

    arrays: tuple[NDArray[Any], ...]


Given = NDArray[Any] | TableParts | None  # what an operation is given of a tensor


class Files:
    """The files that arrays are views of; those stay mapped."""

    def __init__(self, arrays: Iterable[NDArray[Any]] = ()) -> None:
        self._mapped: dict[int, mmap.mmap] = {}
        self.add(arrays)

    def add(self, arrays: Iterable[NDArray[Any]]) -> None:
        """These are read as well. What is no view of a file needs no check."""
        for array in arrays:
            if (file := _file_of(array)) is not None:
                self._mapped[id(file)] = file

    def check(self) -> None:
        """Before the arrays are read: to read behind the end of a file that was cut would end the process.

        Raises ModelError.
        """
        for file in self._mapped.values():
            if (size := file.size()) < len(file):
                raise ModelError(
                    f"a file of the checkpoint was cut to {size} bytes, of {len(file)}, since it was loaded: restore it and "
                    "start this process anew"
                )

    def let_go(self) -> None:
        """After they were read: with a row the system maps what it has cached around it, up to 1 MB, and at first all is mapped
        that was read to prove the files."""
        for file in self._mapped.values():
            file.madvise(mmap.MADV_DONTNEED)
            file.madvise(mmap.MADV_RANDOM)


def _file_of(array: NDArray[Any]) -> mmap.mmap | None:
    """What `array` is a view of, if that is a file, and not memory of the process."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    if not isinstance(base, mmap.mmap):
        return None
    try:
        base.size()
    except OSError:  # memory, which is lost if it is let go of
        return None
    return base
