"""manyhands.wire.codec: the same bits come back, in fewer bytes; what others send cannot be blown up."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import SessionId
from manyhands.errors import Corruption, ProtocolError
from manyhands.wire.codec import LEAST_BYTES, SLOW_Bps, coded, pays, plain
from manyhands.wire.frame import FrameReader, encode, wire_size
from manyhands.wire.header import MAX_CODED_ROWS
from manyhands.wire.message import PROTOCOL_VERSION, DType, Hello, Payload, Step, Token
from manyhands.wire.rows import read_rows, store

SESSION = SessionId(b"s" * 16)


def rows(count: int, width: int, dtype: DType = "bf16", seed: int = 1) -> Payload:
    """Like hidden states: normal, with channels of different size."""
    rng = np.random.default_rng(seed)
    return store((rng.normal(size=(count, width)) * rng.lognormal(size=width)).astype(np.float32), dtype)


def step(payload: Payload, count: int) -> Step:
    return Step(SESSION, 1, 1, 0, count, 0, 0, "hidden", None, payload)


def reread(message: Step) -> Step:
    """As a peer reads it."""
    reader = FrameReader("data")
    data = b"".join(encode(Hello(PROTOCOL_VERSION, "data", "", None, (), Token("00" * 16))) + encode(message))
    found = []
    while data:
        buffer = reader.get_buffer(-1)
        taken = min(len(buffer), len(data))
        buffer[:taken], data = data[:taken], data[taken:]
        found += reader.buffer_updated(taken)
    assert isinstance(found[-1], Step)
    return found[-1]


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 0.70), ("fp32", 0.86)])
def test_hidden_states_take_less_and_come_back_bit_for_bit(dtype: DType, most: float) -> None:
    whole = rows(64, 256, dtype)
    less = coded(whole)
    assert less.codec == "planes" and len(less.data) < most * len(whole.data)
    assert wire_size(step(less, 64)) - len(less.data) == wire_size(step(whole, 64)) - len(whole.data)
    again = reread(step(less, 64)).payload
    assert again is not None and plain(again, 64).data == whole.data
    assert bytes(read_rows(again, 64)) == whole.data


@given(st.binary(min_size=4, max_size=400), st.sampled_from(["bf16", "fp32"]))
def test_any_bits_come_back(data: bytes, dtype: DType) -> None:
    """NaN, infinities and noise too; what would not get smaller stays as it is."""
    whole = Payload(dtype, 1, data[: len(data) // 4 * 4])
    count = len(whole.data) // (4 if dtype == "fp32" else 2)
    less = coded(whole)
    assert plain(less, count).data == whole.data and len(less.data) <= len(whole.data)


@given(st.data())
def test_foreign_bytes_are_refused_or_decode_to_what_they_declare(draw: st.DataObject) -> None:
    whole = rows(8, 32)
    data = bytearray(coded(whole).data)
    for _ in range(draw.draw(st.integers(1, 6))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    cut = draw.draw(st.integers(0, len(data)))
    try:
        assert len(plain(Payload("bf16", 32, bytes(data[:cut]), "planes"), 8).data) == len(whole.data)
    except Corruption:
        pass


def bomb(num_exponents: int, count: int, width: int) -> Payload:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    exponents = deflate.compress(bytes(num_exponents)) + deflate.flush()
    return Payload("bf16", width, len(exponents).to_bytes(4, "little") + exponents + bytes(count * width), "planes")


def test_a_bomb_is_not_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of zeros in 64 KiB: of what they inflate to no more is made than the rows have numbers."""
    made = []

    class Watched:
        def __init__(self) -> None:
            self._plain = zlib_decompressobj(-15)

        def decompress(self, data: bytes, most: int) -> bytes:
            assert most > 0  # 0: no limit
            made.append(len(found := self._plain.decompress(data, most)))
            return found

        def __getattr__(self, name: str) -> object:
            return getattr(self._plain, name)

    zlib_decompressobj = zlib.decompressobj
    monkeypatch.setattr("manyhands.wire.codec.zlib.decompressobj", lambda _: Watched())
    with pytest.raises(Corruption, match="inflate to other than"):
        plain(bomb(64 << 20, 128, 1024), 128)
    assert sum(made) <= 128 * 1024 + 1
    assert len(plain(bomb(128 * 1024, 128, 1024), 128).data) == 2 * 128 * 1024


@pytest.mark.parametrize(
    ("payload", "count"),
    [
        (Payload("bf16", 4096, bytes(4096 * 64), "planes"), 64 * 64),  # far less than half of what they declare
        (Payload("bf16", 4096, bytes(2 * 4096), "planes"), 1),  # not fewer bytes
        (
            Payload("bf16", 1024, bytes(MAX_CODED_ROWS // 2 + 2048), "planes"),
            MAX_CODED_ROWS // 2048 + 1,
        ),  # too many rows
        (Payload("int32", 1024, bytes(3 * 1024), "planes"), 1),  # not hidden states
        (Payload("fp16", 1024, bytes(1200), "planes"), 1),
    ],
)
def test_a_header_that_cannot_be_is_refused_before_its_body_is_read(payload: Payload, count: int) -> None:
    with pytest.raises(ProtocolError):
        encode(step(payload, count))


def test_coding_is_for_slow_links_and_many_bytes() -> None:
    many, few = rows(64, 256), rows(1, 256)
    assert len(many.data) >= LEAST_BYTES > len(few.data)
    assert pays(many, SLOW_Bps / 2) and not pays(many, SLOW_Bps) and not pays(many, None)
    assert not pays(few, 1.0) and not pays(coded(many), 1.0) and not pays(Payload("int32", 1, bytes(LEAST_BYTES)), 1.0)
