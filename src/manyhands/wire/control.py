"""Bodies of control messages: compact JSON of the dataclass, with a strict decoder. Knows nothing of frames.

The decoder is built from the type hints in message.py: exact keys, exact types, bounded numbers, nothing extra. A
peer's bytes select no class and no code path beyond these hints, whose depth is finite.
"""

import json
import math
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from manyhands.core import MAX_BIASES, MAX_STOP_IDS, MAX_STOPS, ModelId, NodeId, SessionId
from manyhands.errors import ManyhandsError, ProtocolError
from manyhands.plain import LIMIT, one_line
from manyhands.wire.attest_message import Attest, Attested, Root, Signature
from manyhands.wire.message import (
    Close,
    Extend,
    Extended,
    Fault,
    Feed,
    Hello,
    Message,
    Open,
    Opened,
    Ping,
    Pong,
    Probe,
    Progress,
    Reassign,
    Reassigned,
    Retract,
    Token,
)
from manyhands.wire.rounding import MAX_RANGES
from manyhands.wire.weights_message import MAX_CHUNK_BYTES, WeightRequest, WeightsNotFound

Decoder = Callable[[Any], Any]  # JSON value -> Python value; raises ValueError
M = TypeVar("M", bound=Message)

U32 = (1 << 32) - 1
U64 = (1 << 64) - 1
# Largest value by field name; other integers are u32. None is negative.
LIMITS = {"hop": 255, "blame": 255, "num_hops": 255, "port": 65535, "nonce": U64, "serial": U64, "seed": U64}
LIMITS |= {"offset": U64, "length": MAX_CHUNK_BYTES}
LEAST = {"hidden_size": 1}  # others may be 0
# Items of a list by field name; other lists, of the spans in a Hello, have MAX_SPANS.
MAX_ITEMS = {"logit_bias": MAX_BIASES, "stop_ids": MAX_STOP_IDS, "stop": MAX_STOPS, "ranges": MAX_RANGES}
MAX_SPANS = 256
_ATOMS: Final = frozenset({str, int, float, bool, type(None)})
MAX_ERROR_CHARS = 200  # an error quotes the peer's bytes; logs must not be flooded by them
# Characters of a text by field name; other texts have plain.LIMIT. What is longer is cut, what is not printable replaced:
# texts are for people, and are compared at most. Stop strings are exact: they belong to the text, and are never shown.
TEXT_LIMITS = {"name": 64, "code": 64, "detail": 500}
EXACT = {"stop"}


def encode(message: Message) -> bytes:
    """The JSON body of a control message. Raises ProtocolError for what JSON cannot hold (NaN, lone surrogates)."""
    if isinstance(message, Ping | Pong):  # ten times a second and link; an encoder takes half of the time
        return b'{"nonce":%d}' % message.nonce
    try:
        return _write_json(_plain(message)).encode()
    except (TypeError, ValueError) as exc:
        raise ProtocolError(f"{type(message).__name__} cannot be sent: {exc}") from exc


def decode(kind: type[M], body: bytes) -> M:
    """Read one message of type `kind`. Raises ProtocolError, and nothing else, for any other bytes."""
    try:
        value = _read_json(body.decode())
        message = _DECODERS[kind](value)
    except (ValueError, RecursionError, ManyhandsError) as exc:
        raise ProtocolError(f"{kind.__name__} is malformed: {exc!s:.{MAX_ERROR_CHARS}}") from exc
    assert isinstance(message, kind)
    return message


def _plain(value: Any) -> object:
    kind: Any = type(value)
    if kind in _ATOMS:
        return value
    if names := _names(kind):
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


@cache
def _names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


# Made once: a ping has to be decoded some ten times a second.
_write_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
_read_json = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant).decode


def _integer(least: int, limit: int) -> Decoder:
    def decode_integer(value: Any) -> int:
        if type(value) is not int or not least <= value <= limit:
            raise ValueError(f"{value!r:.40} is not an integer from {least} to {limit}")
        return value

    return decode_integer


def _number(value: Any) -> float:
    if type(value) is int and abs(value) <= 1 << 53:
        return float(value)
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(f"{value!r:.40} is not a finite number")
    return value


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r:.40} is not true or false")
    return value


def _string(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.40} is not a string")
    value.encode()  # refuses lone surrogates, which could not be sent on or logged
    return value


def _text(limit: int) -> Decoder:
    return lambda value: one_line(_string(value), limit)


def _hex(num_bytes: int) -> Callable[[Any], str]:
    def decode_hex(value: Any) -> str:
        if type(value) is not str or len(value) != 2 * num_bytes or bytes.fromhex(value).hex() != value:
            raise ValueError(f"{value!r:.40} is not {num_bytes} bytes in lower-case hex")
        return value

    return decode_hex


def _session(value: Any) -> SessionId:
    return SessionId(bytes.fromhex(_hex(16)(value)))


def _choice(options: tuple[Any, ...]) -> Decoder:
    def decode_choice(value: Any) -> str:
        if type(value) is not str or value not in options:
            raise ValueError(f"{value!r:.40} is not one of {options}")
        return value

    return decode_choice


def _optional(inner: Decoder) -> Decoder:
    return lambda value: None if value is None else inner(value)


def _items(hints: tuple[Any, ...], name: str) -> Decoder:
    repeated = hints[-1] is Ellipsis
    inner = [decoder_for(hint, name) for hint in hints if hint is not Ellipsis]
    least, most = (0, MAX_ITEMS.get(name, MAX_SPANS)) if repeated else (len(inner), len(inner))

    def decode_items(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or not least <= len(value) <= most:
            raise ValueError(f"{name} is not a list of {least} to {most}")
        decoders = inner * len(value) if repeated else inner
        return tuple(decode_item(item) for decode_item, item in zip(decoders, value, strict=True))

    return decode_items


def _record(cls: type[Any]) -> Decoder:
    hints = get_type_hints(cls)
    decoders = {
        field.name: _SELECTING.get((cls, field.name)) or decoder_for(hints[field.name], field.name)
        for field in fields(cls)
    }

    def decode_record(value: Any) -> Any:
        if type(value) is not dict or value.keys() != decoders.keys():
            raise ValueError(f"{cls.__name__} does not have exactly the keys {', '.join(decoders)}")
        return cls(**{name: decode_field(value[name]) for name, decode_field in decoders.items()})

    return decode_record


# A text that selects something here is exact: names of tensors have more than 64 characters where experts are quantised.
_SELECTING: dict[tuple[type[Any], str], Decoder] = {(WeightRequest, "name"): _string}
_BY_HINT: dict[Any, Decoder] = {
    NodeId: _hex(32),
    ModelId: _hex(32),
    Token: _hex(16),
    Root: _hex(32),
    Signature: _hex(64),
    SessionId: _session,
    float: _number,
    bool: _boolean,
}


def decoder_for(hint: Any, name: str) -> Decoder:
    """The decoder of a type hint; `name` of the field selects an integer's range. Raises TypeError for other hints."""
    if hint is int:
        return _integer(LEAST.get(name, 0), LIMITS.get(name, U32))
    if hint is str:
        return _string if name in EXACT else _text(TEXT_LIMITS.get(name, LIMIT))
    if hint in _BY_HINT:
        return _BY_HINT[hint]
    if is_dataclass(hint) and isinstance(hint, type):
        return _record(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _choice(arguments)
    if origin is tuple:
        return _items(arguments, name)
    if origin in (Union, types.UnionType) and len(arguments) == 2 and arguments[1] is type(None):
        return _optional(decoder_for(arguments[0], name))
    raise TypeError(f"{name}: no decoder for {hint}")


_DECODERS: dict[type[Any], Decoder] = {
    cls: _record(cls)
    for cls in (
        *(Hello, Open, Opened, Close, Fault, Retract, Probe, Progress, Extend, Extended, Feed, Attest, Attested),
        *(Ping, Pong, WeightRequest, WeightsNotFound, Reassign, Reassigned),
    )
}
