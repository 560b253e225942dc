"""How far are the predictions of small weights from those of bf16, and is that as near as llama.cpp's?

Over windows of a text, at every position: the divergence KL(bf16 || other) of the next token's distribution (mean, median,
99.9 %; in thousandths of a nat), how often the likeliest token is the same, and the ratio of perplexities. Arms: ours at w8
and w4; llama.cpp in bf16 (its noise), at q8_0 and q4_0 where llama-cpp-python is importable, with 8 bits for embedding and
head in both.
The text is FILE, else one that the model draws from its own bf16 logits: of a model with random weights it says little.
Holds if the mean divergence is at most 1.1x llama.cpp's of the like format.
Run: python -m bench.quality [MODEL] [--text FILE] [--windows N]
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.report import finish, note
from manyhands.checkpoint.config_fields import read_facts
from manyhands.config import home_from_env
from manyhands.core import Precision, Span
from manyhands.engine.span import Piece
from manyhands.place.shape import look_up
from manyhands.worker.runner import load_ends, load_span

WINDOW, SEED_IDS = 256, 4
TARGET = {"mean_kl_of_llama_cpp_x": 1.1}
LIKE = {"w8": "q8_0", "w4": "q4_0"}
Logits = NDArray[np.float64]  # [positions, vocab]
Predict = Callable[[Sequence[int]], Logits]


def ours(folder: Path, precision: Precision) -> Predict:
    """Logits of all positions of a window."""
    ends = load_ends(folder, precision, 1)
    span = load_span(folder, Span(0, read_facts(folder).num_layers), precision, 1)

    def predict(ids: Sequence[int]) -> Logits:
        rows = span.step(ends.embed(ids).tobytes(), [Piece(span.new_cache(len(ids)), 0, len(ids))], 1)
        return ends.logits(rows, len(ids), 1).astype(np.float64)

    return predict


def llama_cpp(file: Path) -> Predict:
    from llama_cpp import Llama

    model = Llama(str(file), n_ctx=WINDOW, n_batch=WINDOW, n_threads=1, logits_all=True, verbose=False)

    def predict(ids: Sequence[int]) -> Logits:
        model.reset()
        model.eval(list(ids))
        return np.array(model.scores[: len(ids)], np.float64)

    return predict


def log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def drawn(folder: Path, windows: int) -> list[list[int]]:
    """Windows that the model draws from its bf16 logits, at temperature 1."""
    ends = load_ends(folder, "bf16", 1)
    span = load_span(folder, Span(0, read_facts(folder).num_layers), "bf16", 1)
    rng, out = np.random.default_rng(0), []
    for _ in range(windows):
        cache, ids = span.new_cache(WINDOW), [int(i) for i in rng.integers(0, ends.vocab_size, SEED_IDS)]
        fed = 0
        while len(ids) < WINDOW:
            rows = span.step(ends.embed(ids[fed:]).tobytes(), [Piece(cache, fed, len(ids) - fed)], 1)
            fed = len(ids)
            ids.append(int(np.argmax(ends.logits(rows[-1:], 1, 1)[0] + rng.gumbel(size=ends.vocab_size))))
        out.append(ids)
    return out


def windows_of(folder: Path, text: Path | None, windows: int) -> list[list[int]]:
    if text is None:
        return drawn(folder, windows)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text.read_text()).ids
    return [ids[at : at + WINDOW] for at in range(0, min(len(ids), windows * WINDOW), WINDOW)]


def compared(right: Predict, other: Predict, windows: Sequence[Sequence[int]]) -> dict[str, float]:
    """What the module's docstring lists. `right` predicts the same at every call."""
    divergences, same, cost = [], [], [0.0, 0.0]
    for ids in windows:
        p, q = log_softmax(right(ids)), log_softmax(other(ids))
        divergences.append((np.exp(p) * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
        for i, log in enumerate((p, q)):
            cost[i] -= float(log[np.arange(len(ids) - 1), list(ids[1:])].sum())
    every, count = np.concatenate(divergences), sum(len(ids) - 1 for ids in windows)
    found = {"mean_mkl": 1e3 * every.mean(), "median_mkl": 1e3 * np.median(every)}
    found |= {"mkl_99_9": 1e3 * np.quantile(every, 0.999)}
    found |= {"same_top": np.concatenate(same).mean(), "perplexity_x": np.exp((cost[1] - cost[0]) / count)}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


@contextmanager
def arms_of(folder: Path) -> Iterator[dict[str, Callable[[], Predict]]]:
    """By name, made when they are called."""
    arms: dict[str, Callable[[], Predict]] = {"w8": lambda: ours(folder, "w8"), "w4": lambda: ours(folder, "w4")}
    with tempfile.TemporaryDirectory() as place:
        if find_spec("llama_cpp") is not None:
            from bench.gguf import gguf, quantised

            copy = Path(shutil.copytree(folder, Path(place) / "model"))
            arms["llama_cpp bf16"] = lambda: llama_cpp(gguf(copy))
            arms["llama_cpp q8_0"] = lambda: llama_cpp(quantised(copy, "q8_0"))
            arms["llama_cpp q4_0"] = lambda: llama_cpp(quantised(copy, "q4_0"))
        yield arms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tales", help="a checkpoint folder that is here, or tales")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=16)
    options = parser.parse_args()
    folder = look_up(options.model, "bf16", home_from_env()).folder
    if folder is None:
        parser.error(f"{options.model} is not on this machine: fetch it first")
    windows = windows_of(folder, options.text, options.windows)
    right, out = ours(folder, "bf16"), dict[str, Any](model=options.model, positions=sum(map(len, windows)))
    with arms_of(folder) as arms:
        for name, make in arms.items():
            out[name] = compared(right, make(), windows)
            note(f"{name}: {out[name]}")
    like = {ours_: f"llama_cpp {theirs}" for ours_, theirs in LIKE.items() if f"llama_cpp {theirs}" in out}
    ratios = {name: out[name]["mean_mkl"] / out[theirs]["mean_mkl"] for name, theirs in like.items()}
    out["mean_kl_of_llama_cpp_x"] = {name: round(ratio, 3) for name, ratio in ratios.items()}
    return finish("quality", out, TARGET, {name: ratio <= 1.1 for name, ratio in ratios.items()})


if __name__ == "__main__":
    sys.exit(main())
