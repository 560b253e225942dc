"""What attackers leave behind: nothing. Sessions opened, overtaken, refused and abandoned, and links, are freed when they end.

Freed at once, by their reference counts: what waits for the cyclic collector may wait for minutes, and holds the memory of
TLS and of tensors meanwhile. (Each session left 11 KB, each link 300 KB.)
"""

import asyncio
import gc
import logging
import socket
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.cli.connect import tls_node
from manyhands.core import NodeAddr, NodeId
from manyhands.errors import LinkClosed
from manyhands.net.tls import TlsTransport
from manyhands.origin.node import FullNode
from manyhands.swarm.ticket import Ticket
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Close, Fault, Message, Opened, Payload, Step
from tests.hostile.test_floods import Flooder, attack
from tests.hostile.test_sessions import overhear
from tests.kill import Bench, kept_models
from tests.waiting import until

SECRET = b"\7" * 32
TURNS = 120  # of each kind of attack that is measured, after a tenth of it that is not
PER_TURN = 0.9  # objects, and
BYTES_PER_TURN = 400.0  # that may stay of each: the door remembers 8,192 tokens of links


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("leftovers") / "qwen3", seed=21), models)


class Left:
    """What stays of turns: objects by kind, without the collector's help, and bytes that Python allocated.

    `look` before them, after half of them and after all. What stays of each turn stays in both halves; what Python keeps once
    (100 weak references where a type is first compared with an ABC of many subclasses) is in one of them.
    """

    def __init__(self, turns: int) -> None:
        self.turns = turns // 2  # of a half
        self._objects: Counter[str] | None = None
        self._bytes = 0
        self._stays: list[tuple[Counter[str], int]] = []  # of each half

    def look(self) -> None:
        objects, num_bytes = kinds(), traced()
        if self._objects is not None:
            self._stays.append((objects - self._objects, num_bytes - self._bytes))
        self._objects, self._bytes = kinds(), num_bytes  # without what the collector has freed by now

    def check(self) -> None:
        (first, few), (second, more) = self._stays
        grown = {kind: count for kind, count in (first & second).items() if count > PER_TURN * self.turns}
        assert not grown, f"of {self.turns} turns there stay {grown}"
        num_bytes = min(few, more)
        assert num_bytes < BYTES_PER_TURN * self.turns, f"{num_bytes / self.turns:.0f} bytes stay of a turn"


def kinds() -> Counter[str]:
    return Counter(type(thing).__name__ for thing in gc.get_objects())


def traced() -> int:
    """Bytes that Python holds without its free lists, which only a run of the collector empties."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@contextmanager
def without_collector() -> Iterator[None]:
    """Nothing but reference counts frees anything while the block runs; allocations are traced."""
    gc.collect()
    gc.freeze()  # what is here already need not be looked at, now and later
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


async def refused_step(flooder: Flooder, turn: int) -> None:
    """A session whose first row is all zeros: its device step fails."""
    control, data = await flooder.link(), await flooder.link("data")
    flooder.answers.clear()
    control.send(flooder.open(control, turn, hop=0))
    await flooder.heard(Opened, 1)
    data.send(Step(flooder.session(turn), 1, 0, 0, 1, 0, 0, "hidden", None, Payload("bf16", 64, bytes(128))))
    await flooder.heard(Fault, 1)
    control.send(Close(flooder.session(turn)))


async def overtaken(flooder: Flooder, turn: int) -> None:
    """Opens of rising epochs with a successor that does not answer, the last of them closed."""
    control = await flooder.link()
    for epoch in range(1, 5):
        control.send(flooder.open(control, turn, epoch=epoch, successor=NodeAddr("mem", 10_000 + turn)))
    await asyncio.sleep(0.01)
    control.send(Close(flooder.session(turn)))


async def unreachable(flooder: Flooder, turn: int) -> None:
    """An Open whose successor refuses: its dial fails."""
    control = await flooder.link()
    flooder.answers.clear()
    control.send(flooder.open(control, turn, successor=NodeAddr("mem", 1000 + turn)))
    await flooder.heard(Fault, 1)


async def forged(flooder: Flooder, turn: int) -> None:
    """An Open with a broken signature, one that comes twice, one for too many positions."""
    control = await flooder.link()
    flooder.answers.clear()
    message = flooder.open(control, turn)
    for each in (flooder.open(control, turn, capacity=1 << 30), message, message):
        control.send(each)
    await flooder.heard(Fault, 2)
    control.send(Close(flooder.session(turn)))


@pytest.mark.parametrize("way", [refused_step, overtaken, unreachable, forged])
def test_sessions_leave_nothing(
    bench: Bench, way: object, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.net.setbacks.MAX_REMEMBERED", TURNS // 20)  # full before it is measured
    left = Left(TURNS)
    logging.disable(logging.WARNING)  # or pytest would keep the records
    request.addfinalizer(lambda: logging.disable(logging.NOTSET))

    async def work(flooder: Flooder) -> None:
        nowhere_when_far(flooder.victim)
        with without_collector():
            begun = TURNS // 10
            for turn in range(1, 1 + begun + TURNS):
                await way(flooder, turn)  # type: ignore[operator]
                if turn in (begun, begun + TURNS // 2, begun + TURNS):
                    await settle(flooder)
                    left.look()

    attack(bench, work)
    left.check()


def test_rows_that_come_by_an_origin_after_the_end_are_not_kept(bench: Bench) -> None:
    """A stream over a star ends while rows of its first hop are on their way. (They were kept, as early rows of a session that
    is to be opened here, while the link lived.)"""

    async def main() -> None:
        async with bench.scene(spares=[]) as scene:
            first, origin, heard = scene.hops[0], scene.swarm.origin.node, list[Message]()
            overhear(origin, "_dispatch", heard)
            scene.faults.delay(first, origin, "data", 1.0)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await scene.ask(path="star")
            assert not any(isinstance(message, Step) for message in heard)
            await until(lambda: any(isinstance(message, Step) for message in heard))
            assert not any(held.sessions for held in origin.worker.unopened._by_link.values())

    bench.play(main)


async def settle(flooder: Flooder) -> None:
    """Let what was asked for end, and forget what was heard."""
    await asyncio.sleep(15)
    flooder.answers.clear()


def nowhere_when_far(node: FullNode) -> None:
    """Dials to ports from 10,000 on hang."""
    plain = node.transport.dial

    async def dial(addr: NodeAddr, lane: object) -> object:
        if addr.port >= 10_000:
            await asyncio.Event().wait()
        return await plain(addr, lane)  # type: ignore[arg-type]

    node.transport.dial = dial  # type: ignore[method-assign,assignment]


@asynccontextmanager
async def tls_nodes() -> AsyncIterator[list[FullNode]]:
    async with (
        FullNode(
            lambda hello: TlsTransport(Ed25519PrivateKey.generate(), SECRET, hello), Ed25519PrivateKey.generate()
        ) as a,
        FullNode(
            lambda hello: TlsTransport(Ed25519PrivateKey.generate(), SECRET, hello), Ed25519PrivateKey.generate()
        ) as b,
    ):
        yield [a, b]


def test_links_leave_nothing() -> None:
    """A member that dials, sends and goes, politely and not; on uvloop, as nodes run."""
    uvloop = pytest.importorskip("uvloop")
    left = Left(100)

    async def main() -> None:
        async with tls_nodes() as (node, other):
            addr = await node.listen(NodeAddr("127.0.0.1", 0))
            with without_collector():
                for turn in range(110):
                    if turn in (10, 60):
                        await asyncio.sleep(0.6)
                        left.look()
                    link = await other.pool.get(addr, "control")
                    await link.ping()
                    if turn % 2:
                        link.abort("gone")
                    else:
                        await link.aclose()
                await asyncio.sleep(0.6)  # the watch has looked
                left.look()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    left.check()


@pytest.mark.parametrize("patience_s", [2.0, 0.02], ids=["refused", "silent"])
def test_failed_dials_leave_nothing(patience_s: float) -> None:
    """Addresses of made-up nodes, where nothing listens or something that never answers. A refused dial left its link,
    77 KB, in a cycle: a task's error led to the frame that had read it, and that to the task. On uvloop, over every
    way that nodes dial."""
    uvloop = pytest.importorskip("uvloop")
    left = Left(60)

    async def main() -> None:
        async with tls_node(Ticket.new("leftovers"), None) as node:
            with socket.create_server(("127.0.0.1", 0), backlog=128) as silent, socket.socket() as bound:
                bound.bind(("127.0.0.1", 0))  # and does not listen: its port refuses
                port = (bound if patience_s > 1 else silent).getsockname()[1]

                async def dial(turn: int) -> None:
                    with pytest.raises((LinkClosed, TimeoutError)):
                        async with asyncio.timeout(patience_s):
                            await node.pool.get(NodeAddr("127.0.0.1", port, NodeId(f"{turn:064x}")), "control")

                await dial(67)
                await asyncio.sleep(0.5)
                num_tasks = len(asyncio.all_tasks())  # once no dial is under way
                with without_collector():
                    for turn in range(67):
                        if turn in (6, 36):
                            await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
                            left.look()
                        await dial(turn)
                    await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
                    left.look()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    left.check()
