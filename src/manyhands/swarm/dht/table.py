"""The contacts of a DHT node: k-buckets over 256-bit ids. Pure: no clock, no network.

Maymounkov and Mazieres, "Kademlia: A Peer-to-peer Information System Based on the XOR Metric" (2002), sections 2.2 and
4.1 (replacement cache). Only nodes that called or answered themselves, over a link that proves their key, are entered here;
those that others name are not. Long-lived contacts stay: a newcomer enters a full bucket only where one fails to answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from manyhands.core import NodeId
from manyhands.swarm.directory import Peer

K = 16  # copies of a record, and contacts per bucket; all of 16 die within a refresh with chance 0.33^16 = 2e-8
ID_BITS = 256
CHECK_S = 30.0  # a full bucket checks its oldest contact at most this often, however many newcomers ask
FORGET_S = 3600.0  # a contact that fails is kept this long while no other node needs its place: partitions heal


class Contact(NamedTuple):
    """A peer, its place in the id space, and its bytes in messages, made once (wire.py)."""

    id: int
    peer: Peer
    wire: bytes


def number(node: NodeId) -> int:
    """A node's place in the id space: its public key."""
    return int(node, 16)


@dataclass(slots=True)
class _Bucket:
    contacts: dict[int, Contact] = field(default_factory=dict)  # least recently seen first
    spares: dict[int, Contact] = field(default_factory=dict)  # newest last
    checked_s: float = float("-inf")


class Table:
    """The contacts of node `own`, in buckets by the highest bit in which their id differs from it."""

    def __init__(self, own: int, k: int = K) -> None:
        self.own = own
        self.k = k
        self._buckets: dict[int, _Bucket] = {}
        self._failing: dict[int, float] = {}  # id -> since when

    def __len__(self) -> int:
        return sum(len(bucket.contacts) for bucket in self._buckets.values())

    def __iter__(self) -> Iterator[Contact]:
        for bucket in self._buckets.values():
            yield from bucket.contacts.values()

    def __contains__(self, node: int) -> bool:
        return self.find(node) is not None

    @property
    def failing(self) -> list[Contact]:
        """Contacts that did not answer lately."""
        return [contact for node in self._failing if (contact := self.find(node)) is not None]

    @property
    def is_empty(self) -> bool:
        return not self._buckets

    def find(self, node: int) -> Contact | None:
        bucket = self._buckets.get((node ^ self.own).bit_length())
        return bucket.contacts.get(node) if bucket else None

    def answering(self, node: int) -> Contact | None:
        """A contact that did not fail to answer lately."""
        return None if node in self._failing else self.find(node)

    def seen(self, contact: Contact, now: float) -> Contact | None:
        """Note that a message of `contact` came. Returns a contact that should be pinged: its place is wanted."""
        node = contact.id
        if node == self.own:
            return None
        index = (node ^ self.own).bit_length()
        bucket = self._buckets.get(index)
        if bucket is None:
            bucket = self._buckets[index] = _Bucket()
        if node in bucket.contacts:
            del bucket.contacts[node]
            bucket.contacts[node] = contact
            if self._failing:
                self._failing.pop(node, None)
            return None
        return self._newcomer(bucket, contact, now)

    def _newcomer(self, bucket: _Bucket, contact: Contact, now: float) -> Contact | None:
        if len(bucket.contacts) >= self.k:
            failing = next((i for i in bucket.contacts if i in self._failing), None)
            if failing is None:
                return self._spare(bucket, contact, now)
            self._remove(bucket, failing)
        bucket.spares.pop(contact.id, None)
        bucket.contacts[contact.id] = contact
        return None

    def _spare(self, bucket: _Bucket, contact: Contact, now: float) -> Contact | None:
        bucket.spares.pop(contact.id, None)
        bucket.spares[contact.id] = contact
        if len(bucket.spares) > self.k:
            del bucket.spares[next(iter(bucket.spares))]
        if now < bucket.checked_s + CHECK_S:
            return None
        bucket.checked_s = now
        return next(iter(bucket.contacts.values()))

    def failed(self, node: int, now: float) -> None:
        """Note that a contact did not answer: the newest spare takes its place, or it keeps it until one is wanted."""
        bucket = self._buckets.get((node ^ self.own).bit_length())
        if bucket is None:
            return
        bucket.spares.pop(node, None)
        if node not in bucket.contacts:
            return
        if bucket.spares:
            self._remove(bucket, node)
            spare, contact = bucket.spares.popitem()
            bucket.contacts[spare] = contact
        elif now - self._failing.setdefault(node, now) > FORGET_S:
            self._remove(bucket, node)

    def _remove(self, bucket: _Bucket, node: int) -> None:
        del bucket.contacts[node]
        self._failing.pop(node, None)

    def closest(self, target: int, count: int) -> list[Contact]:
        """The `count` known contacts nearest to `target` by XOR, nearest first; none that fails to answer.

        Bucket by bucket: those that share more leading bits with the target are nearer than all others.
        """
        split = (target ^ self.own).bit_length()
        found = self._sorted((split,), target)
        if len(found) < count:
            found += self._sorted([i for i in self._buckets if i < split], target)
        for index in sorted(i for i in self._buckets if i > split):
            if len(found) >= count:
                break
            found += self._sorted((index,), target)
        return found[:count]

    def _sorted(self, indexes: tuple[int, ...] | list[int], target: int) -> list[Contact]:
        contacts: list[Contact] = []
        for index in indexes:
            bucket = self._buckets.get(index)
            if bucket is not None:
                contacts += bucket.contacts.values()
        if self._failing:
            contacts = [c for c in contacts if c.id not in self._failing]
        contacts.sort(key=lambda contact: contact.id ^ target)
        return contacts

    def refresh_target(self, draw: int) -> int:
        """An id to look up so that buckets fill: near oneself, or in one of the occupied buckets, chosen by `draw`.

        `draw` is random of at least 256 + 16 bits.
        """
        depths = [ID_BITS - min(self._buckets, default=ID_BITS), 0]
        depth = (draw >> ID_BITS) % (depths[0] + 2)
        if depth > depths[0]:
            return self.own
        keep = (1 << ID_BITS) - (1 << (ID_BITS - depth))
        return (self.own & keep) | (draw & ((1 << (ID_BITS - depth)) - 1))
