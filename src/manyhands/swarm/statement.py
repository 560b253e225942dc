"""Statements: records as signed bytes, with a beat behind them. Encoding, signatures, and what is refused. Pure.

    statement   body · signature 64 · nothing, or a beat: number u16 · value 8                                big endian
    body        version u8 · node 32 · sequence u64 · issued at u64 (ms) · lifetime u8 (s) · flags u8 · scope u8 · anchor 8
                · memory u64 · cores u16 · sessions u32 · queue u32 · layer_s f64 · row_s f64 · p95_s f64
                · memory of the span u64 · process u32 · uplink f64 (bytes/s) · name · device
                · relay (empty: none) · number of addresses u8 · addresses (host, port u16)
                · number of neighbours u8 · neighbours (first 8 bytes of the node, round trip u16 in 0.1 ms) · the span, if any
    span        model 32 · start u16 · end u16 · layers u16 · precision u8 · flags u8 · hidden u32 · context u32
                · free tokens u64 · sessions u32 · model name · arithmetic            texts: u8 length, UTF-8, printable

There is one encoding of every record: bytes that differ from it are refused.
"""

import struct
from dataclasses import replace
from typing import Any, Literal

from manyhands.core import PRECISIONS, ModelId, NodeAddr, NodeId, Span, SpanInfo, SpanLoad
from manyhands.errors import BadRequest, ManyhandsError, ProtocolError
from manyhands.swarm.identity import NodeKey, verify
from manyhands.swarm.record import MAX_BEATS, SCOPES, NearNode, Record, wind

FORMAT = 2
MAX_BYTES = 4096  # of a statement
SIGNATURE_BYTES = 64
_DOMAIN = b"manyhands-record-1\0"  # what the key signs elsewhere can never be read as a record
_HEAD = struct.Struct(">B32sQQBBB8sQHIIdddQId")
_SPAN = struct.Struct(">32sHHHBBIIQI")
_NEAR = struct.Struct(">8sH")
_BEAT = struct.Struct(">H8s")
_WITHDRAWN, _HAS_SPAN = 1, 2
_HAS_ENDS, _IS_SPARE, _TO_LOAD = 1, 2, 4
# Why a statement was taken or not. new: taken; same: known already; fork: signed, but contradicts one with its number;
# full: no room for another; unknown: a beat of a record we lack; flood: its sender sent more than its share.
Verdict = Literal[
    "new", "same", "stale", "fork", "malformed", "oversized", "forged", "expired", "full", "unknown", "flood"
]


class RecordRefused(ProtocolError):
    """A statement that fails a check; `verdict` says in one word why."""

    def __init__(self, verdict: Verdict, detail: str) -> None:
        super().__init__(f"record is {verdict}: {detail}")
        self.verdict = verdict


def sign(record: Record, key: NodeKey) -> bytes:
    """The statement of `record`, without beats. Raises BadRequest for another node's key."""
    if record.node != key.node_id:
        raise BadRequest(f"record of node {record.node[:16]} cannot be signed by {key.node_id[:16]}")
    body = _encode(record)
    return body + key.sign(_DOMAIN + body)


def with_beat(data: bytes, beat: int, value: bytes) -> bytes:
    """The statement `data` (without a beat) followed by beat number `beat` >= 1."""
    return data + _BEAT.pack(beat, value)


def read(data: bytes) -> tuple[Record, int]:
    """The record of a statement, unverified and without its beat, and the length of its signed part. Raises RecordRefused."""
    if len(data) > MAX_BYTES:
        raise RecordRefused("oversized", f"{len(data)} bytes, limit {MAX_BYTES}")
    try:
        record, length = _decode(data)
        if _encode(record) != data[:length]:
            raise RecordRefused("malformed", "it is not written as records are")
    except RecordRefused:
        raise
    except (ManyhandsError, ValueError, IndexError, struct.error) as exc:
        raise RecordRefused("malformed", f"{exc!s:.200}") from exc
    size = length + SIGNATURE_BYTES
    if len(data) not in (size, size + _BEAT.size):
        raise RecordRefused("malformed", f"{len(data)} bytes instead of {size}, or {size + _BEAT.size} with a beat")
    return record, size


def check_signature(record: Record, signed: bytes) -> None:
    """Raises RecordRefused unless `signed` (body and signature) was signed by the record's node."""
    if not verify(record.node, _DOMAIN + signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]):
        raise RecordRefused("forged", f"node {record.node[:16]} did not sign it")


def read_beat(tail: bytes) -> tuple[int, bytes] | None:
    """Number and value of the beat behind a statement. Raises RecordRefused."""
    if not tail:
        return None
    number, value = _BEAT.unpack(tail)
    return number, value


def check_beat(record: Record, beat: int, value: bytes) -> Record:
    """`record` with `beat` beats, if `value` proves them. Raises RecordRefused."""
    if not 1 <= beat <= MAX_BEATS:
        raise RecordRefused("malformed", f"beat {beat} is not between 1 and {MAX_BEATS}")
    if wind(record.node, record.sequence, value, beat) != record.anchor:
        raise RecordRefused("forged", f"beat {beat} was not made by node {record.node[:16]}")
    return replace(record, beats=beat)


def _encode(record: Record) -> bytes:
    info = record.info
    flags = record.is_withdrawn * _WITHDRAWN + (info is not None) * _HAS_SPAN
    load = record.load
    head = _HEAD.pack(
        FORMAT,
        bytes.fromhex(record.node),
        record.sequence,
        round(record.issued_at * 1000),
        record.lifetime_s,
        flags,
        SCOPES.index(record.scope),
        record.anchor,
        record.memory_bytes,
        record.cores,
        load.sessions,
        load.queue,
        load.layer_s,
        load.row_s,
        load.p95_s,
        load.memory_bytes,
        record.process,
        record.uplink_Bps,
    )
    body = head + _pack_text(record.name) + _pack_text(record.device) + _pack_text(record.relay or "")
    body += bytes([len(record.addresses)])
    body += b"".join(_pack_text(addr.host) + struct.pack(">H", addr.port) for addr in record.addresses)
    body += bytes([len(record.near)]) + b"".join(_NEAR.pack(bytes.fromhex(n), units) for n, units in record.near)
    return body if info is None else body + _encode_info(info)


def _encode_info(info: SpanInfo) -> bytes:
    head = _SPAN.pack(
        bytes.fromhex(info.model),
        info.span.start,
        info.span.end,
        info.num_layers,
        PRECISIONS.index(info.precision),
        info.has_ends * _HAS_ENDS + info.is_spare * _IS_SPARE + (not info.is_loaded) * _TO_LOAD,
        info.hidden_size,
        info.context_length,
        info.free_tokens,
        info.max_sessions,
    )
    return head + _pack_text(info.model_name) + _pack_text(info.arithmetic)


def _decode(data: bytes) -> tuple[Record, int]:
    """The record at the front of `data` and the length of its body. Raises many things."""
    (
        version,
        node,
        sequence,
        issued_at,
        lifetime_s,
        flags,
        scope,
        anchor,
        memory,
        cores,
        sessions,
        queue,
        layer_s,
        row_s,
        p95_s,
        held,
        process,
        uplink,
    ) = _HEAD.unpack_from(data)
    if version != FORMAT:
        raise RecordRefused(
            "malformed", f"version {version}, this program reads version {FORMAT}; update one of the two"
        )
    node_id = NodeId(node.hex())
    reader = _Reader(data, _HEAD.size)
    name, device, relay = reader.text(), reader.text(), reader.text()
    addresses = tuple(NodeAddr(reader.text(), reader.number(2), node_id) for _ in range(reader.number(1)))
    near = tuple(NearNode(n.hex(), units) for n, units in (reader.unpack(_NEAR) for _ in range(reader.number(1))))
    info = _decode_info(reader) if flags & _HAS_SPAN else None
    record = Record(
        node_id,
        name,
        sequence,
        issued_at / 1000,
        lifetime_s,
        addresses,
        relay or None,
        SCOPES[scope],
        info,
        SpanLoad(sessions, queue, layer_s, row_s, p95_s, held),
        memory,
        cores,
        device,
        bool(flags & _WITHDRAWN),
        anchor,
        process=process,
        uplink_Bps=uplink,
        near=near,
    )
    return record, reader.at


def _decode_info(reader: "_Reader") -> SpanInfo:
    model, start, end, layers, precision, flags, hidden, context, free, sessions = reader.unpack(_SPAN)
    name, arithmetic = reader.text(), reader.text()
    return SpanInfo(
        ModelId(model.hex()),
        name,
        Span(start, end),
        layers,
        PRECISIONS[precision],
        arithmetic,
        hidden,
        context,
        bool(flags & _HAS_ENDS),
        free,
        sessions,
        bool(flags & _IS_SPARE),
        not flags & _TO_LOAD,
    )


class _Reader:
    """Reads fields off `data` from `at` on. Raises ValueError, struct.error or IndexError beyond its end."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def take(self, size: int) -> bytes:
        if self.at + size > len(self._data):
            raise ValueError("a field goes beyond its end")
        self.at += size
        return self._data[self.at - size : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def text(self) -> str:
        return self.take(self.number(1)).decode()

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))


def _pack_text(text: str) -> bytes:
    coded = text.encode()
    return bytes([len(coded)]) + coded
