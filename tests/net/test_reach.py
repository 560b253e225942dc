"""Which way is tried when, and how a relayed link is bettered."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest, LinkClosed
from manyhands.net.pool import LinkPool
from manyhands.net.reach import Attempt, ReachPolicy, ReachTransport, plan, race, reach_transport
from manyhands.net.relay.relay import RelayLimits
from manyhands.net.relay.tunnel import relayed
from manyhands.net.transport import Link, Transport
from manyhands.testing.clock import run_virtual
from manyhands.wire.message import Step
from tests.net.links import A, receive, says, step
from tests.waiting import GUARD_S, until

SECRET = bytes(32)
LOOPBACK = NodeAddr("127.0.0.1", 0)
NOWHERE = NodeAddr("127.0.0.1", 1)
ONE, TWO, IROH = NodeAddr("one", 1, A), NodeAddr("two", 1, A), NodeAddr("iroh%h", 1, A)
RELAY = relayed(NodeAddr("r", 1), A)
QUICK = ReachPolicy(better_s=0.05)
PATIENT = ReachPolicy(fallback_s=GUARD_S)


def test_direct_ways_are_staggered_then_iroh_then_relays() -> None:
    policy = ReachPolicy(stagger_s=0.25, fallback_s=1.0)
    assert plan([RELAY, ONE, IROH, TWO, ONE], policy) == [(0, ONE), (0.25, TWO), (1.25, IROH), (2.25, RELAY)]
    assert plan([RELAY], policy) == [(0, RELAY)]
    assert plan([], policy) == []


class FakeLink:
    def __init__(self) -> None:
        self.aborted: str | None = None

    def abort(self, reason: str) -> None:
        self.aborted = reason


class Dialling:
    """Answers by a table: after so long, a link or a refusal. Records when each was begun."""

    def __init__(self, **answers: tuple[float, bool]) -> None:
        self.answers = answers
        self.begun: dict[str, float] = {}
        self.made: list[FakeLink] = []
        self.num_cancelled = 0

    async def __call__(self, addr: NodeAddr) -> Link:
        loop = asyncio.get_running_loop()
        self.begun[addr.host] = loop.time()
        delay_s, is_good = self.answers[addr.host]
        try:
            await asyncio.sleep(delay_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if not is_good:
            raise LinkClosed(f"{addr} refused")
        self.made.append(FakeLink())
        return self.made[-1]  # type: ignore[return-value]


PLAN = [Attempt(0, ONE), Attempt(0.25, TWO), Attempt(1.25, IROH)]


def raced(dialling: Dialling, attempts: Iterable[Attempt] = tuple(PLAN)) -> Any:
    async def main() -> Any:
        begin = asyncio.get_running_loop().time()
        addr, _ = await race(list(attempts), dialling)
        return addr, round(asyncio.get_running_loop().time() - begin, 6)

    return run_virtual(main())


def test_the_first_answer_wins_and_later_ways_are_not_tried() -> None:
    dialling = Dialling(one=(0.2, True))
    assert raced(dialling) == (ONE, 0.2)
    assert list(dialling.begun) == ["one"]


def test_a_silent_way_does_not_hold_up_the_others() -> None:
    dialling = Dialling(one=(99, True), two=(0.1, True))
    assert raced(dialling) == (TWO, 0.35)
    assert dialling.num_cancelled == 1


def test_after_a_refusal_the_next_begins_at_once() -> None:
    dialling = Dialling(one=(0.01, False), two=(0.01, False), **{"iroh%h": (0.01, True)})
    assert raced(dialling) == (IROH, 0.03)


def test_a_relay_waits_for_its_turn_while_a_direct_way_is_open() -> None:
    dialling = Dialling(one=(1.0, True), two=(0.01, False), **{"iroh%h": (0.01, True)})
    assert raced(dialling) == (ONE, 1.0)


def test_two_links_at_once_leave_one() -> None:
    dialling = Dialling(one=(0.25, True), two=(0.0, True))
    raced(dialling)
    assert sum(link.aborted is None for link in dialling.made) == 1


def test_every_reason_is_told_once() -> None:
    with pytest.raises(LinkClosed, match=r"^one:1 refused; two:1 refused$"):
        raced(Dialling(one=(0, False), two=(0, False)), PLAN[:2])
    with pytest.raises(LinkClosed, match="no address is known"):
        raced(Dialling(), [])


def test_a_way_that_fails_by_another_error_is_one_of_the_reasons() -> None:
    async def dial(addr: NodeAddr) -> Link:
        if addr == ONE:
            raise LinkClosed("one refused")
        raise RuntimeError("can't start new thread")

    with pytest.raises(LinkClosed, match=r"one refused; .*can't start new thread"):
        run_virtual(race(PLAN[:2], dial))


def test_cancelling_a_race_leaves_nothing() -> None:
    async def main() -> int:
        dialling = Dialling(one=(99, True), two=(99, True))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await race(PLAN, dialling)
        return dialling.num_cancelled

    assert run_virtual(main()) == 2


def test_a_caller_that_leaves_as_the_race_is_won_leaves_no_link() -> None:
    """A way that is given up takes a moment to end. The peer would go on using the link, which this node does not read."""

    class Slow(Dialling):
        async def __call__(self, addr: NodeAddr) -> Link:
            try:
                return await super().__call__(addr)
            except asyncio.CancelledError:
                await asyncio.sleep(0.01)
                raise

    async def main() -> list[FakeLink]:
        dialling = Slow(one=(99, True), two=(0.1, True))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.355):
                await race(PLAN, dialling)
        return dialling.made

    (link,) = run_virtual(main())
    assert link.aborted is not None


# -- the whole transport, on loopback ---------------------------------------------------------------------------------


class Book(dict[NodeId, list[NodeAddr]]):
    def __call__(self, node: NodeId) -> Iterable[NodeAddr]:
        return self.get(node, [])


@asynccontextmanager
async def reach(
    book: Book, policy: ReachPolicy = QUICK, iroh_urls: tuple[str, ...] | None = None
) -> AsyncIterator[ReachTransport]:
    key = Ed25519PrivateKey.generate()
    transport = reach_transport(
        key, SECRET, says("node"), book=book, limits=RelayLimits(), policy=policy, iroh_urls=iroh_urls
    )
    yield transport
    await transport.aclose()


def test_a_peer_without_a_direct_way_is_reached_through_a_known_relay() -> None:
    async def main() -> None:
        book = Book()
        async with reach(book) as relay, reach(book) as a, reach(book) as b:
            at = await relay.listen(LOOPBACK)
            await a.listen(relayed(at))
            addr = await b.listen(relayed(at))
            assert (addr.node, addr.host) == (b.node, "relay%127.0.0.1")
            for way in (addr, NodeAddr(NOWHERE.host, NOWHERE.port, b.node)):
                near, far = await asyncio.gather(a.dial(way, "data"), b.accept())
                assert near.peer == b.node and near.health.path_kind == "relay" == far.health.path_kind
                near.send(step(1))
                assert isinstance(await receive(far), Step)
                await asyncio.gather(near.aclose(), far.aclose())

    asyncio.run(asyncio.wait_for(main(), GUARD_S))


def test_a_direct_way_is_preferred() -> None:
    async def main() -> None:
        book = Book()
        async with reach(book) as relay, reach(book, PATIENT) as a, reach(book) as b:
            at = await relay.listen(LOOPBACK)
            addr = await b.listen(relayed(at))
            book[b.node] = [await b.listen(LOOPBACK)]
            near, far = await asyncio.gather(a.dial(addr, "data"), b.accept())
            assert near.health.path_kind == "direct"
            await asyncio.gather(near.aclose(), far.aclose())

    asyncio.run(asyncio.wait_for(main(), GUARD_S))


@pytest.mark.parametrize("who", ["caller", "callee"])
def test_when_a_direct_path_appears_new_links_take_it_and_the_old_one_lives(who: str) -> None:
    """Either side may be the one that can be dialled; both sides' pools then prefer the direct link."""

    async def main() -> None:
        book = Book()
        async with reach(book) as relay, reach(book) as a, reach(book) as b:
            at = await relay.listen(LOOPBACK)
            addr = await b.listen(relayed(at))
            pools = LinkPool(a), LinkPool(b)
            arrivals = asyncio.gather(*(collect(t, p) for t, p in zip((a, b), pools, strict=True)))
            near = await pools[0].get(addr, "data")
            assert near.health.path_kind == "relay"
            reachable = b if who == "caller" else a
            book[reachable.node] = [await reachable.listen(LOOPBACK)]
            await until(lambda: is_direct(pools[0], b.node) and is_direct(pools[1], a.node))
            assert (await pools[0].get(addr, "data")).health.path_kind == "direct"
            near.send(step(1))
            assert not near.is_closed
            arrivals.cancel()
            await asyncio.gather(*(pool.aclose() for pool in pools))

    asyncio.run(asyncio.wait_for(main(), GUARD_S))


async def collect(transport: Transport, pool: LinkPool) -> None:
    while True:
        pool.add(await transport.accept())


def is_direct(pool: LinkPool, node: NodeId) -> bool:
    link = pool.find(node, "data")
    return link is not None and link.health.path_kind == "direct"


def test_a_hopeless_direct_way_is_tried_less_and_less() -> None:
    async def main() -> None:
        book = Book()
        async with reach(book) as relay, reach(book) as a, reach(book) as b:
            at = await relay.listen(LOOPBACK)
            addr = await b.listen(relayed(at))
            near, far = await asyncio.gather(a.dial(addr, "data"), b.accept())
            a._start()
            book[b.node] = [NOWHERE]
            [each] = a._relayed
            await until(lambda: each.wait_s >= 4 * QUICK.better_s)
            assert near.health.path_kind == "relay" and not near.is_closed
            await asyncio.gather(near.aclose(), far.aclose())

    asyncio.run(asyncio.wait_for(main(), GUARD_S))


def test_iroh_is_tried_where_no_direct_way_answers() -> None:
    async def main() -> None:
        book = Book()
        async with reach(book, iroh_urls=()) as a, reach(book, iroh_urls=()) as b, reach(book) as plain:
            book[b.node] = [await b.listen(NodeAddr("iroh%127.0.0.1", 0))]
            near, far = await asyncio.gather(a.dial(NodeAddr(NOWHERE.host, 1, b.node), "data"), b.accept())
            assert (near.peer, far.peer) == (b.node, a.node) and near.health.path_kind == "direct"
            await asyncio.gather(near.aclose(), far.aclose())
            with pytest.raises(LinkClosed, match="cannot be reached"):
                await plain.dial(NodeAddr(NOWHERE.host, 1, b.node), "data")

    asyncio.run(asyncio.wait_for(main(), GUARD_S))


def test_iroh_addresses_need_iroh() -> None:
    async def main() -> None:
        async with reach(Book()) as a:
            with pytest.raises(BadRequest, match="does not use iroh"):
                await a.listen(NodeAddr("iroh%127.0.0.1", 0))
            with pytest.raises(LinkClosed, match="does not use"):
                await a.dial(IROH, "data")

    asyncio.run(asyncio.wait_for(main(), GUARD_S))


def test_closing_ends_accept() -> None:
    async def main() -> None:
        async with reach(Book()) as a:
            waiting = asyncio.ensure_future(a.accept())
            await asyncio.sleep(0)
            await a.aclose()
            with pytest.raises(LinkClosed, match="stopped listening"):
                await waiting

    asyncio.run(asyncio.wait_for(main(), GUARD_S))


def test_a_node_finds_itself_whatever_its_address_is_said_to_be() -> None:
    """A router may not lead back in, and a machine that moves loses the address that its records name."""

    async def main() -> None:
        async with reach(Book()) as node:
            await node.listen(NodeAddr("0.0.0.0", 0))
            near, far = await asyncio.gather(
                node.dial(NodeAddr(NOWHERE.host, NOWHERE.port, node.node), "data"), node.accept()
            )
            assert near.peer == far.peer == node.node
            await asyncio.gather(near.aclose(), far.aclose())

    asyncio.run(asyncio.wait_for(main(), GUARD_S))


def test_who_took_the_call_in_place_of_another_is_told() -> None:
    async def main() -> None:
        async with reach(Book()) as one, reach(Book()) as two:
            at = await two.listen(LOOPBACK)
            with pytest.raises(LinkClosed, match="expected") as refused:
                await one.dial(NodeAddr(at.host, at.port, A), "control")
            assert refused.value.answered == {(at.host, at.port): two.node}

    asyncio.run(main())
