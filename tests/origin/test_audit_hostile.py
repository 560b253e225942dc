"""Audits against those who want none: hops that undo them, auditors that leave, feeders that feed nothing."""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import ProtocolError, ShardUnavailable, StateGone
from manyhands.net.transport import Link, try_send
from manyhands.origin import Origin
from manyhands.origin.audit import Audit
from manyhands.origin.node import FullNode
from manyhands.origin.route import Hop, Lease
from manyhands.route.offer import Offer
from manyhands.testing.swarm import memory_node
from manyhands.testing.tiny import make_tiny
from manyhands.wire.attest_message import Attest, Attested
from manyhands.worker import attesting, feeding
from manyhands.worker.attesting import Attesting
from manyhands.worker.execute import Device
from manyhands.worker.session import HopSession
from tests.kill import NEW, REQUEST, Bench, Scene, kept_models, request_of
from tests.origin.test_adoption import LONG, begin, go_on
from tests.waiting import until

AUDITED = replace(REQUEST, audit=1.0)
TWO = ["0-5", "0-5"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("audit") / "qwen3", seed=21), models)


async def audited(bench: Bench, scene: Scene, **options: Any) -> Audit:
    """What the audit of an answer found, whose text is as it must be unless a hop is poisoned."""
    await scene.ask("hot", **options)
    audit = scene.answers[-1].audit
    assert audit is not None
    return audit


def ids(nodes: Sequence[FullNode]) -> list[NodeId]:
    return [node.transport.node for node in nodes]


def draw(scene: Scene, number: float) -> None:
    """Every draw of the origin's audits is `number`."""
    scene.swarm.origin._audits._draw = lambda: number


def backwards(place: HopSession, standby: Link, start: int, until: int) -> None:
    """Feed a standby the rows of each step of the log in the wrong order."""
    for step in place.log.replay(until, start):
        assert step.payload is not None
        rows = bytes(step.payload.data)
        width = len(rows) // step.count
        turned = b"".join(rows[at : at + width] for at in range(0, len(rows), width)[::-1])
        again = place.addressed(step, step._replace(payload=step.payload._replace(data=turned)))
        try_send(standby, again._replace(reply_from=until, committed=until))


class OtherTokens:
    """Ends that embed the token after each."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def embed(self, ids: Sequence[int]) -> Any:
        return self._plain.embed([(i + 1) % 256 for i in ids])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


# -- auditors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_an_auditor_that_leaves_as_it_is_asked_costs_no_answer(
    bench: Bench, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has computed all rows by then."""
    plain = Attesting.on_attest

    async def main() -> None:
        async with bench.scene(spares=TWO, request=AUDITED) as scene:
            (host,) = scene.hops[3].hosts

            def leave(self: Attesting, message: Attest, link: Link, now: float) -> bool:
                if host not in self._hosts:
                    return plain(self, message, link, now)
                place = host.meant(message, link.peer)
                assert place is not None
                if how == "leaves":
                    place.fault(ShardUnavailable.code, "leaves", None)
                else:
                    scene.faults.die(scene.hops[3])
                return True

            monkeypatch.setattr(Attesting, "on_attest", leave)
            draw(scene, 0.0)
            audit = await audited(bench, scene)
            assert scene.answers[-1].token_ids == bench.wanted["hot", 0]
            assert audit.outcome == "passed" and len(audit.spans) == 3 and "n3" not in audit.detail

    bench.play(main)


def test_an_auditor_that_dies_while_it_computes_is_passed_over(bench: Bench) -> None:
    async def main() -> None:
        async with bench.scene("0-5", spares=TWO, request=AUDITED) as scene:
            draw(scene, 0.0)
            scene.faults.slow(auditor := scene.hops[1], 2.0)
            later = asyncio.get_running_loop().call_later
            scene.faults.at("prefill", auditor, lambda: later(1.0, scene.faults.die, auditor))
            audit = await audited(bench, scene)
            assert audit.outcome == "passed" and audit.detail == "n2 computed the same as n0", audit

    bench.play(main)


def test_a_node_that_cannot_be_reached_is_passed_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers on the control lane, as before, and takes no other link."""

    async def main() -> None:
        async with bench.scene(spares=TWO, request=AUDITED) as scene:
            draw(scene, 0.0)
            connect, tried = scene.swarm.origin.routes.connect, list[NodeId]()

            async def refused(index: int, offer: Offer, num_hops: int, lease: Lease) -> Hop:
                tried.append(offer.node)
                if offer.node == scene.hops[3].transport.node:
                    raise ShardUnavailable("it cannot be reached")
                return await connect(index, offer, num_hops, lease)

            monkeypatch.setattr(scene.swarm.origin.routes, "connect", refused)
            audit = await audited(bench, scene)
            assert sorted(tried) == sorted(3 * ids(scene.hops[3:])), "each once for each hop"
            assert audit.outcome == "passed" and len(audit.spans) == 3, audit

    bench.play(main)


def test_a_node_that_names_many_spans_is_not_drawn_more_often(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with bench.scene(spares=TWO, request=AUDITED) as scene:
            draw(scene, 0.5)
            known = scene.swarm.origin.node.requests.known_offers

            def more(addrs: Sequence[NodeAddr], excluded: Collection[NodeId]) -> list[Offer]:
                found = known(addrs, excluded)
                eager = [offer for offer in found if offer.name == "n3"]
                return [offer for offer in found if offer.name != "n3"] + 100 * eager

            monkeypatch.setattr(scene.swarm.origin.node.requests, "known_offers", more)
            audit = await audited(bench, scene)
            assert audit.outcome == "passed" and "n4" not in audit.detail, audit
            draw(scene, 0.49)
            audit = await audited(bench, scene)
            assert audit.outcome == "passed" and "n3" not in audit.detail, audit

    bench.play(main)


def test_a_third_node_that_was_given_other_rows_decides_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """n3 says that it was given what hop 1 was, and states the numbers that n4 comes to from other rows: hop 0 is its
    accomplice, and feeds n4 these. Hop 1 computed what it should."""
    plain = attesting._attested

    async def main() -> None:
        async with bench.scene(spares=TWO, request=AUDITED) as scene:
            draw(scene, 0.0)
            (honest,), (false,) = scene.hops[1].hosts, scene.hops[3].hosts
            monkeypatch.setattr(feeding, "_send_log", backwards)

            def agreed(place: HopSession, message: Attest) -> Attested:
                if message.hop != 1 and place.is_standby:
                    return replace(plain(place, message), given=None)  # not to be looked at here
                if place in false._places.values():
                    (here,) = honest._places.values()
                    return replace(plain(place, message), given=plain(here, message).given)
                return plain(place, message)

            monkeypatch.setattr(attesting, "_attested", agreed)
            audit = await audited(bench, scene)
            assert audit.outcome == "disputed" and [offer.name for offer in audit.nodes] == ["n0", "n4"], audit
            assert not scene.swarm.origin.routes.evicted

    bench.play(main)


# -- hops -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["nothing", "falsely"])
def test_a_hop_that_feeds_no_auditor_does_not_save_another(
    bench: Bench, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hop 0 keeps hop 1 from being audited; hop 2 is found all the same."""
    plain = feeding._send_log

    def feed(place: HopSession, standby: Link, start: int, until: int) -> None:
        if place.opened.hop:
            plain(place, standby, start, until)
        elif how == "falsely":
            backwards(place, standby, start, until)

    async def main() -> None:
        async with bench.scene(spares=TWO, request=AUDITED) as scene:
            monkeypatch.setattr(feeding, "_send_log", feed)
            scene.faults.poison(wrong := scene.hops[2], "nudge")
            audit = await audited(bench, scene)
            assert audit.outcome == "failed" and [offer.node for offer in audit.nodes] == ids([wrong]), audit
            assert scene.swarm.origin.routes.evicted == {wrong.transport.node}

    bench.play(main)


# -- this machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["embedded", "feed_first"])
def test_what_fails_in_an_audit_costs_no_answer(bench: Bench, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends have no memory left for the rows that an audit needs."""

    async def full(*_: Any) -> None:
        raise MemoryError("no room")

    async def main() -> None:
        async with bench.scene(request=AUDITED) as scene:
            monkeypatch.setattr(f"manyhands.origin.audit.{where}", full)
            audit = await audited(bench, scene)
            assert scene.answers[-1].token_ids == bench.wanted["hot", 0]
            assert (audit.outcome, audit.detail) == ("impossible", "no room")

    bench.play(main)


@pytest.mark.parametrize("how", ["dies", "fails", "blames", "goes back"])
def test_no_hop_undoes_what_it_has_signed(bench: Bench, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, learns by that that the answer is audited, and tries to end the audit."""
    plain = Attesting.on_attest
    faults = {
        "fails": (ShardUnavailable.code, None),
        "blames": (ProtocolError.code, 0),
        "goes back": (StateGone.code, None),
    }

    async def main() -> None:
        async with bench.scene(spares=TWO, request=AUDITED) as scene:
            wrong = scene.hops[1]
            (host,) = wrong.hosts

            def regret(self: Attesting, message: Attest, link: Link, now: float) -> bool:
                plain(self, message, link, now)
                place = host.meant(message, link.peer) if host in self._hosts else None
                if place is not None and how == "dies":
                    asyncio.get_running_loop().call_later(0.01, scene.faults.die, wrong)
                elif place is not None:
                    place.fault(faults[how][0], "it cannot be", faults[how][1])
                return True

            monkeypatch.setattr(Attesting, "on_attest", regret)
            scene.faults.poison(wrong, "nudge")
            audit = await audited(bench, scene)
            assert audit.outcome == "failed" and [offer.node for offer in audit.nodes] == ids([wrong]), audit
            assert scene.swarm.origin.routes.evicted == {wrong.transport.node}

    bench.play(main)


def test_a_hop_that_is_gone_as_it_is_asked_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: nothing is waited for."""
    plain = Attesting.on_attest

    async def main() -> None:
        async with bench.scene(spares=TWO, request=AUDITED) as scene:
            (host,), asked_at = scene.hops[1].hosts, list[float]()

            def go(self: Attesting, message: Attest, link: Link, now: float) -> bool:
                if host not in self._hosts:
                    return plain(self, message, link, now)
                asked_at.append(now)
                scene.faults.die(scene.hops[1])
                return True

            monkeypatch.setattr(Attesting, "on_attest", go)
            audit = await audited(bench, scene)
            assert audit.outcome == "disputed" and [offer.name for offer in audit.nodes] == ["n1"], audit
            assert asyncio.get_running_loop().time() < asked_at[0] + 1
            assert scene.answers[-1].token_ids == bench.wanted["hot", 0]

    bench.play(main)


# -- origins ----------------------------------------------------------------------------------------------------------


def test_hops_do_not_answer_for_what_another_origin_sent_them(bench: Bench) -> None:
    """An origin sends rows of other tokens than it says. Another one, which goes on with that session, audits its answer: hop 0
    was given other rows than this origin would have sent it, and is not to blame."""

    async def main() -> None:
        async with bench.scene(spares=TWO, request=AUDITED) as scene:
            device = Device.start(1)
            async with memory_node(scene.swarm.network, "other", request=AUDITED) as node:
                false, honest = scene.swarm.origin, Origin(node, scene.swarm.origin.model, device, scene.swarm.addrs)
                assert false.ends is not None
                false.ends.ends = cast(Any, OtherTokens(false.ends.ends))
                cut = await begin(false, LONG, 9)
                answer = await go_on(honest, LONG, cut, 9)
                assert answer.redrawn and answer.cached_tokens
                assert answer.audit is not None and answer.audit.outcome == "impossible", answer.audit
                assert not honest.routes.evicted
            device.close()

    bench.play(main)


def test_what_hops_have_cached_of_wrong_numbers_is_not_gone_on_with(bench: Bench) -> None:
    """The first turn is not audited. Another answer is: the node is found. What hop 2 has cached of its numbers goes, too."""

    async def main() -> None:
        async with bench.scene(spares=TWO, request=AUDITED) as scene:
            draw(scene, 1.0)
            scene.faults.poison(wrong := scene.hops[1], "nudge")
            await scene.ask("hot", tenant="someone")
            draw(scene, 0.0)
            audit = await audited(bench, scene)
            assert scene.answers[0].audit is None and audit.outcome == "failed"
            assert scene.swarm.origin.routes.evicted == {wrong.transport.node}
            assert await scene.ask("hot", tenant="someone") == bench.wanted["hot", 0]

    bench.play(main)


def test_what_a_session_computed_of_wrong_numbers_before_its_repair_is_not_kept(bench: Bench) -> None:
    """An answer of someone else is under way over the node that is found, and goes on over another one."""

    async def main() -> None:
        async with bench.scene(spares=TWO, request=AUDITED) as scene:
            origin = scene.swarm.origin
            scene.faults.poison(wrong := scene.hops[1], "nudge")
            answer = origin.answer(origin.request_ids(*request_of("hot", 0)))
            tokens = origin.stream(answer, tenant="someone")
            for _ in range(5):
                await anext(tokens)
            draw(scene, 0.0)
            await audited(bench, scene)
            assert origin.routes.evicted == {wrong.transport.node}
            draw(scene, 1.0)
            assert len([token async for token in tokens]) == NEW - 5 and answer.repairs
            assert await scene.ask("hot", tenant="someone") == bench.wanted["hot", 0]

    bench.play(main)


def test_a_client_that_leaves_during_the_audit_leaves_no_lease(bench: Bench) -> None:
    async def main() -> None:
        async with bench.scene(request=AUDITED) as scene:  # looks for leases in the end
            (host,) = scene.hops[3].hosts
            host.step = lambda *_: None  # type: ignore[method-assign]
            asked = asyncio.ensure_future(scene.ask("hot"))
            await until(lambda: host.num_sessions == 3)  # one for each hop
            assert scene.answers[0].token_ids == bench.wanted["hot", 0] and not asked.done()
            asked.cancel()
            await asyncio.wait((asked,))
            assert asked.cancelled() and scene.answers[0].audit is None and not scene.swarm.origin.node.sessions

    bench.play(main)
