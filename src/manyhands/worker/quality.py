"""How far the predictions of a model are from those of another, position by position, in the figures that llama.cpp reports.

Over windows of a text: the divergence KL(A || B) of the next token's distribution, how often the likeliest token is the
same, and the perplexities. Models are compared by what they predict for the same ids, so they need one tokenizer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.core import Precision, Span
from manyhands.engine.span import Piece
from manyhands.errors import BadRequest
from manyhands.worker.runner import describe, load_ends, load_span

WINDOW: Final = 256  # positions that see each other, if the models have so many
_AT_ONCE: Final = 64  # rows whose logits are compared at once
_FIRST_IDS: Final = 4  # of a drawn window, at random

Logits = NDArray[np.float32]  # [positions, vocab]
Predict = Callable[[Sequence[int]], Logits]
Encode = Callable[[str], list[int]]


class Predictor:
    """A model in memory. It predicts the same at every call."""

    def __init__(self, folder: Path, precision: Precision, threads: int) -> None:
        self._threads, layers = threads, describe(folder, precision).num_layers
        self._ends, self._span = (
            load_ends(folder, precision, threads),
            load_span(folder, Span(0, layers), precision, threads),
        )
        self.vocab_size = self._ends.vocab_size

    def __call__(self, ids: Sequence[int]) -> Logits:
        """Logits of all positions of a window."""
        pieces = [Piece(self._span.new_cache(len(ids)), 0, len(ids))]
        rows = self._span.step(self._ends.embed(ids).tobytes(), pieces, self._threads)
        return self._ends.logits(rows, len(ids), self._threads)

    def draw(self, windows: int, rng: np.random.Generator, length: int = WINDOW) -> Iterator[list[int]]:
        """Windows of `length` ids drawn from its own predictions at temperature 1."""
        first = min(_FIRST_IDS, length)
        for _ in range(windows):
            cache, ids = self._span.new_cache(length), [int(i) for i in rng.integers(0, self.vocab_size, first)]
            while len(ids) < length:
                new = ids[cache.length :]
                piece = Piece(cache, cache.length, len(new))
                rows = self._span.step(self._ends.embed(new).tobytes(), [piece], self._threads)
                noisy = self._ends.logits(rows[-1:], 1, self._threads)[0] + rng.gumbel(size=self.vocab_size)
                ids.append(int(np.argmax(noisy)))
            yield ids


def window_within(contexts: Iterable[int]) -> int:
    """How long windows may be for models of these contexts. Raises BadRequest where one is too short to predict anything."""
    if (length := min(WINDOW, *contexts)) < 2:
        raise BadRequest(f"a model has a context of {length}: at least 2 are needed")
    return length


def windows_of(encoders: Sequence[Encode], text: str, windows: int, length: int = WINDOW) -> list[list[int]]:
    """At most `windows` windows of a text's ids, of `length` at most. Raises BadRequest if the tokenizers of the models differ
    on it, or it is too short to predict anything."""
    found = [encode(text) for encode in encoders]
    if any(ids != found[0] for ids in found):
        raise BadRequest("the two models have different tokenizers: compare models whose texts are the same ids")
    if len(found[0]) < 2:
        raise BadRequest(f"the text has {len(found[0])} tokens: at least 2 are needed, some thousands say something")
    return [ids for at in range(0, len(found[0]), length) if len(ids := found[0][at : at + length]) > 1][:windows]


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far B is from A. KL divergences in nats; `same_top`: the share of positions with one likeliest token."""

    positions: int
    mean_kl: float
    median_kl: float
    kl_99_9: float
    max_kl: float
    same_top: float
    perplexity_a: float
    perplexity_b: float

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity_b / self.perplexity_a


def compare(
    a: Predict, b: Predict, windows: Sequence[Sequence[int]], each: Callable[[int], None] = lambda _: None
) -> Divergence:
    """`each` is told how many windows are done."""
    divergences, same, cost, count = [], 0, np.zeros(2), 0
    for done, ids in enumerate(windows, 1):
        both = a(ids), b(ids)
        for at in range(0, len(ids), _AT_ONCE):
            p, q = (log_softmax(logits[at : at + _AT_ONCE]) for logits in both)
            divergences.append((np.exp(p) * (p - q)).sum(-1))
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
            following = np.array(ids[at + 1 : at + 1 + _AT_ONCE])
            cost -= [float(log[np.arange(len(following)), following].sum()) for log in (p, q)]
            count += len(following)
        each(done)
    every, (ours, theirs) = np.concatenate(divergences), np.exp(cost / count)
    tail = (float(np.median(every)), float(np.quantile(every, 0.999)), float(every.max()))
    return Divergence(len(every), float(every.mean()), *tail, same / len(every), float(ours), float(theirs))


def log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
