"""A member's way in against machines that take its call and say nothing, or half of what they should, and against names that
no resolver answers for: what it says, and that Ctrl-C ends it at once."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.checkpoint.manifest import Silent
from manyhands.cli import membership
from manyhands.cli.membership import _meet, _weights
from manyhands.cli.reporter import Reporter
from manyhands.core import NodeAddr
from manyhands.errors import BadRequest, LinkClosed, ShardUnavailable
from manyhands.member import bootstrap
from manyhands.member.bootstrap import Bootstrap
from manyhands.net.certificate import server_context
from manyhands.net.names import MAX_LOOKUPS, Lookups
from manyhands.net.pairing.dial import ask_ticket
from manyhands.net.tls import TlsTransport
from manyhands.node import Node
from manyhands.swarm.ticket import Ticket
from manyhands.weights.provider import STALL_S
from manyhands.wire.frame import encode
from manyhands.wire.message import PROTOCOL_VERSION, Hello, Token
from manyhands.wire.weights_message import WeightRequest
from tests.member.conftest import four_layers, play
from tests.member.members import Play, Town
from tests.net.conftest import Run, run
from tests.waiting import GUARD_S, until

__all__ = ["four_layers", "play", "run"]

SECRET = bytes(range(32))
NAMED = "hub.example"
HALF_RECORD = bytes.fromhex("160303007a0200")  # of TLS: a ServerHello of 122 bytes begins
HELLO = b"".join(map(bytes, encode(Hello(PROTOCOL_VERSION, "control", "hub", None, (), Token("0" * 32)))))


@asynccontextmanager
async def hub(said: bytes, *, has_tls: bool) -> AsyncIterator[NodeAddr]:
    """A machine that takes every call, says `said` and nothing more; with `has_tls` after the handshake of a member."""
    calls: list[asyncio.StreamWriter] = []

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(writer)
        writer.write(said)

    context = server_context(Ed25519PrivateKey.generate(), SECRET) if has_tls else None
    async with await asyncio.start_server(take, "127.0.0.1", 0, ssl=context) as server:
        yield NodeAddr("127.0.0.1", server.sockets[0].getsockname()[1])
        for call in calls:
            call.transport.abort()


@pytest.mark.parametrize(
    ("said", "has_tls"), [(b"", False), (HALF_RECORD, False), (b"", True), (HELLO[:9], True), (HELLO[:-3], True)]
)
def test_a_hub_that_does_not_answer_is_named_with_what_to_ask(
    said: bytes, has_tls: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "DIAL_S", 0.2)

    async def body() -> None:
        async with hub(said, has_tls=has_tls) as addr, Node(_transport, name="me", spans=tuple) as node:
            ticket = Ticket(SECRET, "town", (addr,))
            calling = Bootstrap(node, node.transport.node, ticket, (), tuple, lambda: 0.0)
            told = (
                rf"no node of swarm town answers \({addr}: no answer within 0.2 s\): is it up there, .* newest ticket"
            )
            with pytest.raises(ShardUnavailable, match=told):
                await calling.call()
            assert calling.answered() == []

    run(body())


def test_who_does_not_answer_is_said_while_it_is_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "DIAL_S", 0.5)
    monkeypatch.setattr(membership, "SILENT_S", 0.05)

    async def body() -> None:
        async with Node(_transport, name="me", spans=tuple) as node:
            async with hub(b"", has_tls=False) as addr:
                await _fails_to_meet(node, addr)
                assert capsys.readouterr().out == f"no answer yet from {addr}: waiting 0.5 s in all\n"
            await _fails_to_meet(node, addr)  # refused at once, now that nothing listens there
            await asyncio.sleep(2 * membership.SILENT_S)
            assert capsys.readouterr().out == ""

    run(body())


async def _fails_to_meet(node: Node, addr: NodeAddr) -> None:
    ticket = Ticket(SECRET, "town", (addr,))
    calling = Bootstrap(node, node.transport.node, ticket, (), tuple, lambda: 0.0)

    async def meets_no_one(is_met: Callable[[], bool], seconds: float) -> bool:
        await asyncio.sleep(2 * membership.SILENT_S)
        return is_met()

    member: Any = SimpleNamespace(
        config=SimpleNamespace(scope="lan"),
        id=node.transport.node,
        bootstrap=calling,
        meet=calling.call,
        ticket=ticket,
        records=tuple,
        wait_until=meets_no_one,
        found_on_lan=lambda addresses: None,
    )
    with pytest.raises(ShardUnavailable, match=f"{addr}"):
        await _meet(member, None, Reporter(False))


def _transport(hello: Callable[[Any], Hello]) -> TlsTransport:
    return TlsTransport(Ed25519PrivateKey.generate(), SECRET, hello)


def test_a_machine_that_shows_a_code_and_does_not_answer_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.net.pairing.dial.ASK_S", 0.2)

    async def body() -> None:
        for said in (b"", HALF_RECORD):
            async with hub(said, has_tls=False) as addr:
                with pytest.raises(LinkClosed, match=f"{addr} did not answer within 0.2 s"):
                    await ask_ticket([addr], "0" * 16, "K7W4QX")

    run(body())


def test_a_member_that_links_and_says_nothing_of_the_swarm_is_named(play: Play) -> None:
    """It was said that the swarm serves no model: run `manyhands up` there."""

    async def scene(town: Town) -> None:
        mute = Node(lambda hello: town.network.transport("ab" * 32, hello), name="mute", spans=tuple)  # type: ignore[arg-type]
        await town.stack.enter_async_context(mute)
        addr = await mute.listen(NodeAddr("127.0.0.1", 0))
        town.ticket = town.ticket.with_address(NodeAddr(addr.host, addr.port))
        member = await town.stack.enter_async_context(town.member(1))
        await _meet(member, None, Reporter(False))
        with pytest.raises(ShardUnavailable, match=rf"{addr.host}:{addr.port} took the call and says nothing of swarm"):
            await _weights(member, None, town.home, Silent())

    play(scene)


def test_a_machine_whose_key_another_one_uses_is_told_that_it_may_be_so(play: Play) -> None:
    """What members say goes to the machine that was there before. (The one that came was told to stop the member it called.)"""

    async def scene(town: Town) -> None:
        await town.open(0)
        await town.open(1)
        copy = await town.stack.enter_async_context(town.member(1))
        await _meet(copy, None, Reporter(False))
        with pytest.raises(ShardUnavailable, match=r"a copy of this one's key, start this one with --key FILE"):
            await _weights(copy, None, town.home, Silent())

    play(scene)


def test_a_machine_that_calls_no_other_says_so(play: Play) -> None:
    """It was said after a while that the swarm serves no model: run `manyhands up` there."""

    async def scene(town: Town) -> None:
        member = await town.stack.enter_async_context(town.member(1, scope="off"))
        await _meet(member, None, Reporter(False))
        with pytest.raises(BadRequest, match="join with another --scope"):
            await _weights(member, None, town.home, Silent())

    play(scene)


def test_a_member_that_does_not_answer_for_its_model_is_named_with_the_reason(play: Play, tmp_path: Path) -> None:
    async def scene(town: Town) -> None:
        first = await town.host(0)
        first.member.node._handlers[WeightRequest] = [lambda message, link: True]  # taken, and that is all
        member = await town.stack.enter_async_context(town.member(1))
        await _meet(member, None, Reporter(False))
        said = rf"1 asked: n0 \({first.member.id[:8]}\): no answer about .* for {STALL_S:g} s\): is the one .* up"
        with pytest.raises(ShardUnavailable, match=said):
            await _weights(member, None, tmp_path / "elsewhere", Silent())

    play(scene)


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


def test_ctrl_c_does_not_wait_for_relays_that_are_silent(tmp_path: Path) -> None:
    """Two of them: the second is not called any more. The command waited for each of them, 5 s."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ways = [f"127.0.0.1:{each.getsockname()[1]}" for each in (first, second)]
        ticket = Ticket(SECRET, "town", (NodeAddr("127.0.0.1", 1),)).encode()
        command = ["join", ticket, "--listen", "127.0.0.1:0", "--api", "off", "--relay", ways[0], "--relay", ways[1]]
        with subprocess.Popen(
            [sys.executable, "-m", "manyhands", *command],
            env=os.environ | {"MANYHANDS_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                first.settimeout(GUARD_S)
                call, _ = first.accept()
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=GUARD_S)
            finally:
                process.kill()
            call.close()
        assert (process.returncode, out, err) == (130, "left\n", "")
        second.setblocking(False)
        with pytest.raises(BlockingIOError):
            second.accept()


@contextmanager
def silent_resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], list[str]]]:
    """Names that are asked for, and those that were given an answer: none before the block ends."""
    asked, answered, ends = list[str](), list[str](), threading.Event()
    real = socket.getaddrinfo

    def find(host: str, *arguments: Any, **more: Any) -> Any:
        if more.get("flags") or not host.endswith(NAMED):  # one that asks for no name
            return real(host, *arguments, **more)
        asked.append(host)
        ends.wait(GUARD_S / 4)
        answered.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", find)
    try:
        yield asked, answered
    finally:
        ends.set()


def test_the_end_of_a_command_does_not_wait_for_a_resolver(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`join` stayed for 13 s after Ctrl-C, and said that an exception was never retrieved."""

    async def body() -> None:
        async with Node(_transport, name="me", spans=tuple) as node:
            dial = asyncio.ensure_future(node.pool.get(NodeAddr(NAMED, 1), "control"))
            await until(lambda: asked)
            dial.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dial

    with silent_resolver(monkeypatch) as (asked, answered):
        run(body())
        assert (asked, answered) == ([NAMED], [])


def test_so_many_names_are_looked_up_at_a_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of members name hosts, and each lookup has a thread."""

    async def body() -> None:
        waiting = [asyncio.ensure_future(lookups.find(f"{number}.{NAMED}", 1)) for number in range(MAX_LOOKUPS)]
        await until(lambda: len(asked) == MAX_LOOKUPS)
        with pytest.raises(OSError, match=f"{MAX_LOOKUPS} names are being looked up"):
            await lookups.find(NAMED, 1)
        assert await lookups.find("127.0.0.1", 1)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(OSError, match="names are being looked up"):  # given up by who asked, not ended
            await lookups.find(NAMED, 1)

    lookups = Lookups()
    with silent_resolver(monkeypatch) as (asked, _):
        run(body())
