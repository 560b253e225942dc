"""Closes and refused Opens that come from any member before a session's own Open: no rows are lost and no memory leaks."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from manyhands.core import NodeId, SessionId, Span
from manyhands.net.transport import Link
from manyhands.testing.swarm import memory_node
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Close, Fault, Open, Opened
from manyhands.wire.signed import DRAWN_BYTES, session_of
from manyhands.worker.early import MAX_ENDED
from tests.hostile.test_sessions import Member, overhear
from tests.kill import Bench, kept_models


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("closes") / "qwen3", seed=21), models)


def closes(member: Member, link: Link) -> None:
    """Of the session, and of more others than a hop knows as ended, their own and made up."""
    (session,) = member.scene.swarm.origin.node.sessions
    link.send(Close(session))
    for number in range(MAX_ENDED + 10):
        link.send(Close(numbered(member.node.transport.node, number)))
        link.send(Close(SessionId(number.to_bytes(16, "big"))))
    link.send(Close(session))


def opens(member: Member, link: Link) -> None:
    """Opens that are refused: of another's signature, of layers that the hop does not hold; and of the very place, rightly
    signed by the member, whose session it would be if it came first."""
    link.send(replace(member.forged(link, epoch=1), signature=bytes(64).hex()))  # type: ignore[arg-type]
    link.send(member.forged(link, epoch=1, span=Span(0, 6)))
    (session,) = member.scene.swarm.origin.node.sessions.values()
    hops = session.route.hops
    index = [hop.offer.node for hop in hops].index(link.peer)
    before = hops[index - 1].offer.node if index else member.scene.swarm.origin.node.transport.node
    link.send(member.signer.sign(replace(member.forged(link, epoch=1), predecessor=before)))


def numbered(node: NodeId, number: int) -> SessionId:
    """A session of `node`."""
    return session_of(node, number.to_bytes(DRAWN_BYTES, "big"))


@pytest.mark.parametrize("after_s", [0.0, 0.05])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("work", [closes, opens])
def test_what_another_says_of_a_session_before_its_open_drops_no_rows(
    bench: Bench, work: Callable[[Member, Link], None], index: int, after_s: float
) -> None:
    """A member that knows the id of a session, as a hop does, where its Open is late: before rows have come, or after. (They
    were dropped without a word, and a hop lost its place for them.)"""

    async def main() -> None:
        async with bench.scene(spares=["0-5"]) as scene, memory_node(scene.swarm.network, "member") as node:
            member, hop, origin = Member(node, scene), scene.hops[index], scene.swarm.origin.node
            link = await member.link(hop)
            await scene.ask("greedy", 1)  # links are open
            scene.faults.delay(origin, hop, "control", 0.1)
            task = asyncio.ensure_future(scene.ask("hot"))
            await asyncio.sleep(after_s or 0.001)
            assert origin.sessions and not hop.hosts[0]._opening and not hop.hosts[0].num_sessions
            work(member, link)
            assert await task == bench.wanted["hot", 0]
            assert work is closes or len([m for m in member.answers if isinstance(m, Fault)]) == 3
            answer = scene.answers[1]
            assert not answer.repairs and [offer.name for offer in answer.route] == ["n0", "n1", "n2"]
            for each in scene.hops:
                assert not any(held.sessions for held in each.worker.unopened._by_link.values())

    bench.play(main)


def test_closes_of_sessions_that_were_never_open_leave_little(bench: Bench) -> None:
    """A bounded number is known; one that its own origin opens afterwards is open, and closed by the next."""

    async def main() -> None:
        async with bench.scene() as scene, memory_node(scene.swarm.network, "member") as node:
            member, taken, worker = Member(node, scene), list[Open](), scene.hops[1].worker
            overhear(worker, "on_open", taken)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            link = await member.link(scene.hops[1])
            await member.link(scene.hops[1], "data")
            own: dict[str, Any] = {"origin": node.transport.node, "predecessor": node.transport.node, "successor": None}
            me = node.transport.node
            message = replace(taken[-1], to=link.peer, token=link.hello.token, session=numbered(me, 77), **own)
            for number in range(1000, 1000 + 2 * MAX_ENDED):
                link.send(Close(numbered(me, number)))
            link.send(Close(message.session))
            link.send(member.signer.sign(message))
            await asyncio.sleep(0.5)
            assert [m for m in member.answers if isinstance(m, Opened)] and scene.hops[1].hosts[0].num_sessions == 1
            link.send(Close(message.session))
            await asyncio.sleep(0.5)
            assert len(worker.unopened._ended) == MAX_ENDED and scene.hops[1].hosts[0].num_sessions == 0
            assert await scene.ask("hot") == bench.wanted["hot", 0]

    bench.play(main)
