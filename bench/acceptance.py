"""How often is a draft of tales' drafter right? Not timed: the figures are the same at any load.

tales writes TEXTS texts behind each of OPENINGS at a temperature; at each of their positions both models' odds are compared, as
the engine computes them. `same_noise`: the drafter draws with the target's noise (origin/draft_model.py); `likeliest`: it
guesses its likeliest token; `own_noise`: it draws by itself. All three in closed form, so no luck of a draw is in them; at
temperature 0 they are the same. A chain of drafts gives at most 1 / (1 - same_noise) tokens a traversal.
Run: python -m bench.acceptance [--drafter FOLDER] [--texts N]
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from bench.report import finish, note
from manyhands import tales
from manyhands.core import Span
from manyhands.engine.span import Piece
from manyhands.text.tokenizer import load_tokenizer
from manyhands.worker.runner import describe, load_ends, load_span

OPENINGS = (
    "Once upon a time there was a king who had three sons, and",
    "The old witch looked at the little girl and said,",
    "In the middle of the forest stood a small house, and in it",
    "The youngest brother took the golden ring and",
    "One winter evening the miller heard a knock at the door.",
)
TEMPERATURES = (0.0, 0.7, 1.0)
LENGTH, TEXTS = 200, 4
TARGET = {"greedy": 0.7, "T 0.7": 0.7, "T 1.0": 0.7}
ROWS = 256  # of a step that reads

Floats = NDArray[np.float64]
Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Texts:
    """N texts of the same length: ids [N, L], and the bf16 rows that left the last layer at each, as bits [N, L, hidden]."""

    ids: NDArray[np.int64]
    rows: NDArray[np.uint16]


class Whole:
    """A whole model, run by the engine on one thread of this process; what its ends lack is that of `beside`."""

    def __init__(self, folder: Path, beside: Path | None = None) -> None:
        facts = describe(folder, "bf16")
        self.hidden, self.vocab = facts.hidden_size, facts.vocab_size
        self._span = load_span(folder, Span(0, facts.num_layers), "bf16", 1)
        self._ends = load_ends(folder, "bf16", 1, beside=beside)

    def logits(self, rows: NDArray[np.uint16]) -> Logits:
        """[T, vocab] of rows [T, hidden]."""
        parts = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
        return np.concatenate([self._ends.logits(part.tobytes(), len(part), 1) for part in parts])

    def read(self, ids: Sequence[int]) -> NDArray[np.uint16]:
        """The rows [T, hidden] that leave the last layer."""
        cache = self._span.new_cache(len(ids))
        parts = [(start, ids[start : start + ROWS]) for start in range(0, len(ids), ROWS)]
        return np.concatenate([self._step([part], [Piece(cache, start, len(part))]) for start, part in parts])

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        length: int,
        banned: Sequence[int],
        rng: np.random.Generator,
    ) -> Texts:
        """Go on behind each prompt at its temperature until it has `length` ids; `banned` ones are never drawn."""
        texts = [list(prompt) for prompt in prompts]
        caches = [self._span.new_cache(length) for _ in texts]
        rows = np.zeros((len(texts), length, self.hidden), np.uint16)
        while waiting := [n for n, text in enumerate(texts) if caches[n].length < len(text)]:
            pieces = [Piece(caches[n], caches[n].length, len(texts[n]) - caches[n].length) for n in waiting]
            out = self._step([texts[n][piece.start :] for n, piece in zip(waiting, pieces, strict=True)], pieces)
            ends = np.cumsum([piece.count for piece in pieces])
            for n, piece, end in zip(waiting, pieces, ends, strict=True):
                rows[n, piece.start : piece.start + piece.count] = out[end - piece.count : end]
            going = [k for k, n in enumerate(waiting) if len(texts[n]) < length]
            if not going:
                continue
            logits = self.logits(out[[ends[k] - 1 for k in going]])
            logits[:, list(banned)] = -np.inf
            drawn = draw(logits, [temperatures[waiting[k]] for k in going], rng)
            for k, token in zip(going, drawn, strict=True):
                texts[waiting[k]].append(int(token))
        return Texts(np.array(texts), rows)

    def _step(self, ids: Sequence[Sequence[int]], pieces: Sequence[Piece]) -> NDArray[np.uint16]:
        rows = self._ends.embed([i for part in ids for i in part])
        out = self._span.step(rows.tobytes(), pieces, 1)
        return out.view(np.uint16).reshape(-1, self.hidden)


def draw(logits_NV: Logits, temperatures: Sequence[float], rng: np.random.Generator) -> NDArray[np.intp]:
    """A token of each row at its temperature; 0: the likeliest."""
    heat_N1 = np.array(temperatures, np.float32)[:, None]
    noise_NV = -np.log(np.maximum(rng.standard_exponential(logits_NV.shape, np.float32), 1e-30))
    drawn: NDArray[np.intp] = (logits_NV + heat_N1 * noise_NV).argmax(-1)
    return drawn


def odds(logits_TV: Logits, temperature: float) -> Floats:
    """The softmax of each row at a temperature above 0."""
    depth_TV = (logits_TV.astype(np.float64) - logits_TV.max(-1, keepdims=True)) / temperature
    weights_TV = np.exp(depth_TV)
    return np.asarray(weights_TV / weights_TV.sum(-1, keepdims=True))


def same_noise(p_TV: Floats, q_TV: Floats) -> Floats:
    """The chance that draws from the odds p and q with the same Gumbel noise are the same token, row by row.

    Both are token i with the chance 1 / sum over j of max(p_j / p_i, q_j / q_i): the first of exponential arrivals at the
    rates max(p_j / p_i, q_j / q_i) is i's, whose rate is 1. The larger is p_j / p_i for the j whose p / q is above i's.
    """
    order = np.argsort(np.log(np.maximum(q_TV, 1e-300)) - np.log(np.maximum(p_TV, 1e-300)), axis=-1)
    p_TV, q_TV = np.take_along_axis(p_TV, order, -1), np.take_along_axis(q_TV, order, -1)
    above, below = np.cumsum(p_TV, -1), np.maximum(1 - np.cumsum(q_TV, -1), 0.0)
    return np.asarray((p_TV * q_TV / np.maximum(above * q_TV + below * p_TV, 1e-300)).sum(-1))


def chances(p_TV: Logits, q_TV: Logits, temperature: float) -> dict[str, float]:
    """The mean chance of a right draft over rows of the target's logits p and the drafter's q."""
    likeliest = q_TV.argmax(-1)
    if not temperature:
        return dict.fromkeys(("same_noise", "likeliest", "own_noise"), float((p_TV.argmax(-1) == likeliest).mean()))
    p, q = odds(p_TV, temperature), odds(q_TV, temperature)
    return {
        "same_noise": float(same_noise(p, q).mean()),
        "likeliest": float(np.take_along_axis(p, likeliest[:, None], -1).mean()),
        "own_noise": float((p * q).sum(-1).mean()),
    }


def openings(folder: Path, num_texts: int) -> tuple[list[list[int]], list[int]]:
    """Ids of every one of OPENINGS, `num_texts` times, and the ids that end a text, which stay undrawn as in bench.ladder."""
    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer.encode(opening) for opening in OPENINGS for _ in range(num_texts)]
    banned = [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None]
    return prompts, banned


def measure(
    target: Whole, drafter: Whole, temperature: float, num_texts: int, length: int = LENGTH
) -> dict[str, float]:
    """The mean chances of a right draft over texts behind OPENINGS."""
    prompts, banned = openings(tales.model_path(), num_texts if temperature else 1)
    texts = target.write(prompts, [temperature] * len(prompts), length, banned, np.random.default_rng(1))
    told = []
    for prompt, ids, rows in zip(prompts, texts.ids.tolist(), texts.rows, strict=True):
        own = drafter.read(ids)
        p, q = (model.logits(each[len(prompt) - 1 :]) for model, each in ((target, rows), (drafter, own)))
        p[:, banned] = q[:, banned] = -np.inf
        told.append(chances(p, q, temperature))
    return {name: round(fmean(each[name] for each in told), 4) for name in told[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, default=tales.drafter_path(), help="folder of another checkpoint")
    parser.add_argument("--texts", type=int, default=TEXTS, help="behind each opening")
    options = parser.parse_args()
    target, drafter = Whole(tales.model_path()), Whole(options.drafter, tales.model_path())
    figures = {}
    for name, temperature in zip(TARGET, TEMPERATURES, strict=True):
        figures[name] = measure(target, drafter, temperature, options.texts)
        note(f"{name}: {figures[name]}")
    holds = {name: figures[name]["same_noise"] >= least for name, least in TARGET.items()}
    return finish("acceptance", {**figures, "positions": len(OPENINGS) * options.texts * LENGTH}, TARGET, holds)


if __name__ == "__main__":
    sys.exit(main())
