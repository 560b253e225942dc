"""Whom a listener lets into the TLS handshake: a token that only members can make, and bounds on callers without one. Pure.

A dialling member puts a token into the server name of its ClientHello, which TLS sends in clear: 12 random bytes and their
MAC under a key derived from the swarm secret. The listener looks at it before any public-key operation. Without a fresh valid
token a caller gets a TLS alert and costs one MAC. The token does not identify the caller: that is the certificate's
task. Seen on the wire it can be used once more elsewhere, which opens a handshake and no more; each listener refuses the
tokens that it has seen lately.
"""

import hashlib
import hmac
import ipaddress
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

NONCE_BYTES, MAC_BYTES = 12, 16
TOKEN_LENGTH = 2 * (NONCE_BYTES + MAC_BYTES)  # hex digits; one label of a host name has at most 63 characters
MAX_SEEN = 1 << 13
# A ClientHello of OpenSSL with a post-quantum key share has 1.7 kB.
MAX_HELLO_BYTES = 4096
# TLS: a fatal alert, access_denied (RFC 8446 §6.2). What the caller's TLS library reports is then not a broken line.
REFUSAL = bytes((21, 3, 3, 0, 2, 2, 49))


class NotAMember(Exception):
    """The caller's first bytes are no ClientHello with a fresh token of this swarm."""


class Tokens:
    """Makes tokens of one swarm and checks those of others. `draw` gives random bytes. Remembers MAX_SEEN checked tokens."""

    def __init__(self, secret: bytes, draw: Callable[[int], bytes]) -> None:
        self._key = HKDF(hashes.SHA256(), length=32, salt=None, info=b"manyhands door v1").derive(secret)
        self._draw = draw
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # whatever letters they came in

    def make(self) -> str:
        """A new token: TOKEN_LENGTH hex digits."""
        nonce = self._draw(NONCE_BYTES)
        return nonce.hex() + self._mac(nonce).hex()

    def check(self, token: str) -> None:
        """Raise NotAMember unless a member made `token` and it was not checked here lately."""
        try:
            raw = bytes.fromhex(token)
        except ValueError:
            raw = b""
        if len(raw) != NONCE_BYTES + MAC_BYTES:
            raise NotAMember("no token in its server name")
        if not hmac.compare_digest(raw[NONCE_BYTES:], self._mac(raw[:NONCE_BYTES])):
            raise NotAMember("its token is of another swarm")
        if raw in self._seen:
            raise NotAMember("its token was used before")
        self._seen[raw] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def _mac(self, nonce: bytes) -> bytes:
        return hmac.digest(self._key, nonce, hashlib.sha256)[:MAC_BYTES]


def server_name(first: bytes) -> str | int:
    """The server name in the ClientHello that `first` begins with; while that is incomplete, how many bytes are needed.

    Raises NotAMember for what is not a ClientHello with a server name within one record of MAX_HELLO_BYTES.
    """
    if first[:1] not in (b"", b"\x16") or first[1:2] not in (b"", b"\x03"):
        raise NotAMember("it does not use TLS")
    if len(first) < 5:
        return 5
    length = int.from_bytes(first[3:5], "big")
    if length + 5 > MAX_HELLO_BYTES:
        raise NotAMember(f"its ClientHello has {length} bytes, more than {MAX_HELLO_BYTES}")
    if len(first) < 5 + length:
        return 5 + length
    try:
        return _server_name(first[5 : 5 + length])
    except (struct.error, IndexError, UnicodeDecodeError) as exc:
        raise NotAMember("its ClientHello is malformed") from exc


def _server_name(hello: bytes) -> str:
    """RFC 8446 §4.1.2: type, length, version, random, session id, cipher suites, compression, extensions."""
    if hello[0] != 1:
        raise NotAMember("it does not begin with a ClientHello")
    at = 4 + 2 + 32
    at += 1 + hello[at]
    at += 2 + struct.unpack_from(">H", hello, at)[0]
    at += 1 + hello[at]
    end = at + 2 + struct.unpack_from(">H", hello, at)[0]
    at += 2
    while at < min(end, len(hello)):
        kind, size = struct.unpack_from(">HH", hello, at)
        if kind == 0:  # RFC 6066 §3: list length, type 0 (host name), length, name
            (length,) = struct.unpack_from(">H", hello, at + 7)
            return hello[at + 9 : at + 9 + length].decode("ascii")
        at += 4 + size
    raise NotAMember("no token in its server name")


def source_of(host: str) -> str:
    """What counts as one source: an IPv4 address, or the /64 that an IPv6 address belongs to."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.IPv6Network((address, 64), strict=False).network_address)
        address = address.ipv4_mapped
    return str(address)


Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class PendingLimits:
    """Connections that have proved nothing yet: in all, of one source, and seconds that each has."""

    total: int
    per_source: int
    patience_s: float


class Pending(Generic[Key]):
    """Connections that have proved nothing yet. At a limit the oldest of the source with the most of them has to go.

    A new caller therefore never waits and is never refused for the others: one that proves itself within the time in which
    `per_source` others arrive from its own address gets through, whatever the flood.
    """

    def __init__(self, limits: PendingLimits) -> None:
        self.limits = limits
        self._sources: dict[str, OrderedDict[Key, float]] = {}
        self._source_of: OrderedDict[Key, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._source_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._source_of

    def enter(self, key: Key, source: str, now: float) -> Key | None:
        """Note a new connection; returns the one to be dropped for it, if any."""
        self._sources.setdefault(source, OrderedDict())[key] = now
        self._source_of[key] = source
        if len(self._sources[source]) > self.limits.per_source:
            return self._evict(source)
        return self.evict() if len(self) > self.limits.total else None

    def evict(self) -> Key | None:
        """Forget and return the oldest connection of the source with the most; None if there is none."""
        if not self._sources:
            return None
        return self._evict(max(self._sources, key=lambda source: len(self._sources[source])))

    def leave(self, key: Key) -> None:
        """Forget a connection that proved itself or ended. Harmless when repeated."""
        source = self._source_of.pop(key, None)
        if source is not None:
            del self._sources[source][key]
            if not self._sources[source]:
                del self._sources[source]

    def overdue(self, now: float) -> list[Key]:
        """Forget and return the connections that have been here for patience_s."""
        overdue: list[Key] = []
        for key, source in self._source_of.items():  # in the order of arrival
            if now - self._sources[source][key] < self.limits.patience_s:
                break
            overdue.append(key)
        for key in overdue:
            self.leave(key)
        return overdue

    def _evict(self, source: str) -> Key:
        oldest = next(iter(self._sources[source]))
        self.leave(oldest)
        return oldest
