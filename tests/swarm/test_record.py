"""Records are read exactly as they were signed, or refused with the right word."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import NodeAddr, Span, SpanLoad
from manyhands.errors import BadRequest
from manyhands.swarm.record import MAX_BEATS, MAX_NEIGHBOURS, NearNode
from manyhands.swarm.statement import MAX_BYTES, SIGNATURE_BYTES, RecordRefused, Verdict, read, sign, with_beat
from tests.swarm.records import NOW, address_of, chain_of, info_of, key_of, open_record, record_of

RECORD = record_of()
DATA = sign(RECORD, key_of(0))


def refusal(data: bytes) -> Verdict:
    with pytest.raises(RecordRefused) as caught:
        open_record(data)
    return caught.value.verdict


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        record_of(info=None),
        record_of(is_withdrawn=True),
        record_of(relay="https://relay.example.org./", scope="public", addresses=()),
        record_of(addresses=(address_of(0, "::1"), address_of(0, "fe80::1%eth0"), address_of(0, "häuschen.local"))),
        record_of(
            info=info_of(16, 24, has_ends=True, is_spare=True, is_loaded=False, precision="w8"),
            name="küche",
            device="cuda:0",
        ),
        record_of(
            load=SpanLoad(1, 2, 0.01, 0.002, 0.03, 5 << 30),
            process=(1 << 32) - 1,
            uplink_Bps=2.5e6,
            near=tuple(NearNode(f"{i:016x}", 1 + i) for i in range(MAX_NEIGHBOURS)),
        ),
    ],
)
def test_round_trip(record: Any) -> None:
    assert open_record(sign(record, key_of(0))) == record


def test_a_usual_record_is_small() -> None:
    assert len(DATA) <= 300
    near = tuple(NearNode(f"{i:016x}", 1 + i) for i in range(MAX_NEIGHBOURS))
    assert len(sign(record_of(near=near), key_of(0))) <= 300 + 10 * MAX_NEIGHBOURS


def test_every_changed_or_missing_byte_is_refused() -> None:
    for place in range(len(DATA)):
        assert refusal(DATA[:place] + bytes([DATA[place] ^ 1]) + DATA[place + 1 :])
        assert refusal(DATA[:place]) == "malformed"
    for extra in (1, 9, 11):
        assert refusal(DATA + bytes(extra)) == "malformed"


@given(st.binary(max_size=600))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert refusal(data) == "malformed"


@given(st.data())
def test_mangled_records_raise_nothing_else(data: st.DataObject) -> None:
    mangled = bytearray(DATA)
    for _ in range(data.draw(st.integers(1, 6))):
        mangled[data.draw(st.integers(0, len(DATA) - 1))] = data.draw(st.integers(0, 255))
    if bytes(mangled) != DATA:
        assert refusal(bytes(mangled)) in ("malformed", "forged", "expired", "future")


def test_the_size_is_checked_before_anything_is_read() -> None:
    assert refusal(DATA + bytes(MAX_BYTES)) == "oversized"


def test_another_nodes_signature_is_forged() -> None:
    body = DATA[:-SIGNATURE_BYTES]
    assert refusal(body + key_of(1).sign(b"manyhands-record-1\0" + body)) == "forged"
    assert refusal(body + key_of(0).sign(body)) == "forged", "the domain is part of what is signed"
    with pytest.raises(BadRequest, match="cannot be signed by"):
        sign(RECORD, key_of(1))


def test_beats_prove_that_the_node_spoke_again() -> None:
    for beat in (1, 2, MAX_BEATS):
        opened = open_record(with_beat(DATA, beat, chain_of().value(beat)))
        assert (opened.beats, opened.version, opened.spoken_at) == (beat, 7 + beat, NOW + 5 * beat)
        assert replace(opened, beats=0) == RECORD
    assert refusal(with_beat(DATA, 2, chain_of().value(1))) == "forged", "an old value with a new number"
    assert refusal(with_beat(DATA, 1, chain_of(0, 8).value(1))) == "forged", "the chain of another record"
    assert refusal(with_beat(DATA, 1, bytes(8))) == "forged"
    for beat in (0, MAX_BEATS + 1, 65535):
        assert refusal(with_beat(DATA, beat, bytes(8))) == "malformed"


def test_no_beat_can_follow_zeros() -> None:
    data = sign(record_of(anchor=bytes(8)), key_of(0))
    assert refusal(with_beat(data, 1, bytes(8))) == "forged"


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "x" * 65},
        {"name": "a\x1b[2J"},
        {"name": "two\nlines"},
        {"device": "\u202e"},
        {"sequence": -1},
        {"sequence": 1 << 63},
        {"issued_at": math.nan},
        {"lifetime_s": 0},
        {"lifetime_s": 121},
        {"addresses": tuple(address_of(0) for _ in range(9))},
        {"addresses": (address_of(1),)},
        {"addresses": (NodeAddr("a b", 1, RECORD.node),)},
        {"addresses": (NodeAddr("a", 0, RECORD.node),)},
        {"relay": ""},
        {"scope": "world"},
        {"memory_bytes": -1},
        {"process": 1 << 32},
        {"uplink_Bps": -0.0},
        {"uplink_Bps": math.nan},
        {"load": SpanLoad(p95_s=math.inf)},
        {"load": SpanLoad(memory_bytes=-1)},
        {"near": tuple(NearNode(f"{i:016x}", 1) for i in range(MAX_NEIGHBOURS + 1))},
        {"near": (NearNode("b" * 16, 1), NearNode("a" * 16, 1))},
        {"near": (NearNode("a" * 16, 1), NearNode("a" * 16, 2))},
        {"near": (NearNode("a" * 16, 0),)},
        {"near": (NearNode("a" * 16, 1 << 16),)},
        {"near": (NearNode("A" * 16, 1),)},
        {"near": (NearNode("a" * 15, 1),)},
        {"cores": 65536},
        {"anchor": bytes(7)},
        {"beats": MAX_BEATS + 1},
        {"load": SpanLoad(-1)},
        {"load": SpanLoad(layer_s=math.nan)},
        {"load": SpanLoad(layer_s=math.inf)},
        {"load": SpanLoad(row_s=-0.0)},
        {"info": info_of(span=Span(20, 25))},
        {"info": info_of(num_layers=65536)},
        {"info": info_of(free_tokens=-1)},
        {"info": info_of(model_name="x" * 256)},
    ],
)
def test_what_cannot_be_said_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        record_of(**changes)


def test_the_largest_record_fits() -> None:
    host = "h" * 255
    record = record_of(
        name="n" * 64,
        device="d" * 64,
        relay="r" * 255,
        addresses=tuple(address_of(0, host) for _ in range(8)),
        info=info_of(model_name="m" * 255, arithmetic="a" * 255),
    )
    data = with_beat(sign(record, key_of(0)), MAX_BEATS, chain_of().value(MAX_BEATS))
    assert len(data) <= MAX_BYTES and replace(open_record(data), beats=0) == record


def test_there_is_one_encoding() -> None:
    """Bits without meaning, in the flags, are refused before the signature is looked at."""
    flags = 1 + 32 + 8 + 8 + 1
    with pytest.raises(RecordRefused, match="not written as records are"):
        read(DATA[:flags] + bytes([DATA[flags] | 4]) + DATA[flags + 1 :])


def test_tags_tell_keys_apart() -> None:
    records = [record_of(), record_of(1), record_of(info=None), record_of(info=info_of(8, 16))]
    records.append(record_of(info=info_of(precision="fp32")))
    assert len({record.key.tag for record in records}) == len({record.key for record in records}) == 5
    assert record_of(sequence=9, load=SpanLoad()).key == RECORD.key
