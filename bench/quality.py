"""How far are the predictions of small weights, and of caches of 8 bit, from those of bf16, and is that as near as llama.cpp's?

Over windows of a text, at every position: the divergence KL(bf16 || other) of the next token's distribution (mean, median,
99.9 %; in thousandths of a nat), how often the likeliest token is the same, and the ratio of perplexities. Arms: ours at w8
and w4, and at bf16 with a cache of 8 bit; llama.cpp in bf16 (its noise), also with a cache in q8_0, at q8_0 and q4_0 where
llama-cpp-python is importable, with 8 bits for embedding and head in both.
Caches are also compared with the model in fp32, which rounds nothing (`from_fp32`): what llama.cpp's bf16 and ours round
besides stands in every divergence of its from ours, and twice, for it is not the same, in that of two of ours.
With --outliers the model gets outlier channels, as large models have them, that change no bit of bf16 (bench/outliers.py).
A GGUF file's model is taken in bf16, with groups that lie across the file's own (bench/shifted.py).
The text is FILE, else one that the model draws from its own bf16 logits: of a model with random weights it says little.
Holds if the mean divergence is at most 1.1x llama.cpp's of the like format.
Run: python -m bench.quality [MODEL] [--called NAME] [--text FILE] [--windows N] [--outliers]
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

from bench.outliers import with_outliers
from bench.report import finish, note
from bench.shifted import shifted
from manyhands.checkpoint.gguf import SUFFIX
from manyhands.config import home_from_env
from manyhands.place.shape import look_up
from manyhands.text.tokenizer import load_tokenizer
from manyhands.worker.quality import WINDOW, Divergence, Logits, Predict, Predictor, compare, windows_of

TARGET = {"mean_kl_of_llama_cpp_x": 1.1}
LIKE = {"w8": "q8_0", "w4": "q4_0", "bf16+c8": "bf16, cache q8_0"}
CACHES = ("bf16+c8", "llama_cpp bf16", "llama_cpp bf16, cache q8_0")


def llama_cpp(file: Path, **options: Any) -> Predict:
    from llama_cpp import Llama

    model = Llama(str(file), n_ctx=WINDOW, n_batch=WINDOW, n_threads=1, logits_all=True, verbose=False, **options)

    def predict(ids: Sequence[int]) -> Logits:
        model.reset()
        model.eval(list(ids))
        return np.array(model.scores[: len(ids)], np.float32)

    return predict


def shown(found: Divergence) -> dict[str, float]:
    """What the module's docstring lists."""
    thousandths = {"mean_mkl": found.mean_kl, "median_mkl": found.median_kl, "mkl_99_9": found.kl_99_9}
    rest = {"same_top": found.same_top, "perplexity_x": found.perplexity_ratio}
    return {name: float(f"{x:.4g}") for name, x in ({n: 1e3 * kl for n, kl in thousandths.items()} | rest).items()}


@contextmanager
def arms_of(folder: Path) -> Iterator[dict[str, Callable[[], Predict]]]:
    """By name, made when they are called."""
    arms: dict[str, Callable[[], Predict]] = {
        "w8": lambda: Predictor(folder, "w8", 1),
        "w4": lambda: Predictor(folder, "w4", 1),
        "bf16+c8": lambda: Predictor(folder, "bf16+c8", 1),
    }
    with tempfile.TemporaryDirectory() as place:
        if find_spec("llama_cpp") is not None:
            import llama_cpp as package

            from bench.gguf import gguf, quantised

            coded = {"type_k": package.GGML_TYPE_Q8_0, "type_v": package.GGML_TYPE_Q8_0, "flash_attn": True}
            copy = Path(shutil.copytree(folder, Path(place) / "model"))
            arms["llama_cpp bf16"] = lambda: llama_cpp(gguf(copy))
            arms["llama_cpp bf16, cache q8_0"] = lambda: llama_cpp(gguf(copy), **coded)
            arms["llama_cpp q8_0"] = lambda: llama_cpp(quantised(copy, "q8_0"))
            arms["llama_cpp q4_0"] = lambda: llama_cpp(quantised(copy, "q4_0"))
        yield arms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default="tales", help="a checkpoint folder or GGUF file that is here, or tales"
    )
    parser.add_argument("--called", default="", help="what the result is stored as, for another model than tales")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--outliers", action="store_true")
    options = parser.parse_args()
    folder = look_up(options.model, "bf16", home_from_env()).folder
    if folder is None:
        parser.error(f"{options.model} is not on this machine: fetch it first")
    with tempfile.TemporaryDirectory() as place:
        folder = shifted(folder, Path(place) / "shifted") if options.model.endswith(SUFFIX) else folder
        folder = with_outliers(folder, Path(place) / "model") if options.outliers else folder
        return measure(options, folder)


def measure(options: argparse.Namespace, folder: Path) -> int:
    right = Predictor(folder, "bf16", 1)
    if options.text is None:
        windows = list(right.draw(options.windows, np.random.default_rng(0)))
    else:
        windows = windows_of([load_tokenizer(folder).encode], options.text.read_text(), options.windows)
    out = dict[str, Any](model=options.called or options.model, positions=sum(map(len, windows)))
    exact = Predictor(folder, "fp32", 1)
    from_exact = {"bf16": compare(exact, right, windows)}
    with arms_of(folder) as arms:
        for name, make in arms.items():
            arm = make()
            out[name] = shown(compare(right, arm, windows))
            if name in CACHES:
                from_exact[name] = compare(exact, arm, windows)
            note(f"{name}: {out[name]}")
    out["from_fp32"] = {name: shown(found)["mean_mkl"] for name, found in from_exact.items()}
    like = {ours_: f"llama_cpp {theirs}" for ours_, theirs in LIKE.items() if f"llama_cpp {theirs}" in out}
    ratios = {name: out[name]["mean_mkl"] / out[theirs]["mean_mkl"] for name, theirs in like.items()}
    out["mean_kl_of_llama_cpp_x"] = {name: round(ratio, 3) for name, ratio in ratios.items()}
    if (theirs := like.get("bf16+c8")) is not None:
        out["from_fp32_of_llama_cpp_x"] = round(from_exact["bf16+c8"].mean_kl / from_exact[theirs].mean_kl, 3)
    return finish("quality", out, TARGET, {name: ratio <= 1.1 for name, ratio in ratios.items()})


if __name__ == "__main__":
    sys.exit(main())
