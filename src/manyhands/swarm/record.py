"""A record: what a node says about itself and one span, numbered and short-lived. statement.py signs and encodes it. Pure.

Beats. A record that did not change is kept alive without a new signature. Its anchor is the end of a chain of hashes, and the
n-th beat reveals the value that hashes to it in n steps: 8 bytes that only the signer had, and that prove that it is alive
(Lamport, "Password authentication with insecure communication", 1981). 64 bits suffice: a forger needs 2^64 hashes
within the record's 120 s, to make a dead node look alive for that long. Beats prolong freshness, never the lifetime.
"""

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from manyhands.core import ModelId, NodeAddr, NodeId, Precision, Span, SpanInfo, SpanLoad
from manyhands.errors import BadRequest
from manyhands.plain import one_line

Scope = Literal["off", "lan", "trusted", "public"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

MAX_LIFETIME_S = 120  # HN-18
BEAT_S = 5.0  # a node announces itself this often
REFRESH_S = 60.0  # and signs anew this often: two refreshes may get lost before a record ends
MAX_BEATS = 24  # of one record: then it is signed anew. MAX_BEATS * BEAT_S = MAX_LIFETIME_S
MAX_ADDRESSES = 8
MAX_LAYERS = 4096  # of a model, as its config may have (checkpoint/config_fields.py)
MAX_SEQUENCE = (1 << 63) - 1
# Round trips that a record states, each 10 bytes: all of a small swarm, the nearest of a large one.
MAX_NEIGHBOURS = 24
NEAR_DIGITS = 16  # hex digits of a NodeId that name a neighbour: 64 bits, not to be hit on purpose
RTT_UNIT_S = 1e-4
MAX_RTT_UNITS = (1 << 16) - 1  # 6.5 s; what takes longer is said to take that
_U32 = (1 << 32) - 1
ANCHOR_BYTES = 8
TAG_BYTES = 8


class Hosted(NamedTuple):
    """What a record states beside its node: layers of a model in a precision."""

    model: ModelId
    precision: Precision
    span: Span


class NearNode(NamedTuple):
    """A neighbour, by the first NEAR_DIGITS digits of its NodeId, and the round trip to it in units of RTT_UNIT_S."""

    node: str
    units: int

    @classmethod
    def of(cls, node: NodeId, rtt_s: float) -> "NearNode":
        return cls(node[:NEAR_DIGITS], min(MAX_RTT_UNITS, max(1, round(rtt_s / RTT_UNIT_S))))

    @property
    def rtt_s(self) -> float:
        return self.units * RTT_UNIT_S


class RecordKey(NamedTuple):
    """One place in the directory: a node writes only where `node` is itself (IN-W04)."""

    node: NodeId
    hosted: Hosted | None  # None: a member that hosts nothing

    @property
    def tag(self) -> bytes:
        """8 bytes that stand for the key where a whole one is too long. 64 bits: that of a given key is not to be hit on
        purpose. A member can find two keys of its own with one tag; a node keeps one of them (record_store.py)."""
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
    process: int = 0  # drawn when the node's process started: another one says that its caches are gone
    uplink_Bps: float = 0.0  # bytes per second that it was seen to send; 0: not measured
    near: tuple[NearNode, ...] = ()  # round trips to linked nodes, by node

    def __post_init__(self) -> None:
        _within("sequence", self.sequence, 0, MAX_SEQUENCE)
        _within("issued_at", self.issued_at, 0, 1e11)
        object.__setattr__(self, "issued_at", round(self.issued_at * 1000) / 1000)
        _within("lifetime_s", self.lifetime_s, 1, MAX_LIFETIME_S)
        _within("addresses", len(self.addresses), 0, MAX_ADDRESSES)
        _within("memory_bytes", self.memory_bytes, 0, MAX_SEQUENCE)
        _within("cores", self.cores, 0, 65535)
        _within("beats", self.beats, 0, MAX_BEATS)
        _within("process", self.process, 0, _U32)
        _figure("uplink", self.uplink_Bps, 1e15)
        _check_near(self.near)
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

    def is_of(self, model: ModelId) -> bool:
        """Whether it is about a span of that model."""
        return self.info is not None and self.info.model == model

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
        """When the node last announced itself, on its own clock, to about a beat's length. Shown, not used."""
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


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise BadRequest(f"a record's {name} is {value}; it must be between {low} and {high}")


def _figure(name: str, value: float, high: float) -> None:
    _within(name, value, 0.0, high)
    if math.copysign(1.0, value) < 0:  # -0.0 would be a second encoding of 0.0
        raise BadRequest(f"a record's {name} is -0.0; it must not be negative")


def _check_near(near: tuple[NearNode, ...]) -> None:
    _within("neighbours", len(near), 0, MAX_NEIGHBOURS)
    names = [each.node for each in near]
    if names != sorted(set(names)):
        raise BadRequest("a record's neighbours must stand once each, in order")
    for name, units in near:
        _within(f"round trip to {name:.16}", units, 1, MAX_RTT_UNITS)
        if len(name) != NEAR_DIGITS or not set(name) <= set("0123456789abcdef"):
            raise BadRequest(f"a record's neighbour is named by {NEAR_DIGITS} hex digits, not {name!r:.40}")


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
    _within("load (memory)", load.memory_bytes, 0, MAX_SEQUENCE)
    for seconds in (load.layer_s, load.row_s, load.p95_s):
        _figure("speed", seconds, 1e6)


def _check_info(info: SpanInfo) -> None:
    _within("last layer", info.span.end, 1, info.num_layers)
    _within("layers", info.num_layers, 1, MAX_LAYERS)
    _within("hidden_size", info.hidden_size, 1, _U32)
    _within("context_length", info.context_length, 0, _U32)
    _within("free_tokens", info.free_tokens, 0, MAX_SEQUENCE)
    _within("max_sessions", info.max_sessions, 0, _U32)
    _text("model_name", info.model_name, 0, 255)
    _text("arithmetic", info.arithmetic, 0, 255)
