"""Payloads as torch tensors and back. Knows nothing of frames; frame.py takes only ITEMSIZE from here.

torch is imported on first use, so that the wire can be spoken by programs that never load it.
Dimensions: T = count (rows), D = width. Hosts are little endian, like the wire.
"""

import ctypes
import functools
from typing import TYPE_CHECKING, Any, cast

from manyhands.errors import ProtocolError
from manyhands.wire.message import DType, Payload

if TYPE_CHECKING:
    import torch

ITEMSIZE: dict[DType, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "int32": 4}


@functools.cache
def _torch() -> Any:
    """The module. (With cold caches an import statement takes five times as long to find it loaded.)"""
    import torch

    return torch


@functools.cache
def _torch_dtypes() -> "dict[DType, torch.dtype]":
    torch = _torch()
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32}


@functools.cache
def _names() -> "dict[torch.dtype, DType]":
    return {dtype: name for name, dtype in _torch_dtypes().items()}


def encode_tensor(tensor_TD: "torch.Tensor") -> Payload:
    """The bytes of a [T, D] tensor: a copy, which keeps nothing else alive in logs and queues.

    Raises ProtocolError for another rank or dtype.
    """
    name = _names().get(tensor_TD.dtype)
    if name is None or tensor_TD.dim() != 2:
        raise ProtocolError(f"a {tensor_TD.dim()}-d {tensor_TD.dtype} tensor cannot be sent: 2-d {list(ITEMSIZE)} only")
    if not (tensor_TD.is_cpu and tensor_TD.is_contiguous()):  # two calls that do nothing take a hop 10 us
        tensor_TD = tensor_TD.cpu().contiguous()
    return Payload(name, tensor_TD.shape[1], ctypes.string_at(tensor_TD.data_ptr(), tensor_TD.nbytes))


def decode_tensor(payload: Payload, count: int) -> "torch.Tensor":
    """The [count, width] CPU tensor of a payload; contiguous. Shares memory with `payload.data` if that is writable.

    (What FrameReader returns is. torch cannot hold read-only memory, so plain `bytes` are copied.)
    Raises ProtocolError unless data is exactly count * width * itemsize bytes.
    """
    expected = count * payload.width * ITEMSIZE[payload.dtype]
    view = memoryview(payload.data)
    if count < 0 or payload.width < 0 or view.nbytes != expected:
        raise ProtocolError(f"payload of {view.nbytes} bytes is not [{count}, {payload.width}] {payload.dtype}")
    dtype = _torch_dtypes()[payload.dtype]
    if expected == 0:
        return cast("torch.Tensor", _torch().empty(count, payload.width, dtype=dtype))
    buffer = bytearray(view) if view.readonly else view
    return cast("torch.Tensor", _torch().frombuffer(buffer, dtype=dtype).view(count, payload.width))
