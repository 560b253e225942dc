"""F3: a session is its origin's. Members who know its id, on the route or beside it, can change nothing about it."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.core import NodeAddr, NodeId, SamplingParams, SessionId, Span, public_id
from manyhands.net.transport import Link
from manyhands.origin.node import FullNode
from manyhands.origin.repair_plan import Slot
from manyhands.testing.swarm import memory_node
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import (
    Close,
    Credit,
    Fault,
    Feed,
    Message,
    Open,
    Opened,
    Payload,
    Probe,
    Progress,
    Retract,
    Step,
)
from manyhands.wire.signed import DRAWN_BYTES, Serials, Signer, is_session_of, is_signed, session_of
from tests.kill import Bench, Scene, kept_models
from tests.worker.hop import opening

U32 = (1 << 32) - 1


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("sessions") / "qwen3", seed=21), models)


def overhear(owner: Any, method: str, heard: list[Any]) -> None:
    """Keep the messages that a method of `owner` is called with."""
    plain = getattr(owner, method)

    def keep(message: Message, link: Link) -> None:
        heard.append(message)
        plain(message, link)

    setattr(owner, method, keep)


class Member:
    """A member with a node of its own, and what others answered it."""

    def __init__(self, node: FullNode, scene: Scene) -> None:
        self.node, self.scene, self.answers = node, scene, list[Message]()
        self.signer: Signer = node.signer
        overhear(node, "_dispatch", self.answers)

    async def link(self, hop: FullNode, lane: Any = "control") -> Link:
        assert hop.address is not None
        return await self.node.pool.get(hop.address, lane)

    def forged(self, link: Link, **changes: Any) -> Open:
        """The victim's newest Open for the node at `link`, as this member would have it, rightly signed by this member."""
        (session,) = self.scene.swarm.origin.node.sessions.values()
        nodes = [hop.offer.node for hop in session.route.hops]
        index = nodes.index(link.peer) if link.peer in nodes else 1
        hop = session.route.hops[index]
        message = session.route.open_message(index, Slot(hop.offer, None), hop.control)
        plain = replace(message, to=link.peer, token=link.hello.token)
        return self.signer.sign(replace(plain, predecessor=self.node.transport.node, successor=None, **changes))


def at_a_step(scene: Scene, work: Callable[[], Any]) -> list["asyncio.Task[Any]"]:
    """Run `work` beside the victim's stream, once it has begun."""
    tasks: list[asyncio.Task[Any]] = []
    scene.faults.at("decode", scene.hops[1], lambda: tasks.append(asyncio.ensure_future(work())), 5)
    return tasks


def attack(bench: Bench, work: Callable[[Member], Any], check: Callable[[Member], None] = lambda _: None) -> None:
    """Let a member that knows the session's id do `work` while a stream runs: its text and its route stay as they are."""

    async def main() -> None:
        async with bench.scene(spares=["2-3"]) as scene:
            async with memory_node(scene.swarm.network, "insider") as node:
                await node.listen(NodeAddr("mem", 0))
                member = Member(node, scene)
                links = {link for hop in scene.hops for links in hop.pool._links.values() for link in links}
                tasks = at_a_step(scene, lambda: work(member))
                assert await scene.ask("hot") == bench.wanted["hot", 0]
                await asyncio.gather(*tasks)
                await asyncio.sleep(0.1)
                assert tasks and not scene.answers[0].repairs and not scene.answers[0].events
                assert not [link for link in links if link.is_closed], "an honest node's link was closed"
                check(member)

    bench.play(main)


def refused(member: Member) -> None:
    assert [m for m in member.answers if isinstance(m, Fault)]
    assert not [m for m in member.answers if isinstance(m, Opened)]


def test_another_origins_open_for_a_session_is_refused_on_every_span(bench: Bench) -> None:
    """Same place, another span, another hop, any epoch. (A sub-span took the victim's steps; its stream was lost.)"""
    variants: list[dict[str, Any]] = [
        {},
        {"epoch": 2},
        {"epoch": U32},
        {"span": Span(2, 3)},
        {"span": Span(3, 4), "epoch": 9},
        {"span": Span(2, 3), "hop": 0},
        {"span": Span(2, 3), "hop": 2, "capacity": 1},
    ]

    async def work(member: Member) -> None:
        for hop in member.scene.hops[:3]:
            link = await member.link(hop)
            for changes in variants:
                link.send(member.forged(link, **changes))

    def check(member: Member) -> None:
        faults = [m for m in member.answers if isinstance(m, Fault)]
        assert len(faults) == 3 * len(variants) and not [m for m in member.answers if isinstance(m, Opened)]

    attack(bench, work, check)


def test_an_open_that_fails_frees_nothing_of_another_origin(bench: Bench) -> None:
    """F3, `abandon`: a successor that cannot be reached, on a node of the route. (It freed all places of the id.)"""

    async def work(member: Member) -> None:
        link = await member.link(member.scene.hops[1])
        message = member.forged(link, span=Span(2, 3), epoch=5)
        link.send(member.signer.sign(replace(message, successor=NodeAddr("mem", 999))))

    attack(bench, work, refused)


def test_the_id_on_a_bystander_node_diverts_nothing(bench: Bench) -> None:
    """A node beside the route is to open the victim's id for the insider, to send steps by it: it refuses, and drops them.

    (It opened it, and its steps cost it its link to the origin, and so others their hops.)
    """

    async def work(member: Member) -> None:
        scene = member.scene
        bystander, (session,) = scene.hops[3], scene.swarm.origin.node.sessions.values()
        control, data = await member.link(bystander), await member.link(bystander, "data")
        plain = member.forged(control, span=Span(2, 4), hop=1, num_hops=3, epoch=1)
        for successor in (scene.hops[2].address, scene.hops[0].address):
            plain = replace(plain, epoch=plain.epoch + 1, successor=successor)
            control.send(member.signer.sign(plain))
            await asyncio.sleep(0.02)
            rows = session.route.hops[0].offer.info.hidden_size
            data.send(
                Step(session.id, plain.epoch, 1, 0, 1, 0, 0, "hidden", None, Payload("bf16", rows, b"\1\2" * rows))
            )
            await asyncio.sleep(0.02)
        control.send(Close(session.id))

    attack(bench, work, refused)


def test_nothing_else_that_a_member_says_of_the_session_is_heard(bench: Bench) -> None:
    """Every message with a session's id, to every node, from beside the route."""

    async def work(member: Member) -> None:
        scene = member.scene
        (session,) = scene.swarm.origin.node.sessions.values()
        epoch = session.route.epoch
        for node in (*scene.hops, scene.swarm.origin.node):
            if node.address is None:
                await node.listen(NodeAddr("mem", 0))
            control, data = await member.link(node), await member.link(node, "data")
            for hop in (0, 1, 2, 255):
                control.send(Close(session.id))
                control.send(Probe(session.id, epoch))
                control.send(Retract(session.id, epoch, U32, 0))
                control.send(Retract(session.id, epoch + 1, 0, 0))
                control.send(Feed(session.id, epoch, hop, NodeAddr("mem", 1), 0, 5))
                control.send(Fault(session.id, epoch, hop, "pipeline_aborted", "gone"))
                control.send(Fault(session.id, epoch, hop, "draining", "leaves", hop))
                control.send(Opened(session.id, epoch, hop, "x", False))
                control.send(Progress(session.id, epoch, hop, 0, 0, 0))
                data.send(Credit(session.id, epoch, hop, U32))
                data.send(Step(session.id, epoch, hop, 0, 0, 0, U32, "hidden", None, None))
                data.send(Step(session.id, epoch, hop, 40, 1, 0, U32, "ids", (1,), None))

    def check(member: Member) -> None:
        assert not [m for m in member.answers if isinstance(m, Progress)], "a Probe of another was answered"

    attack(bench, work, check)


# -- signed Opens -----------------------------------------------------------------------------------------------------


def test_an_open_is_worth_nothing_to_others_elsewhere_or_again(bench: Bench) -> None:
    """A true Open of the origin: sent by another member, to another node, twice, changed, or signed by another key."""

    async def main() -> None:
        async with bench.scene(spares=["2-3"]) as scene, memory_node(scene.swarm.network, "insider") as node:
            member, taken = Member(node, scene), list[Open]()
            origin = scene.swarm.origin.node
            worker = scene.hops[1].worker
            overhear(worker, "on_open", taken)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            (stolen,) = taken
            assert is_signed(stolen) and stolen.origin == origin.transport.node
            link = await member.link(scene.hops[1])
            spare = await member.link(scene.hops[3])
            own = origin.pool.find(scene.hops[1].transport.node, "control")
            assert own is not None
            other = Signer(Ed25519PrivateKey.from_private_bytes(bytes(32)))
            link.send(stolen)
            spare.send(stolen)
            link.send(member.signer.sign(stolen))  # the token of another link
            link.send(replace(member.signer.sign(replace(stolen, token=link.hello.token)), capacity=9))
            own.send(stolen)  # a second time, over the same link
            own.send(replace(stolen, serial=stolen.serial + 1))
            own.send(other.sign(stolen))
            await asyncio.sleep(0.5)
            assert len([m for m in member.answers if isinstance(m, Fault)]) == 4
            assert not any(host.num_sessions or host._opening for hop in scene.hops for host in hop.hosts)

    bench.play(main)


def test_an_id_is_its_origins_alone() -> None:
    """Another key, other drawn bytes or another tag: not a session of it. Nodes draw no id twice."""
    one, other = NodeId("1" * 64), NodeId("1" * 63 + "2")
    session = session_of(one, bytes(DRAWN_BYTES))
    assert len(session) == 16 and is_session_of(session, one) and not is_session_of(session, other)
    for at in range(16):
        changed = bytearray(session)
        changed[at] ^= 1
        assert not is_session_of(SessionId(bytes(changed)), one), at
    assert session_of(other, bytes(DRAWN_BYTES)) != session


def test_every_field_of_an_open_is_signed(bench: Bench) -> None:
    """Changing any of them breaks the signature; numbers are signed as the receiver reads them."""
    signer = Signer(Ed25519PrivateKey.from_private_bytes(bytes(32)))
    message = signer.sign(opening(1))
    assert is_signed(message) and message.serial + 1 == signer.sign(message).serial
    changes: dict[str, Any] = {"session": SessionId(bytes(16)), "successor": None, "span": Span(0, 1)}
    changes |= {"path": "star", "ends": "edges", "precision": "fp32", "token": "ff" * 16, "signature": "ff" * 64}
    changes |= {name: NodeId("ee" * 32) for name in ("model", "predecessor", "origin", "to")}
    changes["sampling"] = SamplingParams(temperature=1)
    for name in Open.__slots__:
        value = changes.get(name, 77)
        assert not is_signed(replace(message, **{name: value})), name
    assert is_signed(signer.sign(replace(message, sampling=SamplingParams(temperature=1))))


def test_a_serial_is_admitted_once() -> None:
    """In any order, as far as the window reaches back; numbers of any size."""
    serials = Serials()
    assert [serials.admit(n) for n in (5, 5, 3, 3, 1, 0, 6, 5, 1 << 64, 6, (1 << 64) - 1023, (1 << 64) - 1024)] == [
        *(True, False, True, False, True, True, True, False),
        *(True, False, True, False),
    ]


# -- ids --------------------------------------------------------------------------------------------------------------


def test_logs_and_events_do_not_show_session_ids(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Not even a part of one: a hash stands in its place, the same on all nodes."""

    async def main() -> None:
        ids: list[SessionId] = []
        async with bench.scene() as scene:
            scene.faults.at("decode", scene.hops[1], lambda: ids.extend(scene.swarm.origin.node.sessions), 3)
            scene.faults.at("decode", scene.hops[1], lambda: scene.faults.die(scene.hops[1]), 5)
            with caplog.at_level("DEBUG", logger="manyhands"):
                await scene.ask("hot")
            (session,) = ids
            answer = scene.answers[0]
            said = "\n".join([caplog.text, repr(answer.session), repr(answer.events), repr(answer.repairs)])
            assert public_id(session) in said and session.hex()[:8] not in said

    bench.play(main)
