"""Hidden states in 8 bits, with loss: each 32 numbers of a row share an exponent. Pure.

    exponents  u8[count, groups] · numbers  i8[count, width]

A number is its byte times two to the power of its group's exponent less EXPONENT_ZERO: the least power with which the largest
of the group is a byte from -127 to 127. Others are rounded to the nearest, halves to even. Products by powers of two are exact,
and a byte is exact in bf16, so every machine encodes and decodes the same bits, and rows that were decoded are encoded to what
they came from: rounding twice is rounding once.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import Corruption
from manyhands.wire.header import INT8_GROUP, int8_bytes
from manyhands.wire.message import DType, Payload

EXPONENT_ZERO: Final = 100  # the byte of the exponent 0
MAX_EXPONENT: Final = EXPONENT_ZERO + 121  # 127 * 2**121 is the largest that is finite in bf16 and fp32
_LEAST: Final = -EXPONENT_ZERO  # groups whose numbers are all below 2**-101 become zero
_INFINITE: Final = 0x7F80_0000

Grouped = NDArray[Any]  # [T, groups, INT8_GROUP]


def int8_coded(payload: Payload, count: int) -> Payload | None:
    """`count` rows of bf16 or fp32, as they are, in 8 bits. None if one of their numbers is not finite."""
    numbers = _grouped(_fp32_bits(payload).reshape(count, payload.width))
    bits = numbers & 0x7FFF_FFFF
    tops = bits.max(axis=2)
    if (tops >= _INFINITE).any():
        return None
    exponents = np.maximum(
        (tops >> 23).astype(np.int32) - 133, _LEAST
    )  # of tops: from 64 to 128 times two to the power of it
    exponents += tops.view(np.float32) * _power(-exponents) >= 127.5
    np.minimum(exponents, MAX_EXPONENT - EXPONENT_ZERO, out=exponents)
    scaled = np.rint(numbers.view(np.float32) * _power(-exponents)[:, :, None])
    bytes_TW = np.minimum(np.maximum(scaled, -127), 127).astype(np.int8).reshape(count, -1)[:, : payload.width]
    data = (exponents + EXPONENT_ZERO).astype(np.uint8).tobytes() + bytes_TW.tobytes()
    return payload._replace(data=data, codec="int8")


def int8_plain(payload: Payload, count: int) -> Payload:
    """The `count` rows that the bytes stand for. Raises Corruption for bytes that are not those of so many rows."""
    width, data = payload.width, np.frombuffer(payload.data, np.uint8)
    if not count or len(data) != int8_bytes(count, width):
        raise Corruption(f"{len(data)} bytes in 8-bit groups do not hold [{count}, {width}] {payload.dtype}")
    edge = len(data) - count * width
    exponents, numbers = data[:edge].reshape(count, -1), data[edge:].view(np.int8).reshape(count, width)
    if (exponents > MAX_EXPONENT).any() or (numbers == -128).any():
        raise Corruption(f"8-bit groups with an exponent over {MAX_EXPONENT} or a number of -128, which none has")
    powers = _power(exponents.astype(np.int32) - EXPONENT_ZERO)
    values = _grouped(numbers).astype(np.float32) * powers[:, :, None]
    return payload._replace(data=_stored(values.reshape(count, -1)[:, :width], payload.dtype), codec="plain")


def _fp32_bits(payload: Payload) -> NDArray[np.uint32]:
    if payload.dtype == "fp32":
        return np.frombuffer(payload.data, np.uint32)
    return np.frombuffer(payload.data, np.uint16).astype(np.uint32) << np.uint32(16)


def _stored(values_TW: NDArray[np.float32], dtype: DType) -> bytes:
    values_TW = np.ascontiguousarray(values_TW)
    return values_TW.tobytes() if dtype == "fp32" else (values_TW.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def _grouped(rows_TW: NDArray[Any]) -> Grouped:
    """Rows in groups; the last is filled up with zeros."""
    count, width = rows_TW.shape
    if lacking := -width % INT8_GROUP:
        rows_TW = np.concatenate([rows_TW, np.zeros((count, lacking), rows_TW.dtype)], axis=1)
    return rows_TW.reshape(count, -1, INT8_GROUP)


def _power(exponents: NDArray[np.int32]) -> NDArray[np.float32]:
    """Two to the powers of -122 to 127."""
    return ((exponents + 127) << 23).view(np.float32)
