"""manyhands.origin.draft_model: a drafter changes no token, is right where it is alike, and costs nothing when it fails."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from manyhands import tales
from manyhands.config import RequestConfig
from manyhands.core import EndsAt, SamplingParams
from manyhands.errors import BadRequest, ModelError
from manyhands.origin import Origin
from manyhands.origin.draft_model import BUDGET_S, DraftModel, _Line, check_tokenizer
from manyhands.origin.sampler import Sampler
from manyhands.testing.swarm import MemorySwarm
from manyhands.testing.tiny import make_tiny
from manyhands.testing.wan import WanProfile, WanTransport
from manyhands.text.grammar import Grammars, json_grammar
from manyhands.text.tokenizer import load_tokenizer
from manyhands.worker.batch import WINDOW_ROWS
from manyhands.worker.execute import Device
from tests.origin.scenes import GREEDY, HOT, PROMPT, expected, play, swarm_of

LONG = 40


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of other weights and the same tokenizer."""
    return make_tiny("llama", tmp_path_factory.mktemp("drafter") / "llama", seed=5)


@asynccontextmanager
async def drafting(
    folder: Path, drafter: Path, *, ends: EndsAt = "origin", cut: str = "0-2,3-5", draft: str = "model"
) -> AsyncIterator[tuple[MemorySwarm, Origin]]:
    """A swarm 40 ms away, and an origin with a drafter beside it."""
    request = RequestConfig(draft=draft)
    far = {"wrap": lambda transport: WanTransport(transport, WanProfile(delay_s=0.02), WanProfile(delay_s=0.02))}
    async with swarm_of(folder, cut, ends=ends, request=request, **far) as swarm:
        device, old = Device.start(1), swarm.origin
        model = DraftModel(drafter, "drafter", old.model.tokenizer)
        try:
            yield swarm, Origin(old.node, old.model, device, swarm.addrs, None, model)
        finally:
            device.close()


async def ids(origin: Origin, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> tuple[list[int], int, int]:
    """The answer, and how many drafts of the model were sent and right."""
    answer = await origin.complete(origin.request_ids(prompt, params))
    tally = answer.drafting.drafters.get("model")
    return answer.token_ids, tally.drafted if tally else 0, tally.accepted if tally else 0


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("ends", ["origin", "edges"])
def test_a_drafter_that_is_the_model_itself_is_always_right(folder: Path, params: SamplingParams, ends: EndsAt) -> None:
    """With temperature, every filter, penalties and a bias: the noise and the history of each position are the target's."""
    params = replace(params, max_tokens=LONG)
    want = expected(folder, PROMPT, params)

    async def main() -> None:
        async with drafting(folder, folder, ends=ends) as (_, origin):
            got, drafted, accepted = await ids(origin, params)
            assert got == want
            assert accepted > LONG / 4
            assert drafted - accepted <= WINDOW_ROWS, "what was on its way when the answer ended"

    play(main)


def test_a_drafter_of_other_weights_changes_no_token(folder: Path, other: Path) -> None:
    """Also several at once: each has its own cache."""
    cases = [replace(HOT, seed=seed, max_tokens=LONG) for seed in range(3)]

    async def main() -> None:
        async with drafting(folder, other) as (_, origin):
            got = await asyncio.gather(*(ids(origin, params) for params in cases))
            assert [one[0] for one in got] == [expected(folder, PROMPT, params) for params in cases]
            assert sum(one[1] for one in got) > sum(one[2] for one in got)

    play(main)


def test_drafts_follow_the_grammar(folder: Path) -> None:
    """The drafter has the grammar's state at its own position, which is ahead of the target's."""
    tokenizer = load_tokenizer(folder)

    async def main() -> None:
        async with drafting(folder, folder) as (_, origin):
            made = Grammars(tokenizer, origin.model.vocab_size, origin.model.eos_ids)
            params, texts = SamplingParams(max_tokens=LONG, temperature=0.8, seed=4), list[str]()
            for draft in ("model", "off"):
                answer = origin.answer(origin.request_ids(PROMPT, params))
                constraint = made.compile(json_grammar(None))
                async for _ in origin.stream(answer, draft=draft, constraint=constraint):
                    pass
                texts.append(answer.text)
                if draft == "model":
                    assert answer.drafting.accepted > 0
            assert texts[0] == texts[1]

    play(main)


def test_a_drafter_with_another_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"tales cannot draft for this model: \d+ entries of their vocabularies"):
        check_tokenizer("tales", load_tokenizer(folder), load_tokenizer(tales.model_path()))
    check_tokenizer("tales", load_tokenizer(tales.model_path()), load_tokenizer(tales.model_path()))


def test_a_request_for_a_model_where_none_drafts_is_refused(folder: Path) -> None:
    async def main() -> None:
        async with swarm_of(folder, "0-5") as swarm:
            with pytest.raises(BadRequest, match="--draft model:MODEL"):
                await swarm.origin.complete(swarm.origin.request_ids(PROMPT, GREEDY), draft="model")

    play(main)


class FailingDevice:
    """A Device whose third job and those after it end in an error after `fail_s` of the loop's time, or never."""

    def __init__(self, plain: Device, fail_s: float | None) -> None:
        self._plain, self._fail_s = plain, fail_s
        self._num_jobs = 0

    def run(self, function: Callable[[], object]) -> "asyncio.Future[Any]":
        self._num_jobs += 1
        if self._num_jobs < 3:
            return self._plain.run(function)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        if self._fail_s is not None:
            loop.call_later(self._fail_s, done.set_exception, MemoryError("no memory"))
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


@pytest.mark.parametrize("fail_s", [0.0, 2 * BUDGET_S, None], ids=["dies", "dies late", "hangs"])
def test_a_drafter_that_fails_costs_nothing(
    folder: Path, fail_s: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It dies in its third turn, or does not end it in time: the answer is the same, and says why there were no more drafts.

    Of a turn that was given up nothing more is heard. (asyncio logged its error.)"""
    plain = DraftModel.__init__

    def failing(self: DraftModel, *args: Any) -> None:
        plain(self, *args)
        self.device = cast(Device, FailingDevice(self.device, fail_s))

    monkeypatch.setattr(DraftModel, "__init__", failing)

    async def main() -> None:
        async with drafting(folder, folder) as (_, origin):
            answer = await origin.complete(origin.request_ids(PROMPT, replace(GREEDY, max_tokens=LONG)))
            assert answer.token_ids == expected(folder, PROMPT, replace(GREEDY, max_tokens=LONG))
            why = "MemoryError: no memory" if fail_s == 0 else "a turn took more than"
            assert f"the model drafter is off: {why}" in answer.drafting.verdict
            await asyncio.sleep(2 * BUDGET_S)

    play(main)
    gc.collect()
    heard = [record.exc_info for record in caplog.records if record.name == "asyncio" and record.exc_info]
    assert not [error for _, error, _ in heard if isinstance(error, MemoryError)]


def test_a_line_that_is_rolled_back_draws_as_one_that_was_not(folder: Path) -> None:
    """Wherever it is cut, also within what it drew itself, and read in parts."""
    model = DraftModel(folder, "drafter", load_tokenizer(folder))
    try:
        sampler = Sampler(HOT, model.vocab_size, frozenset())

        def drawn(line: _Line, start: Sequence[int]) -> list[int] | None:
            while (drafts := line.turn(start, 4, lambda: False)) is None:
                pass
            return drafts

        want = {}
        for cut in (3, 17, len(PROMPT)):
            for tail in ((), (7,), (7, 8, 9)):
                start = [*PROMPT[:cut], *tail]
                want[tuple(start)] = drawn(_Line(model, sampler, 3), start)
        line = _Line(model, sampler, 3)
        for begin, drafts in [*want.items(), *reversed(want.items())]:
            assert drawn(line, list(begin)) == drafts
            assert drafts is not None and drawn(line, [*begin, *drafts[:2]]) is not None
    finally:
        model.close()
