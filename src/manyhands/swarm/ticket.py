"""The text that lets a machine join a swarm: its secret, its name, and where some members can be dialled.

    "mh1" + URL-safe base64, without padding, of:
    body length u16 · body · first 8 bytes of SHA-256("mh1" + length + body)
    body   secret 32 bytes · name (u8 length, UTF-8) · number of addresses u8 · addresses
           · nothing (directory by gossip), or 1 (dht), or 2 (static)
    address   host (u8 length, UTF-8) · port u16 · 0, or 1 and the node's 32 bytes                   big endian

The holder of a ticket is a member: treat it as a password.
"""

import base64
import binascii
import hashlib
import secrets
import struct
from dataclasses import dataclass, field, replace

from manyhands.config import DIRECTORIES
from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest, TicketError

PREFIX = "mh1"
SECRET_BYTES = 32
MAX_ADDRESSES = 16
MAX_NAME_BYTES = 64
_CHECK_BYTES = 8


@dataclass(frozen=True, slots=True)
class Ticket:
    """Raises TicketError for a secret, name, address or directory that a ticket cannot carry. Its repr hides the secret.

    `directory`: the back-end by which all nodes of the swarm keep their directory (directory.py).
    """

    secret: bytes = field(repr=False)
    name: str
    addresses: tuple[NodeAddr, ...] = ()
    directory: str = DIRECTORIES[0]

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise TicketError(f"a swarm secret has {SECRET_BYTES} bytes, not {len(self.secret)}")
        if not self.name.isprintable() or not 1 <= len(self.name.encode()) <= MAX_NAME_BYTES:
            raise TicketError(f"a swarm's name has 1 to {MAX_NAME_BYTES} printable bytes")
        if len(self.addresses) > MAX_ADDRESSES:
            raise TicketError(f"{len(self.addresses)} addresses; a ticket holds at most {MAX_ADDRESSES}")
        if self.directory not in DIRECTORIES:
            raise TicketError(f"directory is {self.directory!r:.40}; it must be one of {', '.join(DIRECTORIES)}")
        for addr in self.addresses:
            check_address(addr)

    @classmethod
    def new(cls, name: str, directory: str = "") -> "Ticket":
        """The ticket of a new swarm, with a fresh secret and no addresses. `directory` "": the usual one, gossip."""
        return cls(secrets.token_bytes(SECRET_BYTES), name, directory=directory or DIRECTORIES[0])

    def with_address(self, addr: NodeAddr) -> "Ticket":
        """The same ticket with `addr` first, without older entries for its host and port or beyond the limit."""
        others = [old for old in self.addresses if (old.host, old.port) != (addr.host, addr.port)]
        return replace(self, addresses=(addr, *others)[:MAX_ADDRESSES])

    def rotate(self, directory: str = "") -> "Ticket":
        """The ticket of the same swarm with a fresh secret. Nodes that use it know no holder of the old one any more.

        So this is also the moment to change its `directory`: no node meets one that keeps the other.
        """
        return replace(self, secret=secrets.token_bytes(SECRET_BYTES), directory=directory or self.directory)

    def agree(self, directory: str) -> None:
        """Raise BadRequest if this machine is set to another `directory` than the swarm's ("" is any).

        Raises TicketError for one that does not exist.
        """
        replace(self, directory=directory or self.directory)
        if directory not in ("", self.directory):
            raise BadRequest(
                f"swarm {self.name} keeps its directory by {self.directory}, this machine is set to {directory}: leave "
                f"--directory and swarm.directory out, or change the swarm: manyhands ticket rotate --directory {directory}"
            )

    @property
    def fingerprint(self) -> str:
        """16 hex digits that tell swarms apart and say nothing of the secret (a domain-separated hash of 256 random bits)."""
        return hashlib.sha256(b"manyhands-fingerprint-1\0" + self.secret).hexdigest()[:16]

    def encode(self) -> str:
        """The ticket as text; equal tickets give equal texts."""
        name = self.name.encode()
        body = self.secret + bytes([len(name)]) + name + bytes([len(self.addresses)])
        body += b"".join(_encode_address(addr) for addr in self.addresses)
        number = DIRECTORIES.index(self.directory)
        body += bytes([number]) if number else b""
        payload = struct.pack(">H", len(body)) + body
        return PREFIX + base64.urlsafe_b64encode(payload + _checksum(payload)).rstrip(b"=").decode()

    @classmethod
    def parse(cls, text: str) -> "Ticket":
        """Read what `encode` wrote; white space is ignored, also where a letter broke its line. Raises TicketError."""
        text = "".join(text.split())
        ticket = _read(_open(text))
        if ticket.encode() != text:  # base64 has several spellings of the same last byte
            raise TicketError("ticket is damaged: its last character is not the one that was given out")
        return ticket


def _open(text: str) -> bytes:
    """The body of a ticket whose version, length and checksum are right."""
    if not text.startswith("mh"):
        raise TicketError('this is not a ticket: tickets begin with "mh1" (`manyhands up` prints one)')
    if not text.startswith(PREFIX):
        raise TicketError(f"ticket has version {text[2:3]!r}, this program reads version '1'; update one of the two")
    coded = text[len(PREFIX) :]
    try:
        raw = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as exc:
        raise TicketError("ticket holds characters that no ticket has, or lacks its end; copy it again") from exc
    size = 2 + int.from_bytes(raw[:2], "big") + _CHECK_BYTES
    if len(raw) < size:
        raise TicketError(f"ticket is truncated: {len(raw)} of {size} bytes; copy it again, whole")
    if len(raw) > size:
        raise TicketError(f"ticket is too long by {len(raw) - size} bytes; copy it again")
    payload, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    if not secrets.compare_digest(_checksum(payload), check):
        raise TicketError("ticket has a wrong checksum: a character was changed; copy it again")
    return payload[2:]


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(PREFIX.encode() + payload).digest()[:_CHECK_BYTES]


class _Body:
    """Reads fields off the front of a ticket's body."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > len(self._data):
            raise TicketError("ticket is malformed: a field goes beyond its end")
        head, self._data = self._data[:num_bytes], self._data[num_bytes:]
        return head

    def byte(self) -> int:
        return self.take(1)[0]

    def text(self) -> str:
        try:
            return self.take(self.byte()).decode()
        except UnicodeDecodeError as exc:
            raise TicketError("ticket is malformed: a text in it is not UTF-8") from exc

    def address(self) -> NodeAddr:
        host = self.text()
        port = int.from_bytes(self.take(2), "big")
        return NodeAddr(host, port, NodeId(self.take(32).hex()) if self.byte() else None)

    def directory(self) -> str:
        """The last field."""
        if not self._data:
            return DIRECTORIES[0]
        number = self.byte()
        if self._data or not 0 < number < len(DIRECTORIES):
            raise TicketError(
                "ticket is of a newer program: it holds a field that this one does not know; update this one"
            )
        return DIRECTORIES[number]


def _read(body: bytes) -> Ticket:
    fields = _Body(body)
    secret, name = fields.take(SECRET_BYTES), fields.text()
    addresses = tuple(fields.address() for _ in range(fields.byte()))
    return Ticket(secret, name, addresses, fields.directory())


def _encode_address(addr: NodeAddr) -> bytes:
    host = addr.host.encode()
    node = b"\0" if addr.node is None else b"\1" + bytes.fromhex(addr.node)
    return bytes([len(host)]) + host + struct.pack(">H", addr.port) + node


def check_address(addr: NodeAddr) -> None:
    """Raise TicketError for what could not be written as "host:port" again, or not dialled."""
    try:
        again = NodeAddr.parse(str(addr), addr.node)
    except BadRequest as exc:
        raise TicketError(f"a ticket cannot hold an address: {exc}") from exc
    if again != addr or not 1 <= addr.port <= 65535 or len(addr.host.encode()) > 255:
        raise TicketError(f"a ticket cannot hold address {addr}: host:port with a port from 1 to 65535")
