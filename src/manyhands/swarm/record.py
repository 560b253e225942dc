"""A record: what a node says about itself and one span, signed, numbered and short-lived. Pure: bytes and times in.

    statement   body · signature 64 · nothing, or a beat: number u16 · value 8                                big endian
    body        version u8 · node 32 · sequence u64 · issued at u64 (ms) · lifetime u8 (s) · flags u8 · scope u8 · anchor 8
                · memory u64 · cores u16 · sessions u32 · queue u32 · layer_s f64 · row_s f64 · name · device
                · relay (empty: none) · number of addresses u8 · addresses (host, port u16) · the span, if any
    span        model 32 · start u16 · end u16 · layers u16 · precision u8 · flags u8 · hidden u32 · context u32
                · free tokens u64 · sessions u32 · model name · arithmetic            texts: u8 length, UTF-8, printable

There is one encoding of every record: bytes that would not be written so are refused.

Beats. A record that did not change is kept alive without a new signature. Its anchor is the end of a chain of hashes, and the
n-th beat reveals the value that hashes to it in n steps: 8 bytes that only the signer knew, and that prove he spoke again
(Lamport, "Password authentication with insecure communication", 1981). 64 bits suffice: a forger needs 2^64 hashes
within the record's 120 s, to make a dead node look alive for that long. Beats prolong freshness, never the lifetime.
"""

import hashlib
import math
import struct
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from manyhands.core import PRECISIONS, ModelId, NodeAddr, NodeId, Precision, Span, SpanInfo, SpanLoad
from manyhands.errors import BadRequest, ManyhandsError, ProtocolError
from manyhands.plain import one_line
from manyhands.swarm.identity import NodeKey, verify

Scope = Literal["off", "lan", "trusted", "public"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

FORMAT = 1
MAX_BYTES = 4096  # of a statement
MAX_LIFETIME_S = 120  # HN-18
BEAT_S = 5.0  # a node speaks this often
REFRESH_S = 60.0  # and signs anew this often: two refreshes may get lost before a record ends
MAX_BEATS = 24  # of one record: then it is signed anew. MAX_BEATS * BEAT_S = MAX_LIFETIME_S
MAX_ADDRESSES = 8
MAX_SEQUENCE = (1 << 63) - 1
SIGNATURE_BYTES = 64
_U32 = (1 << 32) - 1
ANCHOR_BYTES = 8
TAG_BYTES = 8
_DOMAIN = b"manyhands-record-1\0"  # what the key signs elsewhere can never be read as a record
_HEAD = struct.Struct(">B32sQQBBB8sQHIIdd")
_SPAN = struct.Struct(">32sHHHBBIIQI")
_BEAT = struct.Struct(">H8s")
_WITHDRAWN, _HAS_SPAN = 1, 2
_HAS_ENDS, _IS_SPARE, _TO_LOAD = 1, 2, 4

# Why a statement was taken or not. new: taken; same: known already; fork: signed, but contradicts one with its number;
# full: no room for another; unknown: a beat of a record we lack; flood: its sender sent more than its share.
Verdict = Literal[
    "new", "same", "stale", "fork", "malformed", "oversized", "forged", "expired", "full", "unknown", "flood"
]
REFUSED: tuple[Verdict, ...] = ("fork", "malformed", "oversized", "forged", "expired", "full", "flood")


class RecordRefused(ProtocolError):
    """A statement that is not to be believed; `verdict` says in one word why."""

    def __init__(self, verdict: Verdict, detail: str) -> None:
        super().__init__(f"record is {verdict}: {detail}")
        self.verdict = verdict


class Hosted(NamedTuple):
    """What a record speaks of beside its node: layers of a model in a precision."""

    model: ModelId
    precision: Precision
    span: Span


class RecordKey(NamedTuple):
    """One place in the directory: a node writes only where `node` is itself (IN-W04)."""

    node: NodeId
    hosted: Hosted | None  # None: a member that hosts nothing

    @property
    def tag(self) -> bytes:
        """8 bytes that stand for the key where a whole one is too long. 64 bits: not to be hit on purpose."""
        hosted = "" if self.hosted is None else " ".join(str(part) for part in self.hosted)
        return hashlib.sha256(f"{self.node} {hosted}".encode()).digest()[:TAG_BYTES]


@dataclass(frozen=True, slots=True)
class Record:
    """A node's statement about itself and one span. Raises BadRequest for what cannot be said.

    `sequence` grows with every record of the same key and exceeds the `version` of the one before. `beats` is not signed:
    it counts the beats that came with the record. A withdrawn record keeps its `info`, which says what is withdrawn.
    """

    node: NodeId
    name: str
    sequence: int
    issued_at: float  # unix seconds on the signer's clock, kept to a millisecond
    lifetime_s: int  # counted by each node from when it got the record
    addresses: tuple[NodeAddr, ...]
    relay: str | None  # URL of the iroh relay where the node listens
    scope: Scope
    info: SpanInfo | None
    load: SpanLoad
    memory_bytes: int
    cores: int
    device: str
    is_withdrawn: bool = False
    anchor: bytes = bytes(ANCHOR_BYTES)  # zeros: no beats will follow
    beats: int = 0

    def __post_init__(self) -> None:
        _within("sequence", self.sequence, 0, MAX_SEQUENCE)
        _within("issued_at", self.issued_at, 0, 1e11)
        object.__setattr__(self, "issued_at", round(self.issued_at * 1000) / 1000)
        _within("lifetime_s", self.lifetime_s, 1, MAX_LIFETIME_S)
        _within("addresses", len(self.addresses), 0, MAX_ADDRESSES)
        _within("memory_bytes", self.memory_bytes, 0, MAX_SEQUENCE)
        _within("cores", self.cores, 0, 65535)
        _within("beats", self.beats, 0, MAX_BEATS)
        _text("name", self.name, 1, 64)
        _text("device", self.device, 0, 64)
        _text("relay", self.relay or "", 0, 255)
        if self.scope not in SCOPES or len(self.anchor) != ANCHOR_BYTES or self.relay == "":
            raise BadRequest(f"record of {self.name}: scope {self.scope!r}, anchor or relay make no sense")
        for addr in self.addresses:
            _check_address(addr, self.node)
        _check_load(self.load)
        if self.info is not None:
            _check_info(self.info)

    @property
    def key(self) -> RecordKey:
        info = self.info
        return RecordKey(self.node, None if info is None else Hosted(info.model, info.precision, info.span))

    @property
    def version(self) -> int:
        """Orders everything said about one key: a beat counts as one more than what came before it."""
        return self.sequence + self.beats

    @property
    def spoken_at(self) -> float:
        """When the node last spoke, on its own clock, to about a beat's length. For people: nothing is decided by it."""
        return self.issued_at + self.beats * BEAT_S


@dataclass(frozen=True, slots=True)
class Chain:
    """The values behind the beats of one record, known to its signer only. `secret`: 32 random bytes, used once."""

    node: NodeId
    sequence: int
    secret: bytes

    def value(self, beat: int) -> bytes:
        """What beat number `beat` reveals; number 0 is the record's anchor."""
        return wind(self.node, self.sequence, hashlib.sha256(self.secret).digest()[:ANCHOR_BYTES], MAX_BEATS - beat)


def wind(node: NodeId, sequence: int, value: bytes, steps: int) -> bytes:
    """`value` hashed `steps` times, in the chain of one record of `node`."""
    salt = bytes.fromhex(node) + struct.pack(">Q", sequence)
    for _ in range(steps):
        value = hashlib.sha256(salt + value).digest()[:ANCHOR_BYTES]
    return value


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
    )
    body = head + _pack_text(record.name) + _pack_text(record.device) + _pack_text(record.relay or "")
    body += bytes([len(record.addresses)])
    body += b"".join(_pack_text(addr.host) + struct.pack(">H", addr.port) for addr in record.addresses)
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
    ) = _HEAD.unpack_from(data)
    if version != FORMAT:
        raise RecordRefused(
            "malformed", f"version {version}, this program reads version {FORMAT}; update one of the two"
        )
    node_id = NodeId(node.hex())
    reader = _Reader(data, _HEAD.size)
    name, device, relay = reader.text(), reader.text(), reader.text()
    addresses = tuple(NodeAddr(reader.text(), reader.number(2), node_id) for _ in range(reader.number(1)))
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
        SpanLoad(sessions, queue, layer_s, row_s),
        memory,
        cores,
        device,
        bool(flags & _WITHDRAWN),
        anchor,
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


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise BadRequest(f"a record's {name} is {value}; it must be between {low} and {high}")


def _text(name: str, text: str, low: int, high: int) -> None:
    if not low <= len(text.encode()) <= high or one_line(text, high) != text:  # it will be shown in terminals
        raise BadRequest(f"a record's {name} must have {low} to {high} printable bytes: {text!r:.80}")


def _check_address(addr: NodeAddr, node: NodeId) -> None:
    _text("address", addr.host, 1, 255)
    _within("port", addr.port, 1, 65535)
    if addr.node != node or NodeAddr.parse(str(addr), node) != addr:
        raise BadRequest(f"a record's address must be host:port of the node itself: {addr!s:.80}")


def _check_load(load: SpanLoad) -> None:
    _within("load (sessions)", load.sessions, 0, _U32)
    _within("load (queue)", load.queue, 0, _U32)
    for seconds in (load.layer_s, load.row_s):
        _within("speed", seconds, 0.0, 1e6)
        if math.copysign(1.0, seconds) < 0:  # -0.0 would be a second encoding of 0.0
            raise BadRequest("a record's speed is -0.0; it must not be negative")


def _check_info(info: SpanInfo) -> None:
    _within("last layer", info.span.end, 1, info.num_layers)
    _within("layers", info.num_layers, 1, 65535)
    _within("hidden_size", info.hidden_size, 1, _U32)
    _within("context_length", info.context_length, 0, _U32)
    _within("free_tokens", info.free_tokens, 0, MAX_SEQUENCE)
    _within("max_sessions", info.max_sessions, 0, _U32)
    _text("model_name", info.model_name, 0, 255)
    _text("arithmetic", info.arithmetic, 0, 255)
