"""Rows in fewer bytes, without loss: the exponents of numbers are alike, so they are put together and deflated. Pure.

    planes    length of the deflated exponents u32 · exponents, a byte a number, as raw deflate · the other bytes as they are

A number's bits are turned left by one, so that the exponent is a byte of its own and the sign goes with the mantissa, which is
noise and is not touched. Of bf16 rows of hidden states about a third goes (docs/protocol.md). What is decoded never has
more bytes than its header declares, and encoded rows are never more than twice as small: nothing can be blown up.
"""

import struct
import zlib
from typing import Any, Final

import numpy as np

from manyhands.errors import Corruption
from manyhands.wire.header import MAX_CODED_ROWS
from manyhands.wire.int8 import int8_coded, int8_plain
from manyhands.wire.message import ITEMSIZE, DType, Payload
from manyhands.wire.rounding import Rounding

_LENGTH: Final = struct.Struct("<I")
_WORDS: Final[dict[DType, type[Any]]] = {"bf16": np.uint16, "fp32": np.uint32}
# Fewer bytes are not worth the trouble: a step of a row, say, whose way through the nodes is to be short.
LEAST_BYTES: Final = 4 << 10
# Where bytes go faster than this, coding takes longer than sending what it saves: a third, coded at 60 MB/s by a busy core.
SLOW_Bps: Final = 10e6


def is_slow(uplink_Bps: float | None) -> bool:
    """Whether a link that was measured to carry `uplink_Bps` (None: not measured) is worth coding for."""
    return uplink_Bps is not None and uplink_Bps < SLOW_Bps


def pays(payload: Payload, uplink_Bps: float | None) -> bool:
    """Whether to code `payload` without loss for a link that was measured to carry `uplink_Bps`."""
    return is_slow(uplink_Bps) and payload.codec == "plain" and _is_worth_it(payload)


def _is_worth_it(payload: Payload) -> bool:
    return payload.dtype in _WORDS and LEAST_BYTES <= len(payload.data) <= MAX_CODED_ROWS


def as_sent(payload: Payload, position: int, rounding: Rounding | None, uplink_Bps: float | None) -> Payload:
    """The hidden states of positions from `position` on as they leave by a link: rounded where `rounding` says so, whatever
    the link is by now, and in as few bytes as pays."""
    row_bytes = payload.width * ITEMSIZE[payload.dtype]
    count = len(payload.data) // row_bytes
    for first, last in rounding.within(position, count) if rounding is not None else ():
        part = payload._replace(data=memoryview(payload.data)[first * row_bytes : last * row_bytes])
        if payload.dtype not in _WORDS or (less := int8_coded(part, last - first)) is None:
            continue  # what is not finite is refused where it arrives
        if last - first == count and _is_worth_it(payload):
            return less
        inside = int8_plain(less, last - first).data
        data = b"".join([payload.data[: first * row_bytes], inside, payload.data[last * row_bytes :]])
        payload = payload._replace(data=data)
    return coded(payload) if pays(payload, uplink_Bps) else payload


def coded(payload: Payload) -> Payload:
    """The same rows in fewer bytes, or as they were if that saves nothing."""
    word = _WORDS[payload.dtype]
    words = np.frombuffer(payload.data, word)
    turned = words << 1 | words >> (8 * words.itemsize - 1)
    planes = turned.view(np.uint8).reshape(len(words), words.itemsize)
    deflate = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    exponents = deflate.compress(planes[:, -1].tobytes()) + deflate.flush()
    data = _LENGTH.pack(len(exponents)) + exponents + planes[:, :-1].tobytes()
    return payload if len(data) >= len(payload.data) else payload._replace(data=data, codec="planes")


def plain(payload: Payload, count: int) -> Payload:
    """The `count` rows as they were before coding. Raises Corruption for bytes that are not those of so many rows."""
    if payload.codec == "plain":
        return payload
    if payload.codec == "int8":
        return int8_plain(payload, count)
    num_words, itemsize = count * payload.width, ITEMSIZE[payload.dtype]
    view, rest = memoryview(payload.data), num_words * (itemsize - 1)
    end = len(view) - rest
    if not num_words or end < _LENGTH.size or _LENGTH.unpack_from(view)[0] != end - _LENGTH.size:
        raise Corruption(f"{len(view)} bytes of coded rows do not hold [{count}, {payload.width}] {payload.dtype}")
    planes = np.empty((num_words, itemsize), np.uint8)
    planes[:, -1] = np.frombuffer(_inflated(view[_LENGTH.size : end], num_words), np.uint8)
    planes[:, :-1] = np.frombuffer(view[end:], np.uint8).reshape(num_words, itemsize - 1)
    turned = planes.view(_WORDS[payload.dtype])[:, 0]
    words = turned >> 1 | turned << (8 * itemsize - 1)
    return payload._replace(data=words.tobytes(), codec="plain")


def _inflated(data: memoryview, num_bytes: int) -> bytes:
    inflate = zlib.decompressobj(-15)
    try:
        found = inflate.decompress(data, num_bytes)
        ended = inflate.eof or (not inflate.decompress(inflate.unconsumed_tail, 1) and inflate.eof)
    except zlib.error as error:
        raise Corruption(f"coded rows cannot be inflated: {error}") from error
    if len(found) != num_bytes or not ended or inflate.unused_data:
        raise Corruption(f"coded rows inflate to other than the {num_bytes} exponents that they declare")
    return found
