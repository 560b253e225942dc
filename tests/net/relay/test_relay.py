"""Links through a relay, under asyncio and uvloop: end to end, whatever the relay does."""

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest, Busy, LinkClosed, ProtocolError, ShardUnavailable
from manyhands.net.admission import Tokens
from manyhands.net.certificate import client_context
from manyhands.net.relay.relay import (
    ALIVE,
    ANSWER,
    BUFFER_BYTES,
    CALL,
    CALL_ID_BYTES,
    LISTEN,
    RELAY_ALPN,
    Relay,
    RelayLeg,
    RelayLimits,
    Switchboard,
    parse_request,
)
from manyhands.net.relay.tunnel import MAX_ANSWERING, MAX_MAILBOXES, RETRY_S, Tunnels, relayed
from manyhands.net.tls import TlsPolicy, TlsTransport
from manyhands.net.transport import Link
from manyhands.wire.message import Close, Lane, Payload, Step
from tests.net.conftest import Run
from tests.net.links import SESSION, A, B, pass_all_before_closing, pass_sizes, receive, says, step
from tests.waiting import until

SECRET, OTHER_SECRET = bytes(32), b"\1" * 32
LOOPBACK = NodeAddr("127.0.0.1", 0)
C = NodeId("cc" * 32)


class Member(NamedTuple):
    tls: TlsTransport
    tunnels: Tunnels

    @property
    def node(self) -> NodeId:
        return self.tls.node


@asynccontextmanager
async def member(secret: bytes = SECRET, policy: TlsPolicy | None = None) -> AsyncIterator[Member]:
    key = Ed25519PrivateKey.generate()
    tls = TlsTransport(key, secret, says("member"), policy)
    tunnels = Tunnels(key, secret, tls)
    yield Member(tls, tunnels)
    await tunnels.aclose()
    await tls.aclose()


@asynccontextmanager
async def relay_at(
    limits: RelayLimits | None = None, policy: TlsPolicy | None = None, relay: Relay | None = None
) -> AsyncIterator[tuple[Relay, NodeAddr]]:
    relay = relay or Relay(secrets.token_bytes, limits)
    tls = TlsTransport(Ed25519PrivateKey.generate(), SECRET, says("relay"), policy, {RELAY_ALPN: relay.leg})
    addr = await tls.listen(LOOPBACK)
    yield relay, NodeAddr(addr.host, addr.port)
    await tls.aclose()


class Scene(NamedTuple):
    """`a` can call `b` at `addr`, through `relay`, which listens `at`."""

    relay: Relay
    at: NodeAddr
    a: Member
    b: Member
    addr: NodeAddr


@asynccontextmanager
async def scene(relay: Relay | None = None, limits: RelayLimits | None = None) -> AsyncIterator[Scene]:
    async with relay_at(limits, relay=relay) as (relay, at), member() as a, member() as b:
        yield Scene(relay, at, a, b, await b.tunnels.listen(relayed(at)))


@asynccontextmanager
async def linked(s: Scene, lane: Lane) -> AsyncIterator[tuple[Link, Link]]:
    near = await s.a.tunnels.dial(s.addr, lane)
    far = await s.b.tls.accept()
    yield near, far
    await asyncio.gather(near.aclose(), far.aclose())


def test_members_meet_through_the_relay_and_know_each_other(run: Run) -> None:
    async def body() -> None:
        async with scene() as s, linked(s, "control") as (near, far):
            assert s.addr == NodeAddr(f"relay%{s.at.host}", s.at.port, s.b.node)
            assert (near.peer, far.peer) == (s.b.node, s.a.node)
            assert near.health.path_kind == far.health.path_kind == "relay"
            assert 0 < await near.ping() < 5 and 0 < await far.ping() < 5
            near.send(Close(SESSION))
            assert await receive(far) == Close(SESSION)

    run(body())


def test_an_address_through_a_relay_is_text_like_any_other() -> None:
    for relay in (NodeAddr("203.0.113.1", 4040), NodeAddr("relay.example.org", 1), NodeAddr("2001:db8::1", 2)):
        assert NodeAddr.parse(str(relayed(relay, A)), A) == relayed(relay, A)


def test_steps_of_any_size_pass_both_ways(run: Run) -> None:
    async def body() -> None:
        async with scene() as s, linked(s, "data") as (near, far):
            await pass_sizes(near, far)

    run(body())


def test_what_was_sent_before_closing_arrives_and_the_relay_forgets(run: Run) -> None:
    async def body() -> None:
        async with scene() as s:
            async with linked(s, "data") as (near, far):
                await pass_all_before_closing(near, far)
            await until(lambda: "tunnels=0" in repr(s.relay))

    run(body())


def test_the_relay_sees_no_plaintext(run: Run) -> None:
    async def body() -> None:
        seen = bytearray()

        class Curious(RelayLeg):
            def forward(self, data: bytes) -> None:
                seen.extend(data)
                super().forward(data)

        async with scene(relay_of_legs(Curious)) as s, linked(s, "data") as (near, far):
            secret = b"activations" * 100
            near.send(step(1)._replace(payload=Payload("int32", len(secret) // 4, secret)))
            message = await receive(far)
            assert isinstance(message, Step) and message.payload is not None and bytes(message.payload.data) == secret
            assert len(seen) > len(secret) and b"activations" not in seen

    run(body())


def relay_of_legs(make: Callable[[Relay, NodeId], RelayLeg]) -> Relay:
    class Custom(Relay):
        def leg(self, node: NodeId) -> RelayLeg:
            return make(self, node)

    return Custom(secrets.token_bytes)


def mangling(mangle: Callable[[bytes], bytes]) -> Relay:
    """A relay that changes what it forwards once `is_evil` is set on it."""

    class Evil(RelayLeg):
        def forward(self, data: bytes) -> None:
            super().forward(mangle(data) if getattr(self._relay, "is_evil", False) else data)

    return relay_of_legs(Evil)


def swap_halves(data: bytes) -> bytes:
    return data[len(data) // 2 :] + data[: len(data) // 2]


@pytest.mark.parametrize(
    "mangle",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[1:],
        lambda data: data + data,
        swap_halves,
        lambda data: b"",
        lambda data: bytes(len(data)),
    ],
    ids=["corrupts", "drops a byte", "repeats", "reorders", "drops all, then resumes", "sends zeros"],
)
def test_a_relay_that_changes_the_stream_loses_the_link_and_nothing_wrong_is_delivered(
    run: Run, mangle: Callable[[bytes], bytes]
) -> None:
    async def body() -> None:
        relay: Any = mangling(mangle)
        async with scene(relay) as s, linked(s, "data") as (near, far):
            near.send(step(1, num_bytes=4000))
            assert isinstance(await receive(far), Step)
            before = far.health.bytes_received
            relay.is_evil = True
            sent = relay.num_forwarded
            near.send(step(2, num_bytes=4000))
            await until(lambda: far.is_closed or relay.num_forwarded > sent or mangle(b"xy") == b"")
            await asyncio.sleep(0.05)
            relay.is_evil = False
            for position in range(3, 20):
                if not near.is_closed:
                    near.send(step(position, num_bytes=4000))
            with pytest.raises(LinkClosed):
                await receive(far)
            assert far.health.bytes_received == before

    run(body())


def test_a_relay_that_answers_in_the_callees_name_is_found_out(run: Run) -> None:
    """It connects the caller with another member: TLS proves the wrong key."""

    async def body() -> None:
        async with relay_at() as (relay, at), member() as a, member() as b:
            await b.tunnels.listen(relayed(at))
            relay.board._mailboxes[A] = relay.board._mailboxes[b.node]
            real = relay.board.answer
            relay.board.answer = lambda call_id, node, leg: real(call_id, A, leg)  # type: ignore[method-assign]
            with pytest.raises(LinkClosed, match=f"it is node {b.node[:16]}, expected {A[:16]}"):
                await a.tunnels.dial(relayed(at, A), "data")

    run(body())


def test_a_node_without_the_secret_gets_no_byte_of_the_relay(run: Run) -> None:
    async def body() -> None:
        async with scene() as s, member(OTHER_SECRET) as outsider:
            with pytest.raises(LinkClosed, match="is not a member of this swarm"):
                await outsider.tunnels.dial(s.addr, "data")
            with pytest.raises(BadRequest, match=rf"the relay at {s.at} is not a member .*; name a member"):
                await outsider.tunnels.listen(relayed(s.at))
            assert s.relay.num_forwarded == 0

    run(body())


def test_a_denied_member_gets_no_service(run: Run) -> None:
    async def body() -> None:
        async with member() as a, relay_at(policy=TlsPolicy(deny=frozenset({a.node}))) as (_, at):
            with pytest.raises(BadRequest, match="no relay at"):
                await a.tunnels.listen(relayed(at))

    run(body())


def test_a_member_that_is_no_relay_is_named(run: Run) -> None:
    async def body() -> None:
        async with member() as a, member() as b:
            addr = await b.tls.listen(LOOPBACK)
            with pytest.raises(BadRequest, match="is a member but no relay"):
                await a.tunnels.listen(relayed(addr))

    run(body())


def test_no_route_to_the_relay(run: Run) -> None:
    async def body() -> None:
        async with member() as a:
            # Told once, with the system's word for it: Python's own text has the address in place of the reason.
            said = r"^the relay at 127\.0\.0\.1:1 cannot be reached: Connection refused; name a member that others can dial$"
            with pytest.raises(BadRequest, match=said):
                await a.tunnels.listen(relayed(NodeAddr("127.0.0.1", 1)))
            with pytest.raises(LinkClosed, match="must be told which node"):
                await a.tunnels.dial(relayed(NodeAddr("127.0.0.1", 1)), "data")

    run(body())


def test_a_node_that_is_not_waiting_cannot_be_called(run: Run) -> None:
    async def body() -> None:
        async with scene() as s:
            with pytest.raises(LinkClosed, match="does not know it"):
                await s.a.tunnels.dial(relayed(s.at, C), "data")

    run(body())


def test_a_mailbox_comes_back_after_the_relay_was_away(run: Run) -> None:
    async def body() -> None:
        async with scene() as s:
            mailbox = s.relay.board._mailboxes[s.b.node]
            mailbox.abort()
            await until(lambda: s.b.tunnels._away == {s.at})
            with pytest.raises(BadRequest, match=f"{s.at} is away"):
                await s.b.tunnels.listen(relayed(s.at))
            await until(lambda: s.relay.board._mailboxes.get(s.b.node) not in (None, mailbox))
            async with linked(s, "data") as (near, far):
                near.send(step(1))
                assert isinstance(await receive(far), Step)
            assert await s.b.tunnels.listen(relayed(s.at)) == s.addr

    run(body())


def test_a_node_that_replaces_its_relay_again_and_again_waits_at_few(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that went away are asked no more; of those that stay, the one looked at longest ago is left, and says so there."""
    monkeypatch.setattr("manyhands.net.relay.tunnel.MAX_RETRY_S", RETRY_S)

    async def body() -> None:
        async with AsyncExitStack() as stack:
            b, asked = await stack.enter_async_context(member()), list[NodeAddr]()
            ask = b.tunnels._ask

            async def noted(relay: NodeAddr, request: bytes) -> Any:
                asked.append(relay)
                return await ask(relay, request)

            monkeypatch.setattr(b.tunnels, "_ask", noted)
            gone = list[NodeAddr]()
            for _ in range(MAX_MAILBOXES + 3):
                async with relay_at() as (relay, at):
                    gone.append(at)
                    await b.tunnels.listen(relayed(at))
                relay.board._mailboxes[b.node].abort()
                await until(lambda at=at: at in b.tunnels._away)  # type: ignore[misc]
            kept = gone[-MAX_MAILBOXES:]
            assert list(b.tunnels._mailboxes) == kept and b.tunnels._away == set(kept)
            asked.clear()
            await until(lambda: set(kept) <= set(asked))
            assert set(asked) == set(kept)
            here = [await stack.enter_async_context(relay_at()) for _ in range(MAX_MAILBOXES + 1)]
            for _, at in here[:-1]:
                await b.tunnels.listen(relayed(at))
            assert list(b.tunnels._mailboxes) == [at for _, at in here[:-1]] and not b.tunnels._away
            await b.tunnels.listen(relayed(here[0][1]))
            await b.tunnels.listen(relayed(here[-1][1]))
            assert b.tunnels.relays == tuple(at for _, at in (*here[2:-1], here[0], here[-1]))
            await until(lambda: b.node not in here[1][0].board._mailboxes)
            assert all(b.node in relay.board._mailboxes for relay, at in here if at != here[1][1])

    run(body())


def test_half_open_a_call_without_an_answer_ends_at_the_deadline(run: Run) -> None:
    async def body() -> None:
        async with scene() as s:
            deaf = await s.b.tunnels._ask(s.at, LISTEN)  # replaces b's mailbox and never answers
            s.relay.limits = RelayLimits(answer_s=0.1)
            with pytest.raises(LinkClosed, match="closed the connection"):
                await s.a.tunnels.dial(s.addr, "data")
            deaf.transport.abort()
            await until(lambda: "tunnels=0" in repr(s.relay))

    run(body())


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n", b"", b"C123", LISTEN + b"junk", ANSWER + bytes(CALL_ID_BYTES), bytes(100_000)],
    ids=["http", "silence", "truncated", "too much", "no such call", "zeros"],
)
def test_garbage_after_the_handshake_costs_its_sender(run: Run, garbage: bytes) -> None:
    async def body() -> None:
        async with scene() as s, linked(s, "data") as (near, far):
            s.relay.limits = RelayLimits(answer_s=0.2)  # from now on: what was opened had all the time it needed
            context = client_context(Ed25519PrivateKey.generate(), SECRET)
            context.set_alpn_protocols([RELAY_ALPN])
            reader, writer = await asyncio.open_connection(
                s.at.host, s.at.port, ssl=context, server_hostname=Tokens(SECRET, os.urandom).make()
            )
            writer.write(garbage)
            received = await asyncio.gather(reader.read(), return_exceptions=True)
            assert received[0] in (b"", b"+", b"?") or isinstance(received[0], OSError)
            writer.transport.abort()
            near.send(step(1))
            assert isinstance(await receive(far), Step)

    run(body())


def test_a_relay_that_talks_nonsense_loses_the_mailbox_only(run: Run) -> None:
    async def body() -> None:
        async with scene() as s:
            mailbox = s.relay.board._mailboxes[s.b.node]
            mailbox.write(b"nonsense")
            await until(lambda: s.relay.board._mailboxes.get(s.b.node) not in (None, mailbox))
            async with linked(s, "control") as (near, _):
                await near.ping()

    run(body())


async def at_rest(relay: Relay) -> None:
    """Wait until `relay` has forwarded nothing for 50 looks: by the clock alone, a busy machine may only be slow."""
    num_still, before = 0, relay.num_forwarded
    while num_still < 50:
        await asyncio.sleep(0.01)
        num_still, before = num_still + 1 if relay.num_forwarded == before else 0, relay.num_forwarded


def test_a_flood_through_one_tunnel_is_bounded_and_starves_no_other(run: Run) -> None:
    """The flooder's reader takes nothing: the relay must stop reading from it, and others must get through."""

    async def body() -> None:
        async with AsyncExitStack() as stack:
            s = await stack.enter_async_context(scene())
            flood, clogged = await stack.enter_async_context(linked(s, "data"))
            near, far = await stack.enter_async_context(linked(s, "control"))
            num_sent, is_clogged = 0, False
            while not is_clogged:
                flood.send(step(1, num_bytes=1 << 20))
                num_sent += 1
                draining = asyncio.create_task(flood.drain())
                await asyncio.wait([draining], timeout=0.1)
                if not draining.done():
                    await at_rest(s.relay)
                is_clogged = draining.cancel()
            assert num_sent < 200  # 16 MiB of inbox, then sockets and TLS buffers
            before = s.relay.num_forwarded
            for _ in range(20):
                await near.ping()
                await far.ping()
            assert s.relay.num_forwarded - before < 1 << 20
            flood.abort("enough")
            clogged.abort("enough")

    run(body())


def test_limits_hold_per_node_and_are_freed(run: Run) -> None:
    async def body() -> None:
        async with scene(limits=RelayLimits(per_caller=2)) as s, member() as other:
            async with linked(s, "control"), linked(s, "data"):
                with pytest.raises(LinkClosed, match="has reached its limit"):
                    await s.a.tunnels.dial(s.addr, "data")
                near = await other.tunnels.dial(s.addr, "data")
                await near.aclose()
            await until(lambda: "tunnels=0" in repr(s.relay))
            async with linked(s, "control"):
                pass

    run(body())


def test_connections_without_a_request_are_limited_per_node(run: Run) -> None:
    async def body() -> None:
        async with scene(limits=RelayLimits(per_node=3)) as s:
            lines = [await s.a.tunnels._open(s.at) for _ in range(4)]
            await until(lambda: lines[3].is_lost)
            with pytest.raises(LinkClosed, match="closed the connection"):
                await s.a.tunnels.dial(s.addr, "data")
            for line in lines:
                line.transport.abort()
            await until(lambda: s.relay.num_connections[s.a.node] == 0)
            async with linked(s, "data"):
                pass

    run(body())


def test_a_cancelled_dial_leaves_nothing(run: Run) -> None:
    async def body() -> None:
        async with scene() as s:
            deaf = await s.b.tunnels._ask(s.at, LISTEN)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await s.a.tunnels.dial(s.addr, "data")
            await until(lambda: "tunnels=0" in repr(s.relay))
            deaf.transport.abort()

    run(body())


# -- decisions --------------------------------------------------------------------------------------------------------


def board(**limits: int) -> Switchboard[str]:
    return Switchboard(RelayLimits(**limits))


def test_switchboard_rings_and_connects() -> None:
    b = board()
    assert b.listen(B, "box") is None
    assert b.call(b"1", A, B, "near") == "box" and b.partner("near") is None
    assert b.answer(b"1", B, "far") == "near"
    assert (b.partner("near"), b.partner("far")) == ("far", "near")
    assert b.leave("far") == "near" and b.leave("near") is None
    assert b.leave("box") is None
    with pytest.raises(ShardUnavailable, match="not waiting"):
        b.call(b"2", A, B, "near")


def test_switchboard_only_the_called_node_answers_and_only_once() -> None:
    b = board()
    b.listen(B, "box")
    b.call(b"1", A, B, "near")
    for node, call_id in ((C, b"1"), (B, b"2")):
        with pytest.raises(ShardUnavailable, match="was not made"):
            b.answer(call_id, node, "thief")
    b.answer(b"1", B, "far")
    with pytest.raises(ShardUnavailable):
        b.answer(b"1", B, "twice")


@pytest.mark.parametrize("limit", ["num_tunnels", "per_pair", "per_caller", "per_callee"])
def test_switchboard_limits(limit: str) -> None:
    b = board(**{limit: 1})
    b.listen(B, "box")
    b.call(b"1", A, B, "near")
    with pytest.raises(Busy, match="limit"):
        b.call(b"2", A, B, "other")
    b.leave("near")
    b.call(b"2", A, B, "other")


def test_one_caller_does_not_use_up_what_a_node_answers() -> None:
    """32 calls of one member, left in the handshake and made again, took all that a node answers: no other reached it."""
    b, limits = board(), RelayLimits()
    b.listen(B, "box")
    for number in range(limits.per_pair):
        b.call(b"%d" % number, A, B, f"{number}")
    with pytest.raises(Busy, match="limit"):
        b.call(b"more", A, B, "more")
    assert b.call(b"other", C, B, "other") == "box" and 5 * limits.per_pair < MAX_ANSWERING


def test_switchboard_mailboxes_are_limited_and_the_newest_counts() -> None:
    b = board(num_mailboxes=1)
    b.listen(B, "old")
    assert b.listen(B, "new") == "old"
    b.leave("old")
    assert b.call(b"1", A, B, "near") == "new"
    with pytest.raises(Busy, match="use another relay"):
        b.listen(C, "box")


@given(st.lists(st.tuples(st.sampled_from("lcax"), st.sampled_from([A, B, C]), st.integers(0, 5))))
def test_switchboard_stays_consistent(moves: list[tuple[str, NodeId, int]]) -> None:
    """Whatever happens in whatever order: partners are mutual, and when all have left nothing remains."""
    b = board(per_caller=3, num_tunnels=4)
    legs = set()
    for index, (move, node, number) in enumerate(moves):
        leg = f"{index}"
        try:
            if move == "l":
                b.listen(node, leg)
            elif move == "c":
                b.call(leg.encode(), A, node, leg)
            elif move == "a":
                b.answer(str(number).encode(), node, leg)
            else:
                leg = str(number)
                b.leave(leg)
                legs.discard(leg)
                continue
            legs.add(leg)
        except (Busy, ShardUnavailable):
            continue
        for some in legs:
            partner = b.partner(some)
            assert partner is None or b.partner(partner) == some
    for leg in legs:
        b.leave(leg)
    assert not b._tunnels and not b._calls and not b._mailboxes and not +b._load


@given(st.binary(max_size=40))
def test_requests_are_read_byte_by_byte_or_refused(data: bytes) -> None:
    try:
        request = parse_request(data)
    except ProtocolError:
        assert data[:1] not in (LISTEN, CALL, ANSWER) or len(data) > 1
    else:
        assert request is None or request.kind + request.argument == data


@pytest.mark.parametrize("whole", [LISTEN, CALL + bytes(32), ANSWER + bytes(CALL_ID_BYTES)])
def test_requests_complete_at_their_last_byte(whole: bytes) -> None:
    assert [parse_request(whole[:end]) for end in range(len(whole))] == [None] * len(whole)
    request = parse_request(whole)
    assert request is not None and request.kind == whole[:1]


class Unread(asyncio.Transport):
    """A connection whose far end reads nothing."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__({"socket": connection})
        self.num_waiting, self.high, self.is_aborted = 0, 0, False
        self.leg: RelayLeg | None = None

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high or 0

    def is_closing(self) -> bool:
        return self.is_aborted

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.num_waiting += len(data)
        if self.leg is not None and self.num_waiting > self.high:
            self.leg.pause_writing()

    def abort(self) -> None:
        if self.leg is not None and not self.is_aborted:
            asyncio.get_running_loop().call_soon(self.leg.connection_lost, None)
        self.is_aborted = True


def test_a_mailbox_that_reads_no_answer_to_its_signs_of_life_is_closed() -> None:
    """Each is answered by a byte, of which a member that never reads could have as many wait as it likes."""

    async def main() -> Unread:
        with socket.socket() as connection:
            unread = Unread(connection)
            unread.leg = leg = Relay(secrets.token_bytes).leg(A)
            leg.connection_made(unread)
            leg.data_received(LISTEN)
            for _ in range(2 * BUFFER_BYTES):
                if unread.is_aborted:
                    break
                leg.data_received(ALIVE)
            await asyncio.sleep(0)
        return unread

    unread = asyncio.run(main())
    assert unread.is_aborted and unread.num_waiting <= BUFFER_BYTES + 1


def test_connections_without_a_request_are_bounded_over_all_nodes() -> None:
    """A member may have any number of keys, and each connection holds TLS's memory for as long as a request may take."""

    async def main() -> tuple[int, int]:
        relay = Relay(secrets.token_bytes)
        with socket.socket() as connection:

            def call(node: NodeId) -> Unread:
                unread = Unread(connection)
                unread.leg = relay.leg(node)
                unread.leg.connection_made(unread)
                return unread

            false = [call(NodeId(f"{number // 150:064x}")) for number in range(1500)]
            honest = call(A)
            assert honest.leg is not None
            honest.leg.data_received(LISTEN)
            await asyncio.sleep(0)
            false += [call(NodeId(f"{number // 150:064x}")) for number in range(1500)]
            found = sum(not unread.is_aborted for unread in false), honest.is_aborted
            for unread in (*false, honest):
                unread.abort()
            await asyncio.sleep(0)
            assert len(relay.requests) == 0 and not relay.num_connections
        return found

    assert asyncio.run(main()) == (RelayLimits().num_requests, False)
