"""manyhands.origin.draft_model: a drafter changes no token, is right where it is alike, and costs nothing when it fails."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from manyhands import tales
from manyhands.config import RequestConfig
from manyhands.core import EndsAt, SamplingParams
from manyhands.errors import BadRequest, ModelError
from manyhands.origin import Origin
from manyhands.origin.draft_model import DraftModel, _Line, check_tokenizer
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
    check_tokenizer("tales", load_tokenizer(tales.model_path()), load_tokenizer(tales.drafter_path()))


def test_a_request_for_a_model_where_none_drafts_is_refused(folder: Path) -> None:
    async def main() -> None:
        async with swarm_of(folder, "0-5") as swarm:
            with pytest.raises(BadRequest, match="--draft model:MODEL"):
                await swarm.origin.complete(swarm.origin.request_ids(PROMPT, GREEDY), draft="model")

    play(main)


@pytest.mark.parametrize("fails", ["dies", "hangs"])
def test_a_drafter_that_fails_costs_nothing(folder: Path, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies in its third turn, or never ends it: the answer is the same, and says why there were no more drafts."""
    params, turns, hold = replace(GREEDY, max_tokens=LONG // 2), [0], threading.Event()
    turn = _Line.turn

    def broken(self: _Line, *args: object) -> object:
        turns[0] += 1
        if turns[0] >= 3 and fails == "dies":
            raise MemoryError("no memory")
        if turns[0] >= 3:
            hold.wait()
        return turn(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(_Line, "turn", broken)

    async def main() -> None:
        async with drafting(folder, folder) as (_, origin):
            answer = origin.answer(origin.request_ids(PROMPT, params))
            # The virtual clock stands still while a thread works: the deadline is real here.
            monkeypatch.setattr("manyhands.origin.draft_model.BUDGET_S", 0.2)
            async for _ in origin.stream(answer):
                pass
            assert answer.token_ids == expected(folder, PROMPT, params)
            why = "MemoryError: no memory" if fails == "dies" else "a turn took more than"
            assert f"the model drafter is off: {why}" in answer.drafting.verdict

    try:
        asyncio.run(main())
    finally:
        hold.set()


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
