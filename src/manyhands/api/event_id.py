"""The ids of a stream's events: where each choice has got to, sealed. Pure.

    id         URL-safe base64, without padding, of: version u8 · stream 16 · attempt 8 · event u32 · ciphertext · tag 16
    plaintext  created u32 · told u32 · seed u64 · salt 16 · request 8 · caller 8 · flags u8
               · routes: count, each: number of hops, each: node 6, first layer, number of layers
               · choices: count, each: tokens, events, thoughts, 2 * route + (1 if done)            big endian, varints

The key of an attempt is derived from a secret that all gateways of a swarm know (docs/threat.md), the nonce is the number
of the event. A client can read that an event belongs to the stream that the answer names, and nothing else; it can change
nothing.
"""

import base64
import binascii
import hashlib
import hmac
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from manyhands.core import Exactness
from manyhands.errors import BadRequest
from manyhands.origin.adoption import HopMark

VERSION: Final = 2
STREAM_BYTES: Final = 16
ATTEMPT_BYTES: Final = 8
DIGEST_BYTES: Final = 8
SALT_BYTES: Final = 16
NODE_BYTES: Final = 6
# Longer ids are not looked at: 128 choices over routes of their own do not need as much.
MAX_ID_CHARS: Final = 32 << 10
_HEAD = struct.Struct(f">B{STREAM_BYTES}s{ATTEMPT_BYTES}sI")
_FIXED = struct.Struct(f">IIQ{SALT_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}sB")
_USAGE_TOLD, _IS_E2 = 1, 2
NO_ROUTE: Final = b"\0"


class BadEventId(BadRequest):
    """A Last-Event-ID that nothing can be gone on from."""

    code = "bad_event_id"
    param = "Last-Event-ID"


class Reached(NamedTuple):
    """How far the client has one choice: `events` of it, and with them all text of its first `tokens` tokens.

    `thoughts`: how many of those were thoughts. `route`: which hops had them cached, as ids hold it (route_bytes).
    """

    tokens: int = 0
    events: int = 0
    thoughts: int = 0
    is_done: bool = False
    route: bytes = NO_ROUTE


class Position(NamedTuple):
    """What an id says. `request` and `caller` are digests; times are Unix seconds. `salt`: random, of the stream. `exactness`
    is the least of its choices."""

    stream: bytes
    created: int
    told: int
    seed: int
    salt: bytes
    request: bytes
    caller: bytes
    choices: tuple[Reached, ...]
    is_usage_told: bool = False
    exactness: Exactness = "E0"

    @property
    def num_events(self) -> int:
        """Events of all choices together: it never falls along a stream."""
        return sum(choice.events for choice in self.choices) + self.is_usage_told


class Sealer:
    """Seals the ids of one attempt at a stream, each under a nonce of its own."""

    def __init__(self, secret: bytes, stream: bytes, attempt: bytes) -> None:
        self._stream, self._attempt, self._cipher = stream, attempt, _cipher(secret, stream, attempt)
        self._event = 0

    def seal(self, position: Position) -> bytes:
        """The id of the next event."""
        self._event += 1
        head = _HEAD.pack(VERSION, self._stream, self._attempt, self._event)
        sealed = self._cipher.encrypt(_nonce(self._event), _pack(position), head)
        return base64.urlsafe_b64encode(head + sealed).rstrip(b"=")


def unseal(secret: bytes, text: str) -> Position:
    """What the id `text` says. Raises BadEventId unless it was sealed under `secret` and is whole. Takes some 20 us."""
    if len(text) > MAX_ID_CHARS:
        raise BadEventId(f"Last-Event-ID has {len(text)} characters; ids of events have at most {MAX_ID_CHARS}")
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        if base64.urlsafe_b64encode(raw).rstrip(b"=") != text.encode():
            raise ValueError("another spelling of the same bytes")
        version, stream, attempt, event = _HEAD.unpack_from(raw)
        if version != VERSION:
            raise BadEventId(f"Last-Event-ID has version {version}, this gateway reads version {VERSION}: {_AGAIN}")
        plain = _cipher(secret, stream, attempt).decrypt(_nonce(event), raw[_HEAD.size :], raw[: _HEAD.size])
        return _unpack(stream, plain)
    except (binascii.Error, ValueError, struct.error, InvalidTag, IndexError) as error:
        raise BadEventId(
            f"Last-Event-ID is not the id of an event of this swarm's gateways, or not whole: {_AGAIN}"
        ) from error


_AGAIN = "send the request again without it"


def derive(secret: bytes, label: str, *parts: bytes) -> bytes:
    """32 bytes that cannot be computed without `secret`; another `label` or other parts (of fixed sizes) give others."""
    return hmac.digest(secret, b"manyhands " + label.encode() + b"\0" + b"".join(parts), "sha256")


def digest(label: str, *parts: bytes) -> bytes:
    """DIGEST_BYTES that tell requests or callers apart; the parts are told apart too."""
    hashed = hashlib.sha256(label.encode())
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big") + part)
    return hashed.digest()[:DIGEST_BYTES]


def _cipher(secret: bytes, stream: bytes, attempt: bytes) -> AESGCM:
    return AESGCM(derive(secret, "event ids 2", stream, attempt))


def _nonce(event: int) -> bytes:
    return event.to_bytes(12, "big")


# -- plaintext --------------------------------------------------------------------------------------------------------


def _pack(position: Position) -> bytes:
    _, created, told, seed, salt, request, caller, choices, is_usage_told, exactness = position
    flags = _USAGE_TOLD * is_usage_told + _IS_E2 * (exactness != "E0")
    fixed = _FIXED.pack(created, told, seed, salt, request, caller, flags)
    parts: list[bytes] = []
    routes: dict[bytes, int] = {}
    for tokens, events, thoughts, is_done, route in choices:
        number = routes.setdefault(route, len(routes))
        parts += (_number(tokens), _number(events), _number(thoughts), _number(2 * number + is_done))
    return b"".join((fixed, _number(len(routes)), *routes, _number(len(choices)), *parts))


def route_bytes(marks: Sequence[HopMark]) -> bytes:
    """A route as ids hold it."""
    hops = [bytes.fromhex(hop.node) + _number(hop.start) + _number(hop.end - hop.start) for hop in marks]
    return _number(len(marks)) + b"".join(hops)


def marks_of(route: bytes) -> tuple[HopMark, ...]:
    """The hops of a route that an id holds."""
    return _Plain(route).marks()


@lru_cache(4096)
def _number(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


class _Plain:
    """Reads a plaintext, which is authentic: a gateway of this swarm wrote it."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self) -> int:
        value = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte <= 0x7F:
                return value
            shift += 7

    def hop(self) -> HopMark:
        node, start = self.take(NODE_BYTES).hex(), self.number()
        return HopMark(node, start, start + self.number())

    def marks(self) -> tuple[HopMark, ...]:
        return tuple([self.hop() for _ in range(self.number())])


def _unpack(stream: bytes, data: bytes) -> Position:
    plain = _Plain(data)
    created, told, seed, salt, request, caller, flags = _FIXED.unpack(plain.take(_FIXED.size))
    routes = [route_bytes(plain.marks()) for _ in range(plain.number())]
    choices = tuple([_reached(plain, routes) for _ in range(plain.number())])
    exactness: Exactness = "E2" if flags & _IS_E2 else "E0"
    return Position(stream, created, told, seed, salt, request, caller, choices, bool(flags & _USAGE_TOLD), exactness)


def _reached(plain: _Plain, routes: Sequence[bytes]) -> Reached:
    tokens, events, thoughts, last = (plain.number() for _ in range(4))
    return Reached(tokens, events, thoughts, bool(last & 1), routes[last >> 1])
