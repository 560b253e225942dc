"""manyhands.wire.int8 and rounding: what is rounded is rounded once, alike on every machine; what others send is refused."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import Corruption, ProtocolError
from manyhands.wire.codec import LEAST_BYTES, SLOW_Bps, as_sent, is_slow, plain
from manyhands.wire.frame import encode
from manyhands.wire.header import MAX_CODED_ROWS, int8_bytes
from manyhands.wire.int8 import MAX_EXPONENT, int8_coded, int8_plain
from manyhands.wire.message import DType, Payload
from manyhands.wire.rounding import MAX_RANGES, Rounding
from manyhands.wire.rows import numbers, read_rows
from tests.wire.test_codec import reread, rows, step

DTYPES: tuple[DType, ...] = ("bf16", "fp32")


def values(payload: Payload, count: int) -> np.ndarray:
    return numbers(read_rows(payload, count), payload.dtype)


def rounded(payload: Payload, count: int) -> Payload:
    less = int8_coded(payload, count)
    assert less is not None
    return int8_plain(less, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 31, 32, 33, 256])
def test_a_number_is_off_by_half_a_step_of_its_group_at_most(dtype: DType, width: int) -> None:
    whole = rows(16, width, dtype)
    less = int8_coded(whole, 16)
    assert less is not None and less.codec == "int8" and len(less.data) == int8_bytes(16, width)
    before, after = values(whole, 16), values(int8_plain(less, 16), 16)
    for start in range(0, width, 32):
        group = slice(start, start + 32)
        top = np.abs(before[:, group]).max(axis=1, keepdims=True)
        assert (np.abs(before[:, group] - after[:, group]) <= top / 127).all()


@given(st.binary(min_size=4, max_size=600), st.sampled_from(DTYPES), st.integers(1, 40))
def test_rounding_twice_is_rounding_once_for_any_finite_bits(data: bytes, dtype: DType, width: int) -> None:
    row_bytes = width * (4 if dtype == "fp32" else 2)
    count = len(data) // row_bytes
    if not count:
        return
    whole = Payload(dtype, width, data[: count * row_bytes])
    less = int8_coded(whole, count)
    if less is None:
        assert not np.isfinite(values(whole, count)).all()
        return
    again = int8_plain(less, count)
    assert np.isfinite(values(again, count)).all()
    assert int8_coded(again, count) == less


def test_each_row_is_rounded_by_itself() -> None:
    whole = rows(8, 100)
    each = [Payload("bf16", 100, whole.data[200 * i : 200 * (i + 1)]) for i in range(8)]
    assert b"".join(bytes(rounded(row, 1).data) for row in each) == rounded(whole, 8).data


def test_the_bytes_are_the_same_on_every_machine() -> None:
    """Of numbers that are made of integers alone. Who changes this changes the protocol."""
    bits = (
        np.arange(64 * 96, dtype=np.uint64) * 2654435761 % 0x7F80 | (np.arange(64 * 96, dtype=np.uint64) % 2 << 15)
    ).astype(np.uint16)
    less = int8_coded(Payload("bf16", 96, bits.tobytes()), 64)
    assert less is not None
    assert hashlib.sha256(less.data).hexdigest()[:16] == "3d8071e3027af36c"


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 2.0**-101, 2.0**-93, 127.0, 127.5, 128.0, 3.38e38, -3.38e38])
def test_the_ends_of_what_can_be_said(value: float) -> None:
    row = Payload("fp32", 32, np.full(32, value, np.float32).tobytes())
    after = values(rounded(row, 1), 1)
    assert np.isfinite(after).all() and (np.abs(after - np.float32(value)) <= max(abs(value) / 127, 2.0**-101)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_sent_as_it_is_and_refused_where_it_arrives(bad: float) -> None:
    numbers_TD = np.zeros((64, 64), np.float32)
    numbers_TD[3, 5] = bad
    whole = Payload("fp32", 64, numbers_TD.tobytes())
    assert int8_coded(whole, 64) is None
    assert as_sent(whole, 0, Rounding(((0, 64),)), None) == whole


@given(st.data())
def test_foreign_bytes_are_refused_or_decode_to_finite_numbers(draw: st.DataObject) -> None:
    count, width, dtype = (
        draw.draw(st.integers(0, 4)),
        draw.draw(st.integers(1, 70)),
        draw.draw(st.sampled_from(DTYPES)),
    )
    size = draw.draw(st.sampled_from([int8_bytes(count, width), int8_bytes(count, width) + 1, count * width]))
    data = draw.draw(st.binary(min_size=size, max_size=size))
    try:
        found = plain(Payload(dtype, width, data, "int8"), count)
    except Corruption:
        return
    assert len(data) == int8_bytes(count, width) and np.isfinite(values(found, count)).all()


@pytest.mark.parametrize(("at", "byte"), [(0, MAX_EXPONENT + 1), (0, 255), (2, 128)])
def test_an_exponent_or_a_number_that_none_has_is_refused(at: int, byte: int) -> None:
    less = int8_coded(rows(1, 64), 1)
    assert less is not None
    data = bytearray(less.data)
    data[at] = byte
    with pytest.raises(Corruption, match="8-bit groups"):
        int8_plain(less._replace(data=bytes(data)), 1)


@pytest.mark.parametrize(
    ("payload", "count"),
    [
        (Payload("bf16", 64, bytes(int8_bytes(4, 64) - 1), "int8"), 4),
        (Payload("bf16", 64, bytes(int8_bytes(4, 64) + 1), "int8"), 4),
        (Payload("int32", 64, bytes(int8_bytes(4, 64)), "int8"), 4),
        (Payload("fp16", 64, bytes(int8_bytes(4, 64)), "int8"), 4),
        (Payload("bf16", 1024, bytes(int8_bytes(513, 1024)), "int8"), MAX_CODED_ROWS // 2048 + 1),
    ],
)
def test_a_header_that_cannot_be_is_refused_before_its_body_is_read(payload: Payload, count: int) -> None:
    with pytest.raises(ProtocolError):
        encode(step(payload, count))


def test_a_step_of_8_bits_passes_a_link() -> None:
    less = int8_coded(rows(64, 100), 64)
    assert less is not None
    again = reread(step(less, 64)).payload
    assert again is not None and again.codec == "int8" and bytes(again.data) == less.data


@given(st.integers(0, 300), st.integers(1, 40), st.lists(st.integers(0, 300), max_size=6))
def test_the_same_positions_are_rounded_however_they_are_sent(position: int, count: int, edges: list[int]) -> None:
    """Whole, or row by row; over a fast link or a slow one."""
    ends = sorted(edges)[: len(edges) // 2 * 2]
    rounding = Rounding(tuple(zip(ends[::2], ends[1::2], strict=True)))
    whole = rows(count, 64)
    wanted = values(whole, count).copy()
    for row in range(count):
        if any(start <= position + row < end for start, end in rounding.ranges):
            wanted[row] = values(rounded(Payload("bf16", 64, whole.data[128 * row : 128 * (row + 1)]), 1), 1)
    for rate in (None, SLOW_Bps / 2):
        assert (values(as_sent(whole, position, rounding, rate), count) == wanted).all()
    parts = [
        as_sent(Payload("bf16", 64, whole.data[128 * i : 128 * (i + 1)]), position + i, rounding, 1.0)
        for i in range(count)
    ]
    assert (np.concatenate([values(part, 1) for part in parts]) == wanted).all()


def test_what_is_rounded_as_a_whole_goes_in_8_bits() -> None:
    many, few, inside = rows(64, 256), rows(4, 256), Rounding(((0, 64),))
    assert as_sent(many, 0, inside, None).codec == "int8" and len(few.data) < LEAST_BYTES
    assert as_sent(few, 0, inside, 1.0) == rounded(few, 4)
    assert as_sent(many, 1, inside, None).codec == "plain" and as_sent(many, 1, inside, 1.0).codec == "planes"
    assert as_sent(many, 0, None, None) == many
    assert is_slow(SLOW_Bps - 1) and not is_slow(SLOW_Bps) and not is_slow(None)


def test_ranges_are_ascending_and_few() -> None:
    for ranges in (((3, 2),), ((0, 4), (3, 5)), ((0, 0),) * (MAX_RANGES + 1)):
        with pytest.raises(ValueError, match="ranges"):
            Rounding(ranges)


def test_a_conversation_remembers_what_was_rounded() -> None:
    first = Rounding(((0, 100),))
    second = first.going_on(130, 200)
    assert second is not None and second.ranges == ((0, 100), (130, 200))
    assert first.going_on(60, 200) == Rounding(((0, 200),)) and second.going_on(100, 150) == Rounding(((0, 150),))
    many: Rounding | None = Rounding(())
    for turn in range(MAX_RANGES):
        assert many is not None
        many = many.going_on(10 * turn + 5, 10 * turn + 9)
    assert many is not None and len(many.ranges) == MAX_RANGES
    assert many.going_on(1000, 1100) is None
