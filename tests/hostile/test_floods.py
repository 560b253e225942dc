"""F4, F16: receivers enforce what they granted. A flood costs its sender a session, and others neither memory nor tasks."""

import asyncio
import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from manyhands.config import RequestConfig
from manyhands.core import MAX_CREDITS, ORIGIN_HOP, NodeAddr, PathKind, SessionId, Span
from manyhands.errors import BadRequest, Busy
from manyhands.net.transport import Link
from manyhands.origin.node import FullNode
from manyhands.origin.route import Lease
from manyhands.origin.session import Session
from manyhands.testing.swarm import memory_node
from manyhands.testing.tiny import make_tiny
from manyhands.wire.attest_message import Attest, Attested
from manyhands.wire.credit import Credits
from manyhands.wire.message import STANDBY, Close, Credit, Fault, Feed, Lane, Message, Open, Opened, Payload, Step
from manyhands.wire.signed import DRAWN_BYTES, session_of
from manyhands.worker.dials import MAX_DIALS, MAX_DIALS_PER_PEER
from manyhands.worker.feeding import feed
from manyhands.worker.worker import Worker
from tests.hostile.test_sessions import overhear
from tests.kill import Bench, Scene, kept_models
from tests.origin.test_session import ORIGIN, star_hop
from tests.waiting import until
from tests.worker.hop import AFTER, BEFORE, MODEL, Notes, hidden, opening
from tests.worker.tensors import encode_tensor

U32 = (1 << 32) - 1


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("floods") / "qwen3", seed=21), models)


class Flooder:
    """A member with sessions of its own on hop 1 of a scene, layers 2-3."""

    def __init__(self, node: FullNode, scene: Scene) -> None:
        self.node, self.scene, self.victim, self.answers = node, scene, scene.hops[1], list[Message]()
        self.one = self.session(1)
        overhear(node, "_dispatch", self.answers)

    def session(self, number: int) -> SessionId:
        """One of its own."""
        return session_of(self.node.transport.node, number.to_bytes(DRAWN_BYTES, "big"))

    async def link(self, lane: Any = "control") -> Link:
        assert self.victim.address is not None
        return await self.node.pool.get(self.victim.address, lane)

    def open(self, link: Link, number: int = 1, **changes: Any) -> Open:
        info = self.victim.hosts[0].info
        plain = opening(number, model=info.model, precision=info.precision, predecessor=self.node.transport.node)
        named = replace(plain, to=link.peer, token=link.hello.token, session=self.session(number))
        return self.node.signer.sign(replace(named, **{"successor": None, **changes}))

    def of(self, kind: type[Message]) -> list[Any]:
        return [m for m in self.answers if isinstance(m, kind)]

    async def heard(self, kind: type[Message], count: int) -> None:
        while len(self.of(kind)) < count:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.001)


def attack(bench: Bench, work: Any) -> None:
    """Let a flooder work, under a deadline in virtual time; an honest request before and after it is answered."""

    async def main() -> None:
        async with bench.scene(spares=[]) as scene:
            async with memory_node(scene.swarm.network, "flooder") as node:
                await node.listen(NodeAddr("mem", 0))
                async with asyncio.timeout(300):
                    await work(Flooder(node, scene))
                    beside = asyncio.ensure_future(scene.ask("hot"))
                    assert await beside == bench.wanted["hot", 0] and not scene.answers[0].repairs

    bench.play(main)


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("emit_from", [0, STANDBY])
def test_a_flood_of_steps_waits_nowhere(bench: Bench, emit_from: int) -> None:
    """F4: 4,050 large Steps with 16 credits. (They took 1.5 GB in 13 s.) What comes again is dropped; of a standby, which
    may be fed again, the session's origin hears of it. The link stays."""

    async def work(flooder: Flooder) -> None:
        control, data = await flooder.link(), await flooder.link("data")
        control.send(flooder.open(control, capacity=1000, emit_from=emit_from))
        await flooder.heard(Opened, 1)
        (place,) = flooder.victim.hosts[0]._places.values()
        payload = Payload("bf16", 64, bytes(999 * 64 * 2))
        before = resident_bytes()
        for number in range(4050):
            data.send(Step(flooder.one, 1, 1, 0, 999, 0, 0, "hidden", None, payload))
            if number % 16 == 0:
                await asyncio.sleep(0)
            assert len(place.waiting) <= 2
        await flooder.heard(Fault, 1)
        assert resident_bytes() - before < 64 << 20
        said = "rows wait" if emit_from else "all zeros"
        assert said in flooder.of(Fault)[0].detail and not data.is_closed
        control.send(Close(flooder.one))

    attack(bench, work)


def test_hashes_are_told_once_a_second_and_to_their_origin_alone(bench: Bench) -> None:
    """10,000 Attests of a place. (Each hashes 32 bytes a position on the event loop, and is signed there.)"""

    async def work(flooder: Flooder) -> None:
        control, _ = await flooder.link(), await flooder.link("data")
        control.send(flooder.open(control, attests=True))
        await flooder.heard(Opened, 1)
        for number in range(10_000):
            control.send(Attest(flooder.one, 1, 1, 0, number))
            if number % 64 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(0.5)
        assert len(flooder.of(Attested)) == 1
        await asyncio.sleep(1)
        control.send(Attest(flooder.one, 1, 1, 0, U32))
        await flooder.heard(Attested, 2)
        assert all((said.given, said.made) == (None, None) for said in flooder.of(Attested)), "nothing was computed"
        async with memory_node(flooder.scene.swarm.network, "unknown") as node:
            assert flooder.victim.address is not None
            link = await node.pool.get(flooder.victim.address, "control")
            await asyncio.sleep(2)
            link.send(Attest(flooder.one, 1, 1, 0, 1))
            await asyncio.sleep(1)
        assert len(flooder.of(Attested)) == 2
        control.send(Close(flooder.one))

    attack(bench, work)


def test_a_step_without_credit_is_not_taken(bench: Bench) -> None:
    """One row each: no bytes to speak of, but there are so many credits, whatever the flooder asked for."""

    async def work(flooder: Flooder) -> None:
        control, data = await flooder.link(), await flooder.link("data")
        for credits in (0, MAX_CREDITS + 1, U32):
            control.send(flooder.open(control, credits=credits))
        await flooder.heard(Fault, 3)
        control.send(flooder.open(control, credits=MAX_CREDITS, epoch=2, capacity=3 * MAX_CREDITS))
        await flooder.heard(Opened, 1)
        (place,) = flooder.victim.hosts[0]._places.values()
        place.outbox.append(cast(Step, None))  # its successor gives no credit: nothing is computed
        payload = Payload("bf16", 64, b"\1\2" * 64)
        for position in range(3 * MAX_CREDITS):
            data.send(Step(flooder.one, 2, 1, position, 1, 0, 0, "hidden", None, payload))
        await flooder.heard(Fault, 4)
        assert len(place.waiting) == MAX_CREDITS and "without credit" in flooder.of(Fault)[3].detail
        place.outbox.clear()
        control.send(Close(flooder.one))

    attack(bench, work)


@pytest.mark.parametrize("path", ["ring", "star"])
def test_an_origin_takes_as_many_results_as_it_granted(path: PathKind) -> None:
    """A last hop that sends without end, and in a star one whose successor does not compute: both lose their place."""

    async def main() -> None:
        links = [Notes(BEFORE), Notes(AFTER)]
        hops = [star_hop(link, span) for link, span in zip(links, (Span(0, 2), Span(2, 4)), strict=True)]
        session = Session(ORIGIN, hops, Lease(MODEL, "bf16", 64, 1, path, "origin", None), RequestConfig())
        session.route.renew(hops)

        def send(hop: int, link: Notes) -> None:
            session.on_step(Step(session.id, 1, hop, 0, 0, 0, 0, "hidden", None, None), cast(Link, link))

        for _ in range(16):
            send(ORIGIN_HOP, links[1])
        await session.next_result(1.0)
        for _ in range(8):
            await session.next_result(1.0)
        assert [credit.steps for credit in links[1].of(Credit)] == [8], "paid when they are taken"
        for _ in range(8):
            send(ORIGIN_HOP, links[1])
        assert not session.losses
        for _ in range(5000):
            send(ORIGIN_HOP, links[1])
        assert list(session.losses) == [1] and "without credit" in session.losses[1]
        assert len(session.returns.results) == 15
        for _ in range(5000):
            send(1, links[0])
        assert (0 in session.losses, len(hops[1].outbox)) == ((True, 16) if path == "star" else (False, 0))
        assert len(links[1].of(Step)) == (16 if path == "star" else 0)

    asyncio.run(main())


def test_both_sides_count_alike() -> None:
    """However steps and credits interleave, an honest sender never exceeds what the receiver counts, and never starves."""
    for granted in range(1, MAX_CREDITS + 1):
        sender, receiver, under_way, unpaid = Credits(granted), Credits(granted), 0, 0
        for turn in range(500):
            while sender.take():
                assert receiver.take(), "an honest step was refused"
                under_way += 1
            assert under_way <= granted
            done = under_way if turn % 3 else max(1, under_way // 2)
            under_way -= done
            unpaid += receiver.settle(done)
            if turn % 2 or not under_way:
                sender.give(unpaid)
                unpaid = 0
            assert sender.left or under_way or unpaid, "nothing moves any more"
        sender.give(U32)
        assert sender.left <= granted


# -- opens and dials --------------------------------------------------------------------------------------------------


def num_tasks(node: FullNode) -> int:
    """Tasks that carry out what peers asked for. (Those of links end a heartbeat after them.)"""
    asked = (Worker._open.__name__, feed.__name__)
    return sum(task.get_coro().__name__ in asked for task in node.tasks)  # type: ignore[union-attr]


class Nowhere:
    """Makes dials to ports from 10,000 on hang, as a host does that drops packets; counts those at once."""

    def __init__(self, node: FullNode) -> None:
        self.under_way = self.most = 0
        self.of = Counter[int]()  # dials by port
        plain = node.transport.dial

        async def dial(addr: NodeAddr, lane: Any) -> Link:
            self.of[addr.port] += 1
            if addr.port < 10_000:
                return await plain(addr, lane)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            try:
                await asyncio.Event().wait()
            finally:
                self.under_way -= 1
            raise AssertionError

        node.transport.dial = dial  # type: ignore[method-assign]


@pytest.mark.parametrize("way", ["epochs", "closes", "links"])
def test_openings_that_are_over_cost_nothing(bench: Bench, way: str) -> None:
    """F16: 1,000 Opens with rising epochs, each to another address; or 500 closed; or 50 on a link that is then dropped.

    (There were 1,092 tasks and as many connections under way, for 10 s each.)
    """

    async def work(flooder: Flooder) -> None:
        nowhere, before = Nowhere(flooder.victim), num_tasks(flooder.victim)
        control = await flooder.link()
        for epoch in range(1, {"epochs": 1001, "closes": 501, "links": 51}[way]):
            to = NodeAddr("mem", 10_000 + epoch)
            control.send(flooder.open(control, epoch=epoch, successor=to))
            if way == "closes":
                control.send(Close(flooder.one))
            if epoch % 50 == 0 or way == "links":
                await asyncio.sleep(0.001)
                assert num_tasks(flooder.victim) <= before + 2
            if way == "links":
                control.abort("next")
                await asyncio.sleep(0.001)
                control = await flooder.link()
        await asyncio.sleep(0.1)
        assert nowhere.most <= 2 and nowhere.under_way <= 1
        assert flooder.victim.worker.dials.under_way.num_used <= 1
        control.send(Close(flooder.one))
        await asyncio.sleep(0.01)
        assert nowhere.under_way == 0 and num_tasks(flooder.victim) <= before + 2
        host = flooder.victim.hosts[0]
        assert not host._opening and host.info.free_tokens == flooder.victim.worker.config.cache_tokens

    attack(bench, work)


def test_dials_for_one_member_and_for_all_are_bounded(bench: Bench) -> None:
    """As many sessions as it may have, each with another successor that does not answer: refused from the 17th on."""

    async def work(flooder: Flooder) -> None:
        nowhere, control = Nowhere(flooder.victim), await flooder.link()
        for number in range(1, 31):
            control.send(flooder.open(control, number, successor=NodeAddr("mem", 10_000 + number)))
        await flooder.heard(Fault, 30 - MAX_DIALS_PER_PEER)
        assert nowhere.most == nowhere.under_way == MAX_DIALS_PER_PEER <= MAX_DIALS
        assert {fault.code for fault in flooder.of(Fault)} == {Busy.code}
        await flooder.heard(Fault, 30)
        assert nowhere.under_way == 0 and flooder.victim.worker.dials.under_way.num_used == 0

    attack(bench, work)


@pytest.mark.parametrize("port", [999, 10_001], ids=["refuses", "is silent"])
def test_an_address_that_cannot_be_reached_is_left_alone_whichever_peer_names_it(bench: Bench, port: int) -> None:
    """Session after session names it as its successor: it is dialled once in 5 s, then ever more seldom. (It was each time.)"""

    async def work(flooder: Flooder) -> None:
        dialled, control = Nowhere(flooder.victim), await flooder.link()
        began = asyncio.get_running_loop().time()
        for number in range(1, 61):
            node = flooder.node.transport.node if number % 2 else None
            control.send(flooder.open(control, number, successor=NodeAddr("mem", port, node)))
            await flooder.heard(Fault, number)
            await asyncio.sleep(1)
        took_s = asyncio.get_running_loop().time() - began
        assert took_s < 200 and dialled.of[port] <= 6, "at 0, 5, 15, 35 and 75 s, and once while it was tried"
        assert not flooder.victim.setbacks.failing_s(flooder.node.transport.node, began), "its name was abused"

    attack(bench, work)


def test_a_flood_of_feeds_is_one_at_a_time(bench: Bench) -> None:
    """500 Feeds to as many addresses, of any length: one task for each place."""

    async def work(flooder: Flooder) -> None:
        control, _ = await flooder.link(), await flooder.link("data")
        control.send(flooder.open(control))
        await flooder.heard(Opened, 1)
        nowhere, before = Nowhere(flooder.victim), num_tasks(flooder.victim)
        session = flooder.one
        for number in range(500):
            until = (5, U32, 0)[number % 3]
            control.send(Feed(session, 1, 1, NodeAddr("mem", 10_000 + number), 0, until))
            if number % 50 == 0:
                await asyncio.sleep(0.001)
                assert num_tasks(flooder.victim) <= before + 1
        assert nowhere.most == 1
        control.send(Close(session))

    attack(bench, work)


@pytest.mark.parametrize(("start", "until"), [(10, 5), (5, 5), (U32, 5), (U32, 0)])
def test_rows_that_end_before_they_begin_are_none(bench: Bench, start: int, until: int) -> None:
    """Asked for in a Feed and in an Open, of a log with a step around both positions. (The Feed stopped the whole node.)"""

    async def work(flooder: Flooder) -> None:
        control, data = await flooder.link(), await flooder.link("data")
        addr = flooder.node.address
        assert addr is not None
        control.send(flooder.open(control))
        await flooder.heard(Opened, 1)
        data.send(Step(flooder.one, 1, 1, 0, 16, 15, 0, "hidden", None, encode_tensor(hidden(16))))
        await flooder.heard(Step, 1)
        control.send(Feed(flooder.one, 1, 1, addr, start, until))
        await asyncio.sleep(1)
        control.send(flooder.open(control, epoch=2, replay_from=start, replay_until=until))
        await flooder.heard(Opened, 2)
        assert len(flooder.of(Step)) == 1 and not flooder.of(Fault)
        control.send(Close(flooder.one))

    attack(bench, work)


def test_a_feed_whose_dial_fails_in_any_way_stops_no_node(bench: Bench) -> None:
    """As iroh's where its UDP port cannot be had. (Whatever was not a closed link or a deadline ended the node.)"""

    async def work(flooder: Flooder) -> None:
        control, _ = await flooder.link(), await flooder.link("data")
        control.send(flooder.open(control))
        await flooder.heard(Opened, 1)
        dialled, plain = list[NodeAddr](), flooder.victim.transport.dial

        async def dial(addr: NodeAddr, lane: Lane) -> Link:
            if addr.port != 9999:
                return await plain(addr, lane)
            dialled.append(addr)
            raise BadRequest("cannot use UDP here")

        flooder.victim.transport.dial = dial  # type: ignore[method-assign]
        control.send(Feed(flooder.one, 1, 1, NodeAddr("mem", 9999), 0, 5))
        await until(lambda: dialled and not next(iter(flooder.victim.hosts[0]._places.values())).is_feeding)
        control.send(Close(flooder.one))

    attack(bench, work)


def test_refused_opens_use_up_no_layers_that_a_node_would_load(bench: Bench) -> None:
    """A node loads six layers at most on demand; Opens there that could never fit are refused, and load nothing."""

    async def work(flooder: Flooder) -> None:
        worker, host = flooder.victim.worker, flooder.victim.hosts[0]
        await worker.offer_to_load(
            bench.folder, Span(0, 6), "bf16", host.engine.device, model_name="test", max_layers=6
        )
        control, much = await flooder.link(), 2 * host.engine.cache_tokens
        for number in range(1, 51):
            control.send(flooder.open(control, number, span=Span(0, 1), capacity=much))
        await flooder.heard(Fault, 50)
        await flooder.link("data")
        assert len(worker.hosts) == 1 and worker._loadable[0].num_loaded == 0
        control.send(flooder.open(control, 51, span=Span(0, 1)))
        await flooder.heard(Opened, 1)
        assert len(worker.hosts) == 2 and worker._loadable[0].num_loaded == 1
        control.send(Close(flooder.session(51)))

    attack(bench, work)
