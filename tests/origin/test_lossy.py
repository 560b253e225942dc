"""Rows of prompts sent in 8 bits: one text whatever happens to the route, no loss where the guard objects, and it is told."""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import PathKind, SamplingParams
from manyhands.origin import Answer, lossy
from manyhands.route.offer import Rules
from manyhands.testing.faults import Faults
from manyhands.testing.swarm import memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.testing.trouble import Phase
from manyhands.wire.message import Payload
from manyhands.worker.execute import Result
from tests.kill import REQUEST, Models, Scene, kept_models
from tests.origin.scenes import play
from tests.worker.pipeline import random_ids

PROMPT = random_ids(90, seed=4)
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.3, seed=2)
INT8 = Rules(codec="int8")


class House:
    """Plays scenes on one checkpoint; all links of its swarms count as slow while sessions open, until told otherwise."""

    def __init__(self, folder: Path, models: Models) -> None:
        self.folder, self._models = folder, models
        self.is_slow = True
        self.exact = play(lambda: self._text(Rules()))
        self.wanted = play(lambda: self._text(INT8))

    async def _text(self, rules: Rules) -> list[int]:
        async with self.scene() as scene:
            return (await ask(scene, rules=rules)).token_ids

    @asynccontextmanager
    async def scene(self, cut: str = "0-1,2-3,4-5", spares: Sequence[str] = ("0-5",), **options: Any) -> Any:
        self._models.give_back()
        self.is_slow, faults = True, Faults()
        async with memory_swarm(
            self.folder, cut, spares=spares, wrap=faults.wrap, **{"request": REQUEST, **options}
        ) as swarm:
            scene = Scene(swarm, faults)
            yield scene
            await scene.free()


async def ask(scene: Scene, ids: Sequence[int] = PROMPT, **options: Any) -> Answer:
    origin = scene.swarm.origin
    return await origin.complete(origin.request_ids(ids, PARAMS), **{"rules": INT8, **options})


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A random model differs more by rounding than the guard admits."""
    with kept_models() as models, pytest.MonkeyPatch.context() as patch:
        made: list[House] = []
        patch.setattr(lossy, "MAX_MEAN_KL", 1e9)
        patch.setattr(lossy, "MAX_FLIPS", 1.0)
        for module in ("manyhands.worker.opening", "manyhands.origin.route"):
            patch.setattr(f"{module}.is_slow", lambda _: not made or made[0].is_slow)
        made.append(House(make_tiny("qwen3", tmp_path_factory.mktemp("lossy") / "qwen3", seed=21, hidden=256), models))
        yield made[0]


def test_loss_is_told_and_changes_the_text(house: House) -> None:
    """Else nothing below could fail."""

    async def main() -> None:
        async with house.scene() as scene:
            answer = await ask(scene)
            assert answer.exactness == "E2" and answer.token_ids == house.wanted != house.exact
            told = answer.routing.as_object()["codec"]
            assert told["used"] == "int8" and told["before_layers"] == [0, 2, 4] and told["sample"]["rows"] == 32
            plain = await ask(scene, rules=Rules())
            assert plain.exactness == "E0" and plain.token_ids == house.exact
            assert plain.routing.as_object()["codec"] is None

    play(main)


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_one_text_for_every_chunk_and_in_company(house: House, path: PathKind, chunk: int) -> None:
    worker = WorkerConfig(prefill_rows=17, mixed_rows=5)

    async def main() -> None:
        async with house.scene(request=RequestConfig(prefill_chunk=chunk), worker=worker) as scene:
            answers = await asyncio.gather(
                ask(scene, path=path),
                ask(scene, rules=Rules(), path=path),
                ask(scene, PROMPT[5:]),
                ask(scene, path=path),
            )
            assert answers[0].token_ids == answers[3].token_ids == house.wanted
            assert answers[1].token_ids == house.exact

    play(main)


DEATHS = [(0,), (1,), (2,), (1, 2), (0, 1, 2)]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("victims", DEATHS)
@pytest.mark.parametrize("log_bytes", [1 << 24, 0])
def test_a_repaired_stream_has_the_text_of_one_that_was_not(
    house: House, phase: Phase, victims: tuple[int, ...], log_bytes: int
) -> None:
    """From logs, or computed again. Links are fast by then, and the spare holds all layers: one hop would reach over those
    before which rows were rounded."""
    path: PathKind = "star" if len(victims) == 2 or (log_bytes == 0 and victims == (1,)) else "ring"

    async def main() -> None:
        async with house.scene(worker=WorkerConfig(log_bytes=log_bytes)) as scene:

            def kill() -> None:
                house.is_slow = False
                for victim in victims:
                    scene.faults.die(scene.hops[victim])

            scene.faults.at(phase, scene.hops[victims[0]], kill, 4 if phase == "prefill" else 8)
            answer = await ask(scene, path=path)
            assert answer.repairs and answer.token_ids == house.wanted
            assert answer.session is not None
            assert {0, 2, 4} <= {hop.offer.info.span.start for hop in answer.session.route.hops}

    play(main)


def test_a_lost_hop_may_be_cut_anew(house: House) -> None:
    """Rows are not rounded where no boundary was."""

    async def main() -> None:
        async with house.scene(spares=("2-2", "3-3")) as scene:
            scene.faults.at("decode", scene.hops[1], lambda: scene.faults.die(scene.hops[1]), 8)
            answer = await ask(scene)
            assert answer.repairs and answer.token_ids == house.wanted

    play(main)


def test_a_standby_takes_over(house: House) -> None:
    async def main() -> None:
        async with house.scene(request=replace(REQUEST, standby=True)) as scene:
            scene.faults.at("decode", scene.hops[1], lambda: scene.faults.die(scene.hops[1]), 20)
            answer = await ask(scene)
            assert answer.repairs and answer.token_ids == house.wanted

    play(main)


@pytest.mark.parametrize("lost", [(), (1,), (0, 2)])
def test_a_conversation_goes_on_as_it_was_rounded(house: House, lost: Collection[int]) -> None:
    """The second turn, with hops that have lost all logs and die: as without the deaths. Without loss it begins anew."""

    async def main(deaths: Collection[int]) -> tuple[list[int], int, list[int]]:
        async with house.scene(worker=WorkerConfig(log_bytes=0), spares=("0-5", "0-5")) as scene:
            first = await ask(scene, tenant="me")
            history = [*PROMPT, *first.token_ids, *random_ids(70, seed=8)]
            house.is_slow = False
            for victim in deaths:
                node = scene.hops[victim]
                scene.faults.at("decode", node, lambda node=node: scene.faults.die(node), 6)
            second = await ask(scene, history, tenant="me")
            exact = await ask(scene, history, tenant="me", rules=Rules())
            assert exact.cached_tokens == 0 and exact.exactness == "E0"
            assert len(second.repairs) >= bool(deaths)
            return second.token_ids, second.cached_tokens, exact.token_ids

    undisturbed = play(lambda: main(()))
    assert undisturbed[1] == len(PROMPT) + PARAMS.max_tokens - 1
    assert play(lambda: main(lost)) == undisturbed


def test_without_a_slow_link_and_for_short_prompts_nothing_is_lost(house: House) -> None:
    async def main() -> None:
        async with house.scene() as scene:
            short = await ask(scene, PROMPT[:40])
            house.is_slow = False
            answer = await ask(scene)
            assert answer.token_ids == house.exact and answer.exactness == short.exactness == "E0"
            assert "slow" in answer.routing.loss.why and "less than 64" in short.routing.loss.why

    play(main)


def test_where_the_last_hop_has_the_head_nothing_is_lost(house: House) -> None:
    async def main() -> None:
        async with house.scene(ends="edges") as scene:
            answer = await ask(scene)
            assert answer.token_ids == house.exact and "head" in answer.routing.loss.why

    play(main)


@pytest.mark.parametrize("family", ["deepseek_v4", "glm_moe_dsa_shared"])
def test_rows_that_hold_whole_numbers_lose_nothing(family: str, house: House, tmp_path: Path) -> None:
    """In 8 bits the digits of id 129 + 256 * 200 are those of another, whose experts were computed, and chosen positions
    others."""
    folder = make_tiny(family, tmp_path, layers=6, vocab=60_000)
    prompt = [129 + 256 * (200 + i % 30) for i in range(90)]

    async def main() -> None:
        async with memory_swarm(folder, "0-2,3-5") as swarm:
            house.is_slow, origin = True, swarm.origin
            asked = [origin.complete(origin.request_ids(prompt, PARAMS), rules=rules) for rules in (INT8, Rules())]
            lossy, exact = [await answer for answer in asked]
            assert lossy.token_ids == exact.token_ids and lossy.exactness == "E0"
            assert "tokens' ids, or chosen positions" in lossy.routing.loss.why

    play(main)


# -- the guard --------------------------------------------------------------------------------------------------------


def test_the_guard_switches_loss_off_and_says_so(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample: the route is not tried again, until it is time."""
    monkeypatch.setattr(lossy, "MAX_MEAN_KL", 0.0)

    async def main() -> None:
        async with house.scene() as scene:
            for turn in range(3):
                answer = await ask(scene)
                assert answer.token_ids == house.exact and answer.exactness == "E0"
                told = answer.routing.as_object()["codec"]
                assert told["used"] == "lossless" and "guard" in told["why"] and told["sample"]["mean_kl"] > 0
                guard = scene.swarm.origin._loss_guard
                (known,) = guard.samples._known.values()
                assert known.uses == turn + 1  # one sample for all

    play(main)


def test_a_guard_that_gets_no_answer_lets_no_loss_through(house: House) -> None:
    """Nodes without room for the two sessions of a sample."""

    async def main() -> None:
        async with house.scene(worker=WorkerConfig(cache_tokens=len(PROMPT) + PARAMS.max_tokens + 20)) as scene:
            answer = await ask(scene)
            assert answer.token_ids == house.exact and "could not compare" in answer.routing.loss.why

    play(main)


@pytest.mark.parametrize("phase", ["opening", "prefill"])
@pytest.mark.parametrize("skip", range(0, 12, 3))
def test_a_node_may_die_while_the_guard_waits(house: House, phase: Phase, skip: int) -> None:
    """Nothing is left behind, and the text is that with loss or that without."""

    async def main() -> None:
        async with house.scene() as scene:
            scene.faults.at(phase, scene.hops[1], lambda: scene.faults.die(scene.hops[1]), skip)
            answer = await ask(scene)
            assert len(answer.token_ids) == PARAMS.max_tokens
            if answer.exactness == "E0":
                assert answer.token_ids == house.exact

    play(main)


def test_a_client_may_leave_while_the_guard_waits(house: House) -> None:
    """No lease is left, whenever it leaves (Scene.free)."""

    async def main() -> None:
        for turns in (1, 3, 10, 30, 60):
            async with house.scene() as scene:
                task = asyncio.ensure_future(ask(scene))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    play(main)


@pytest.mark.parametrize("byte", [0xFF, 0x80])
def test_a_hop_that_sends_what_no_8_bits_are_loses_its_place(house: House, byte: int) -> None:
    async def main() -> None:
        async with house.scene() as scene:
            model, spoiled = scene.hops[0].hosts[0].engine.model, 0
            assert model is not None
            plain_run: Any = model.run

            def run(works: Any) -> list[Any]:
                nonlocal spoiled
                results: list[Any] = plain_run(works)
                for at, result in enumerate(results):
                    if isinstance(result, Result) and result.position >= 32 and isinstance(result.payload, Payload):
                        if result.payload.codec == "int8":
                            spoiled += 1
                            data = bytes([byte]) * len(result.payload.data)
                            results[at] = result._replace(payload=result.payload._replace(data=data))
                return results

            model.run = run
            try:
                answer = await ask(scene)
            finally:
                del model.run
            assert spoiled and answer.repairs and answer.token_ids == house.wanted

    play(main)
