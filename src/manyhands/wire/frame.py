"""Frames: a fixed header, then a body. Sans-I/O: no sockets, no torch.

    header   header.py
    Step     ids as u32[count] if flag 1, then the tensor's count * width * itemsize bytes if flag 2, or fewer if they
             are coded (codec.py), then flags >> 2 timings (timings.py)
    Credit   no body; its steps stand in count
    DirectoryUpdate    its body as it is
    WeightsChunk    request u32 · offset u64, then its data
    others   JSON (control.py)
             in all but Step and Credit every header field after the length, the flags and the hop are zero

Nothing is allocated for a body before its header has been checked, and its memory is not touched before its bytes come.
"""

import struct
from typing import Any

import numpy as np

from manyhands.errors import ProtocolError
from manyhands.wire import control
from manyhands.wire.header import (
    CHUNK,
    CODEC_SHIFT,
    CODECS,
    CONTENTS,
    DTYPES,
    HAS_IDS,
    HAS_PAYLOAD,
    HEADER_BYTES,
    KIND_OF,
    KINDS,
    LAYOUT,
    LENGTH,
    MAX_CONTROL_BODY,
    MAX_STEP_BODY,
    RAW_BODIES,
    STEP,
    TIMINGS_SHIFT,
    Limits,
    Shape,
    check_control,
    check_raw,
    check_step,
    credit_header,
    plain_header,
)
from manyhands.wire.message import LANES, PROTOCOL_VERSION, Credit, DirectoryUpdate, Hello, Lane, Message, Payload, Step
from manyhands.wire.timings import MAX_TIMINGS, TIMING
from manyhands.wire.weights_message import WeightsChunk

_FIRST: dict[int, type[Any]] = {KIND_OF[Hello]: Hello}  # on a link
_DUE = {lane: {KIND_OF[kind]: kind for kind in kinds} for lane, kinds in LANES.items()}

# What one read takes in while no body is open, a TLS record. Of the smallest frames with JSON that is 250, and their decoding
# holds the event loop for some 3 ms: no other work comes between frames of one read.
SCRATCH_BYTES = 16 << 10

Body = bytearray | memoryview

_NOTHING = memoryview(b"")
_NO_ROWS = Payload("bf16", 0, b"")
_MAX_TIMINGS_BYTES = MAX_TIMINGS * TIMING.size
_DTYPE_NUMBERS, _CODEC_NUMBERS, _CONTENT_NUMBERS = (
    {name: number for number, name in enumerate(names)} for names in (DTYPES, CODECS, CONTENTS)
)


def encode(message: Message) -> list[bytes | memoryview]:
    """The bytes of one frame, in order. A Step's tensor is not copied: do not change it until the bytes are sent.

    Raises ProtocolError for what a peer would refuse: too large, shape and size that differ, numbers out of range.
    """
    try:
        match message:
            case Step():
                return _encode_step(message)
            case Credit():
                return [LAYOUT.pack(*credit_header(*message))]
            case DirectoryUpdate(body):
                return _encode_raw(message, b"", body)
            case WeightsChunk(request, offset, data):
                return _encode_raw(message, CHUNK.pack(request, offset), data)
            case _:
                return _encode_control(message)
    except struct.error as exc:
        raise ProtocolError(f"{type(message).__name__} cannot be sent: {exc}") from exc


def wire_size(message: Message) -> int:
    """Number of bytes that `encode` makes of a message."""
    return sum(len(part) for part in encode(message))


def _encode_control(message: Message) -> list[bytes | memoryview]:
    body = control.encode(message)
    if len(body) > MAX_CONTROL_BODY:
        raise ProtocolError(f"{type(message).__name__} of {len(body)} bytes is over the limit of {MAX_CONTROL_BODY}")
    return [plain_header(KIND_OF[type(message)], len(body)) + body]


def _encode_raw(message: Message, prefix: bytes, data: bytes | bytearray | memoryview) -> list[bytes | memoryview]:
    """The frame of a message whose body is bytes and not JSON; `data` is not copied."""
    view = memoryview(data).cast("B")
    length = len(prefix) + len(view)
    check_raw(type(message), length)
    return [plain_header(KIND_OF[type(message)], length) + prefix, view]


def _encode_step(step: Step) -> list[bytes | memoryview]:
    session, epoch, hop, position, count, reply_from, guess, content, ids, payload, timings, committed = step
    dtype, width, data, codec = _NO_ROWS if payload is None else payload
    head = b"" if ids is None else struct.pack(f"<{len(ids)}I", *ids)
    body = data if isinstance(data, bytes) else memoryview(data).cast("B")
    timings = timings[:_MAX_TIMINGS_BYTES]
    flags = HAS_IDS * (ids is not None) | HAS_PAYLOAD * (payload is not None)
    flags |= len(timings) // TIMING.size << TIMINGS_SHIFT
    length = len(head) + len(body) + len(timings)
    where = session, epoch, position, count, reply_from, guess, committed
    kind = _DTYPE_NUMBERS[dtype] | _CODEC_NUMBERS[codec] << CODEC_SHIFT
    header = PROTOCOL_VERSION, STEP, flags, hop, length, *where, width, kind, _CONTENT_NUMBERS[content]
    if len(session) != 16 or (ids is not None and len(ids) != count):
        raise ProtocolError("Step cannot be sent: a session has 16 bytes, and there are as many ids as rows")
    check_step(header, MAX_STEP_BODY)
    head = LAYOUT.pack(*header) + head
    return [head, body, timings] if timings else [head, body]


def _credit(header: tuple[Any, ...]) -> Credit:
    _, _, _, hop, _, session, epoch, _, steps, *_ = header
    return Credit(session, epoch, hop, steps)


def _decode_chunk(body: Body) -> WeightsChunk:
    request, offset = CHUNK.unpack_from(body)
    return WeightsChunk(request, offset, memoryview(body)[CHUNK.size :])


def _decode_step(header: tuple[Any, ...], shape: Shape, body: Body) -> Step:
    """Make a Step of a checked header and its whole body; the payload shares the body's memory."""
    _, _, _, hop, _, session, epoch, position, count, reply_from, guess, committed, width, _, _ = header
    has_ids, has_rows, ids_end, rows_end, dtype, codec, content = shape
    ids = struct.unpack_from(f"<{count}I", body) if has_ids else None
    payload = Payload(dtype, width, memoryview(body)[ids_end:rows_end], codec) if has_rows else None
    timings = bytes(body[rows_end:])
    return Step(session, epoch, hop, position, count, reply_from, guess, content, ids, payload, timings, committed)


def _untouched(num_bytes: int) -> memoryview:
    """Memory that is not filled: what a peer declares and does not send costs no page."""
    return np.empty(num_bytes, np.uint8).data


class FrameReader:
    """Bytes in, messages out, for one direction of one link; shaped for asyncio.BufferedProtocol.

    The first message must be Hello. With `lane` None (a listener) it chooses the lane, else it must name `lane`.
    After an error the reader is dead: buffer_updated raises the same ProtocolError for ever.
    Memory: SCRATCH_BYTES and one body.
    """

    def __init__(self, lane: Lane | None, limits: Limits | None = None) -> None:
        self.lane = lane
        self._limits = limits or Limits()
        self._due = _FIRST  # the kinds of frames that may come next, by their numbers
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._num_scratch = 0
        self._open: tuple[Any, ...] | None = None  # the header of the frame whose body is being read
        self._body = _NOTHING
        self._num_body = 0
        self._error: str | None = None
        self.num_open = 0  # bytes of the body that is being read, those that have not come yet too
        self.num_read = 0  # bytes of the frames that the last read completed

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go; never empty. `sizehint` is ignored: the frame at hand decides."""
        if self._open is not None:
            return self._body[self._num_body :]
        return self._scratch[self._num_scratch :]

    def buffer_updated(self, num_bytes: int) -> list[Message]:
        """Take note of `num_bytes` written to the last buffer; return the messages now complete, in order.

        Raises ProtocolError. Messages completed by the same read as the error are lost with the link.
        """
        if self._error is not None:
            raise ProtocolError(self._error)
        try:
            return self._continue_body(num_bytes) if self._open is not None else self._read_scratch(num_bytes)
        except ProtocolError as exc:
            self.end(str(exc))
            raise

    def end(self, reason: str) -> None:
        """Free the body that is being read; `buffer_updated` raises ProtocolError from now on. The first call counts."""
        self._error = self._error or reason
        self._open, self._body, self.num_open, self._num_scratch = None, _NOTHING, 0, 0

    def _continue_body(self, num_bytes: int) -> list[Message]:
        assert self._open is not None
        self._num_body += num_bytes
        if self._num_body < len(self._body):
            return []
        header, body = self._open, self._body
        self._open, self._body, self.num_open = None, _NOTHING, 0
        self.num_read = HEADER_BYTES + len(body)
        shape = self._check(header)
        return [self._decode(header, body) if shape is None else _decode_step(header, shape, body)]

    def _read_scratch(self, num_bytes: int) -> list[Message]:
        messages: list[Message] = []
        scratch, start, end = self._scratch, 0, self._num_scratch + num_bytes
        while end - start >= HEADER_BYTES:
            header = LAYOUT.unpack_from(scratch, start)
            shape = self._check(header)
            start += HEADER_BYTES
            stop = start + header[LENGTH]
            if stop > end:
                self._open, self._body, self._num_body = header, _untouched(header[LENGTH]), end - start
                self.num_open = header[LENGTH]
                self._body[: end - start] = scratch[start:end]
                start = end
                break
            body = bytearray(scratch[start:stop])
            messages.append(self._decode(header, body) if shape is None else _decode_step(header, shape, body))
            start = stop
            self.num_read = stop
        self._num_scratch = end - start
        if 0 < self._num_scratch < end:
            scratch[: self._num_scratch] = scratch[start:end]
        return messages

    def _check(self, header: tuple[Any, ...]) -> Shape | None:
        """Raise ProtocolError unless this frame may come now and is within limits. Of a Step: what its body is."""
        kind = self._due.get(header[1])
        if kind is None or header[0] != PROTOCOL_VERSION:
            raise ProtocolError(self._out_of_place(*header[:2]))
        if kind is Step:
            return check_step(header, self._limits.step_body)
        self._check_plain(kind, header)
        return None

    def _out_of_place(self, version: int, number: int) -> str:
        """Why a frame may not come now."""
        kind = KINDS.get(number)
        if version != PROTOCOL_VERSION or kind is None:
            return f"unknown frame: version {version}, kind {number}"
        if (kind is Hello) == (self._due is not _FIRST):
            return f"{kind.__name__} out of place: a link begins with one Hello"
        return f"{kind.__name__} does not belong on the {self.lane} lane"

    def _check_plain(self, kind: type[Any], header: tuple[Any, ...]) -> None:
        if kind is Credit:
            if header != credit_header(*_credit(header)):
                raise ProtocolError("Credit with a body or fields that only a Step has")
        elif kind in RAW_BODIES:
            check_raw(kind, header[LENGTH])
            check_control(header, RAW_BODIES[kind][1])
        else:
            check_control(header, min(self._limits.control_body, MAX_CONTROL_BODY))

    def _decode(self, header: tuple[Any, ...], body: Body) -> Message:
        kind = KINDS[header[1]]
        if kind is Credit:
            return _credit(header)
        if kind is DirectoryUpdate:
            return DirectoryUpdate(bytes(body))
        if kind is WeightsChunk:
            return _decode_chunk(body)
        message: Message = control.decode(kind, bytes(body))
        if isinstance(message, Hello):
            self._greet(message)
        return message

    def _greet(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(f"the peer has protocol {hello.version}, this node has {PROTOCOL_VERSION}: update one")
        if self.lane not in (None, hello.lane):
            raise ProtocolError(f"peer opened the {hello.lane} lane, expected {self.lane}")
        self.lane = hello.lane
        self._due = _DUE[hello.lane]
