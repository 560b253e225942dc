"""Who can be reached: the interface that tls, memory (and later iroh) implement, and that the rest of the node sees.

A Transport is one node's way in and out; a Link carries the messages of one lane between two nodes that proved their
keys. Neither reads messages, except Hello (which node the peer is) and Ping (its round trip).
"""

import asyncio
from collections.abc import Callable
from typing import NoReturn, Protocol

from manyhands.core import EdgeHealth, NodeAddr, NodeId
from manyhands.errors import LinkClosed, ProtocolError
from manyhands.net.liveness import LinkEvidence
from manyhands.wire.message import LANES, Hello, Lane, Message

MAX_RTT_SAMPLES = 32


class Link(Protocol):
    """One lane to one peer. Who took it from `dial` or `accept` closes it (usually a LinkPool)."""

    @property
    def peer(self) -> NodeId:
        """The peer's proven key."""

    @property
    def hello(self) -> Hello:
        """What the peer said first."""

    @property
    def greeting(self) -> Hello:
        """What this node said first."""

    @property
    def lane(self) -> Lane: ...

    @property
    def health(self) -> EdgeHealth:
        """Kept up to date by the link; read only."""

    @property
    def is_closed(self) -> bool: ...

    def send(self, message: Message) -> None:
        """Queue a message; never blocks. A Step's tensor must not change until it has been sent.

        Raises LinkClosed, or ProtocolError for what this lane cannot carry (the link then stays open).
        """

    async def drain(self) -> None:
        """Wait while more is queued for sending than the high-water mark. Raises LinkClosed. Deadline: the caller's."""

    async def deliver(self, take: Callable[[Message], None]) -> NoReturn:
        """Hand every message to `take`, in order, in the loop turn that read it. One caller at a time.

        `take` must not block; it may send and abort, on any link. While nothing delivers, messages wait, and reading
        pauses when there are many. Ends only by raising: LinkClosed with the reason, after the last message that
        arrived before a peer's close; or what `take` raised. Cancelling loses nothing, nor does raising: what comes
        after waits for the next caller.
        """

    def ping(self) -> "asyncio.Future[float]":
        """Send a ping now; the result is its round trip in seconds, also noted in health, or LinkClosed.

        Raises LinkClosed if the link is closed already. Deadline: the caller's.
        """

    def line(self) -> LinkEvidence:
        """What is known of the way to the peer now, for the watch."""

    def answer_pings_with(self, pong: "PongRoute") -> None:
        """Let `pong` carry the answers to the peer's pings, for wrappers that delay messages."""

    def abort(self, reason: str) -> None:
        """Close now, dropping what is queued. Never blocks; harmless when closed."""

    async def aclose(self) -> None:
        """Close after sending what is queued; takes at most a second or so. Harmless when closed."""


class PongRoute(Protocol):
    def __call__(self, message: Message) -> None:
        """Send a Pong; must not raise."""


class Transport(Protocol):
    """One node's way in and out. Constructed with a function that gives this node's Hello for a lane."""

    @property
    def node(self) -> NodeId: ...

    async def listen(self, addr: NodeAddr) -> NodeAddr:
        """Let peers dial `addr` (port 0: any); return the address in force, with this node's id.

        Raises BadRequest naming the address and the remedy if it cannot be had.
        """

    async def accept(self) -> Link:
        """The next link that a peer dialled, greeted and authenticated. Raises LinkClosed after aclose."""

    async def dial(self, addr: NodeAddr, lane: Lane) -> Link:
        """Connect and exchange Hello. Deadline: the caller's (asyncio.timeout); cancelling leaves nothing behind.

        Raises LinkClosed in one line: refused, unreachable, not a member of the swarm, not the node that `addr` names.
        """

    async def aclose(self) -> None:
        """Stop listening and drop links that were not accepted. Links already handed out belong to their takers."""


def try_send(link: Link, message: Message) -> None:
    """Send unless the link is gone; its loss is handled where links are watched."""
    try:
        link.send(message)
    except LinkClosed:
        return


def betters(new: Link, old: Link) -> bool:
    """Whether `new` is a direct link to where `old` goes by way of a relay."""
    ways = (new.health.path_kind, old.health.path_kind)
    return (new.peer, new.lane) == (old.peer, old.lane) and ways == ("direct", "relay")


def check_lane(message: Message, lane: Lane) -> None:
    """Raise ProtocolError unless `message` may be sent on `lane` after Hello."""
    if type(message) not in LANES[lane]:
        raise ProtocolError(f"{type(message).__name__} cannot be sent on the {lane} lane")


def note_rtt(health: EdgeHealth, rtt_s: float) -> None:
    """Add one round trip; `health.rtt_s` is the median of the last MAX_RTT_SAMPLES, of an even number the upper."""
    health.rtt_samples.append(rtt_s)
    del health.rtt_samples[:-MAX_RTT_SAMPLES]
    health.rtt_s = sorted(health.rtt_samples)[len(health.rtt_samples) // 2]
