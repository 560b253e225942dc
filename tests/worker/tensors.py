"""Payloads as torch tensors and back, for tests that compare rows."""

from typing import Final

import torch

from manyhands.wire.message import DType, Payload
from manyhands.wire.rows import read_rows

DTYPES: Final[dict[DType, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int32": torch.int32,
}


def encode_tensor(tensor_TD: torch.Tensor) -> Payload:
    """The bytes of a [T, D] tensor."""
    name = next(name for name, dtype in DTYPES.items() if dtype == tensor_TD.dtype)
    return Payload(name, tensor_TD.shape[1], tensor_TD.contiguous().view(torch.uint8).numpy().tobytes())


def decode_tensor(payload: Payload, count: int) -> torch.Tensor:
    """The [count, width] tensor of a payload. Raises ProtocolError."""
    rows_TB = torch.from_numpy(read_rows(payload, count).copy())
    return rows_TB.view(DTYPES[payload.dtype])
