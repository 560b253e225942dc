"""What nodes of the DHT say to each other, as bytes. Strict: exact lengths, bounded counts, one meaning per message.

    message   kind u8 · request u64 · fields                                                       all big endian
    FIND      target 32 · wants records u8          FOUND    contacts u8 · (length u16 · contact)... · tags u16 · tag 10 ...
    FETCH     target 32 · tags u8 · tag 10 ...       RECORDS  records u8 · (length u16 · bytes)...
    STORE     as RECORDS                            PING, PONG   nothing
    contact   node 32 · addresses u8 · (length u8 · host · port u16)...

The request is drawn by the asker; an answer repeats it. A tag is that of a record's key (record.Key.tag, 8 bytes), then the
last 16 bits of its version.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, NoReturn

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import ProtocolError
from manyhands.swarm.dht.lookup import FETCH_TAGS
from manyhands.swarm.dht.table import Contact, K, number
from manyhands.swarm.directory import Peer

TAG_BYTES = 10
MAX_TAGS = 1024  # per listing
MAX_ADDRESSES = 4  # of a contact; more are not passed on
_HEAD = struct.Struct(">BQ")


class DhtPing(NamedTuple):
    request: int


class DhtPong(NamedTuple):
    request: int


class DhtFind(NamedTuple):
    """Name the contacts nearest to `target`, and if `wants_records`, the tags of what is held under it."""

    request: int
    target: int
    wants_records: bool


class DhtFound(NamedTuple):
    request: int
    contacts: tuple[Contact, ...]
    tags: tuple[bytes, ...]


class DhtFetch(NamedTuple):
    """Send the records with these `tags` under `target`, those that are held."""

    request: int
    target: int
    tags: tuple[bytes, ...]


class DhtRecords(NamedTuple):
    request: int
    records: tuple[bytes, ...]


class DhtPut(NamedTuple):
    """Hold these records of mine. Answered by nothing: they are stored anew long before they end."""

    request: int
    records: tuple[bytes, ...]


Message = DhtPing | DhtPong | DhtFind | DhtFound | DhtFetch | DhtRecords | DhtPut
_KINDS: tuple[type[Message], ...] = (DhtPing, DhtPong, DhtFind, DhtFound, DhtFetch, DhtRecords, DhtPut)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS, start=1)}


def encode(message: Message) -> bytes:
    """The bytes of a message; at most 48 KiB, by its caps."""
    head = _HEAD.pack(_NUMBERS[type(message)], message.request)
    match message:
        case DhtFind(_, target, wants_records):
            return head + target.to_bytes(32) + bytes([wants_records])
        case DhtFound(_, contacts, tags):
            named = _pack([contact.wire for contact in contacts])
            return head + named + len(tags).to_bytes(2) + b"".join(tags)
        case DhtFetch(_, target, tags):
            return head + target.to_bytes(32) + bytes([len(tags)]) + b"".join(tags)
        case DhtRecords(_, records) | DhtPut(_, records):
            return head + _pack(records)
        case _:
            return head


def decode(body: bytes) -> Message:
    """Read a message. Raises ProtocolError, and nothing else, for bytes that `encode` would not write."""
    if len(body) < _HEAD.size:
        _refuse(f"{len(body)} bytes are no message")
    kind, request = _HEAD.unpack_from(body)
    reader = _Reader(body, _HEAD.size)
    message: Message
    match kind:
        case 1 | 2:
            message = DhtPing(request) if kind == 1 else DhtPong(request)
        case 3:
            message = DhtFind(request, int.from_bytes(reader.take(32)), bool(reader.number(1, 1)))
        case 4:
            contacts = tuple([read_contact(wire) for wire in reader.items(K)])
            message = DhtFound(request, contacts, reader.tags(reader.number(2, MAX_TAGS)))
        case 5:
            message = DhtFetch(request, int.from_bytes(reader.take(32)), reader.tags(reader.number(1, FETCH_TAGS)))
        case 6 | 7:
            records = tuple(reader.items(FETCH_TAGS))
            message = DhtRecords(request, records) if kind == 6 else DhtPut(request, records)
        case _:
            _refuse(f"kind {kind} is unknown")
    if reader.at != len(body):
        _refuse(f"{len(body) - reader.at} bytes are left over")
    return message


@lru_cache(maxsize=1 << 14)
def contact_of(peer: Peer) -> Contact | None:
    """A peer as a contact, with the first MAX_ADDRESSES addresses that can be written; None if there is none of these."""
    hosts = [(address.host.encode(), address.port) for address in peer.addresses]
    hosts = [(host, port) for host, port in hosts if _is_host(host) and port][:MAX_ADDRESSES]
    if not hosts:
        return None
    named = b"".join(bytes([len(host)]) + host + port.to_bytes(2) for host, port in hosts)
    return read_contact(bytes.fromhex(peer.node) + bytes([len(hosts)]) + named)


@lru_cache(maxsize=1 << 14)
def read_contact(wire: bytes) -> Contact:
    """Raises ProtocolError. Cached: the same contacts are named again and again."""
    reader = _Reader(wire, 0)
    node = NodeId(reader.take(32).hex())
    addresses = tuple(_read_address(reader, node) for _ in range(reader.number(1, MAX_ADDRESSES)))
    if reader.at != len(wire) or not addresses:
        _refuse("a contact without an address, or with bytes left over")
    return Contact(number(node), Peer(node, addresses), wire)


def _read_address(reader: "_Reader", node: NodeId) -> NodeAddr:
    host = reader.take(reader.number(1, 255))
    port = reader.number(2, 65535)
    if not _is_host(host) or not port:
        _refuse("an address that cannot be dialled")
    return NodeAddr(host.decode("ascii"), port, node)


def _is_host(host: bytes) -> bool:
    return 0 < len(host) < 256 and all(33 <= byte < 127 for byte in host)


def _pack(items: Sequence[bytes]) -> bytes:
    return bytes([len(items)]) + b"".join([len(item).to_bytes(2) + item for item in items])


def _refuse(detail: str) -> NoReturn:
    raise ProtocolError(f"directory message is malformed: {detail}")


class _Reader:
    """Takes fields off the front of `data`; every length is checked before it is used."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def take(self, size: int) -> bytes:
        begin, self.at = self.at, self.at + size
        if self.at > len(self._data):
            _refuse(f"it ends {self.at - len(self._data)} bytes early")
        return self._data[begin : self.at]

    def number(self, size: int, limit: int) -> int:
        value = int.from_bytes(self.take(size))
        if value > limit:
            _refuse(f"{value} is over the limit of {limit}")
        return value

    def items(self, limit: int) -> list[bytes]:
        """Byte strings, each behind its length. Most of the work of a large simulation: hence the plain loop."""
        data, items = self._data, []
        at = self.at + 1
        for _ in range(self.number(1, limit)):
            begin = at + 2
            at = begin + int.from_bytes(data[at:begin])
            items.append(data[begin:at])
        self.at = at
        if at > len(data):
            _refuse(f"it ends {at - len(data)} bytes early")
        return items

    def tags(self, count: int) -> tuple[bytes, ...]:
        data = self.take(count * TAG_BYTES)
        return tuple([data[i : i + TAG_BYTES] for i in range(0, len(data), TAG_BYTES)])
