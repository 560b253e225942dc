"""Joining by a code over real sockets: wrong codes, a man in the middle, recordings, floods, silence, huge messages."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.core import NodeAddr
from manyhands.errors import LinkClosed, ManyhandsError, ProtocolError, WrongCode
from manyhands.net.admission import Tokens
from manyhands.net.certificate import client_context, own_certificate, server_context
from manyhands.net.pairing.code import CODE_S, MAX_FAILURES, JoinCode
from manyhands.net.pairing.dial import ask_ticket
from manyhands.net.pairing.exchange import ELEMENT_BYTES, PROOF_BYTES, HostExchange, JoinerExchange, PairingContext
from manyhands.net.pairing.host import ADMITTED, PENDING, CodeAttempt, PairingHost, door_secret
from manyhands.net.pairing.queue import QueueLimits
from tests.net.conftest import DEADLINE_S, Run
from tests.net.conftest import run as run_on_both
from tests.waiting import GUARD_S

__all__ = ["run_on_both"]

SWARM, OTHER_SWARM = "0123456789abcdef", "fedcba9876543210"
CODE, WRONG = "K7W4QX", "K7W4QY"
TICKET = "mh1" + "t" * 300
FLOOD = 300
# The limits of a host but for its pace, which tests/net/pairing/test_queue.py tries in virtual time.
QUICK = QueueLimits(per_s=1000.0, burst=1000)


@pytest.fixture
def run() -> Run:
    """On the loop that the command runs on."""

    def run_on(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.wait_for(main, DEADLINE_S))

    return run_on


class Shown:
    """A machine that shows a code."""

    def __init__(self, host: PairingHost, addr: NodeAddr, serving: "asyncio.Task[None]") -> None:
        self.host, self.addr, self.serving = host, addr, serving
        self.attempts: list[CodeAttempt] = []


@asynccontextmanager
async def shown(seconds: float = CODE_S, swarm: str = SWARM, limits: QueueLimits = QUICK) -> AsyncIterator[Shown]:
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listening.setblocking(False)
    addr = NodeAddr("127.0.0.1", listening.getsockname()[1])
    attempts: list[CodeAttempt] = []
    code = JoinCode(CODE, asyncio.get_running_loop().time() + seconds)
    host = PairingHost(code, swarm, lambda: TICKET, attempts.append, limits)
    serving = asyncio.create_task(host.serve(listening))
    made = Shown(host, addr, serving)
    made.attempts = attempts
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


class Caller:
    """A caller that speaks TLS as a joiner does, and then what a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: Ed25519PrivateKey) -> None:
        self.reader, self.writer = reader, writer
        mine = own_certificate(key, door_secret(SWARM))
        self.setting = PairingContext(SWARM, mine, writer.get_extra_info("ssl_object").getpeercert(binary_form=True))

    @classmethod
    async def to(cls, addr: NodeAddr, source: str = "127.0.0.1") -> "Caller":
        key, secret = Ed25519PrivateKey.generate(), door_secret(SWARM)
        reader, writer = await asyncio.open_connection(
            addr.host,
            addr.port,
            ssl=client_context(key, secret),
            server_hostname=Tokens(secret, lambda n: Ed25519PrivateKey.generate().private_bytes_raw()[:n]).make(),
            local_addr=(source, 0),
        )
        return cls(reader, writer, key)

    async def ends(self) -> bytes:
        """What still comes, until the host closes."""
        told = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(GUARD_S):
                while piece := await self.reader.read(10_000):
                    told += piece
        self.writer.transport.abort()
        return told


async def hang_up(calls: list["asyncio.Task[Caller]"]) -> None:
    for call in calls:
        call.cancel()
    for made in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(made, Caller):
            made.writer.transport.abort()


def test_the_right_code_gives_the_ticket_and_three_machines_may_use_it(run_on_both: Run) -> None:
    async def body() -> None:
        async with shown() as desk:
            assert [await ask_ticket([desk.addr], SWARM, CODE) for _ in range(3)] == [TICKET] * 3
            assert desk.attempts == [CodeAttempt("127.0.0.1", True, MAX_FAILURES)] * 3

    run_on_both(body())


def test_three_wrong_codes_close_the_listener_and_the_right_one_is_too_late(run: Run) -> None:
    async def body() -> None:
        async with shown() as desk:
            for left in (2, 1, 0):
                with pytest.raises(WrongCode) as wrong:
                    await ask_ticket([desk.addr], SWARM, WRONG)
                assert wrong.value.tries_left == left
            await asyncio.wait_for(asyncio.shield(desk.serving), GUARD_S)
            with pytest.raises(LinkClosed, match="cannot be reached"):
                await ask_ticket([desk.addr], SWARM, CODE)
            assert [attempt.is_right for attempt in desk.attempts] == [False] * 3

    run(body())


def test_a_typo_leaves_the_code_alive(run: Run) -> None:
    async def body() -> None:
        async with shown() as desk:
            with pytest.raises(WrongCode):
                await ask_ticket([desk.addr], SWARM, WRONG)
            assert await ask_ticket([desk.addr], SWARM, CODE) == TICKET

    run(body())


def test_guesses_side_by_side_are_three_in_all(run: Run) -> None:
    """Exchanges that are all under way before the first proof must not each be worth a guess."""

    async def body() -> None:
        async with shown() as desk:
            sources = [f"127.0.2.{n}" for n in range(1, 9)]
            callers = [await Caller.to(desk.addr, source) for source in sources]
            ready = []
            for caller in callers:
                exchange = JoinerExchange(WRONG, caller.setting)
                caller.writer.write(exchange.first())
                ready.append((caller, exchange.prove(await caller.reader.readexactly(ELEMENT_BYTES))))
            for caller, proof in ready:
                caller.writer.write(proof)
            answers = [await caller.ends() for caller in callers]
            assert sorted(answers) == [b""] * 5 + [b"\1\0", b"\1\1", b"\1\2"]
            assert len(desk.attempts) == MAX_FAILURES

    run(body())


def test_an_expired_code_has_no_listener(run: Run) -> None:
    async def body() -> None:
        async with shown(seconds=0.2) as desk:
            await asyncio.wait_for(asyncio.shield(desk.serving), GUARD_S)
            with pytest.raises(LinkClosed, match="cannot be reached"):
                await ask_ticket([desk.addr], SWARM, CODE)

    run(body())


def test_a_renewed_code_ends_exchanges_under_way(run: Run) -> None:
    async def body() -> None:
        async with shown() as desk:
            caller = await Caller.to(desk.addr)
            exchange = JoinerExchange(CODE, caller.setting)
            caller.writer.write(exchange.first())
            proof = exchange.prove(await caller.reader.readexactly(ELEMENT_BYTES))
            desk.host.withdraw()
            caller.writer.write(proof)
            assert await caller.ends() == b""

    run(body())


def test_a_man_in_the_middle_gets_nothing_and_costs_a_failure(run: Run) -> None:
    """He ends TLS on both sides with certificates of his own and forwards every byte between."""

    async def body() -> None:
        async with shown() as desk:

            async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                onward = await Caller.to(desk.addr)
                onward.writer.write(await reader.readexactly(ELEMENT_BYTES))
                writer.write(await onward.reader.readexactly(ELEMENT_BYTES))
                onward.writer.write(await reader.readexactly(PROOF_BYTES))
                heard.append(await onward.ends())
                writer.write(heard[0])
                writer.close()
                await writer.wait_closed()

            heard: list[bytes] = []
            secret = door_secret(SWARM)
            middle = await asyncio.start_server(
                between, "127.0.0.1", 0, ssl=server_context(Ed25519PrivateKey.generate(), secret)
            )
            with pytest.raises(WrongCode):
                await ask_ticket([NodeAddr("127.0.0.1", middle.sockets[0].getsockname()[1])], SWARM, CODE)
            middle.close()
            assert heard == [b"\1\2"] and desk.attempts == [CodeAttempt("127.0.0.1", False, 2)]

    run(body())


def test_an_impostor_cannot_hand_over_a_ticket(run: Run) -> None:
    """It says that the code is right, without knowing it."""

    async def body() -> None:
        async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, EOFError):
                caller = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                exchange = HostExchange(WRONG, PairingContext(SWARM, caller, own_certificate(key, secret)))
                writer.write(exchange.answer(await reader.readexactly(ELEMENT_BYTES)))
                await reader.readexactly(PROOF_BYTES)
                proof, sealed = exchange.seal(TICKET.encode())
                writer.write(ADMITTED + proof + len(sealed).to_bytes(2, "big") + sealed)
                writer.close()
                await writer.wait_closed()

        key, secret = Ed25519PrivateKey.generate(), door_secret(SWARM)
        server = await asyncio.start_server(pretend, "127.0.0.1", 0, ssl=server_context(key, secret))
        with pytest.raises(ProtocolError, match="does not know the code"):
            await ask_ticket([NodeAddr("127.0.0.1", server.sockets[0].getsockname()[1])], SWARM, CODE)
        server.close()

    run(body())


def test_a_recorded_exchange_opens_nothing(run: Run) -> None:
    """Over TLS no other can record one; here the joiner itself sends the same bytes again."""

    async def body() -> None:
        async with shown() as desk:
            caller = await Caller.to(desk.addr)
            exchange = JoinerExchange(CODE, caller.setting)
            first = exchange.first()
            caller.writer.write(first)
            proof = exchange.prove(await caller.reader.readexactly(ELEMENT_BYTES))
            caller.writer.write(proof)
            assert (await caller.ends())[:1] == ADMITTED
            again = await Caller.to(desk.addr)
            again.writer.write(first + proof)
            assert (await again.ends())[ELEMENT_BYTES:] == b"\1\2"

    run(body())


def test_the_code_of_another_swarm_opens_nothing(run: Run) -> None:
    """The caller is turned away before the handshake, and the code keeps its three tries."""

    async def body() -> None:
        async with shown() as desk:
            with pytest.raises(LinkClosed, match="shows no code of this swarm"):
                await ask_ticket([desk.addr], OTHER_SWARM, CODE)
            assert desk.host.code.tries_left == MAX_FAILURES

    run(body())


@pytest.mark.parametrize(
    ("sources", "first"), [(1, b""), (100, b"\x16\x03\x01\x02\x00\x01")], ids=["one, silent", "many, half a hello"]
)
def test_a_flood_of_connections_keeps_no_joiner_out(run: Run, sources: int, first: bytes) -> None:
    async def body() -> None:
        async with shown() as desk:
            callers = []
            for index in range(FLOOD):
                caller = socket.socket()
                caller.setblocking(False)
                caller.bind((f"127.0.1.{1 + index % sources}", 0))
                caller.connect_ex((desk.addr.host, desk.addr.port))
                callers.append(caller)
            await asyncio.sleep(0.1)
            for caller in callers:
                with contextlib.suppress(OSError):
                    caller.send(first)
            assert await asyncio.wait_for(ask_ticket([desk.addr], SWARM, CODE), GUARD_S) == TICKET
            for caller in callers:
                caller.close()

    run(body())


def test_callers_that_fall_silent_in_an_exchange_hold_few_places(run: Run) -> None:
    """Sixteen of one address shake hands and send nothing: two of them hold a place, and another address is served."""

    async def body() -> None:
        async with shown() as desk:
            silent = [asyncio.create_task(Caller.to(desk.addr, "127.0.3.1")) for _ in range(40)]
            await asyncio.sleep(0.3)
            assert desk.host.queue.num_running <= QUICK.running_per_source
            assert len(desk.host.queue.waiting) <= QUICK.waiting_per_source and len(desk.host._raw) <= 64
            assert await asyncio.wait_for(ask_ticket([desk.addr], SWARM, CODE), GUARD_S) == TICKET
            assert desk.host.code.tries_left == MAX_FAILURES  # silence is no guess
            await hang_up(silent)

    run(body())


def test_a_silent_caller_is_cut_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.net.pairing.host.EXCHANGE_S", 1.0)

    async def body() -> None:
        async with shown() as desk:
            caller = None
            while caller is None:
                with contextlib.suppress(OSError):  # a busy machine is cut off in its handshake
                    caller = await Caller.to(desk.addr)
            assert await caller.ends() == b"" and not desk.attempts

    run(body())


def test_a_caller_that_sends_without_end_is_not_read(run: Run) -> None:
    """Of what comes after a message no more is held than READ_BYTES say; the exchange ends as it would without."""

    async def body() -> None:
        async with shown() as desk:
            caller = await Caller.to(desk.addr)
            exchange = JoinerExchange(WRONG, caller.setting)
            caller.writer.write(exchange.first())
            proof = exchange.prove(await caller.reader.readexactly(ELEMENT_BYTES))
            caller.writer.write(proof + b"x" * 50_000_000)
            assert await caller.ends() in (b"\1\2", b"")
            assert desk.host.code.tries_left == 2
            assert await ask_ticket([desk.addr], SWARM, CODE) == TICKET

    run(body())


def test_nonsense_is_no_guess(run: Run) -> None:
    async def body() -> None:
        async with shown() as desk:
            for first in (b"\0" * ELEMENT_BYTES, b"B" + b"\1" + bytes(31), b"A" + b"\xff" * 32):
                caller = await Caller.to(desk.addr)
                caller.writer.write(first)
                assert await caller.ends() == b""
            assert desk.host.code.tries_left == MAX_FAILURES and not desk.attempts

    run(body())


def test_a_code_stands_in_no_log_and_no_error(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def body() -> None:
        async with shown() as desk:
            told = [repr(desk.host), repr(desk.host.code)]
            for code in (WRONG, CODE):
                try:
                    await ask_ticket([desk.addr], SWARM, code)
                except ManyhandsError as error:
                    told += [str(error), repr(error)]
            caller = await Caller.to(desk.addr)
            caller.writer.write(b"nonsense" * 5)
            await caller.ends()
            everything = " ".join([*told, caplog.text])
            for secret in (CODE, WRONG, CODE.lower(), f"{CODE[:3]}-{CODE[3:]}", TICKET):
                assert secret not in everything

    run(body())


def test_nothing_is_left_open_when_the_code_ends(run: Run) -> None:
    async def body() -> None:
        async with shown() as desk:
            silent = [asyncio.create_task(Caller.to(desk.addr, f"127.0.3.{n}")) for n in range(1, 20)]
            await asyncio.sleep(0.3)
            desk.host.withdraw()
            await asyncio.wait_for(asyncio.shield(desk.serving), GUARD_S)
            assert not desk.host.queue.num_running
            assert all(connection.fileno() == -1 for connection in desk.host._raw)
            await hang_up(silent)

    run(body())


def test_a_caller_without_a_hello_waits_at_the_door_of_a_node() -> None:
    """The bound on connections that sent nothing is the listener's, smaller here than at a node."""
    assert (PENDING.total, PENDING.per_source) == (64, 16) and PENDING.patience_s <= 3.0


def test_an_anonymous_tls_client_gets_no_exchange(run: Run) -> None:
    """One without a certificate has nothing that could be bound to the code."""

    async def body() -> None:
        async with shown() as desk:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            name = Tokens(door_secret(SWARM), lambda n: b"\5" * n).make()
            reader, writer = await asyncio.open_connection(
                desk.addr.host, desk.addr.port, ssl=context, server_hostname=name
            )
            with contextlib.suppress(OSError):
                writer.write(b"A" + bytes(32))
                async with asyncio.timeout(GUARD_S):
                    assert await reader.read() == b""
            writer.transport.abort()

    run(body())


def test_an_impostor_with_many_addresses_is_asked_once(run: Run) -> None:
    """Each exchange is one guess at the code that a person typed, so the next address is for one that takes no connection."""

    async def body() -> None:
        asked: list[str] = []

        async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append("")
            writer.close()

        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        shut = NodeAddr("127.0.0.1", 1)
        there = NodeAddr("127.0.0.1", server.sockets[0].getsockname()[1])
        with pytest.raises(LinkClosed):
            await ask_ticket([shut, there, there, there], SWARM, CODE)
        server.close()
        assert len(asked) == 1

    run(body())
