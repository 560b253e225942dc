"""Audits in a whole swarm, under the virtual clock: who is caught, who is not accused, and what cannot be told."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from manyhands.checkpoint.config_fields import read_facts
from manyhands.config import WorkerConfig
from manyhands.core import NodeAddr, PathKind, SamplingParams, Span
from manyhands.net.transport import Link, try_send
from manyhands.origin.audit import Audit
from manyhands.testing.faulty_device import PoisonedModel, spoiled
from manyhands.testing.tiny import make_tiny
from manyhands.wire.attest_message import Attest, Attested, Root
from manyhands.wire.signed import Signer
from manyhands.worker import attesting, feeding
from manyhands.worker.attesting import Attesting
from manyhands.worker.execute import Device, Result, Work
from manyhands.worker.feeding import MAX_FEED_ROWS
from manyhands.worker.session import HopSession
from tests.kill import CUT, REQUEST, Bench, Scene, kept_models
from tests.worker.pipeline import random_ids

AUDITED = replace(REQUEST, audit=1.0)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("audit") / "qwen3", seed=21), models)


def audit_of(scene: Scene) -> Audit:
    audit = scene.answers[-1].audit
    assert audit is not None
    return audit


@pytest.mark.parametrize("path", ["ring", "star"])
def test_honest_hops_pass(bench: Bench, path: PathKind) -> None:
    """All of them, with drafts that are wrong on the way; the text is what it is without."""

    async def main() -> None:
        async with bench.scene(request=AUDITED) as scene:
            for number in range(6):
                drafter = bench.half_right("hot", number % 3) if number % 2 else None
                got = await scene.ask("hot", number % 3, path=path, drafter=drafter)
                assert got == bench.wanted["hot", number % 3]
                audit = audit_of(scene)
                assert audit.outcome == "passed", audit
                assert audit.spans == tuple(hop.hosts[0].info.span for hop in scene.hops[:3])

    bench.play(main)


async def audited(scene: Scene) -> Audit:
    await scene.ask("hot")
    return audit_of(scene)


def draw_by(scene: Scene, seed: int) -> None:
    scene.swarm.origin._audits._draw = random.Random(seed).random


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_hop_with_plausible_wrong_numbers_is_found_and_used_no_more(bench: Bench, wrong: int) -> None:
    async def main() -> None:
        async with bench.scene(spares=["0-5", "0-5"], request=AUDITED) as scene:
            draw_by(scene, wrong)
            node = scene.hops[wrong]
            scene.faults.poison(node, "nudge")
            audit = await audited(scene)
            assert audit.outcome == "failed" and [offer.node for offer in audit.nodes] == [node.transport.node]
            assert audit.spans == (node.hosts[0].info.span,) and len(audit.evidence) == 3
            assert [event.kind for event in scene.answers[-1].events] == ["audit"]
            assert scene.swarm.origin.routes.evicted == {node.transport.node}
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            assert audit_of(scene).outcome == "passed"

    bench.play(main)


def test_of_two_that_differ_without_a_third_none_is_used_less(bench: Bench) -> None:
    async def main() -> None:
        async with bench.scene(request=AUDITED) as scene:
            draw_by(scene, 1)
            scene.faults.poison(scene.hops[1], "nudge")
            audit = await audited(scene)
            assert audit.outcome == "disputed" and {offer.name for offer in audit.nodes} == {"n1", "n3"}
            assert not scene.swarm.origin.routes.evicted and scene.answers[-1].events

    bench.play(main)


def test_a_wrong_auditor_accuses_itself(bench: Bench) -> None:
    async def main() -> None:
        async with bench.scene(spares=["0-5", "0-5"], request=AUDITED) as scene:
            draw_by(scene, 2)
            scene.faults.poison(wrong := scene.hops[3], "nudge")
            audit = await audited(scene)
            assert audit.outcome == "failed" and [offer.node for offer in audit.nodes] == [wrong.transport.node]
            assert scene.answers[-1].token_ids == bench.wanted["hot", 0]

    bench.play(main)


class TwoFaced(PoisonedModel):
    """Sends on other rows than it attests."""

    def run(self, works: Sequence[Work]) -> list[Result | Exception]:
        return [spoiled(result, "nudge") for result in self._plain.run(works)]


@pytest.mark.parametrize(
    ("wrong", "outcome", "named"), [(0, "disputed", "n0 n1"), (1, "disputed", "n1 n2"), (2, "failed", "n2")]
)
def test_a_hop_that_attests_the_right_rows_and_sends_others(bench: Bench, wrong: int, outcome: str, named: str) -> None:
    """The next hop says what came to it. What came to the origin it knows itself."""

    async def main() -> None:
        async with bench.scene(request=AUDITED) as scene:
            (host,) = scene.hops[wrong].hosts
            host.engine.model = cast(Any, TwoFaced(cast(Any, host.engine.model), "nudge"))
            await scene.ask("hot")
            audit = audit_of(scene)
            assert (audit.outcome, " ".join(offer.name for offer in audit.nodes)) == (outcome, named)

    bench.play(main)


@pytest.mark.parametrize("how", ["silent", "unsigned", "of fewer rows", "of no rows"])
def test_a_hop_that_does_not_say_what_it_computed_is_named(
    bench: Bench, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = attesting._attested

    def odd(place: HopSession, message: Attest) -> Attested:
        said = plain(place, message)
        if message.hop != 1:
            return said
        match how:
            case "of fewer rows":
                return plain(place, replace(message, until=message.until - 1))
            case "of no rows":
                return replace(said, made=None)
            case "unsigned":
                return replace(said, made=Root("ab" * 32))
        raise KeyError(how)

    async def main() -> None:
        async with bench.scene(request=AUDITED) as scene:
            if how == "unsigned":
                monkeypatch.setattr(Signer, "attest", lambda self, message: message)
            elif how == "silent":
                monkeypatch.setattr(Attesting, "on_attest", lambda *_: True)
            else:
                monkeypatch.setattr(attesting, "_attested", odd)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            audit, first = audit_of(scene), "n1" if how.startswith("of") else "n0"
            assert audit.outcome == "disputed" and [offer.name for offer in audit.nodes] == [first], audit

    bench.play(main)


def test_a_hop_that_feeds_the_auditor_falsely_is_named_and_its_successor_is_not_accused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def falsely(place: HopSession, standby: Link, start: int, until: int) -> None:
        for step in place.log.replay(until, start):
            assert step.payload is not None
            rows = bytes(step.payload.data)
            width = len(rows) // step.count
            turned = b"".join(rows[at : at + width] for at in range(0, len(rows), width)[::-1])
            wrong = step.payload._replace(data=turned)
            again = place.addressed(step, step._replace(payload=wrong))
            try_send(standby, again._replace(reply_from=until, committed=until))

    async def main() -> None:
        async with bench.scene(request=AUDITED) as scene:
            draw_by(scene, 3)
            monkeypatch.setattr(feeding, "_send_log", falsely)
            audit = await audited(scene)
            assert audit.outcome == "disputed" and not scene.swarm.origin.routes.evicted
            assert [offer.name for offer in audit.nodes] in (["n0", "n3"], ["n1", "n3"])

    bench.play(main)


def test_a_second_turn_is_audited_from_its_beginning(bench: Bench) -> None:
    """Its hops go on with caches of the first, and with their hashes."""

    async def main() -> None:
        async with bench.scene(request=AUDITED) as scene:
            await scene.ask("hot", tenant="someone")
            assert audit_of(scene).outcome == "passed"
            await scene.ask("hot", tenant="someone")
            assert scene.answers[-1].cached_tokens > 0 and audit_of(scene).outcome == "passed", audit_of(scene)

    bench.play(main)


def test_what_cannot_be_audited_says_why(bench: Bench) -> None:
    async def main() -> None:
        async with bench.scene(spares=[], request=AUDITED) as scene:
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            audit = audit_of(scene)
            assert audit.outcome == "impossible" and "no other node" in audit.detail
        async with bench.scene(spares=["0-5", "0-5"], request=AUDITED) as scene:
            scene.faults.at("decode", scene.hops[1], lambda: scene.faults.die(scene.hops[1]), 6)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            audit = audit_of(scene)
            assert audit.outcome == "impossible" and "route was changed" in audit.detail
        async with bench.scene(request=AUDITED, ends="edges") as scene:
            assert await scene.ask("hot") == bench.wanted["hot", 0] and scene.answers[-1].audit is None

    bench.play(main)


def test_a_hop_without_a_log_is_named(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """It feeds no auditor: the audit said that it was not done in time, and neither it nor the hop said why."""
    caplog.set_level("INFO", feeding.__name__)

    async def main() -> None:
        async with bench.scene(request=replace(AUDITED, patience_s=5.0), worker=WorkerConfig(log_bytes=0)) as scene:
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            audit = audit_of(scene)
            assert audit.outcome == "impossible"
            assert "s: n3 had computed 0 of the " in audit.detail
            assert audit.detail.endswith("positions that n0 was to feed it from its output log")

    bench.play(main)
    assert "its standby gets no rows: the output log was dropped (log_bytes)" in caplog.text


def test_an_auditor_that_freezes_holds_no_answer_for_ever(bench: Bench) -> None:
    async def main() -> None:
        async with bench.scene(request=replace(AUDITED, patience_s=5.0)) as scene:
            host = scene.hops[3].hosts[0]
            host.step = lambda *_: None  # type: ignore[method-assign]
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            audit = audit_of(scene)
            assert audit.outcome == "impossible" and "within" in audit.detail

    bench.play(main)


@pytest.mark.parametrize("share", [0.0, 1e-9])
def test_hops_keep_hashes_only_where_answers_are_audited(bench: Bench, share: float) -> None:
    async def main() -> None:
        async with bench.scene(request=replace(REQUEST, audit=share)) as scene:
            draw_by(scene, 0)
            (host,), seen = scene.hops[1].hosts, list[bool]()

            def look() -> None:
                seen.extend(place.leaves is not None for place in host._places.values())

            scene.faults.at("decode", scene.hops[1], look, 3)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            assert seen == [share > 0] and scene.answers[-1].audit is None

    bench.play(main)


def test_nodes_of_another_arithmetic_class_are_not_compared(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bits differ, and no node is accused of that."""
    plain = HopSession.answer_open

    def other_class(self: HopSession, arithmetic: str, **facts: Any) -> None:
        plain(self, f"{arithmetic}{' of another kind' * self.is_standby}", **facts)

    async def main() -> None:
        async with bench.scene(spares=["0-5", "0-5"], request=AUDITED) as scene:
            monkeypatch.setattr(HopSession, "answer_open", other_class)
            scene.faults.poison(scene.hops[3], "nudge")
            audit = await audited(scene)
            assert audit.outcome == "impossible" and not scene.swarm.origin.routes.evicted

    bench.play(main)


@pytest.mark.parametrize("path", ["ring", "star"])
def test_this_machine_is_believed(bench: Bench, path: PathKind) -> None:
    """Where it holds the layers itself it needs no third."""

    async def main() -> None:
        async with bench.scene(spares=[], request=AUDITED) as scene:
            origin = scene.swarm.origin
            route = await origin.node.requests.survey(scene.swarm.addrs)
            await origin.node.listen(NodeAddr("mem", 0))
            device = Device.start(1)
            await origin.host_own(bench.folder, Span(0, 6), device)
            scene.faults.poison(wrong := scene.hops[1], "nudge")
            await scene.ask("hot", route=route, path=path)
            audit = audit_of(scene)
            assert audit.outcome == "failed" and [offer.node for offer in audit.nodes] == [wrong.transport.node]
            assert "this machine" in audit.detail and len(audit.evidence) == 2
            device.close()

    bench.play(main)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "deepseek_v4", "gemma3n_text"])
def test_families_with_states_and_with_what_goes_beside_rows(family: str, tmp_path: Path) -> None:
    with kept_models() as models:
        model = Bench(make_tiny(family, tmp_path / family, seed=3), models)

        async def main() -> None:
            layers = read_facts(model.folder).num_layers
            async with model.scene(CUT, spares=[f"0-{layers - 1}"], request=AUDITED) as scene:
                assert await scene.ask("hot") == model.wanted["hot", 0]
                audit = audit_of(scene)
                assert audit.outcome == "passed" and len(audit.spans) == 3

        model.play(main)


@pytest.mark.parametrize("path", ["ring", "star"])
def test_a_long_answer_is_computed_again_in_parts(bench: Bench, path: PathKind) -> None:
    """More rows than a hop feeds at once."""
    prompt = tuple(random_ids(MAX_FEED_ROWS + 400, seed=9))

    async def main() -> None:
        async with bench.scene(request=AUDITED) as scene:
            origin = scene.swarm.origin
            answer = await origin.complete(origin.request_ids(prompt, SamplingParams(max_tokens=20)), path=path)
            assert answer.audit is not None and answer.audit.outcome == "passed", answer.audit
            assert len(answer.audit.spans) == 3

    bench.play(main)
