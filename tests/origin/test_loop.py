"""manyhands.origin.loop: the text is a function of prompt, seed, model and parameters, and of nothing else."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import EndsAt, NodeId, PathKind, SamplingParams
from manyhands.origin.draft import NoDrafter
from manyhands.testing.faults import Faults
from manyhands.wire.message import Probe, Retract
from manyhands.worker.serve import SpanHost
from tests.origin.scenes import (
    GREEDY,
    HOT,
    NEW,
    PROMPT,
    Oracle,
    drafters,
    expected,
    ids_of,
    play,
    swarm_of,
    tokens_of,
)
from tests.worker.pipeline import random_ids

PATHS: tuple[PathKind, ...] = ("ring", "star")


@pytest.fixture(scope="module")
def greedy(folder: Path) -> list[int]:
    return expected(folder, PROMPT, GREEDY)


@pytest.fixture(scope="module")
def hot(folder: Path) -> list[int]:
    return expected(folder, PROMPT, HOT)


def test_the_settings_differ(greedy: list[int], hot: list[int]) -> None:
    """Else the tests below would prove less than they say."""
    assert greedy != hot and len(set(greedy)) > 3 and len(set(hot)) > 3


@pytest.mark.parametrize("ends", ["origin", "edges"])
@pytest.mark.parametrize(
    ("cut", "chunk", "credits", "rows"),
    [("0-5", 128, 16, 256), ("0-2,3-5", 7, 2, 16), ("0-0,1-3,4-5", 1, 16, 17), ("0-0,1-1,2-2,3-3,4-4,5-5", 16, 3, 256)],
)
def test_nothing_but_the_request_decides_the_text(
    folder: Path, greedy: list[int], hot: list[int], cut: str, chunk: int, credits: int, rows: int, ends: EndsAt
) -> None:
    """Any cut, path, place of the ends, prefill chunk, credits, size of a device step, drafter; all at once."""

    async def main() -> None:
        request = RequestConfig(prefill_chunk=chunk, credits=credits)
        worker = WorkerConfig(prefill_rows=rows, mixed_rows=5)
        async with swarm_of(folder, cut, ends=ends, request=request, worker=worker) as swarm:
            cases = [
                (path, name, params, want)
                for params, want in ((GREEDY, greedy), (HOT, hot))
                for path in PATHS
                for name in drafters(())
            ]
            answers = await asyncio.gather(
                *(
                    ids_of(swarm, PROMPT, params, path=path, drafter=drafters([*PROMPT, *want])[name])
                    for path, name, params, want in cases
                )
            )
            for (path, name, params, want), got in zip(cases, answers, strict=True):
                assert got == want, f"{path} {name} temperature {params.temperature}"

    play(main)


def test_other_requests_change_nothing(folder: Path) -> None:
    """Six requests of different lengths and settings at once; each is what it would be alone."""
    requests = [
        (
            tuple(int(i) for i in random_ids(5 + 19 * n, seed=n)),
            replace(HOT if n % 2 else GREEDY, seed=n, max_tokens=4 + n),
        )
        for n in range(6)
    ]
    wanted = [expected(folder, prompt, params) for prompt, params in requests]

    async def main() -> None:
        async with swarm_of(folder, "0-2,3-5", request=RequestConfig(prefill_chunk=16)) as swarm:
            assert await asyncio.gather(*(ids_of(swarm, *one) for one in requests)) == wanted
            engines = [node.hosts[0].engine for node in swarm.hops]
            shared = sum(engine.rows_run for engine in engines) / sum(engine.steps_run for engine in engines)
            assert shared > 1.5, "they did share steps"

    play(main)


def test_right_drafts_save_steps_and_wrong_ones_cost_none(
    folder: Path, greedy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An oracle of depth 4 needs a third of the windows; each window is one step a hop."""
    monkeypatch.setattr("manyhands.worker.batch.FEWEST_ROWS", len(PROMPT))  # so is the prompt
    counts: dict[str, int] = {}

    async def main() -> None:
        for name, drafter in drafters([*PROMPT, *greedy]).items():
            async with swarm_of(folder, "0-5") as swarm:
                assert await ids_of(swarm, PROMPT, GREEDY, drafter=drafter) == greedy
                counts[name] = swarm.hops[0].hosts[0].engine.steps_run

    play(main)
    assert counts["none"] == counts["wrong"] == NEW
    assert counts["oracle"] == 1 + -(-(NEW - 1) // 5)


def test_the_origin_retracts_dead_guesses_on_all_hops_behind_the_first(
    folder: Path, greedy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that a guess is wrong while others follow it; never of a chain that is right."""
    retracted: list[tuple[int, int]] = []
    follow = SpanHost.follow

    def heed(host: SpanHost, message: Probe | Retract, node: NodeId) -> None:
        if isinstance(message, Retract):
            retracted.append((host.info.span.start, message.guess))
        follow(host, message, node)

    monkeypatch.setattr(SpanHost, "follow", heed)

    async def main() -> None:
        async with swarm_of(folder, "0-1,2-3,4-5") as swarm:
            ids = [*PROMPT, *greedy]
            assert await ids_of(swarm, PROMPT, GREEDY, drafter=Oracle(ids, 2, ahead=True)) == greedy
            assert not retracted
            assert await ids_of(swarm, PROMPT, GREEDY, drafter=Oracle(ids, 2, lambda _: True, ahead=True)) == greedy

    play(main)
    assert {start for start, _ in retracted} == {2, 4}
    assert [guess for start, guess in retracted if start == 2] == list(range(1, NEW - 1))


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
def test_logprobs_are_the_same_at_origin_and_edges(folder: Path, params: SamplingParams) -> None:
    """Also with drafts; the drawn token's own, and the alternatives in order."""
    params = replace(params, logprobs=3)

    async def at(ends: EndsAt, cut: str) -> list[tuple[int, float | None, object]]:
        async with swarm_of(folder, cut, ends=ends) as swarm:
            want = expected(folder, PROMPT, params)
            tokens = await tokens_of(swarm, params, drafter=Oracle([*PROMPT, *want], 5, lambda p: p % 4 == 0))
            return [(t.id, t.logprob, t.top) for t in tokens]

    origin, edges = play(lambda: at("origin", "0-5")), play(lambda: at("edges", "0-1,2-5"))
    assert origin == edges
    assert all(logprob is not None and logprob < 0 for _, logprob, _ in origin)
    assert all(isinstance(top, tuple) and len(top) == 3 for _, _, top in origin)


@pytest.mark.parametrize("dies", [False, True])
def test_logits_that_do_not_fit_into_one_step(folder: Path, dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 14 rows of a vocabulary of 152,000 tokens, say; 8 rows here. Two windows are on their way, which are sent again
    as one step once a hop was replaced. (They could not be sent, and the answer ended.)"""
    for place in ("wire.frame", "worker.fit"):
        monkeypatch.setattr(f"manyhands.{place}.MAX_STEP_BODY", 8 << 10)
    params, faults = replace(HOT, logprobs=3, max_tokens=40), Faults()
    want = expected(folder, PROMPT, params)

    async def main() -> None:
        options: dict[str, Any] = {"ends": "edges", "spares": ["0-5"], "wrap": faults.wrap}
        async with swarm_of(folder, "0-1,2-3,4-5", request=RequestConfig(prefill_chunk=16), **options) as swarm:
            if dies:
                faults.at("window", swarm.hops[1], lambda: faults.die(swarm.hops[1]))
            answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, params))
            async for _ in swarm.origin.stream(answer, drafter=Oracle([*PROMPT, *want], 15, ahead=True)):
                pass
            assert answer.token_ids == want and len(answer.repairs) == dies

    play(main)


@pytest.mark.parametrize("ends", ["origin", "edges"])
def test_a_stop_id_ends_the_answer(folder: Path, hot: list[int], ends: EndsAt) -> None:
    """Its token is the last one, also in the middle of an accepted window, and the leases are free at once."""
    stop = next(i for i in hot[4:] if hot.index(i) >= 4)
    want = hot[: hot.index(stop) + 1]

    async def main() -> None:
        async with swarm_of(folder, "0-2,3-5", ends=ends) as swarm:
            for drafter in drafters([*PROMPT, *hot]).values():
                request = swarm.origin.request_ids(PROMPT, replace(HOT, stop_ids=(stop,)))
                answer = await swarm.origin.complete(request, drafter=drafter)
                assert (answer.token_ids, answer.finish_reason) == (want, "stop")

    play(main)


def test_a_stop_string_ends_the_answer(folder: Path, greedy: list[int]) -> None:
    """The text ends before it, whichever tokens it spans and however many came at once."""

    async def main() -> None:
        async with swarm_of(folder, "0-2,3-5") as swarm:
            whole = (await swarm.origin.complete(swarm.origin.request_ids(PROMPT, GREEDY))).text
            stop = whole[4:6]
            for drafter in drafters([*PROMPT, *greedy]).values():
                request = swarm.origin.request_ids(PROMPT, replace(GREEDY, stop=(stop,)))
                answer = await swarm.origin.complete(request, drafter=drafter)
                assert (answer.text, answer.finish_reason) == (whole[: whole.index(stop)], "stop")

    play(main)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_max_tokens_is_exact(folder: Path, greedy: list[int], count: int) -> None:
    """Drafts never carry an answer beyond its limit, nor a step beyond the lease."""

    async def main() -> None:
        async with swarm_of(folder, "0-2,3-5") as swarm:
            for drafter in drafters([*PROMPT, *greedy]).values():
                request = swarm.origin.request_ids(PROMPT, replace(GREEDY, max_tokens=count))
                answer = await swarm.origin.complete(request, drafter=drafter)
                assert (answer.token_ids, answer.finish_reason) == (greedy[:count], "length")

    play(main)


def test_deterministic_switches_every_processor_off(folder: Path) -> None:
    """The plain argmax of the logits, whatever else the request says."""
    plain = expected(folder, PROMPT, SamplingParams(max_tokens=NEW))

    async def main() -> None:
        async with swarm_of(folder, "0-5") as swarm:
            assert await ids_of(swarm, PROMPT, replace(HOT, ignore_eos=False, deterministic=True)) == plain

    play(main)


def test_a_drafter_that_fails_ends_its_own_answer(folder: Path, greedy: list[int]) -> None:
    """Its error is that request's; the node and the others go on."""

    class Broken(NoDrafter):
        def propose(self, ids: object, guessed: object, most: int) -> list[int]:
            raise RuntimeError("no idea")

    async def main() -> None:
        async with swarm_of(folder, "0-2,3-5") as swarm:
            other = asyncio.ensure_future(ids_of(swarm, PROMPT, GREEDY))
            with pytest.raises(RuntimeError, match="no idea"):
                await ids_of(swarm, PROMPT, HOT, drafter=Broken())
            assert await other == greedy

    play(main)


def test_a_stop_string_before_half_a_character_in_the_last_token_ends_the_text(folder: Path) -> None:
    """It was cut off at the string, and said to have reached its limit."""

    class Halves:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return (b"END\xe2\x80" * len(ids)).decode(errors="replace")

    async def main() -> None:
        async with swarm_of(folder, "0-5") as swarm:
            origin = swarm.origin
            origin.model.tokenizer = Halves()  # type: ignore[assignment]
            answer = await origin.complete(origin.request_ids(PROMPT, replace(GREEDY, max_tokens=1, stop=("END",))))
            assert (answer.text, answer.finish_reason, answer.stopped_by) == ("", "stop", "END")

    play(main)
