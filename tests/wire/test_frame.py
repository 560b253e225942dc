"""Frames: round trips however the bytes are cut, and hostile bytes."""

import random
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core import MAX_STEP_IDS, SessionId
from manyhands.errors import ProtocolError
from manyhands.wire.frame import SCRATCH_BYTES, FrameReader, encode, wire_size
from manyhands.wire.header import HEADER_BYTES, KINDS, MAX_CONTROL_BODY, MAX_SHAPES, MAX_STEP_BODY, Limits, shape_of
from manyhands.wire.message import (
    LANES,
    MAX_DIRECTORY_BYTES,
    PROTOCOL_VERSION,
    Credit,
    DirectoryUpdate,
    Fault,
    Hello,
    Lane,
    Message,
    Payload,
    Ping,
    Step,
)
from manyhands.wire.timings import HopTiming, read_timings, written
from manyhands.wire.weights_message import MAX_CHUNK_BYTES, WeightsChunk, WeightsNotFound
from tests.wire.messages import CONTROL, LARGEST, RAW, SESSION, STEPS, TOKEN, hello, step, steps

# Everything that a link carries after Hello, by lane.
ON_LANE: dict[Lane, list[Message]] = {
    lane: [message for message in [*STEPS, *CONTROL, *RAW] if type(message) in LANES[lane]] for lane in LANES
}
HELLO = {lane: b"".join(encode(hello(lane))) for lane in LANES}


def to_bytes(*messages: Message) -> bytes:
    return b"".join(part for message in messages for part in encode(message))


class Feeder:
    """Feeds bytes to a reader as an event loop would; remembers the largest buffer it was given."""

    def __init__(self, lane: Lane | None, limits: Limits | None = None) -> None:
        self.reader = FrameReader(lane, limits)
        self.largest_buffer = 0

    def feed(self, data: bytes, piece: int = 1 << 30) -> list[Message]:
        messages: list[Message] = []
        while data:
            buffer = self.reader.get_buffer(-1)
            self.largest_buffer = max(self.largest_buffer, len(buffer))
            size = min(len(buffer), len(data), piece)
            assert size > 0, "a buffer is never empty"
            buffer[:size] = data[:size]
            data = data[size:]
            messages += self.reader.buffer_updated(size)
        return messages


def greeted(lane: Lane, limits: Limits | None = None) -> Feeder:
    feeder = Feeder(lane, limits)
    assert feeder.feed(HELLO[lane]) == [hello(lane)]
    return feeder


def plain(messages: list[Message]) -> list[Message]:
    """With tensors as bytes, so that they compare equal."""
    return [_plain(message) for message in messages]


def _plain(message: Message) -> Message:
    match message:
        case Step(payload=Payload() as payload):
            return message._replace(payload=payload._replace(data=bytes(payload.data)))
        case WeightsChunk():
            return replace(message, data=bytes(message.data))
        case _:
            return message


@pytest.mark.parametrize(("lane", "message"), [(lane, m) for lane, some in ON_LANE.items() for m in some])
def test_round_trip(lane: Lane, message: Message) -> None:
    assert plain(greeted(lane).feed(to_bytes(message))) == [message]


def test_the_examples_leave_no_message_out() -> None:
    assert {type(message) for some in ON_LANE.values() for message in some} == {*KINDS.values()} - {Hello}


@given(steps())
def test_any_step_round_trips(message: Step) -> None:
    assert plain(greeted("data").feed(to_bytes(message))) == [message]
    assert wire_size(message) == len(to_bytes(message))


def test_payload_is_not_copied_on_encoding() -> None:
    data = bytearray(12)
    parts = encode(Step(SESSION, 0, 0, 0, 2, 0, 0, "hidden", None, Payload("bf16", 3, data)))
    data[0] = 7
    assert isinstance(parts[-1], memoryview) and parts[-1][0] == 7


def test_payloads_outlive_later_reads() -> None:
    feeder = greeted("data")
    (first,) = plain(kept := feeder.feed(to_bytes(step())))
    feeder.feed(to_bytes(step(count=8, width=5)))
    assert plain(kept) == [first]


@pytest.mark.parametrize("lane", LANES)
def test_split_at_every_byte(lane: Lane) -> None:
    messages = ON_LANE[lane]
    data = HELLO[lane] + to_bytes(*messages)
    for cut in range(len(data)):
        feeder = Feeder(lane)
        assert plain(feeder.feed(data[:cut]) + feeder.feed(data[cut:])) == [hello(lane), *messages]


def test_one_byte_at_a_time() -> None:
    assert plain(Feeder("data").feed(HELLO["data"] + to_bytes(*STEPS), piece=1)) == [hello("data"), *STEPS]


def test_many_frames_in_one_read_all_come_out() -> None:
    pings: list[Message] = [Ping(nonce) for nonce in range(200)]
    reader = greeted("control").reader
    data = to_bytes(*pings)
    assert len(data) < SCRATCH_BYTES
    reader.get_buffer(-1)[: len(data)] = data
    assert reader.buffer_updated(len(data)) == pings


def test_a_body_larger_than_the_scratch_arrives_whole() -> None:
    big = Step(SESSION, 0, 0, 0, 4, 0, 0, "hidden", None, Payload("fp32", 20_000, random.Random(0).randbytes(320_000)))
    assert plain(greeted("data").feed(to_bytes(big, *STEPS, big), piece=30_000)) == [big, *STEPS, big]


def test_a_listener_takes_the_lane_that_hello_names() -> None:
    feeder = Feeder(None)
    assert plain(feeder.feed(HELLO["data"] + to_bytes(STEPS[0]))) == [hello("data"), STEPS[0]]
    assert feeder.reader.lane == "data"


@pytest.mark.parametrize(
    ("lane", "data"),
    [
        ("control", to_bytes(Ping(1))),
        ("data", to_bytes(STEPS[0])),
        ("control", HELLO["data"]),
        ("control", HELLO["control"] + HELLO["control"]),
        ("control", HELLO["control"] + to_bytes(STEPS[0])),
        ("control", HELLO["control"] + to_bytes(Credit(SESSION, 1, 0, 1))),
        ("control", to_bytes(Hello(PROTOCOL_VERSION + 1, "control", "", None, (), TOKEN))),
        ("bulk", HELLO["bulk"] + to_bytes(DirectoryUpdate(b"x"))),
        ("bulk", HELLO["bulk"] + to_bytes(STEPS[0])),
        ("data", HELLO["data"] + to_bytes(WeightsChunk(1, 0, b"x"))),
        ("control", HELLO["control"] + to_bytes(WeightsNotFound(1, "bad_model"))),
    ],
)
def test_messages_out_of_place_are_refused(lane: Lane, data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Feeder(lane).feed(data)


@pytest.mark.parametrize("offset", range(HEADER_BYTES))
def test_every_header_byte_of_a_control_frame_is_checked(offset: int) -> None:
    """A changed length makes the reader wait or fail; every other change fails at once."""
    data = bytearray(to_bytes(Ping(1)))
    data[offset] ^= 0x80
    try:
        assert greeted("control").feed(bytes(data)) == [] and 4 <= offset < 8
    except ProtocolError:
        pass


def step_header(**changes: int) -> bytes:
    """A Step header with one field changed; [1, 3] bf16 otherwise."""
    fields = {
        "version": PROTOCOL_VERSION,
        "kind": 2,
        "flags": 2,
        "hop": 0,
        "length": 6,
        "epoch": 0,
        "position": 0,
        "count": 1,
    }
    fields |= {"reply_from": 0, "guess": 0, "committed": 0, "width": 3, "dtype": 0, "content": 0} | changes
    values = list(fields.values())
    return struct.pack("<4BI16s7I2B", *values[:5], bytes(16), *values[5:])


@pytest.mark.parametrize(
    "changes",
    [
        {"version": PROTOCOL_VERSION + 1},
        {"version": 0},
        {"kind": 0},
        {"kind": 99},
        {"flags": 6},
        {"flags": 0},
        {"flags": 1},
        {"flags": 3},
        {"length": 5},
        {"length": 7},
        {"length": (1 << 32) - 1},
        {"count": 0},
        {"count": 2},
        {"count": (1 << 32) - 1, "width": (1 << 32) - 1},
        {"count": 1 << 31, "width": 1 << 31, "length": 0},
        {"count": 1 << 31, "width": 0, "flags": 0, "length": 0},
        {"position": (1 << 32) - 1},
        {"width": 0},
        {"width": 1 << 31},
        {"dtype": 4},
        {"dtype": 2},
        {"content": 3},
        {"count": MAX_STEP_BODY, "width": 1, "length": 2 * MAX_STEP_BODY},
    ],
)
def test_a_lying_header_is_refused_before_its_body_is_allocated(changes: dict[str, int]) -> None:
    assert plain(greeted("data").feed(step_header() + bytes(6))) != []
    feeder = greeted("data")
    with pytest.raises(ProtocolError):
        feeder.feed(step_header(**changes))
    assert len(feeder.reader._body) == 0
    assert feeder.largest_buffer <= SCRATCH_BYTES


@pytest.mark.parametrize("count", [MAX_STEP_IDS, MAX_STEP_IDS + 1, MAX_STEP_BODY // 4])
def test_token_ids_of_a_step_are_few_enough_to_be_decoded_at_once(count: int) -> None:
    """Two million of them held the event loop for 90 ms and took 80 MB, in a session or not."""
    if count == MAX_STEP_IDS:
        assert plain(greeted("data").feed(step_header(flags=1, count=count, width=0, length=4 * count))) == []
        return
    feeder = greeted("data")
    with pytest.raises(ProtocolError, match=f"Step with {count} token ids: 16384 at most"):
        feeder.feed(step_header(flags=1, count=count, width=0, length=4 * count))
    assert len(feeder.reader._body) == 0
    with pytest.raises(ProtocolError, match="token ids"):
        encode(Step(SESSION, 0, 0, 0, count, 0, 0, "hidden", tuple(range(count)), None))


def test_few_shapes_of_steps_are_remembered() -> None:
    """A peer may send every shape there is: what is kept of them stays as small, and each is still read."""
    widths = range(1, 2 * MAX_SHAPES)
    sent = [step(1, width) for width in widths]
    feeder = greeted("data")
    assert [plain(feeder.feed(to_bytes(each))) for each in sent] == [[each] for each in sent]
    assert shape_of.cache_info().currsize == MAX_SHAPES


def test_limits_hold() -> None:
    with pytest.raises(ProtocolError, match="over the limit of 5"):
        greeted("data", Limits(step_body=5)).feed(step_header())
    feeder = Feeder(None)
    with pytest.raises(ProtocolError, match="over the limit of 65536"):
        feeder.feed(struct.pack("<4BI16s7I2B", PROTOCOL_VERSION, 1, 0, 0, MAX_CONTROL_BODY + 1, bytes(16), *[0] * 9))
    assert len(feeder.reader._body) == 0


@pytest.mark.parametrize("message", LARGEST, ids=lambda m: type(m).__name__)
def test_raw_bodies_end_at_their_limit(message: Message) -> None:
    lane: Lane = "control" if isinstance(message, DirectoryUpdate) else "bulk"
    largest = to_bytes(message)
    assert plain(greeted(lane).feed(largest)) == [message]
    longer = bytearray(largest[:HEADER_BYTES])
    longer[4:8] = (len(largest) - HEADER_BYTES + 1).to_bytes(4, "little")
    feeder = greeted(lane)
    with pytest.raises(ProtocolError, match="outside its limits"):
        feeder.feed(bytes(longer))
    assert len(feeder.reader._body) == 0


def test_a_chunk_has_room_for_its_numbers() -> None:
    data = bytearray(to_bytes(WeightsChunk(1, 0, b"")))
    data[4] -= 1
    with pytest.raises(ProtocolError, match="WeightsChunk of 11 bytes is outside its limits, 12 to"):
        greeted("bulk").feed(bytes(data))


@pytest.mark.parametrize("offset", range(8, HEADER_BYTES))
def test_raw_frames_have_no_field_of_a_step(offset: int) -> None:
    for lane, message in (("control", DirectoryUpdate(b"x")), ("bulk", WeightsChunk(1, 0, b"x"))):
        data = bytearray(to_bytes(message))
        data[offset] = 1
        with pytest.raises(ProtocolError, match="fields that only a Step has"):
            greeted("control" if lane == "control" else "bulk").feed(bytes(data))


def test_a_chunk_is_not_copied_on_encoding() -> None:
    data = bytearray(12)
    parts = encode(WeightsChunk(1, 0, data))
    data[0] = 7
    assert isinstance(parts[-1], memoryview) and parts[-1][0] == 7


def test_a_dead_reader_stays_dead() -> None:
    reader = Feeder("control").reader
    for _ in range(2):
        buffer = reader.get_buffer(-1)
        buffer[:HEADER_BYTES] = bytes(HEADER_BYTES)
        with pytest.raises(ProtocolError, match="unknown frame: version 0"):
            reader.buffer_updated(HEADER_BYTES)


@pytest.mark.parametrize(
    "message",
    [
        Fault(SESSION, 1, 0, "x", "y" * MAX_CONTROL_BODY),
        Step(SESSION, -1, 0, 0, 0, 0, 0, "hidden", None, None),
        Step(SESSION, 0, 256, 0, 0, 0, 0, "hidden", None, None),
        Step(SESSION, 0, 0, 0, 2, 0, 0, "hidden", (1,), None),
        Step(SESSION, 0, 0, 0, 1, 0, 0, "hidden", None, None),
        Step(SESSION, 0, 0, 0, 1, 0, 0, "hidden", (-1,), None),
        Step(SESSION, 0, 0, 0, 1, 0, 0, "hidden", None, Payload("bf16", 2, bytes(3))),
        Step(SESSION, 0, 0, 0, 1, 0, 0, "hidden", None, Payload("bf16", MAX_STEP_BODY, bytes(2 * MAX_STEP_BODY))),
        Step(SessionId(bytes(15)), 0, 0, 0, 0, 0, 0, "hidden", None, None),
        DirectoryUpdate(bytes(MAX_DIRECTORY_BYTES + 1)),
        WeightsChunk(1, 0, bytes(MAX_CHUNK_BYTES + 1)),
        WeightsChunk(-1, 0, b""),
        WeightsChunk(1, 1 << 64, b""),
    ],
)
def test_what_a_peer_would_refuse_is_not_encoded(message: Message) -> None:
    with pytest.raises(ProtocolError):
        encode(message)


def only_protocol_errors(feeder: Feeder, data: bytes) -> None:
    try:
        feeder.feed(data)
    except ProtocolError:
        pass
    assert feeder.largest_buffer <= MAX_STEP_BODY


@given(st.binary(max_size=300), st.sampled_from([*LANES, None]))
def test_random_bytes_before_hello(data: bytes, lane: Lane | None) -> None:
    feeder = Feeder(lane)
    only_protocol_errors(feeder, data)
    assert feeder.largest_buffer <= SCRATCH_BYTES


@given(st.binary(max_size=300), st.sampled_from(list(LANES)))
def test_random_bytes_after_hello(data: bytes, lane: Lane) -> None:
    only_protocol_errors(greeted(lane), data)


@settings(max_examples=300)
@given(st.data(), st.sampled_from(list(LANES)))
def test_mutated_frames(data: st.DataObject, lane: Lane) -> None:
    stream = bytearray(HELLO[lane] + to_bytes(*ON_LANE[lane]))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(stream)))
    only_protocol_errors(Feeder(lane), bytes(stream[:cut]))


def test_every_single_byte_change_is_survived() -> None:
    changed: list[tuple[Lane, list[Message]]] = [
        ("control", [CONTROL[3], DirectoryUpdate(b"abc")]),
        ("data", STEPS[3:5]),
        ("bulk", ON_LANE["bulk"]),
    ]
    for lane, messages in changed:
        stream = to_bytes(*messages)
        for offset in range(len(stream)):
            mutated = bytearray(stream)
            mutated[offset] ^= 0xFF
            only_protocol_errors(greeted(lane), bytes(mutated))


_U32, _U16, _U8 = (st.integers(0, (1 << bits) - 1) for bits in (32, 16, 8))


@given(st.lists(st.builds(HopTiming, _U32, _U32, _U16, _U8, _U8), max_size=63).map(tuple), st.booleans())
def test_timings_travel_with_a_step(timings: tuple[HopTiming, ...], has_rows: bool) -> None:
    """Behind the tensor, as many as the flags say; a step without rows may have them too."""
    payload = Payload("bf16", 2, b"abcd") if has_rows else None
    travels = b"".join(written(*timing) for timing in timings)
    sent = Step(SESSION, 1, 0, 5, int(has_rows), 0, 0, "hidden", None, payload, travels)
    assert len(to_bytes(sent)) == wire_size(sent)
    (_, read) = Feeder("data").feed(HELLO["data"] + to_bytes(sent))
    assert isinstance(read, Step) and read_timings(read.timings) == timings
    assert (read.payload is None) == (payload is None)
    assert read.payload is None or bytes(read.payload.data) == b"abcd"


def test_what_a_timing_cannot_hold_counts_as_the_most() -> None:
    most = HopTiming((1 << 32) - 1, (1 << 32) - 1, (1 << 16) - 1, 255, 255)
    assert read_timings(written(*(number + 1 for number in most))) == (most,)
