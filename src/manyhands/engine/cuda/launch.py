"""What kernels are told: Args and LaunchPart in common.cu, and a launch."""

import ctypes
from collections.abc import Sequence
from typing import Final, NamedTuple

THREADS: Final = 256
MOST_PARTS: Final = 4
_NUMBERS, _REALS, _TENSORS = 12, 3, 3


class LaunchPart(ctypes.Structure):
    """A matrix of a product and where its result goes."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("out_stride", "n", "activation", "first")),
    )


class Args(ctypes.Structure):
    """Rows of registers, tensors, numbers."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "y", "out")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "y_stride", "out_stride")),
        ("tensors", ctypes.c_void_p * _TENSORS),
        ("n", ctypes.c_longlong * _NUMBERS),
        ("reals", ctypes.c_double * _REALS),
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_longlong),
        ("parts", LaunchPart * MOST_PARTS),
        ("num_parts", ctypes.c_longlong),
    )


class Place(NamedTuple):
    """A register on the device: its address, and numbers from a row to the next."""

    address: int = 0
    stride: int = 0

    def column(self, column: int) -> "Place":
        """The register from this column on."""
        return Place(self.address + 4 * column, self.stride)


NOWHERE: Final = Place()


class Launch(NamedTuple):
    """A kernel over a grid of blocks."""

    kernel: str
    grid: tuple[int, int, int]
    args: Args
    threads: int = THREADS


def over_columns(kernel: str, columns: int, rows: int, given: Args) -> Launch:
    """A launch with one thread for each column of each row."""
    return Launch(kernel, (-(-columns // THREADS), rows, 1), given)


def args(
    x: Place = NOWHERE,
    y: Place = NOWHERE,
    out: Place = NOWHERE,
    *,
    tensors: Sequence[int | None] = (),
    n: Sequence[int] = (),
    reals: Sequence[float] = (),
    rows: int = 0,
    count: int = 0,
    parts: Sequence[LaunchPart] = (),
) -> Args:
    """Args of what a kernel reads; the rest is zeros."""
    return Args(
        x.address,
        y.address,
        out.address,
        x.stride,
        y.stride,
        out.stride,
        (ctypes.c_void_p * _TENSORS)(*tensors),
        (ctypes.c_longlong * _NUMBERS)(*n),
        (ctypes.c_double * _REALS)(*reals),
        rows,
        count,
        (LaunchPart * MOST_PARTS)(*parts),
        len(parts),
    )
