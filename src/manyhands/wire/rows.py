"""Payloads as numpy arrays and back: rows of bytes, and the numbers in them. bf16 is the upper half of an fp32.

Dimensions: T rows, D numbers in a row, B bytes of a row. Hosts are little endian, like the wire.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import ProtocolError
from manyhands.wire.codec import plain
from manyhands.wire.message import ITEMSIZE, DType, Payload

Rows = NDArray[np.uint8]  # [T, B], contiguous
Numbers = NDArray[np.float32]  # [T, D]
_TYPES: Final[dict[DType, type[Any]]] = {
    "bf16": np.uint16,
    "fp16": np.float16,
    "fp32": np.float32,
    "int32": np.int32,
}


def read_rows(payload: Payload, count: int) -> Rows:
    """The bytes of `count` rows; they share memory with `payload.data`, unless they are decoded.

    Raises ProtocolError unless data is exactly count * width * itemsize bytes; Corruption for coded rows that are not.
    """
    if payload.codec != "plain":
        payload = plain(payload, count)
    row_bytes = payload.width * ITEMSIZE[payload.dtype]
    flat = np.frombuffer(payload.data, np.uint8)
    if count < 0 or payload.width < 0 or len(flat) != count * row_bytes:
        raise ProtocolError(f"payload of {len(flat)} bytes is not [{count}, {payload.width}] {payload.dtype}")
    return flat.reshape(count, row_bytes)


def rows_payload(rows_TB: Rows, dtype: DType) -> Payload:
    """A copy of the rows, which keeps nothing else alive in logs and queues."""
    return Payload(dtype, rows_TB.shape[1] // ITEMSIZE[dtype], rows_TB.tobytes())


def numbers(rows_TB: Rows, dtype: DType) -> Numbers:
    """The numbers of rows in fp32, exactly."""
    stored_TD = rows_TB.view(_TYPES[dtype])
    if dtype == "bf16":
        bits_TD = stored_TD.astype(np.uint32)
        bits_TD <<= 16
        numbers_TD: Numbers = bits_TD.view(np.float32)
        return numbers_TD
    return np.asarray(stored_TD, np.float32)


def read_ids(payload: Payload, count: int) -> list[int]:
    """Token ids, one a row. Raises ProtocolError."""
    ids: list[int] = read_rows(payload, count).view(np.int32)[:, 0].tolist()
    return ids


def ids_payload(ids: Sequence[int]) -> Payload:
    return Payload("int32", 1, np.array(ids, np.int32).tobytes())


def store(numbers_TD: Numbers, dtype: DType) -> Payload:
    """fp32 numbers as `dtype`; bf16 is cut off."""
    if dtype == "bf16":
        bits = np.ascontiguousarray(numbers_TD).view(np.uint32) >> 16
        return Payload(dtype, numbers_TD.shape[1], bits.astype(np.uint16).tobytes())
    return Payload(dtype, numbers_TD.shape[1], numbers_TD.astype(_TYPES[dtype]).tobytes())


def logits_payload(logits_TV: Numbers) -> Payload:
    return store(logits_TV, "fp32")
