"""Row-invariant bf16 products on AMX tiles (Intel, from Sapphire Rapids), by a kernel of our own: native/product.c.

oneDNN's AMX kernels cut a row's sum in ways that depend on the number of rows and of threads (docs/exactness.md). This one
has a single order of operations for any number of either, and reads the weights at the speed of the memory.
"""

import ctypes
import logging
import threading
from functools import cache
from os import environ, getpid
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from manyhands.model import threads

logger = logging.getLogger(__name__)

# Raised whenever our own kernels, their order of operations or their interface change (tiles_version in native/tiles.c).
VERSION = 7


@cache
def _library() -> ctypes.CDLL | None:
    """The kernel, if it was built, and if this CPU and this process may run it."""
    path = Path(__file__).with_name("_tiles.so")
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    if not has_amx or "ONEDNN_MAX_CPU_ISA" in environ or not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
        is_ours = library.tiles_version() == VERSION
    except (OSError, AttributeError):
        is_ours = False
    if not is_ours:
        logger.warning("%s is not of this version of manyhands: products run without it; install again", path)
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.tiles_size.restype = count
    library.tiles_size.argtypes = [count, count]
    library.tiles_pack.argtypes = [pointer, pointer, count, count]
    library.tiles_team_start.restype = pointer
    library.tiles_team_start.argtypes = [count]
    library.tiles_team_stop.argtypes = [pointer]
    library.tiles_team_rest.argtypes = [pointer]
    library.tiles_team_rest.restype = None
    library.tiles_team_stop.restype = None
    x: list[Any] = [pointer, count]
    out: list[Any] = [pointer, count, count]
    library.tiles_linear.argtypes = [pointer, count, *x, pointer, pointer, *out, count, count, *out]
    library.tiles_norm.argtypes = [*x, pointer, ctypes.c_float, *out]
    library.tiles_norm.restype = None
    library.tiles_measure.argtypes = [*out, count, pointer]
    library.tiles_measure.restype = None
    team: list[Any] = [pointer, count]
    segments: list[Any] = [pointer, count]
    heads: list[Any] = [pointer, count, count]
    library.tiles_attend.argtypes = [*team, pointer, *segments, count, *heads, *heads, *heads, pointer, pointer]
    rows: list[Any] = [pointer, count, pointer, pointer, count]
    library.tiles_front.argtypes = [*team, pointer, pointer, *rows]
    library.tiles_front.restype = None
    module: list[Any] = [*team, count, count, pointer, *segments, *x, count, pointer, pointer, count, pointer]
    library.tiles_module.argtypes = [*module, *out]
    stack: list[Any] = [*team, pointer, pointer, count, *segments, *out, pointer, pointer, count, pointer, pointer]
    library.tiles_stack.argtypes = [*stack, *out]
    return library if library.tiles_init() == 0 else None


def available() -> bool:
    return _library() is not None


def kernel() -> ctypes.CDLL:
    """The library, where it is `available`."""
    library = _library()
    assert library is not None
    return library


class _Team:
    """`size` threads of the kernel, the one that calls among them."""

    def __init__(self, size: int) -> None:
        library = kernel()
        self.size = size
        self._stop, self._process = library.tiles_team_stop, getpid()
        self.handle: int | None = library.tiles_team_start(size)
        if self.handle is None:
            raise MemoryError("no memory for the threads of products")

    def __del__(self) -> None:
        if self.handle is not None and getpid() == self._process:  # a fork has no such threads
            self._stop(self.handle)


class _Here(threading.local):
    """What a device's thread has: its team, and the product that it computed last."""

    team: _Team | None = None
    last: list[int | None]  # where that one keeps what comes after it

    def __init__(self) -> None:
        self.last = [None, 0, 0]


_here = _Here()


def team(count: int) -> _Team:
    """The threads of this device, at least `count` where it has so many."""
    if _here.team is None or _here.team.size < count:
        _here.team = _Team(threads.available())
    return _here.team


def rest() -> None:
    """A step is over: the team of this device, if it has one, need not stay awake for another product."""
    if _here.team is not None:
        kernel().tiles_team_rest(_here.team.handle)


Activation = Literal["none", "silu", "gelu_tanh"]


class ProductStruct(ctypes.Structure):
    """A product, as native/product.h has it."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("n", "k")),
        ("bias", ctypes.c_void_p),
        ("activation", ctypes.c_int64),
    ]


class Tiled:
    """One bf16 matrix [N, K] as tiles. Call with bf16 rows [M, K]; gives [M, N]. Only where `available`.

    With an `activation`, blocks of 16 rows of the matrix come in pairs, and the result is activation(first) * second, rounded
    once: [M, N / 2] (see `gated`).
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, activation: Activation = "none") -> None:
        library = kernel()
        assert weight_NK.dtype == torch.bfloat16 and weight_NK.shape[1] > 0
        self.shape = weight_NK.shape
        self._activation = get_args(Activation).index(activation)
        self._width = self.shape[0] // 2 if self._activation else self.shape[0]
        self._tiles = torch.empty(library.tiles_size(*self.shape), dtype=torch.bfloat16)
        self._bias = None if bias_N is None else bias_N.float().contiguous()
        weight_NK = weight_NK.contiguous()
        library.tiles_pack(weight_NK.data_ptr(), self._tiles.data_ptr(), *self.shape)
        self._linear = library.tiles_linear
        self._matrix: list[int | None] = [self._tiles.data_ptr(), *self.shape]
        self._then: list[int | None] = [None, 0, 0]  # the matrix that was asked for after this one

    def struct(self) -> ProductStruct:
        """For kernels that have this product inside; valid as long as this is."""
        return ProductStruct(*self._matrix, None if self._bias is None else self._bias.data_ptr(), self._activation)

    def comes_next(self, end: "Tiled | None" = None) -> None:
        """Note that this product follows the last one, which from now on is this, or `end` of a kernel that runs several."""
        here = _here
        here.last[:] = self._matrix
        here.last = (end or self)._then

    @property
    def then(self) -> list[int | None]:
        """The packed matrix that came after this one last time: address, rows, columns."""
        return self._then

    def __call__(self, x_MK: Tensor) -> Tensor:
        num_rows, (width, depth) = x_MK.shape[0], self.shape
        x_MK = rows_of(x_MK, depth)
        out_MN = torch.empty(num_rows, self._width, dtype=torch.bfloat16)
        self.comes_next()
        count = threads.for_product(num_rows, width, depth)
        bias = None if self._bias is None else self._bias.data_ptr()
        operands = x_MK.data_ptr(), x_MK.stride(0), self._tiles.data_ptr(), bias, out_MN.data_ptr()
        sizes = num_rows, width, depth, self._activation
        if num_rows and self._linear(team(count).handle, count, *operands, *sizes, *self._then):
            raise MemoryError("no memory for the rows of a product")
        return out_MN


def gated(weight_2NK: Tensor, bias_2N: Tensor | None, activation: Activation) -> Tiled:
    """x -> activation(gate) * up, where x @ weight.T + bias is gate and up side by side. N: a multiple of 16."""

    def paired(values: Tensor) -> Tensor:
        return values.view(2, -1, 16, *values.shape[1:]).transpose(0, 1).reshape(values.shape)

    return Tiled(paired(weight_2NK), None if bias_2N is None else paired(bias_2N), activation)


class NormKernel:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension of bf16 tensors, in fp32, rounded once."""

    def __init__(self, weight_N: Tensor, epsilon: float) -> None:
        library = kernel()
        self._norm, self.weight, self.epsilon = library.tiles_norm, weight_N.float().contiguous(), epsilon

    def __call__(self, x: Tensor) -> Tensor:
        width = len(self.weight)
        x_MN = rows_of(x.reshape(-1, x.shape[-1]), width)
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        rows = x_MN.data_ptr(), x_MN.stride(0)
        self._norm(*rows, self.weight.data_ptr(), self.epsilon, out.data_ptr(), x_MN.shape[0], width)
        return out


def measure(x_MN: Tensor) -> tuple[float, float]:
    """The smallest and the largest Euclidean norm of one or more bf16 rows; the largest is NaN if one is."""
    x_MN, bounds = rows_of(x_MN, x_MN.shape[1]), (ctypes.c_float * 2)()
    kernel().tiles_measure(x_MN.data_ptr(), x_MN.stride(0), *x_MN.shape, bounds)
    return bounds[0], bounds[1]


def rows_of(x_MK: Tensor, depth: int) -> Tensor:
    """`x_MK` with numbers of a row side by side. Raises TypeError for what the kernel would misread."""
    if x_MK.dtype != torch.bfloat16 or x_MK.shape[1] != depth:
        raise TypeError(f"this takes bf16 rows of {depth} numbers, not {x_MK.dtype} of {tuple(x_MK.shape)}")
    return x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
