"""Tensors cross the wire bit for bit; what is encoded is a copy, what is decoded shares the frame's memory."""

import subprocess
import sys

import pytest
import torch

from manyhands.errors import ProtocolError
from manyhands.wire.message import DType, Payload
from manyhands.wire.tensor import ITEMSIZE, decode_tensor, encode_tensor

DTYPES: dict[DType, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int32": torch.int32,
}


@pytest.mark.parametrize("name", DTYPES)
def test_round_trip_is_bit_exact(name: DType) -> None:
    tensor_TD = (torch.arange(12).view(3, 4) - 5).to(DTYPES[name])
    payload = encode_tensor(tensor_TD)
    assert (payload.dtype, payload.width, len(payload.data)) == (name, 4, 12 * ITEMSIZE[name])
    assert torch.equal(decode_tensor(Payload(name, 4, bytearray(payload.data)), 3), tensor_TD)


def test_what_is_encoded_is_a_copy_and_decoding_shares_memory() -> None:
    tensor_TD = torch.zeros(2, 2, dtype=torch.bfloat16)
    payload = encode_tensor(tensor_TD)
    tensor_TD[1, 1] = 3
    data = bytearray(payload.data)
    assert not any(data)
    again_TD = decode_tensor(Payload("bf16", 2, data), 2)
    data[:] = bytes(tensor_TD.view(torch.uint8).flatten().tolist())
    assert again_TD[1, 1] == 3


def test_views_and_gradients_are_encoded_by_value() -> None:
    tensor_TD = torch.arange(6.0, requires_grad=True).view(2, 3).T
    assert decode_tensor(encode_tensor(tensor_TD), 3).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_read_only_bytes_decode_without_a_warning() -> None:
    assert decode_tensor(Payload("int32", 1, b"\1\0\0\0\2\0\0\0"), 2).tolist() == [[1], [2]]


def test_no_rows() -> None:
    payload = encode_tensor(torch.empty(0, 5))
    assert decode_tensor(payload, 0).shape == (0, 5)


@pytest.mark.parametrize("count", [0, 1, 3, -2])
def test_size_must_match(count: int) -> None:
    with pytest.raises(ProtocolError, match="is not"):
        decode_tensor(Payload("fp32", 2, bytes(16)), count)


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.zeros(1, 1, dtype=torch.float64)])
def test_other_tensors_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ProtocolError, match="cannot be sent"):
        encode_tensor(tensor)


@pytest.mark.slow
def test_frames_do_not_import_torch() -> None:
    code = "import sys, manyhands.wire.frame; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0
