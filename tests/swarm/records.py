"""Makers of records for the tests of the swarm."""

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.core import ModelId, NodeAddr, NodeId, Span, SpanInfo, SpanLoad
from manyhands.swarm.announce import Announcer, Profile
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.record import Chain, Record
from manyhands.swarm.statement import check_beat, check_signature, read, read_beat

NOW = 1_800_000_000.0


@cache
def key_of(index: int) -> NodeKey:
    """The same key for the same index, on every run."""
    return NodeKey(Ed25519PrivateKey.from_private_bytes(Random(index).randbytes(32)))


def info_of(start: int = 0, end: int = 8, **changes: Any) -> SpanInfo:
    fields: dict[str, Any] = {
        "model": ModelId("ab" * 32),
        "model_name": "tales",
        "span": Span(start, end),
        "num_layers": 24,
        "precision": "bf16",
        "arithmetic": "cpu/amx-bf16/torch-2.5",
        "hidden_size": 896,
        "context_length": 4096,
        "has_ends": False,
        "free_tokens": 65536,
        "max_sessions": 32,
    }
    return SpanInfo(**(fields | changes))


def address_of(index: int, host: str = "10.0.0.1") -> NodeAddr:
    return NodeAddr(host, 4000 + index, key_of(index).node_id)


def chain_of(index: int = 0, sequence: int = 7) -> Chain:
    return Chain(key_of(index).node_id, sequence, bytes([index]) * 32)


def record_of(index: int = 0, sequence: int = 7, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "node": key_of(index).node_id,
        "name": f"node-{index}",
        "sequence": sequence,
        "issued_at": NOW,
        "lifetime_s": 120,
        "addresses": (address_of(index),),
        "relay": None,
        "scope": "lan",
        "info": info_of(),
        "load": SpanLoad(1, 2, 0.01, 0.002),
        "memory_bytes": 8 << 30,
        "cores": 4,
        "device": "cpu",
        "anchor": chain_of(index, abs(sequence)).value(0),
    }
    return Record(**(fields | changes))


def profile_of(index: int) -> Profile:
    return Profile(f"node-{index}", (address_of(index),), None, "lan", 8 << 30, 4, "cpu")


def announcer_of(index: int, now: float = NOW) -> Announcer:
    return Announcer(key_of(index), profile_of(index), Random(index).randbytes, now)


def hosted(*starts: int) -> Sequence[tuple[SpanInfo, SpanLoad]]:
    return [(info_of(start, start + 8), SpanLoad()) for start in starts]


def node_of(index: int) -> NodeId:
    return key_of(index).node_id


def open_record(data: bytes) -> Record:
    """Read and check a statement: size, form, signature, beat. Raises RecordRefused, and nothing else."""
    record, size = read(data)
    check_signature(record, data[:size])
    beat = read_beat(data[size:])
    return record if beat is None else check_beat(record, *beat)
