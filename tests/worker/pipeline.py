"""A model cut into spans in one thread, without sessions or links: what tests of exactness push rows through."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from manyhands.core import Precision, Span
from manyhands.engine.library import FORCED
from manyhands.engine.span import Cache, EndsRunner, Piece, SpanRunner
from manyhands.worker.runner import load_ends, load_span

Logits = NDArray[np.float32]
Ids = Sequence[int]
MOST_THREADS = 4


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch computes with `count` threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_ids(count: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def pieces(total: int, size: int) -> list[int]:
    """`total` as a sum of pieces of `size` and a rest."""
    return [min(size, total - at) for at in range(0, total, size)]


@contextmanager
def forced(engine: str | None) -> Iterator[None]:
    """MANYHANDS_ENGINE names `engine`; None: nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if engine is None:
            patch.delenv(FORCED, raising=False)
        else:
            patch.setenv(FORCED, engine)
        yield


@dataclass(frozen=True)
class Feed:
    """New rows of one session in a device step: its caches (one a span), the position of the first id, the ids."""

    caches: list[Cache]
    position: int
    ids: Ids


class Pipeline:
    """Spans that cover a model in order, and its ends."""

    def __init__(self, spans: Sequence[SpanRunner], ends: EndsRunner, threads: int = 1) -> None:
        self.spans, self.ends, self.threads = list(spans), ends, threads

    def on(self, threads: int) -> "Pipeline":
        """The same on so many threads."""
        return Pipeline(self.spans, self.ends, threads)

    def session(self, capacity: int = 96) -> list[Cache]:
        return [span.new_cache(capacity) for span in self.spans]

    def step(self, feeds: Sequence[Feed]) -> list[Logits]:
        """One device step of every span over all feeds side by side; the logits of each feed's rows."""
        counts = [len(feed.ids) for feed in feeds]
        rows = self.ends.embed([i for feed in feeds for i in feed.ids])
        for index, span in enumerate(self.spans):
            steps = [Piece(feed.caches[index], feed.position, len(feed.ids)) for feed in feeds]
            rows = span.step(rows.tobytes(), steps, self.threads)
        edges = [sum(counts[:index]) for index in range(len(counts) + 1)]
        return [self.ends.logits(rows[a:b], b - a, self.threads) for a, b in pairwise(edges)]

    def run(self, ids: Ids, sizes: Sequence[int], caches: list[Cache] | None = None) -> Logits:
        """Logits of every row of `ids`, fed alone in steps of `sizes` from position 0."""
        caches = caches or self.session(len(ids))
        out: list[Logits] = []
        at = 0
        for size in sizes:
            out += self.step([Feed(caches, at, ids[at : at + size])])
            at += size
        assert at == len(ids)
        return np.concatenate(out)

    def greedy(self, prompt: Ids, count: int) -> list[int]:
        """`count` ids after `prompt`, each the argmax."""
        caches = self.session(len(prompt) + count)
        row, ids = self.run(prompt, [len(prompt)], caches)[-1], list(prompt)
        for _ in range(count):
            ids.append(int(row.argmax()))
            row = self.step([Feed(caches, len(ids) - 1, ids[-1:])])[0][-1]
        return ids[len(prompt) :]


def in_company(pipeline: Pipeline, ids: Ids, other: Ids) -> Logits:
    """Logits of every row of 430 `ids`, each step beside rows of another session, with wrong rows that are taken back."""
    caches, strange = pipeline.session(440), pipeline.session(440)
    got, at = [pipeline.step([Feed(caches, 0, ids[:65])])[0]], 65
    for turn, size in enumerate((1, 7, 1, 90, 1, 200, 3, 1, 61)):
        wrong = random_ids(size + 2, seed=at)
        pipeline.step([Feed(strange, 10 * turn, other[: 40 + turn]), Feed(caches, at, wrong)])
        got.append(pipeline.step([Feed(caches, at, ids[at : at + size]), Feed(strange, 10 * turn + 20, other[:3])])[0])
        at += size
    return np.concatenate(got)


class Loader:
    """The spans of one checkpoint in one precision, each loaded once, for 1 to 4 threads; `engine`: as `forced`."""

    def __init__(self, folder: Path, precision: Precision, engine: str | None = None) -> None:
        self.folder, self.precision, self.engine = folder, precision, engine
        self._spans: dict[Span, SpanRunner] = {}
        with forced(engine):
            self.ends = load_ends(folder, precision, MOST_THREADS)

    def cut(self, *edges: int) -> Pipeline:
        """The pipeline of spans [edges[0], edges[1]), [edges[1], edges[2]), ..."""
        return Pipeline([self._span(Span(a, b)) for a, b in pairwise(edges)], self.ends)

    def _span(self, span: Span) -> SpanRunner:
        if span not in self._spans:
            with forced(self.engine):
                self._spans[span] = load_span(self.folder, span, self.precision, MOST_THREADS)
        return self._spans[span]
