"""What the kill matrix shares: models loaded once, requests, the answers as they must be, and one cell."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import pytest

from manyhands.config import RequestConfig
from manyhands.core import SamplingParams
from manyhands.origin import Answer, OriginModel
from manyhands.origin.draft import Drafter
from manyhands.origin.node import FullNode
from manyhands.testing.clock import run_virtual
from manyhands.testing.faults import Faults
from manyhands.testing.swarm import MemorySwarm, memory_swarm
from manyhands.worker.execute import SpanModel
from tests.origin.scenes import Oracle
from tests.worker.pipeline import forced, random_ids

CUT = "0-1,2-3,4-5"
NEW = 24
# Prefill in pieces, so that a node can die between them.
REQUEST = RequestConfig(prefill_chunk=16)
PROMPTS = [tuple(int(i) for i in random_ids(37 + 9 * n, seed=n)) for n in range(3)]
PARAMS = {
    "greedy": SamplingParams(max_tokens=NEW, ignore_eos=True),
    "hot": SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.8, seed=5, presence_penalty=0.5),
}


Prompts = Sequence[tuple[int, ...]]


def request_of(kind: str, number: int, prompts: Prompts = PROMPTS) -> tuple[tuple[int, ...], SamplingParams]:
    return prompts[number], replace(PARAMS[kind], seed=number)


class Models:
    """Span models by what they hold, each used by one node of a swarm at a time: loading them is what tests wait for.

    With `back_ends`, one model after the other is loaded on each in turn.
    """

    def __init__(self, back_ends: Sequence[str] = ()) -> None:
        self._back_ends = cycle(back_ends) if back_ends else repeat(None)
        self._kept: dict[tuple[object, ...], list[SpanModel]] = {}
        self._used: dict[tuple[object, ...], int] = {}
        self.origin = cache(OriginModel)

    def span(self, *args: Any) -> SpanModel:
        """As SpanModel(...)."""
        key = args[:-1]  # without who is told how far the load is
        index = self._used.get(key, 0)
        self._used[key] = index + 1
        kept = self._kept.setdefault(key, [])
        if index == len(kept):
            back_end = next(self._back_ends)
            with nullcontext() if back_end is None else forced(back_end):
                kept.append(SpanModel(*args))
        return kept[index]

    def give_back(self) -> None:
        """A new swarm begins."""
        self._used.clear()


@contextmanager
def kept_models(back_ends: Sequence[str] = ()) -> Iterator[Models]:
    models = Models(back_ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("manyhands.worker.worker.SpanModel", models.span)
        patch.setattr("manyhands.testing.swarm.OriginModel", models.origin)
        yield models


@dataclass
class Scene:
    """A swarm with faults. `answers` are those of `ask`, in the order asked."""

    swarm: MemorySwarm
    faults: Faults
    answers: list[Answer] = field(default_factory=list)
    prompts: Prompts = field(default=tuple(PROMPTS))

    @property
    def hops(self) -> list[FullNode]:
        return self.swarm.hops

    async def ask(self, kind: str = "greedy", number: int = 0, **options: Any) -> list[int]:
        """One request's tokens."""
        origin = self.swarm.origin
        answer = origin.answer(origin.request_ids(*request_of(kind, number, self.prompts)))
        self.answers.append(answer)
        async for _ in origin.stream(answer, **options):
            pass
        return answer.token_ids

    async def free(self) -> None:
        """Wait until no node that lives holds a lease, nor the origin a session."""
        living = [n for n in self.hops if n.transport.node not in self.faults.trouble.dead | self.faults.trouble.frozen]
        for _ in range(200):
            if all(
                h.info.free_tokens == n.worker.config.cache_tokens and not h._opening for n in living for h in n.hosts
            ):
                assert not self.swarm.origin.node.sessions
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"leases are left: {[h for n in living for h in n.hosts]}")


class Bench:
    """Plays scenes on one checkpoint; knows the undisturbed answers."""

    def __init__(self, folder: Path, models: Models, prompts: Prompts = PROMPTS) -> None:
        self.folder, self._models, self._prompts = folder, models, tuple(prompts)
        self.wanted: dict[tuple[str, int], list[int]] = {}
        self.play(self._undisturbed)

    async def _undisturbed(self) -> None:
        async with self.scene(CUT) as scene:
            for kind in PARAMS:
                for number in range(len(self._prompts)):
                    self.wanted[kind, number] = await scene.ask(kind, number)

    @asynccontextmanager
    async def scene(self, cut: str = CUT, spares: Sequence[str] = ("0-5",), **options: Any) -> AsyncIterator[Scene]:
        """A swarm whose living nodes hold no lease in the end."""
        self._models.give_back()
        faults = Faults()
        options = {"request": REQUEST, **options}
        async with memory_swarm(self.folder, cut, spares=spares, wrap=faults.wrap, **options) as swarm:
            scene = Scene(swarm, faults, prompts=self._prompts)
            yield scene
            await scene.free()

    def half_right(self, kind: str, number: int) -> Drafter:
        """Three drafts a window; every other one is wrong."""
        return Oracle(
            [*self._prompts[number], *self.wanted[kind, number]],
            3,
            lambda position: position % 5 == 0,
            ahead=number % 2 == 0,
        )

    def play(self, main: Callable[[], Any]) -> Any:
        return run_virtual(main())
