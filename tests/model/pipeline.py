"""A model cut into shards in one thread, without sessions or links: what tests of exactness push rows through."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from manyhands.core import Precision, Span
from manyhands.model.cache import Segment, SessionCache, StepPlan
from manyhands.model.ends import Ends
from manyhands.model.shard import Shard


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with `count` threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_ids(count: int, seed: int, vocab: int = 256) -> Tensor:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def pieces(total: int, size: int) -> list[int]:
    """`total` as a sum of pieces of `size` and a rest."""
    return [min(size, total - at) for at in range(0, total, size)]


@dataclass(frozen=True)
class Feed:
    """New rows of one session in a device step: its caches (one a shard), the position of the first id, the ids."""

    caches: list[SessionCache]
    position: int
    ids: Tensor


class Pipeline:
    """Shards that cover a model in order, and its ends."""

    def __init__(self, shards: Sequence[Shard], ends: Ends) -> None:
        self.shards, self.ends = list(shards), ends

    def session(self, capacity: int = 96) -> list[SessionCache]:
        return [shard.new_cache(capacity) for shard in self.shards]

    def step(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """One device step of every shard over all feeds side by side; the logits of each feed's rows."""
        counts = [len(feed.ids) for feed in feeds]
        rows = [sum(counts[:index]) for index in range(len(counts))]
        hidden = self.ends.embed(torch.cat([feed.ids for feed in feeds]))
        for index, shard in enumerate(self.shards):
            segments = [
                Segment(feed.caches[index], feed.position, row, count)
                for feed, row, count in zip(feeds, rows, counts, strict=True)
            ]
            hidden = shard.forward(hidden, StepPlan(segments))
        return [self.ends.logits(hidden[row : row + count]) for row, count in zip(rows, counts, strict=True)]

    def run(self, ids: Tensor, sizes: Sequence[int], caches: list[SessionCache] | None = None) -> Tensor:
        """Logits of every row of `ids`, fed alone in steps of `sizes` from position 0."""
        caches = caches or self.session(len(ids))
        out: list[Tensor] = []
        at = 0
        for size in sizes:
            out += self.step([Feed(caches, at, ids[at : at + size])])
            at += size
        assert at == len(ids)
        return torch.cat(out)

    def greedy(self, prompt: Tensor, count: int) -> list[int]:
        """`count` ids after `prompt`, each the argmax."""
        caches = self.session(len(prompt) + count)
        row, ids = self.run(prompt, [len(prompt)], caches)[-1], [int(i) for i in prompt]
        for _ in range(count):
            ids.append(int(row.argmax()))
            row = self.step([Feed(caches, len(ids) - 1, torch.tensor(ids[-1:]))])[0][-1]
        return ids[len(prompt) :]


class Loader:
    """The shards of one checkpoint in one precision, each span loaded once."""

    def __init__(self, folder: Path, precision: Precision) -> None:
        self.folder, self.precision = folder, precision
        self._shards: dict[Span, Shard] = {}
        self.ends = Ends(folder, precision)

    def cut(self, *edges: int) -> Pipeline:
        """The pipeline of spans [edges[0], edges[1]), [edges[1], edges[2]), ..."""
        return Pipeline([self._shard(Span(a, b)) for a, b in pairwise(edges)], self.ends)

    def _shard(self, span: Span) -> Shard:
        if span not in self._shards:
            self._shards[span] = Shard(self.folder, span, self.precision)
        return self._shards[span]
