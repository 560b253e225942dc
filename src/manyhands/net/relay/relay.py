"""A relay: a member that others can dial, forwarding bytes between members that cannot dial each other.

    callee ─ LISTEN ─► relay                        its mailbox: open as long as it wants to be found
    caller ─ CALL callee ─► relay ─ RING id ─► callee's mailbox
                            relay ◄─ ANSWER id ─ callee (a new connection)
    caller ◄─ OK ─ relay, and from then on caller ◄══ bytes ══► callee

Every arrow is a connection of its own, over TLS with the relay (so it serves members only) and asked for by ALPN on the
port where the relay listens for links. Inside the bytes caller and callee run the TLS of tls.py with each other: the
relay sees which nodes talk, when and how much, and can delay or cut, but reads nothing and changes nothing unnoticed.

A tunnel holds at most BUFFER_BYTES and one read (256 KiB) each way: a slow reader stops its writer, and the event loop
serves all tunnels in turn. Who may have how many is decided by Switchboard, which is pure.
"""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, cast

from manyhands.core import NodeId
from manyhands.errors import Busy, ProtocolError, ShardUnavailable
from manyhands.net.admission import Pending, PendingLimits

logger = logging.getLogger(__name__)

RELAY_ALPN = "manyhands-relay/1"
LISTEN, CALL, ANSWER = b"L", b"C", b"A"  # requests; CALL is followed by a NodeId, ANSWER by a call id
OK, NOT_HERE, FULL = b"+", b"?", b"!"  # answers to LISTEN and CALL; the last two end the connection
RING, ALIVE = b"R", b"."  # on a mailbox: RING and a call id; ALIVE, which is answered by ALIVE
CALL_ID_BYTES = 16
_REQUEST_BYTES = {LISTEN[0]: 1, CALL[0]: 33, ANSWER[0]: 1 + CALL_ID_BYTES}

ALIVE_S = 15.0  # keeps a NAT's entry: RFC 5382 asks for minutes, home routers were seen to forget TCP after one
SILENCE_S = 3 * ALIVE_S
BUFFER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What a relay does for others. A pair of nodes needs a tunnel for each lane.

    `per_pair` counts the tunnels from one node to another, so that one that calls in vain leaves others a way to it;
    `per_caller` and `per_callee` a node's tunnels, open or ringing; `per_node` its connections to this relay. An ANSWER must
    come within `answer_s`; so must the request after a connection has been made, for which `num_requests` wait at a time, half
    of them of one node: beyond, the oldest of the node with the most goes.
    """

    num_tunnels: int = 512
    per_pair: int = 12
    per_caller: int = 32
    per_callee: int = 128
    per_node: int = 192
    num_mailboxes: int = 256
    num_requests: int = 256
    answer_s: float = 5.0


Leg = TypeVar("Leg", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Tunnel(Generic[Leg]):
    caller: NodeId
    callee: NodeId
    near: Leg  # the caller's
    far: Leg | None  # the callee's, None while it rings


class Switchboard(Generic[Leg]):
    """Which nodes wait for calls, call, and are connected. Pure; a Leg stands for one connection to the relay."""

    def __init__(self, limits: RelayLimits) -> None:
        self._limits = limits
        self._mailboxes: dict[NodeId, Leg] = {}
        self._tunnels: dict[bytes, _Tunnel[Leg]] = {}
        self._calls: dict[Leg, bytes] = {}  # the tunnel of a leg
        self._load: Counter[tuple[str, str]] = Counter()

    def __repr__(self) -> str:
        return f"<Switchboard mailboxes={len(self._mailboxes)} tunnels={len(self._tunnels)}>"

    def listen(self, node: NodeId, leg: Leg) -> Leg | None:
        """Make `leg` the mailbox of `node`; return the one it replaces, which is to be closed. Raises Busy."""
        if node not in self._mailboxes and len(self._mailboxes) >= self._limits.num_mailboxes:
            raise Busy(f"this relay serves {len(self._mailboxes)} nodes, its limit: use another relay")
        old, self._mailboxes[node] = self._mailboxes.get(node), leg
        return old

    def call(self, call_id: bytes, caller: NodeId, callee: NodeId, leg: Leg) -> Leg:
        """Note a call under a fresh id; return the mailbox to ring. Raises ShardUnavailable, or Busy at a limit."""
        mailbox = self._mailboxes.get(callee)
        if mailbox is None:
            raise ShardUnavailable(f"node {callee[:16]} is not waiting at this relay")
        full = len(self._tunnels) >= self._limits.num_tunnels
        full = full or self._load["pair", caller + callee] >= self._limits.per_pair
        full = full or self._load["caller", caller] >= self._limits.per_caller
        if full or self._load["callee", callee] >= self._limits.per_callee:
            raise Busy(f"no tunnel from {caller[:16]} to {callee[:16]}: the relay or one of them has reached its limit")
        self._tunnels[call_id] = _Tunnel(caller, callee, leg, None)
        self._calls[leg] = call_id
        self._load["caller", caller] += 1
        self._load["callee", callee] += 1
        self._load["pair", caller + callee] += 1
        return mailbox

    def answer(self, call_id: bytes, node: NodeId, leg: Leg) -> Leg:
        """Connect `leg` with the caller's; return that one. Raises ShardUnavailable unless `node` was called so."""
        tunnel = self._tunnels.get(call_id)
        if tunnel is None or tunnel.callee != node or tunnel.far is not None:
            raise ShardUnavailable(f"node {node[:16]} answers a call that was not made")
        self._tunnels[call_id] = _Tunnel(tunnel.caller, tunnel.callee, tunnel.near, leg)
        self._calls[leg] = call_id
        return tunnel.near

    def partner(self, leg: Leg) -> Leg | None:
        """The other end of an open tunnel."""
        tunnel = self._tunnels.get(self._calls.get(leg, b""))
        if tunnel is None or tunnel.far is None:
            return None
        return tunnel.far if leg == tunnel.near else tunnel.near

    def leave(self, leg: Leg) -> Leg | None:
        """Forget a leg that is gone; return its partner, which is to be closed. Harmless when repeated."""
        self._mailboxes = {node: other for node, other in self._mailboxes.items() if other != leg}
        partner = self.partner(leg)
        tunnel = self._tunnels.pop(self._calls.get(leg, b""), None)
        if tunnel is not None:
            self._load -= Counter(
                [("caller", tunnel.caller), ("callee", tunnel.callee), ("pair", tunnel.caller + tunnel.callee)]
            )
            for end in (tunnel.near, tunnel.far):
                if end is not None:
                    self._calls.pop(end, None)
        return partner


class Relay:
    """The relay of one node: give `leg` to its TlsTransport as the guest for RELAY_ALPN. `draw` makes random bytes."""

    def __init__(self, draw: Callable[[int], bytes], limits: RelayLimits | None = None) -> None:
        self.limits = limits or RelayLimits()
        self.board: Switchboard[RelayLeg] = Switchboard(self.limits)
        self.draw = draw
        count = self.limits.num_requests
        self.requests: Pending[RelayLeg] = Pending(PendingLimits(count, count // 2, self.limits.answer_s))
        self.num_forwarded = 0  # bytes
        self.num_connections: Counter[NodeId] = Counter()

    def __repr__(self) -> str:
        return f"<Relay {self.board} forwarded={self.num_forwarded}>"

    def leg(self, node: NodeId) -> "RelayLeg":
        return RelayLeg(self, node)


class RelayLeg(asyncio.Protocol):
    """One connection of member `node` to the relay: first a request, then a mailbox or one end of a tunnel."""

    def __init__(self, relay: Relay, node: NodeId) -> None:
        self._relay = relay
        self._node = node
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._request = bytearray()
        self._state: Literal["request", "mailbox", "calling", "tunnel"] = "request"
        self._partner: RelayLeg | None = None

    def __repr__(self) -> str:
        return f"<RelayLeg {self._node[:8]} {self._state}>"

    # -- what asyncio sees --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)
        keep_alive(transport.get_extra_info("socket"))
        self._relay.num_connections[self._node] += 1
        if self._relay.num_connections[self._node] > self._relay.limits.per_node:
            logger.warning("peer=%s has more than %d connections", self._node[:8], self._relay.limits.per_node)
            self.abort()
            return
        self._expire_in(self._relay.limits.answer_s)
        oldest = self._relay.requests.enter(self, self._node, asyncio.get_running_loop().time())
        if oldest is not None:
            oldest.abort()

    def data_received(self, data: bytes) -> None:
        if self._partner is not None:
            self._partner.forward(data)
        elif self._state == "request":
            self._read_request(data)
        elif self._state == "mailbox" and not data.strip(ALIVE):
            self._expire_in(SILENCE_S)
            self.write(ALIVE)
        else:
            self.abort()  # a mailbox says nothing else, and a caller waits for OK

    def pause_writing(self) -> None:
        if self._partner is None:
            self.abort()  # a mailbox that asks for signs of life and does not read them
        elif self._partner._transport is not None:
            self._partner._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._partner is not None and self._partner._transport is not None:
            self._partner._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expire_in(None)
        self._relay.requests.leave(self)
        self._relay.num_connections -= Counter([self._node])
        partner = self._relay.board.leave(self)
        if partner is not None:
            partner.close()

    # -- what other legs see ------------------------------------------------------------------------------------------

    def forward(self, data: bytes) -> None:
        """Send bytes of the tunnel. Bounded: a full buffer has paused the partner's reading."""
        self._relay.num_forwarded += len(data)
        self.write(data)

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def join(self, partner: "RelayLeg") -> None:
        """Forward to `partner` from now on."""
        self._expire_in(None)
        self._state, self._partner = "tunnel", partner

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _expire_in(self, seconds: float | None) -> None:
        """Abort this leg after so long; None: never."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self.abort) if seconds is not None else None

    def _read_request(self, data: bytes) -> None:
        self._request += data
        try:
            request = parse_request(self._request)
        except ProtocolError as error:
            logger.warning("peer=%s broke the relay's protocol: %s", self._node[:8], error)
            self.abort()
            return
        if request is not None:
            self._relay.requests.leave(self)
            self._obey(request)

    def _obey(self, request: "RelayRequest") -> None:
        try:
            match request.kind:
                case b"L":
                    self._listen()
                case b"C":
                    self._call(NodeId(request.argument.hex()))
                case _:
                    self._answer(request.argument)
        except Busy as error:
            self._refuse(FULL, error)
        except ShardUnavailable as error:
            self._refuse(NOT_HERE, error)

    def _listen(self) -> None:
        old = self._relay.board.listen(self._node, self)
        if old is not None and old is not self:
            old.close()
        self._state = "mailbox"
        self._expire_in(SILENCE_S)
        self.write(OK)

    def _call(self, callee: NodeId) -> None:
        self._state = "calling"
        call_id = self._relay.draw(CALL_ID_BYTES)
        self._relay.board.call(call_id, self._node, callee, self).write(RING + call_id)
        self._expire_in(self._relay.limits.answer_s)

    def _answer(self, call_id: bytes) -> None:
        caller = self._relay.board.answer(call_id, self._node, self)
        self.join(caller)
        caller.join(self)
        caller.write(OK)

    def _refuse(self, code: bytes, error: Exception) -> None:
        logger.info("peer=%s refused: %s", self._node[:8], error)
        self.write(code)
        self.close()


@dataclass(frozen=True, slots=True)
class RelayRequest:
    kind: bytes  # LISTEN, CALL or ANSWER
    argument: bytes


def parse_request(data: bytes | bytearray) -> RelayRequest | None:
    """The request that `data` is, None while it is incomplete. Raises ProtocolError for anything else, and for more."""
    if not data:
        return None
    length = _REQUEST_BYTES.get(data[0])
    if length is None or len(data) > length:
        raise ProtocolError(f"a relay's request is one of L, C, A with its argument, not {bytes(data[:40])!r}")
    return RelayRequest(bytes(data[:1]), bytes(data[1:])) if len(data) == length else None


def keep_alive(connection: socket.socket) -> None:
    """Send small writes at once, and notice within a minute that a silent peer is gone (Linux and macOS; else hours)."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        with suppress(OSError):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
