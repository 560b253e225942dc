"""The kill matrix: whatever dies, whenever: the text is what it would have been. Under the virtual clock.

hop x phase x path x requests in flight x temperature; then other ways of losing and replacing hops, by name.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import EndsAt, NodeAddr, PathKind, Span
from manyhands.engine import library
from manyhands.errors import ManyhandsError, PipelineAborted, PipelineStalled, ShardUnavailable
from manyhands.net.liveness import FOUND_S
from manyhands.origin.node import FullNode
from manyhands.route.search import Offer
from manyhands.testing.faults import Faults
from manyhands.testing.faulty_device import Poison
from manyhands.testing.swarm import memory_node
from manyhands.testing.tiny import make_tiny
from manyhands.testing.trouble import PHASES, Phase
from manyhands.worker.execute import Device
from manyhands.worker.serve import SpanHost
from tests.kill import CUT, REQUEST, Bench, Scene, kept_models
from tests.nightly import daily
from tests.worker.pipeline import forced

# A kill is noticed at once and spares are at hand: in virtual time, where computing takes none, nothing may take longer.
DEADLINE_S = 1.0
# How many messages of a phase reach a hop before it dies: some way into it.
SKIP: dict[Phase, int] = {"opening": 0, "prefill": 1, "decode": 7, "window": 2, "replay": 0}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("kill") / "qwen3", seed=21), models)


async def ask(bench: Bench, scene: Scene, kind: str, count: int, path: PathKind, drafts: bool = False) -> None:
    """`count` requests at once, all as undisturbed, within the deadline."""

    def options(number: int) -> dict[str, Any]:
        return {"path": path, **({"drafter": bench.half_right(kind, number)} if drafts else {})}

    async with asyncio.timeout(DEADLINE_S):
        got = await asyncio.gather(*(scene.ask(kind, number, **options(number)) for number in range(count)))
    assert got == [bench.wanted[kind, number] for number in range(count)]


def arm(scene: Scene, phase: Phase, victim: int) -> None:
    """Kill hop `victim` in `phase`. In a replay: first it while decoding, then the hop after it while that is repaired."""
    node = scene.hops[victim]
    if phase == "replay":
        scene.faults.at("decode", node, lambda: scene.faults.die(node), SKIP["decode"])
        second = scene.hops[(victim + 1) % 3]
        scene.faults.at("replay", second, lambda: scene.faults.die(second))
    else:
        scene.faults.at(phase, node, lambda: scene.faults.die(node), SKIP[phase])


def test_the_undisturbed_answers_differ(bench: Bench) -> None:
    """Else equality would prove little."""
    assert len({tuple(ids) for ids in bench.wanted.values()}) == 6
    assert all(len(set(ids)) > 5 for ids in bench.wanted.values())


BACK_ENDS = library.supported()
# (the back end of the hops, that of the spare): each by day once as what is lost, once as what takes over.
PAIRS = list(permutations(BACK_ENDS, 2))
BY_DAY = list(zip(BACK_ENDS, [*BACK_ENDS[1:], BACK_ENDS[0]], strict=True)) if PAIRS else []


@pytest.mark.parametrize(("lost", "taking"), daily(BY_DAY, [pair for pair in PAIRS if pair not in BY_DAY]))
def test_a_hop_is_repaired_by_a_node_on_another_back_end(lost: str, taking: str, tmp_path: Path) -> None:
    """Tiles or vectors of one width are replaced by others, or by plain C: the text is the same, and so is the class."""
    found: list[str] = []

    async def main(mixed: Bench) -> None:
        for victim in range(3):
            for kind in ("greedy", "hot"):
                async with mixed.scene() as scene:
                    found[:] = [(await node.hosts[0].engine.ensure_loaded()).runner.back_end for node in scene.hops]
                    arm(scene, "decode", victim)
                    before = library.calls(taking)
                    await ask(mixed, scene, kind, 2, "ring")
                    assert library.calls(taking) > before and len(scene.answers[0].repairs) == 1
                    assert {answer.exactness for answer in scene.answers} == {"E0"}

    with forced(lost), kept_models([lost, lost, lost, taking]) as models:
        mixed = Bench(make_tiny("gemma2", tmp_path / "gemma2", seed=21), models)
        mixed.play(lambda: main(mixed))
    assert found == [lost, lost, lost, taking]


def test_a_route_of_all_back_ends_is_repaired_by_any(tmp_path: Path) -> None:
    """Every node is on another back end than the one before it."""

    async def main(mixed: Bench) -> None:
        for victim in range(3):
            async with mixed.scene() as scene:
                arm(scene, "decode", victim)
                await ask(mixed, scene, "hot", 2, "ring")
                assert {answer.exactness for answer in scene.answers} == {"E0"}

    with forced(BACK_ENDS[0]), kept_models(BACK_ENDS) as models:
        mixed = Bench(make_tiny("gemma2", tmp_path / "gemma2", seed=21), models)
        before = {name: library.calls(name) for name in BACK_ENDS}
        mixed.play(lambda: main(mixed))
    assert all(library.calls(name) > before[name] for name in BACK_ENDS)


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_any_hop_may_die_in_any_phase(bench: Bench, phase: Phase, victim: int, path: PathKind) -> None:
    """With one and with three requests in flight on three nodes, greedy and hot (HN-47; its speeds: bench/split.py)."""

    async def main() -> None:
        for count in (1, 3):
            for kind in ("greedy", "hot"):
                async with bench.scene() as scene:
                    arm(scene, phase, victim)
                    await ask(bench, scene, kind, count, path, drafts=phase == "window")
                    assert len(scene.faults.trouble.fired) == (2 if phase == "replay" else 1), "it did happen"

    bench.play(main)


# -- more than one at once, other ends, no logs -----------------------------------------------------------------------


@pytest.mark.parametrize("victims", [(0, 1), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize(
    ("ends", "log_bytes", "path"),
    [("origin", 1 << 28, "ring"), ("origin", 0, "star"), ("edges", 1 << 28, "star"), ("edges", 0, "ring")],
)
def test_several_hops_may_die_at_once(
    bench: Bench, victims: tuple[int, ...], ends: EndsAt, log_bytes: int, path: PathKind
) -> None:
    """Adjacent ones, first and last, all; with the ends at the edges; without logs (replay from further upstream)."""

    async def main() -> None:
        for phase, kind in (("prefill", "greedy"), ("decode", "hot")):
            async with bench.scene(ends=ends, worker=WorkerConfig(log_bytes=log_bytes)) as scene:

                def die(scene: Scene = scene) -> None:
                    for victim in victims:
                        scene.faults.die(scene.hops[victim])

                scene.faults.at(phase, scene.hops[victims[0]], die, SKIP[phase])  # type: ignore[arg-type, index]
                await ask(bench, scene, kind, 1, path)
                assert scene.faults.trouble.fired

    bench.play(main)


@pytest.mark.parametrize("ends", ["origin", "edges"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_hop_dies_without_logs_or_with_the_ends_at_the_edges(bench: Bench, victim: int, ends: EndsAt) -> None:
    """Drafts and all, three requests."""

    async def main() -> None:
        async with bench.scene(ends=ends, worker=WorkerConfig(log_bytes=0)) as scene:
            arm(scene, "window", victim)
            await ask(bench, scene, "hot", 3, "ring", drafts=True)
            assert scene.faults.trouble.fired

    bench.play(main)


def test_spans_of_one_node_share_one_bound_and_what_is_bounded_out_comes_from_further_upstream(bench: Bench) -> None:
    """n0 serves hops 0 and 1 of three sessions; room is for two logs of six. When hop 2 dies, all are rebuilt all the same."""
    log_bytes = 16 << 10

    async def main() -> None:
        async with bench.scene(worker=WorkerConfig(log_bytes=log_bytes)) as scene:
            node = scene.hops[0]
            await node.worker.host(bench.folder, Span(2, 4), "bf16", node.hosts[0].engine.device, model_name="test")
            scene.faults.die(scene.hops[1])
            await scene.swarm.origin.node.requests.survey(scene.swarm.addrs)
            route = [
                Offer(scene.swarm.addrs[i], scene.hops[i].transport.node, f"n{i}", h.info) for i, h in hosted(scene)
            ]
            seen: list[tuple[int, int]] = []

            def die() -> None:
                places = [place for host in node.hosts for place in host._places.values()]
                seen.append((node.worker.logs.num_bytes, sum(place.log.num_bytes > 0 for place in places)))
                scene.faults.die(scene.hops[2])

            scene.faults.at("decode", scene.hops[2], die, 3 * 20)
            got = await asyncio.gather(*(scene.ask("hot", number, route=route) for number in range(3)))
            assert got == [bench.wanted["hot", number] for number in range(3)]
            assert all(answer.repairs for answer in scene.answers)
            ((held, kept),) = seen
            assert held <= log_bytes and 1 <= kept < 6
            assert node.worker.logs.num_bytes == 0, "closed sessions give their bytes back"

    bench.play(main)


def hosted(scene: Scene) -> list[tuple[int, SpanHost]]:
    """The spans of n0 and n2, each with the number of its node."""
    return [(0, scene.hops[0].hosts[0]), (0, scene.hops[0].hosts[1]), (2, scene.hops[2].hosts[0])]


@pytest.mark.parametrize("path", ["ring", "star"])
def test_the_replacement_may_die_while_it_is_rebuilt(bench: Bench, path: PathKind) -> None:
    """The next spare takes over, as often as there is one and the origin has patience."""

    async def main() -> None:
        async with bench.scene(spares=["0-5"] * 3) as scene:
            arm(scene, "decode", 1)
            for spare in scene.hops[3:]:
                scene.faults.at("replay", spare, lambda spare=spare: scene.faults.die(spare))  # type: ignore[misc]
            # The three are alike, so the first dies on Open; the second and the third as well: none is left.
            with pytest.raises(ShardUnavailable):
                await scene.ask(path=path)
        async with bench.scene(spares=["0-5"] * 3) as scene:
            arm(scene, "decode", 1)
            for spare in scene.hops[3:5]:
                scene.faults.at("replay", spare, lambda spare=spare: scene.faults.die(spare), skip=1)  # type: ignore[misc]
            await ask(bench, scene, "hot", 1, path)

    bench.play(main)


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("second", [0, 2])
def test_a_survivor_may_die_while_the_replacement_computes_its_replay(
    bench: Bench, second: int, path: PathKind
) -> None:
    """The route stands, and part of the replay waits for the device: it is sent again, and no living node is blamed."""

    async def main() -> None:
        async with bench.scene(worker=WorkerConfig(prefill_rows=8)) as scene:
            arm(scene, "decode", 1)
            scene.faults.slow(scene.hops[3], 0.2)
            loop = asyncio.get_running_loop()

            def die() -> None:
                loop.call_later(0.3, scene.faults.die, scene.hops[second])

            scene.faults.at("replay", scene.hops[3], die, 1)
            assert await scene.ask("hot", 1, path=path) == bench.wanted["hot", 1]
            assert [r.lost for r in scene.answers[0].repairs] == [("n1",), (f"n{second}",)]

    bench.play(main)


# -- who takes over ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("spares", [["0-5"], ["2-2", "3-3"], ["1-2", "3-4"], ["2-3"]])
def test_spares_of_any_shape_take_over(bench: Bench, spares: list[str], path: PathKind) -> None:
    """One that holds everything, several that cover the lost layers, one that fits."""

    async def main() -> None:
        async with bench.scene(spares=spares) as scene:
            arm(scene, "decode", 1)
            await ask(bench, scene, "hot", 1, path)
            (repair,) = scene.answers[0].repairs
            assert repair.lost == ("n1",) and set(repair.replacement) == {f"n{3 + i}" for i in range(len(spares))}
            kinds = [event.kind for event in scene.answers[0].events]
            assert kinds == ["shard_status", "shard_failover" if len(spares) == 1 else "reshard"]

    bench.play(main)


@pytest.mark.parametrize("path", ["ring", "star"])
def test_a_survivor_that_holds_the_layers_takes_them_too(bench: Bench, path: PathKind) -> None:
    """n0 holds everything and serves 0-1; it takes 2-3 as well, and when n2 dies, 4-5: three places on one node."""

    async def main() -> None:
        async with bench.scene("0-5", spares=["2-3", "4-5"]) as scene:
            offers = await scene.swarm.origin.node.requests.survey(scene.swarm.addrs)
            route = [offers[0].part(Span(0, 2)), offers[1], offers[2]]
            scene.faults.at("decode", scene.hops[1], lambda: scene.faults.die(scene.hops[1]), 4)
            scene.faults.at("replay", scene.hops[2], lambda: scene.faults.die(scene.hops[2]), 9)
            async with asyncio.timeout(DEADLINE_S):
                assert await scene.ask("hot", 1, route=route, path=path) == bench.wanted["hot", 1]
            assert [r.replacement for r in scene.answers[0].repairs] == [("n0",), ("n0",)]

    bench.play(main)


def test_a_node_that_is_lost_is_lost_with_all_its_hops(bench: Bench) -> None:
    """Two places on one node; a complaint about one of them replaces both."""

    async def main() -> None:
        async with bench.scene("0-5", spares=["2-3", "0-5"]) as scene:
            offers = await scene.swarm.origin.node.requests.survey(scene.swarm.addrs)
            route = [offers[0].part(Span(0, 2)), offers[1], offers[0].part(Span(4, 6))]
            scene.faults.at("decode", scene.hops[1], lambda: scene.faults.poison(scene.hops[0], "nan"), 5)
            async with asyncio.timeout(DEADLINE_S):
                assert await scene.ask("hot", 1, route=route) == bench.wanted["hot", 1]
            (repair,) = scene.answers[0].repairs
            assert repair.lost == ("n0", "n0") and set(repair.replacement) <= {"n2"}

    bench.play(main)


@asynccontextmanager
async def other_weights(bench: Bench, scene: Scene) -> AsyncIterator[FullNode]:
    """One more node, which holds all layers of another checkpoint."""
    folder = bench.folder.parent / "other"
    if not folder.exists():
        make_tiny("qwen3", folder, seed=22)
    device = Device.start(1)
    try:
        async with memory_node(scene.swarm.network, "other", scene.faults.wrap) as node:
            await node.worker.host(folder, Span(0, 6), "bf16", device, model_name="other")
            scene.swarm.addrs.append(await node.listen(NodeAddr("mem", 0)))
            scene.swarm.origin.routes.addrs.append(scene.swarm.addrs[-1])
            yield node
    finally:
        device.close()


def test_hn_46_other_weights_replace_nothing(bench: Bench) -> None:
    """HN-46: a node with other weights is no replacement, however well it covers; nor is it in the way of the others."""

    async def main() -> None:
        async with bench.scene() as scene, other_weights(bench, scene) as node:
            arm(scene, "decode", 1)
            await ask(bench, scene, "greedy", 1, "ring")
            assert node.hosts[0].engine.rows_run == 0 and scene.answers[0].repairs[0].replacement == ("n3",)
        async with bench.scene(spares=[]) as scene, other_weights(bench, scene):
            arm(scene, "decode", 1)
            with pytest.raises(ShardUnavailable, match="no other node holds layers 2-3"):
                await scene.ask()

    bench.play(main)


def test_a_node_with_other_weights_ends_no_waiting_for_these(bench: Bench) -> None:
    """A new request waits for layers that were there, and goes on when they are back: that a node says it holds another model
    whole, as any may, refused it at once (weights_mismatch), whatever patience or fallback it had."""

    async def main() -> None:
        async with bench.scene(spares=[], request=replace(REQUEST, patience_s=40.0)) as scene:
            async with other_weights(bench, scene):
                assert await scene.ask() == bench.wanted["greedy", 0]
                scene.faults.freeze(scene.hops[1])
                await asyncio.sleep(15)
                asyncio.get_running_loop().call_later(15, scene.faults.thaw, scene.hops[1])
                assert await scene.ask() == bench.wanted["greedy", 0]

    bench.play(main)


# -- what is not death ------------------------------------------------------------------------------------------------


# What is said of a poison, and in which phases and on which paths each hop spreads it here.
NONSENSE: dict[Poison, tuple[str, list[tuple[Phase, PathKind]]]] = {
    "nan": ("not finite", [("decode", "ring")]),
    "inf": ("not finite", [("prefill", "star")]),
    "zero": ("all zeros", [("opening", "ring"), ("decode", "star")]),
    "scale": ("no model's", [("prefill", "ring"), ("decode", "ring"), ("window", "star")]),
}


@pytest.mark.parametrize("how", NONSENSE)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_hn_45_a_hop_that_sends_nonsense_is_replaced(bench: Bench, victim: int, how: Poison) -> None:
    """HN-45: NaN, Inf and norms out of bound are blamed on the hop that sent them; nothing of it reaches the text.

    The origin has seen no row during the prefill, so that it cannot tell there that the last hop's are scaled.
    """
    said, cases = NONSENSE[how]

    async def main() -> None:
        for phase, path in cases[(how, victim) == ("scale", 2) :]:
            async with bench.scene() as scene:
                node = scene.hops[victim]
                scene.faults.at(phase, node, lambda: scene.faults.poison(node, how), SKIP[phase])  # noqa: B023
                await ask(bench, scene, "hot", 1, path, drafts=phase == "window")
                (repair,) = scene.answers[0].repairs
                assert repair.lost == (f"n{victim}",) and said in repair.reason
                session = scene.answers[0].session
                assert session is not None and session.untrusted_nodes == {node.transport.node}

    bench.play(main)


def test_plausible_nonsense_goes_unnoticed(bench: Bench) -> None:
    """What docs/repair.md says is not there: numbers that might be right change the text, and no hop is blamed."""

    async def main() -> None:
        async with bench.scene() as scene:
            node = scene.hops[1]
            scene.faults.at("decode", node, lambda: scene.faults.poison(node, "nudge"), SKIP["decode"])
            assert await scene.ask("hot") != bench.wanted["hot", 0]
            assert not scene.answers[0].repairs

    bench.play(main)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_hn_45_without_an_alternative_the_session_ends(bench: Bench, victim: int) -> None:
    """HN-45, HN-48: with a code, within the patience of the request; never a hang."""

    async def main() -> None:
        async with bench.scene(spares=[], request=replace(REQUEST, patience_s=7.0)) as scene:
            node = scene.hops[victim]
            scene.faults.at("decode", node, lambda: scene.faults.poison(node, "nan"), 5)
            began = asyncio.get_running_loop().time()
            with pytest.raises((PipelineAborted, PipelineStalled, ShardUnavailable)):
                await scene.ask()
            assert 7.0 <= asyncio.get_running_loop().time() - began < 8.0
            assert scene.answers[0].events[-1].kind == "pipeline_aborted"
            assert scene.answers[0].token_ids == bench.wanted["greedy", 0][: len(scene.answers[0].token_ids)]

    bench.play(main)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_hn_48_a_slowloris_is_replaced_if_it_can_be(bench: Bench, victim: int) -> None:
    """HN-48: a hop that suddenly takes more than a second a step is replaced; without a spare it is waited for."""

    async def main() -> None:
        for spares, is_replaced in ((["0-5"], True), ([], False)):
            async with bench.scene(spares=spares) as scene:
                node = scene.hops[victim]
                scene.faults.at("decode", node, lambda: scene.faults.slow(node, 1.6), 7)  # noqa: B023
                began = asyncio.get_running_loop().time()
                assert await scene.ask() == bench.wanted["greedy", 0]
                took = asyncio.get_running_loop().time() - began
                assert (took < 4.0) == is_replaced and took < 24 * 1.6 + 1
                lost = [r.lost for r in scene.answers[0].repairs]
                assert lost == ([(f"n{victim}",)] if is_replaced else [])

    bench.play(main)


def test_the_replay_of_a_repair_ends_with_the_first_new_position(bench: Bench) -> None:
    """What is computed again is in its figures: here a step of the new hop takes 0.4 s, and nothing else takes any time."""

    async def main() -> None:
        async with bench.scene() as scene:
            node, spare = scene.hops[1], scene.hops[3]
            scene.faults.slow(spare, 0.4)
            scene.faults.at("decode", node, lambda: scene.faults.die(node), 7)
            assert await scene.ask() == bench.wanted["greedy", 0]
            (repair,) = scene.answers[0].repairs
            assert 0.4 <= repair.replay_s <= repair.total_s < 1.7

    bench.play(main)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_hn_48_a_hop_that_is_slow_from_its_first_step_is_replaced(bench: Bench, victim: int) -> None:
    """It is compared with what is known of it, here by an earlier request. Without a spare it is waited for."""

    async def main() -> None:
        for spares, is_replaced in ((["0-5"], True), ([], False)):
            async with bench.scene(spares=spares) as scene:
                assert await scene.ask() == bench.wanted["greedy", 0]
                scene.faults.slow(scene.hops[victim], 1.6)
                began = asyncio.get_running_loop().time()
                assert await scene.ask("hot", 1) == bench.wanted["hot", 1]
                took = asyncio.get_running_loop().time() - began
                assert (took < 12.0) == is_replaced, took
                assert [r.lost for r in scene.answers[1].repairs] == ([(f"n{victim}",)] if is_replaced else [])

    bench.play(main)


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_hop_whose_device_hangs_in_a_prompt_is_replaced_and_no_other(
    bench: Bench, victim: int, path: PathKind
) -> None:
    """Those before it have rows to compute as well: they wait for its credits."""

    async def main() -> None:
        async with bench.scene(request=replace(REQUEST, prefill_chunk=2, credits=4)) as scene:
            node = scene.hops[victim]
            scene.faults.at("prefill", node, lambda: scene.faults.slow(node, 500.0), 2)
            assert await scene.ask("hot", 1, path=path) == bench.wanted["hot", 1]
            assert [r.lost for r in scene.answers[0].repairs] == [(f"n{victim}",)]

    bench.play(main)


@pytest.mark.parametrize("path", ["ring", "star"])
def test_a_replacement_that_hangs_is_replaced_and_not_the_hop_that_feeds_it(
    bench: Bench, path: PathKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hop 0 sends from its log waits for credits, and so does all it has to compute."""
    monkeypatch.setattr("manyhands.worker.log.REPLAY_ROWS", 4)

    async def main() -> None:
        async with bench.scene(spares=["0-5", "0-5"], request=replace(REQUEST, credits=4)) as scene:
            arm(scene, "decode", 1)
            for spare in scene.hops[3:]:
                scene.faults.at("replay", spare, lambda spare=spare: slow_one(spare))  # type: ignore[misc]
            slowed: list[FullNode] = []

            def slow_one(spare: FullNode) -> None:
                if not slowed:
                    slowed.append(spare)
                    scene.faults.slow(spare, 500.0)

            assert await scene.ask("hot", 1, path=path) == bench.wanted["hot", 1]
            lost = [r.lost for r in scene.answers[0].repairs]
            assert lost == [("n1",), (f"n{scene.hops.index(slowed[0])}",)]

    bench.play(main)


def test_no_hop_is_replaced_for_a_result_that_is_on_its_way(bench: Bench) -> None:
    """Every hop says that it has computed all, before the last step that says so has come."""

    async def main() -> None:
        async with bench.scene() as scene:
            last, origin = scene.hops[2], scene.swarm.origin.node
            scene.faults.at("decode", last, lambda: scene.faults.delay(last, origin, "data", 1.3), 7)
            assert await scene.ask() == bench.wanted["greedy", 0]
            assert not scene.answers[0].repairs

    bench.play(main)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("phase", ["opening", "prefill", "decode", "window"])
def test_a_frozen_hop_is_replaced_within_four_seconds(bench: Bench, phase: Phase, victim: int) -> None:
    """By the heartbeat at the latest; where steps flow, by the step that is overdue."""

    async def main() -> None:
        async with bench.scene() as scene:
            node = scene.hops[victim]
            scene.faults.at(phase, node, lambda: scene.faults.freeze(node), SKIP[phase])
            async with asyncio.timeout(FOUND_S + 0.1):
                options = {"drafter": bench.half_right("hot", 0)} if phase == "window" else {}
                assert await scene.ask("hot", 0, **options) == bench.wanted["hot", 0]

    bench.play(main)


def test_a_frozen_replacement_is_replaced(bench: Bench) -> None:
    """Twice the deadline of one."""

    async def main() -> None:
        async with bench.scene(spares=["0-5", "0-5"]) as scene:
            arm(scene, "decode", 1)
            scene.faults.at("replay", scene.hops[3], lambda: scene.faults.freeze(scene.hops[3]))
            scene.faults.at("replay", scene.hops[0], lambda: None)
            async with asyncio.timeout(2 * FOUND_S):
                assert await scene.ask("hot") == bench.wanted["hot", 0]

    bench.play(main)


def test_a_short_freeze_without_an_alternative_is_waited_out(bench: Bench) -> None:
    """Two seconds of silence lose nothing, not even the link."""

    async def main() -> None:
        async with bench.scene(spares=[]) as scene:
            node = scene.hops[1]

            def freeze() -> None:
                scene.faults.freeze(node)
                asyncio.get_running_loop().call_later(2.0, scene.faults.thaw, node)

            scene.faults.at("decode", node, freeze, 9)
            async with asyncio.timeout(3.0):
                assert await scene.ask() == bench.wanted["greedy", 0]
            assert not scene.answers[0].repairs

    bench.play(main)


@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 2), (2, None), (None, 0), (1, None)])
def test_a_line_that_is_cut_one_way_is_routed_around(bench: Bench, sender: int | None, receiver: int | None) -> None:
    """No node is dead, one direction of one line is: the pause is 5 s at most."""

    async def main() -> None:
        async with bench.scene(spares=["0-5", "0-5"]) as scene:
            nodes = [*scene.hops[:3], scene.swarm.origin.node]
            a, b = nodes[3 if sender is None else sender], nodes[3 if receiver is None else receiver]
            scene.faults.at("decode", scene.hops[2], lambda: scene.faults.cut(a, b), 6)
            async with asyncio.timeout(5.0):
                assert await scene.ask("hot") == bench.wanted["hot", 0]
            for node in (a, b):
                scene.faults.freeze(node)  # a Close may not get through; links will end

    bench.play(main)


def test_l9_21_a_lost_node_stays_out_of_its_session(bench: Bench) -> None:
    """L9-21: n1 was evicted for nonsense. It is alive and holds the layers, yet when its replacement dies too, it is not asked.

    Another session may use it again.
    """

    async def main() -> None:
        async with bench.scene(request=replace(REQUEST, patience_s=3.0)) as scene:
            plain = scene.hops[1].hosts[0].engine.model
            scene.faults.at("decode", scene.hops[1], lambda: scene.faults.poison(scene.hops[1], "nan"), 5)
            scene.faults.at("any", scene.hops[3], lambda: scene.faults.die(scene.hops[3]), 6)
            with pytest.raises(ShardUnavailable, match="no other node holds layers 2-3"):
                await scene.ask()
            scene.hops[1].hosts[0].engine.model = plain
            assert await scene.ask() == bench.wanted["greedy", 0]
            assert [o.name for o in scene.answers[1].route] == ["n0", "n1", "n2"]

    bench.play(main)


# -- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("phase", ["prefill", "decode", "window"])
def test_a_draining_node_hands_over_without_losing_a_token(bench: Bench, phase: Phase, victim: int) -> None:
    """Three sessions move to the spare; then the node is empty and may leave. (Another hop is slow: no answer ends first.)"""

    async def main() -> None:
        async with bench.scene() as scene:
            node = scene.hops[victim]
            scene.faults.slow(scene.hops[(victim + 1) % 3], 0.01)
            drains: list[asyncio.Task[None]] = []
            scene.faults.at(phase, node, lambda: drains.append(asyncio.ensure_future(node.worker.drain())), SKIP[phase])
            await ask(bench, scene, "hot", 3, "star" if victim == 1 else "ring", drafts=phase == "window")
            async with asyncio.timeout(0.1):
                await drains[0]
            for answer in scene.answers:
                assert [r.lost for r in answer.repairs] == [(f"n{victim}",)]

    bench.play(main)


def test_a_draining_node_without_an_heir_serves_to_the_end(bench: Bench) -> None:
    """It accepts no new session meanwhile."""

    async def main() -> None:
        async with bench.scene(spares=[]) as scene:
            drains: list[asyncio.Task[None]] = []
            node = scene.hops[1]
            scene.faults.at("decode", node, lambda: drains.append(asyncio.ensure_future(node.worker.drain())), 5)
            await ask(bench, scene, "hot", 1, "ring")
            await drains[0]
            assert not scene.answers[0].repairs
            with pytest.raises(ShardUnavailable):
                await scene.ask()

    bench.play(main)


def test_a_draining_node_leaves_in_time_though_no_node_takes_its_sessions(bench: Bench) -> None:
    """Two spans and an origin that has no other node: at the deadline the node is empty, and the origin knows at once."""

    async def main() -> None:
        request = replace(REQUEST, patience_s=1.0)
        async with bench.scene(spares=[], request=request, worker=WorkerConfig(drain_s=5.0)) as scene:
            node = scene.hops[1]
            await node.worker.host(
                bench.folder, Span(0, 2), "bf16", node.hosts[0].engine.device, model_name="test", is_spare=True
            )
            scene.faults.slow(node, 0.9)
            task = asyncio.ensure_future(scene.ask())
            await asyncio.sleep(3.0)
            began = asyncio.get_running_loop().time()
            await node.worker.drain()
            assert asyncio.get_running_loop().time() - began == pytest.approx(5.0, abs=0.01)
            assert not any(host.num_sessions for host in node.hosts)
            with pytest.raises(ShardUnavailable):
                await task
            assert asyncio.get_running_loop().time() - began < 5.0 + 2.0
            assert "no node took its place" in scene.answers[0].events[0].detail
            got = scene.answers[0].token_ids
            assert 0 < len(got) and got == bench.wanted["greedy", 0][: len(got)]

    bench.play(main)


@pytest.mark.parametrize("path", ["ring", "star"])
def test_a_lost_origin_frees_its_hops(bench: Bench, path: PathKind) -> None:
    """At once if the link says so, by the heartbeat if the origin is frozen: within four seconds."""

    async def main() -> None:
        for fault, within in ((Faults.die, 0.01), (Faults.freeze, FOUND_S + 0.01)):
            async with bench.scene() as scene:
                origin = scene.swarm.origin.node
                scene.faults.at("decode", scene.hops[1], lambda: fault(scene.faults, origin), 6)  # noqa: B023
                task = asyncio.ensure_future(scene.ask(path=path))
                await asyncio.sleep(within)
                assert scene.faults.trouble.fired
                assert not any(h.num_sessions or h._opening for n in scene.hops for h in n.hosts)
                task.cancel()
                with suppress(asyncio.CancelledError, ManyhandsError):
                    await task

    bench.play(main)


# -- frames -----------------------------------------------------------------------------------------------------------

Spoil = Callable[[Faults, FullNode, FullNode, Phase, int], None]
SPOILS: dict[str, Spoil] = {
    "duplicate": Faults.duplicate,
    "reorder": Faults.reorder,
    "corrupt": Faults.corrupt,
    "drop": Faults.drop,
    "late": lambda faults, a, b, phase, skip: faults.misplace(a, b, 7, phase, skip),
    "early": lambda faults, a, b, phase, skip: faults.misplace(a, b, -7, phase, skip),
}


@pytest.mark.parametrize("edge", [(3, 0), (0, 1), (1, 2), (2, 3)], ids=["origin-0", "0-1", "1-2", "2-origin"])
@pytest.mark.parametrize("how", SPOILS)
def test_a_spoiled_frame_never_spoils_the_text(bench: Bench, how: str, edge: tuple[int, int]) -> None:
    """No transport of ours does this; a hostile node may. The text is right as far as it goes, and the end is soon.

    Prefill rows at an earlier position are left out: they overwrite, as finite wrong numbers do, and no check can tell.
    """

    async def main() -> None:
        for phase, kind in (("prefill", "greedy"), ("decode", "hot"), ("window", "hot")):
            if (how, phase) == ("early", "prefill"):
                continue
            async with bench.scene(spares=["0-5"] * 2) as scene:
                nodes = [*scene.hops[:3], scene.swarm.origin.node]
                at: Any = "any" if edge[1] == 3 else phase
                SPOILS[how](scene.faults, nodes[edge[0]], nodes[edge[1]], at, SKIP[phase])  # type: ignore[index]
                options = {"drafter": bench.half_right(kind, 0)} if phase == "window" else {}
                outcome = "equal"
                async with asyncio.timeout(20.0):
                    try:
                        await scene.ask(kind, 0, **options)
                    except ManyhandsError as error:
                        outcome = error.code
                got = scene.answers[0].token_ids
                assert got == bench.wanted[kind, 0][: len(got)]
                assert outcome == "equal" or edge[0] == 3, f"{phase}: {outcome}"
                assert scene.faults.trouble.fired

    bench.play(main)


# -- races ------------------------------------------------------------------------------------------------------------


def test_hops_that_recompute_are_placed_before_those_that_feed_them(bench: Bench) -> None:
    """Hop 1 has no log and hears late of the repair: what hop 0 replays to it must not come before it knows the epoch."""

    async def main() -> None:
        async with bench.scene() as scene:
            origin = scene.swarm.origin.node

            def lose() -> None:
                for place in scene.hops[1].hosts[0]._places.values():
                    place.log.drop()
                scene.faults.delay(origin, scene.hops[1], "control", 0.3)
                scene.faults.die(scene.hops[2])

            scene.faults.at("decode", scene.hops[2], lose, 7)
            await ask(bench, scene, "hot", 1, "ring")
            (repair,) = scene.answers[0].repairs
            assert repair.lost == ("n2",)

    bench.play(main)


@pytest.mark.parametrize("phase", ["opening", "decode", "replay"])
def test_a_consumer_that_leaves_in_the_middle_leaves_nothing_behind(bench: Bench, phase: Phase) -> None:
    """Cancelled while opening, while decoding, while a repair is under way: leases, sessions and tasks are gone."""

    async def main() -> None:
        async with bench.scene() as scene:
            task = asyncio.ensure_future(scene.ask())
            await asyncio.sleep(0)
            before = len(scene.swarm.origin.node.tasks)
            if phase == "replay":
                arm(scene, "decode", 1)
                scene.faults.at("replay", scene.hops[3], task.cancel)
            else:
                scene.faults.at(phase, scene.hops[1], task.cancel, SKIP[phase])
            with pytest.raises(asyncio.CancelledError):
                await task
            await scene.free()
            assert len(scene.swarm.origin.node.tasks) <= before + 2 * 4 * 2
            assert await scene.ask("hot", 1) == bench.wanted["hot", 1]

    bench.play(main)


def test_a_repair_that_is_cut_short_frees_what_it_had_opened(bench: Bench) -> None:
    """Spares opened in an attempt that failed are used in the next one or closed."""

    async def main() -> None:
        async with bench.scene(spares=["2-2", "3-3", "3-3"]) as scene:
            arm(scene, "decode", 1)
            scene.faults.at("replay", scene.hops[4], lambda: scene.faults.die(scene.hops[4]))
            scene.faults.at("replay", scene.hops[5], lambda: None)
            await ask(bench, scene, "hot", 1, "ring")
            assert scene.answers[0].repairs[0].replacement in (("n3", "n5"), ("n5",), ("n3", "n4"), ("n3",))

    bench.play(main)


def test_everything_ends(bench: Bench) -> None:
    """The last deadline of all: a pipeline that swallows a step and cannot be repaired has stalled."""

    async def main() -> None:
        request = RequestConfig(prefill_chunk=16, stall_timeout_s=20.0)
        async with bench.scene(CUT, spares=[], request=request) as scene:
            scene.faults.drop(scene.hops[0], scene.hops[1], "decode", 5)
            began = asyncio.get_running_loop().time()
            with pytest.raises(PipelineStalled):
                await scene.ask()
            assert asyncio.get_running_loop().time() - began < 22.0

    bench.play(main)


# -- no node holds the layers in memory --------------------------------------------------------------------------------


async def let_load(bench: Bench, scene: Scene, *nodes: int, max_layers: int = 6) -> None:
    """These nodes would load any layer."""
    for index in nodes:
        node = scene.hops[index]
        await node.worker.offer_to_load(
            bench.folder, Span(0, 6), "bf16", node.hosts[0].engine.device, model_name="test", max_layers=max_layers
        )


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_l9_19_a_survivor_loads_the_lost_layers(bench: Bench, victim: int, path: PathKind) -> None:
    """L9-19's reshard, sticky: only the lost span is loaded, by one survivor; the next session uses it."""

    async def main() -> None:
        async with bench.scene(spares=[]) as scene:
            await let_load(bench, scene, 0, 1, 2)
            arm(scene, "decode", victim)
            await ask(bench, scene, "hot", 1, path)
            (repair,) = scene.answers[0].repairs
            assert repair.lost == (f"n{victim}",) and scene.answers[0].events[-1].kind == "reshard"
            living = [n for i, n in enumerate(scene.hops) if i != victim]
            assert [len(n.hosts) for n in living].count(2) == 1, "one of them, and no other"
            assert await scene.ask("hot", 1) == bench.wanted["hot", 1]
            assert sum(len(n.hosts) for n in living) == 3, "loaded once"

    bench.play(main)


def test_a_node_that_holds_the_layers_comes_before_one_that_would_load_them(bench: Bench) -> None:
    """A spare in memory, then a place on a survivor, then loading; at most max_layers of it."""

    async def main() -> None:
        async with bench.scene() as scene:
            await let_load(bench, scene, 0, 2)
            arm(scene, "decode", 1)
            await ask(bench, scene, "greedy", 1, "ring")
            assert scene.answers[0].repairs[0].replacement == ("n3",) and len(scene.hops[0].hosts) == 1
        async with bench.scene(spares=[], request=replace(REQUEST, patience_s=2.0)) as scene:
            await let_load(bench, scene, 0, 2, max_layers=1)
            arm(scene, "decode", 1)
            with pytest.raises((ShardUnavailable, PipelineAborted), match="2-3"):
                await scene.ask()

    bench.play(main)


def test_a_model_that_no_node_has_loaded_is_loaded_when_asked_for(bench: Bench) -> None:
    """Also for a new session: where a hole is, a node fills it."""

    async def main() -> None:
        async with bench.scene(spares=[]) as scene:
            await let_load(bench, scene, 2)
            scene.faults.die(scene.hops[0])
            await asyncio.sleep(0)
            assert await scene.ask() == bench.wanted["greedy", 0]
            assert [str(h.info.span) for h in scene.hops[2].hosts] == ["4-5", "0-1"]

    bench.play(main)
