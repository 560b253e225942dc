"""The fixed header of a frame: its layout, the kinds of frames, and what a header must fulfil before its body is read.

version u8 · kind u8 · flags u8 · hop u8 · body length u32 · session 16 bytes · epoch · position · count ·
reply_from · guess · committed · width (u32 each) · dtype u8 · content u8                           all little endian
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from manyhands.core import MAX_STEP_IDS
from manyhands.errors import ProtocolError
from manyhands.wire.attest_message import Attest, Attested
from manyhands.wire.message import (
    ITEMSIZE,
    MAX_DIRECTORY_BYTES,
    PROTOCOL_VERSION,
    Close,
    Codec,
    Content,
    Credit,
    DirectoryUpdate,
    DType,
    Extend,
    Extended,
    Fault,
    Feed,
    Hello,
    Open,
    Opened,
    Ping,
    Pong,
    Probe,
    Progress,
    Reassign,
    Reassigned,
    Retract,
    Step,
)
from manyhands.wire.timings import TIMING
from manyhands.wire.weights_message import MAX_CHUNK_BYTES, WeightRequest, WeightsChunk, WeightsNotFound

MAX_CONTROL_BODY = 64 << 10
MAX_STEP_BODY = 8 << 20
MAX_CODED_ROWS = 1 << 20  # bytes of rows that come coded, once decoded: so many are coded in about 10 ms
MAX_SHAPES = 256  # of Steps, that `shape_of` remembers
KINDS: dict[int, type[Any]] = {
    1: Hello,
    2: Step,
    3: Credit,
    4: Open,
    5: Opened,
    6: Close,
    7: Fault,
    8: Ping,
    9: Pong,
    10: Probe,
    11: Progress,
    12: DirectoryUpdate,
    13: WeightRequest,
    14: WeightsChunk,
    15: WeightsNotFound,
    16: Feed,
    17: Reassign,
    18: Reassigned,
    19: Retract,
    20: Extend,
    21: Extended,
    22: Attest,
    23: Attested,
}
KIND_OF = {cls: kind for kind, cls in KINDS.items()}
STEP = KIND_OF[Step]
DTYPES: tuple[DType, ...] = ("bf16", "fp16", "fp32", "int32")
CONTENTS: tuple[Content, ...] = ("hidden", "ids", "logits")
CODECS: tuple[Codec, ...] = ("plain", "planes", "int8")  # in the upper half of the byte of the dtype
CODEC_SHIFT = 4
CODED_DTYPES = (DTYPES.index("bf16"), DTYPES.index("fp32"))
INT8_GROUP = 32  # numbers of a row that share an exponent (int8.py)
HAS_IDS = 1
HAS_PAYLOAD = 2
TIMINGS_SHIFT = 2  # the other six bits of a Step's flags count its timings
U32 = (1 << 32) - 1
LAYOUT = struct.Struct("<4BI16s7I2B")
LENGTH = 4  # index of the body's length
HEADER_BYTES = LAYOUT.size
CHUNK = struct.Struct("<IQ")  # request, offset
# Bodies that are bytes and not JSON: the least and the most of them.
RAW_BODIES: dict[type[Any], tuple[int, int]] = {
    DirectoryUpdate: (0, MAX_DIRECTORY_BYTES),
    WeightsChunk: (CHUNK.size, CHUNK.size + MAX_CHUNK_BYTES),
}


class Header(NamedTuple):
    """The fields of a header; the defaults are those of a control frame.

    A Step's stay a plain tuple: with cold caches, as they are on a hop, to make a Header and ask it for its fields takes 30 us.
    """

    version: int
    kind: int
    flags: int = 0
    hop: int = 0
    length: int = 0
    session: bytes = bytes(16)
    epoch: int = 0
    position: int = 0
    num_rows: int = 0
    reply_from: int = 0
    guess: int = 0
    committed: int = 0
    width: int = 0
    dtype: int = 0
    content: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest bodies accepted, in bytes. A control body can also never exceed MAX_CONTROL_BODY."""

    control_body: int = MAX_CONTROL_BODY
    step_body: int = MAX_STEP_BODY


_NOTHING = Header(0, 0)[2:LENGTH] + Header(0, 0)[LENGTH + 1 :]


def plain_header(kind: int, length: int) -> bytes:
    """The header of a frame whose fields are its body's length and nothing more."""
    return LAYOUT.pack(PROTOCOL_VERSION, kind, *_NOTHING[: LENGTH - 2], length, *_NOTHING[LENGTH - 2 :])


def credit_header(session: bytes, epoch: int, hop: int, steps: int) -> Header:
    """A Credit is its header alone: its steps stand where a Step has its rows."""
    return Header(PROTOCOL_VERSION, KIND_OF[Credit], hop=hop, session=session, epoch=epoch, num_rows=steps)


class Shape(NamedTuple):
    """What the body of a Step is: its ids end at `ids_end`, its rows, if it `has_rows`, at `rows_end`, then come timings."""

    has_ids: bool
    has_rows: bool
    ids_end: int
    rows_end: int
    dtype: DType
    codec: Codec
    content: Content


@lru_cache(maxsize=MAX_SHAPES)  # one decode step after another has the same
def shape_of(flags: int, length: int, count: int, width: int, dtype: int, content: int) -> Shape:
    """The body that these fields of a Step's header describe. Raises ProtocolError unless they are consistent."""
    dtype, codec = dtype & (1 << CODEC_SHIFT) - 1, dtype >> CODEC_SHIFT
    if dtype >= len(DTYPES) or codec >= len(CODECS) or content >= len(CONTENTS):
        raise ProtocolError("Step has an unknown dtype or content")
    has_ids, has_payload = flags & HAS_IDS != 0, flags & HAS_PAYLOAD != 0
    if has_payload != (width != 0) or ((dtype or codec) and not has_payload):
        raise ProtocolError("Step has a width or dtype without a tensor, or a tensor without width")
    if (has_payload and not count) or (count and not (has_ids or has_payload)):
        raise ProtocolError("Step has rows without content, or content without rows")
    if has_ids and count > MAX_STEP_IDS:
        raise ProtocolError(f"Step with {count} token ids: {MAX_STEP_IDS} at most")
    ids_end = 4 * count * has_ids
    tail = TIMING.size * (flags >> TIMINGS_SHIFT) + ids_end
    rows = count * width * ITEMSIZE[DTYPES[dtype]]
    if codec:
        _check_coded(CODECS[codec], dtype, rows, length - tail, int8_bytes(count, width))
    elif length != rows + tail:
        raise ProtocolError(f"Step of {length} bytes does not hold the {count} rows that it declares")
    return Shape(
        has_ids, has_payload, ids_end, length - tail + ids_end, DTYPES[dtype], CODECS[codec], CONTENTS[content]
    )


def check_step(header: tuple[Any, ...], max_body: int) -> Shape:
    """What the body of a Step with this header is. Raises ProtocolError unless it is consistent and within limits."""
    _, _, flags, _, length, _, _, position, count, _, _, _, width, dtype, content = header
    if length > max_body:
        raise ProtocolError(f"Step of {length} bytes is over the limit of {max_body}")
    if position + count > U32:
        raise ProtocolError("Step goes beyond position 2**32 - 1")
    return shape_of(flags, length, count, width, dtype, content)


def int8_bytes(count: int, width: int) -> int:
    """Bytes of so many rows in 8 bits: a byte a number, and one a group."""
    return count * (width + -(-width // INT8_GROUP))


def _check_coded(codec: Codec, dtype: int, rows: int, coded: int, in_8_bits: int) -> None:
    """Raise ProtocolError unless `coded` bytes may be those of rows that take `rows` bytes when they are decoded."""
    if dtype not in CODED_DTYPES or rows > MAX_CODED_ROWS:
        raise ProtocolError(f"Step with coded rows of {rows} bytes: bf16 or fp32, and {MAX_CODED_ROWS} at most")
    if codec == "int8" and coded != in_8_bits:
        raise ProtocolError(f"Step with {coded} bytes of rows in 8 bits, which take {in_8_bits}")
    if codec == "planes" and not rows // 2 <= coded < rows:
        raise ProtocolError(f"Step with {coded} bytes of coded rows of {rows}: at least half, less than all")


def check_control(header: tuple[Any, ...], max_body: int) -> None:
    length = header[LENGTH]
    if length > max_body:
        raise ProtocolError(f"control frame of {length} bytes is over the limit of {max_body}")
    if header[2:LENGTH] + header[LENGTH + 1 :] != _NOTHING:
        raise ProtocolError("control frame with fields that only a Step has")


def check_raw(kind: type[Any], length: int) -> None:
    """Raise ProtocolError unless a DirectoryUpdate or WeightsChunk is within limits."""
    low, high = RAW_BODIES[kind]
    if not low <= length <= high:
        raise ProtocolError(f"{kind.__name__} of {length} bytes is outside its limits, {low} to {high}")
