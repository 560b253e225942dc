"""What tests of the path of a token share: drafters of every character, and the answer as it must be."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from manyhands.core import SamplingParams
from manyhands.origin import Token
from manyhands.origin.draft import Drafter, NoDrafter
from manyhands.origin.sampler import Sampler
from manyhands.testing.clock import run_virtual
from manyhands.testing.swarm import MemorySwarm, memory_swarm
from manyhands.testing.tiny import EOS
from tests.worker.pipeline import Feed, Loader, random_ids

T = TypeVar("T")
PROMPT = tuple(random_ids(37, seed=11))
NEW = 14
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
HOT = SamplingParams(
    max_tokens=NEW,
    ignore_eos=True,
    temperature=0.9,
    seed=77,
    top_k=60,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=((65, 2.0), (66, -3.0)),
)


class Oracle(NoDrafter):
    """Drafts what will be drawn: `depth` tokens, those wrong for whose positions `spoil` says so. With `ahead` further windows
    follow while the first is on its way."""

    def __init__(
        self, ids: Sequence[int], depth: int, spoil: Callable[[int], bool] = lambda _: False, *, ahead: bool = False
    ) -> None:
        super().__init__()
        self._ids, self._depth, self._spoil, self._ahead = tuple(ids), depth, spoil, ahead

    def propose(self, ids: Sequence[int], guessed: Sequence[int], most: int) -> Sequence[int]:
        if guessed and not self._ahead:
            return ()
        start = len(ids) + len(guessed)
        drafts = self._ids[start : start + self._depth]
        return [(i + 1) % 256 if self._spoil(start + at) else i for at, i in enumerate(drafts)]


class Restless(NoDrafter):
    """Right, wrong, absurd and no drafts at all, of changing depth, in as many windows as may be on their way."""

    def __init__(self, ids: Sequence[int], seed: int) -> None:
        super().__init__()
        self._ids, self._random = tuple(ids), Random(seed)

    def propose(self, ids: Sequence[int], guessed: Sequence[int], most: int) -> Sequence[int]:
        start = len(ids) + len(guessed)
        right = self._ids[start : start + self._random.randrange(9)]
        return [i if self._random.random() < 0.8 else self._random.choice([0, 255, -1, 1 << 40]) for i in right]


def drafters(ids: Sequence[int]) -> dict[str, Drafter]:
    """By name, for an answer whose prompt and tokens are `ids`."""
    return {
        "none": NoDrafter(),
        "oracle": Oracle(ids, 4),
        "wrong": Oracle(ids, 3, lambda _: True),
        "half": Oracle(ids, 8, lambda position: position % 3 == 0),
        "stream": Oracle(ids, 2, ahead=True),
        "wrong stream": Oracle(ids, 2, lambda _: True, ahead=True),
        "broken stream": Oracle(ids, 3, lambda position: position % 5 == 0, ahead=True),
        "restless": Restless(ids, 3),
    }


def expected(folder: Path, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """The answer by definition: one span, one token at a time, the sampler called in a plain loop."""
    pipeline = Loader(folder, "bf16").cut(0, 6)
    sampler = Sampler(params, pipeline.ends.vocab_size, frozenset({EOS}))
    ids = list(prompt)
    caches = pipeline.session(len(ids) + params.max_tokens)
    row = pipeline.run(ids, [len(ids)], caches)[-1]
    while True:
        ids.append(sampler.draw(row, len(ids), ids, len(prompt)).token)
        if len(ids) == len(prompt) + params.max_tokens or sampler.is_stop_id(ids[-1]):
            return ids[len(prompt) :]
        row = pipeline.step([Feed(caches, len(ids) - 1, ids[-1:])])[0][-1]


@asynccontextmanager
async def swarm_of(folder: Path, cut: str, **options: Any) -> AsyncIterator[MemorySwarm]:
    """A swarm that must be free of leases in the end."""
    async with memory_swarm(folder, cut, **options) as swarm:
        yield swarm
        await all_free(swarm)


async def all_free(swarm: MemorySwarm) -> None:
    """Wait until no hop holds a lease (a Close may be on its way)."""
    hosts = [host for node in swarm.hops for host in node.hosts]
    for _ in range(200):
        if all(host.info.free_tokens == node.worker.config.cache_tokens for node in swarm.hops for host in node.hosts):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"leases are left: {hosts}")


async def ids_of(swarm: MemorySwarm, prompt: Sequence[int], params: SamplingParams, **options: Any) -> list[int]:
    answer = await swarm.origin.complete(swarm.origin.request_ids(prompt, params), **options)
    return answer.token_ids


async def tokens_of(swarm: MemorySwarm, params: SamplingParams, **options: Any) -> list[Token]:
    answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, params))
    return [token async for token in swarm.origin.stream(answer, **options)]


def play(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a scenario under the virtual clock."""
    return run_virtual(main())
