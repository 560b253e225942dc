"""Row-invariant bf16 products on AMX tiles (Intel, from Sapphire Rapids), by a kernel of our own: tiles.c.

oneDNN's AMX kernels cut a row's sum in ways that depend on the number of rows and of threads (docs/exactness.md). This one
has a single order of operations for any number of either, and reads the weights at the speed of the memory.
"""

import ctypes
from functools import cache
from os import environ
from pathlib import Path

import torch
from torch import Tensor

from manyhands.model import threads


@cache
def _library() -> ctypes.CDLL | None:
    """The kernel, if it was built, and if this CPU and this process may run it."""
    files = list(Path(__file__).parent.glob("_tiles*.so"))
    cpu = torch.cpu
    has_tiles = cpu._is_amx_tile_supported() and cpu._is_avx512_bf16_supported()
    if not files or not has_tiles or "ONEDNN_MAX_CPU_ISA" in environ:  # a user holds the kernels back
        return None
    library = ctypes.CDLL(str(files[0]))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.tiles_size.restype = count
    library.tiles_size.argtypes = [count, count]
    library.tiles_pack.argtypes = [pointer, pointer, count, count]
    library.tiles_linear.argtypes = [pointer, count, pointer, pointer, pointer, count, count, count, count]
    return library if library.tiles_init() == 0 else None


def available() -> bool:
    return _library() is not None


class Tiled:
    """One bf16 matrix [N, K] as tiles. Call with bf16 rows [M, K]; gives [M, N]. Only where `available`."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        library = _library()
        assert library is not None and weight_NK.dtype == torch.bfloat16
        self.shape = weight_NK.shape
        self._tiles = torch.empty(library.tiles_size(*self.shape), dtype=torch.bfloat16)
        self._bias = None if bias_N is None else bias_N.float().contiguous()
        weight_NK = weight_NK.contiguous()
        library.tiles_pack(weight_NK.data_ptr(), self._tiles.data_ptr(), *self.shape)
        self._linear = library.tiles_linear
        self._operands = (self._tiles.data_ptr(), None if self._bias is None else self._bias.data_ptr())

    def __call__(self, x_MK: Tensor) -> Tensor:
        num_rows, (width, depth) = x_MK.shape[0], self.shape
        if x_MK.dtype != torch.bfloat16 or x_MK.shape[1] != depth:
            raise TypeError(f"this product takes bf16 rows of {depth} numbers, not {x_MK.dtype} of {tuple(x_MK.shape)}")
        x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
        out_MN = torch.empty(num_rows, width, dtype=torch.bfloat16)
        count = threads.for_product(num_rows, width, depth)
        place = x_MK.data_ptr(), x_MK.stride(0), *self._operands, out_MN.data_ptr()
        if num_rows and self._linear(*place, num_rows, width, depth, count):
            raise MemoryError("no memory for the rows of a product")
        return out_MN
