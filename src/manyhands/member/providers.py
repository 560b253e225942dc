"""The members of a swarm as sources of weights."""

from collections.abc import Awaitable, Iterable

from manyhands.core import NodeAddr
from manyhands.member.member import Member
from manyhands.net.transport import Link
from manyhands.swarm.record import Record
from manyhands.weights.provider import PeerProvider, Provider


def providers_of(member: Member, records: Iterable[Record]) -> list[Provider]:
    """The nodes of `records` that can be dialled, without this one: those that a link is open to first, then those of the
    ticket in its order."""
    first = [addr.node for addr in member.ticket.addresses]
    linked = member.edges()
    known = {r.node: r for r in records if r.node != member.id and member.book(r.node)}
    rank = {node: number for number, node in reversed(list(enumerate(first)))}
    ordered = sorted(known.values(), key=lambda r: (r.node not in linked, rank.get(r.node, len(first))))
    return [provider_of(member, record) for record in ordered]


def provider_of(member: Member, record: Record) -> Provider:
    """A node as a source of weights."""
    addr: NodeAddr = member.book(record.node)[0]

    def link() -> Awaitable[Link]:
        return member.node.reach(addr, record.node, member.node.pool.connect_s, "bulk")

    return PeerProvider(record.node, record.name, member.node.wants, link)
