"""TLS on loopback, under asyncio and uvloop: members meet, nodes without the secret get nothing."""

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import LinkClosed, NoAddress
from manyhands.net.admission import Tokens
from manyhands.net.certificate import client_context, server_context
from manyhands.net.link import CLOSE_S
from manyhands.net.tls import TlsPolicy, TlsTransport
from manyhands.net.transport import Transport
from manyhands.wire.message import Close, Step
from tests.net.conftest import Run
from tests.net.links import SESSION, linked, pass_all_before_closing, pass_sizes, receive, says, step

SECRET, OTHER_SECRET = bytes(32), b"\1" * 32
LOOPBACK = NodeAddr("127.0.0.1", 0)


@asynccontextmanager
async def node(secret: bytes = SECRET, policy: TlsPolicy | None = None) -> AsyncIterator[TlsTransport]:
    transport = TlsTransport(Ed25519PrivateKey.generate(), secret, says("node"), policy)
    yield transport
    await transport.aclose()


async def read_raw(addr: NodeAddr, context: ssl.SSLContext, hello: bytes = b"") -> bytes:
    """Every application byte that a caller with this TLS context, and with a valid token, gets."""
    received = b""
    name = Tokens(SECRET, os.urandom).make()
    try:
        reader, writer = await asyncio.open_connection(addr.host, addr.port, ssl=context, server_hostname=name)
    except OSError:
        return received
    try:
        writer.write(hello)
        while data := await reader.read(4096):
            received += data
    except OSError:
        pass
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)
    return received


def unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_members_meet_and_know_each_other(run: Run) -> None:
    async def body() -> None:
        async with node() as a, node() as b:
            addr = await b.listen(LOOPBACK)
            assert addr.port > 0 and addr.node == b.node
            async with linked(a, b, addr, "control") as (near, far):
                assert (near.peer, far.peer) == (b.node, a.node)
                assert 0 < await near.ping() < 5 and 0 < await far.ping() < 5
                near.send(Close(SESSION))
                assert await receive(far) == Close(SESSION)

    run(body())


def test_steps_of_any_size_pass(run: Run) -> None:
    async def body() -> None:
        async with node() as a, node() as b:
            async with linked(a, b, await b.listen(LOOPBACK), "data") as (near, far):
                await pass_sizes(near, far)

    run(body())


def test_what_was_sent_before_closing_arrives(run: Run) -> None:
    async def body() -> None:
        async with node() as a, node() as b:
            async with linked(a, b, await b.listen(LOOPBACK), "data") as (near, far):
                await pass_all_before_closing(near, far)

    run(body())


def test_what_was_sent_before_closing_arrives_though_the_loop_is_held_up_meanwhile(run: Run) -> None:
    """For longer than a peer that does not read is waited for."""

    async def body() -> None:
        async with node() as a, node() as b:
            async with linked(a, b, await b.listen(LOOPBACK), "data") as (near, far):
                asyncio.get_running_loop().call_later(0.0, time.sleep, 1.5 * CLOSE_S)
                await pass_all_before_closing(near, far)

    run(body())


def test_an_aborted_link_is_lost_at_the_other_end(run: Run) -> None:
    async def body() -> None:
        async with node() as a, node() as b:
            async with linked(a, b, await b.listen(LOOPBACK), "data") as (near, far):
                near.abort("crash")
                with pytest.raises(LinkClosed):
                    await receive(far)

    run(body())


def test_another_secret_is_refused_by_both_sides(run: Run) -> None:
    async def body() -> None:
        async with node() as a, node(OTHER_SECRET) as outsider:
            for transport, addr in ((outsider, await a.listen(LOOPBACK)), (a, await outsider.listen(LOOPBACK))):
                with pytest.raises(LinkClosed, match=f"{addr} is not a member of this swarm"):
                    await transport.dial(addr, "control")

    run(body())


@pytest.mark.parametrize("has_certificate", [False, True], ids=["no certificate", "other swarm"])
def test_a_node_without_the_secret_that_verifies_nothing_gets_no_byte(run: Run, has_certificate: bool) -> None:
    """The caller's own verification is off, so only the listener can refuse it."""

    async def body() -> None:
        async with node() as a:
            addr = await a.listen(LOOPBACK)
            context = client_context(Ed25519PrivateKey.generate(), OTHER_SECRET) if has_certificate else unverified()
            context.verify_mode = ssl.CERT_NONE
            assert await read_raw(addr, context, hello=b"hello") == b""

    run(body())


def test_old_tls_is_refused(run: Run) -> None:
    async def body() -> None:
        async with node() as a:
            addr = await a.listen(LOOPBACK)
            context = client_context(Ed25519PrivateKey.generate(), SECRET)
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
            assert await read_raw(addr, context) == b""

    run(body())


def test_a_member_that_sends_wrong_bytes_gets_no_byte_and_does_no_harm(run: Run) -> None:
    async def body() -> None:
        async with node() as a, node() as b:
            addr = await b.listen(LOOPBACK)
            async with linked(a, b, addr, "data") as (near, far):
                member = client_context(Ed25519PrivateKey.generate(), SECRET)
                assert await read_raw(addr, member, hello=b"GET / HTTP/1.1\r\n" + bytes(100)) == b""
                near.send(step(1))
                assert isinstance(await receive(far), Step)

    run(body())


def test_a_caller_who_says_nothing_is_dropped_at_the_deadline(run: Run) -> None:
    async def body() -> None:
        async with node(policy=TlsPolicy(handshake_s=0.05)) as a:
            addr = await a.listen(LOOPBACK)
            member = client_context(Ed25519PrivateKey.generate(), SECRET)
            assert await read_raw(addr, member) == b""
            reader, writer = await asyncio.open_connection(addr.host, addr.port)
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()

    run(body())


def test_a_node_whose_loop_runs_late_gives_callers_longer(run: Run) -> None:
    async def body() -> None:
        async with node(policy=TlsPolicy(handshake_s=0.05)) as a:
            addr = await a.listen(LOOPBACK)
            await asyncio.sleep(0.01)
            time.sleep(0.6)  # noqa: ASYNC251  # a stall of 0.35 s at least: 3.5 s more
            await asyncio.sleep(0.01)
            member = client_context(Ed25519PrivateKey.generate(), SECRET)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await read_raw(addr, member)

    run(body())


class SlowPolicy(TlsPolicy):
    """To look whether a node is admitted holds the event loop for longer than a handshake may take."""

    def admits(self, node: NodeId) -> bool:
        time.sleep(1.0)
        return super().admits(node)


def test_a_loop_that_is_held_up_in_a_handshake_drops_no_caller(run: Run) -> None:
    """How late it runs was asked when the handshake began: a caller had the time of a loop that is not."""

    async def body() -> None:
        async with node() as a, node(policy=SlowPolicy(handshake_s=0.5)) as b:
            async with linked(a, b, await b.listen(LOOPBACK), "data") as (near, far):
                near.send(step(1))
                assert isinstance(await receive(far), Step)

    run(body())


def test_wrong_node(run: Run) -> None:
    async def body() -> None:
        async with node() as a, node() as b:
            addr = await b.listen(LOOPBACK)
            with pytest.raises(LinkClosed, match=f"it is node {b.node[:16]}, expected ffff"):
                await a.dial(NodeAddr(addr.host, addr.port, NodeId("ff" * 32)), "data")

    run(body())


def test_lists_bind_both_sides(run: Run) -> None:
    async def body() -> None:
        async with node() as a, node(policy=TlsPolicy(deny=frozenset({a.node}))) as b:
            with pytest.raises(LinkClosed, match=r"closed by the peer|lost"):
                await a.dial(await b.listen(LOOPBACK), "data")
            with pytest.raises(LinkClosed, match="not admitted"):
                await b.dial(await a.listen(LOOPBACK), "data")

    run(body())


def test_allow_and_deny() -> None:
    one, two = NodeId("11" * 32), NodeId("22" * 32)
    assert TlsPolicy().admits(one)
    assert TlsPolicy(allow=frozenset({one})).admits(one) and not TlsPolicy(allow=frozenset({one})).admits(two)
    assert not TlsPolicy(allow=frozenset({one}), deny=frozenset({one})).admits(one)


def test_links_are_bounded_and_room_comes_back(run: Run) -> None:
    async def body() -> None:
        async with node() as a, node(policy=TlsPolicy(max_links=1)) as b:
            addr = await b.listen(LOOPBACK)
            async with linked(a, b, addr, "data"):
                with pytest.raises(LinkClosed):
                    await a.dial(addr, "data")
            async with linked(a, b, addr, "data") as (near, _):
                assert not near.is_closed

    run(body())


def test_handshakes_beyond_the_bound_wait_for_their_turn(run: Run) -> None:
    async def body() -> None:
        async with node() as a, node(policy=TlsPolicy(max_handshakes=1)) as b:
            addr = await b.listen(LOOPBACK)
            links = await asyncio.gather(*(a.dial(addr, "control") for _ in range(4)))
            links += [await b.accept() for _ in range(4)]
            await asyncio.gather(*(link.aclose() for link in links))

    run(body())


def test_listening_where_one_cannot(run: Run) -> None:
    async def body() -> None:
        async with node() as a, node() as b:
            addr = await a.listen(LOOPBACK)
            with pytest.raises(NoAddress, match=f"{addr} is in use: .* choose another port"):
                await b.listen(addr)
            with pytest.raises(
                NoAddress, match=r"cannot listen on 192\.0\.2\.1:0: Cannot assign requested address; choose"
            ):
                await b.listen(NodeAddr("192.0.2.1", 0))

    run(body())


def test_dialling_an_address_without_a_listener(run: Run) -> None:
    async def body() -> None:
        with socket.socket() as taken:  # and not listening, so that no other process can
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            async with node() as a:
                with pytest.raises(LinkClosed, match=f"127.0.0.1:{port} cannot be reached: Connection refused$"):
                    await a.dial(NodeAddr("127.0.0.1", port), "data")

    run(body())


@pytest.mark.parametrize("host", ["a" * 300, "a..b", "\x00", "xn--\ufffd"])
def test_a_host_that_no_resolver_takes_is_a_link_that_fails(run: Run, host: str) -> None:
    """Hosts come from peers' records and messages: a node that dials one must not fail by it."""

    async def body() -> None:
        async with node() as a:
            with pytest.raises(LinkClosed, match="cannot be"):
                await a.dial(NodeAddr(host, 1), "data")

    run(body())


def test_a_cancelled_dial_leaves_nothing(run: Run) -> None:
    """The peer accepts TCP, or even TLS, and then is silent until the caller is gone."""

    async def body() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                await reader.read()
            writer.transport.abort()

        for context in (None, server_context(Ed25519PrivateKey.generate(), SECRET)):
            server = await asyncio.start_server(silent, "127.0.0.1", 0, ssl=context)
            async with server, node() as a:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await a.dial(NodeAddr("127.0.0.1", server.sockets[0].getsockname()[1]), "data")

    run(body())


def test_closing_ends_accept_handshakes_and_unclaimed_links(run: Run) -> None:
    async def body() -> None:
        async with node() as a, node() as b:
            addr = await b.listen(LOOPBACK)
            reader, writer = await asyncio.open_connection(addr.host, addr.port)
            near = await a.dial(addr, "control")
            await b.aclose()
            with pytest.raises(LinkClosed):
                await receive(near)
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
            with pytest.raises(LinkClosed, match="stopped listening"):
                await b.accept()
            await near.aclose()

    run(body())


def test_it_is_a_transport() -> None:
    async def body() -> None:
        async with node() as a:
            transport: Transport = a
            assert len(transport.node) == 64

    asyncio.run(body())
