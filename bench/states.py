"""How fast are models with states (linear attention, short convolutions) against llama.cpp on the same file?

Layers of the shape of Qwen3.5-0.8B (12 of its 24) and of LFM2-350M, random, in Q4_0 as llama.cpp quantises them, with a
vocabulary of 264, so that the layers are all there is. Arms, interleaved, one thread, by the CPU time that they take:
  ours       this engine at w4, in this process, without a network
  llama_cpp  llama-cpp-python
Decode: tokens/s after the first of NEW that follow a prompt of 64. Prefill: 256 tokens over the time to the first.
Holds if both are at least as fast as llama.cpp for both shapes (medians of the ratios rep by rep).
Needs llama-cpp-python and gguf: pip install 'manyhands[bench]'.
Run: python -m bench.states [--reps N]
"""

import argparse
import ctypes
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.gguf import LlamaCpp
from bench.report import finish, measuring, note, paired, spread
from bench.step import Arm, Figures, Ours, figures
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.config import home_from_env
from tests.gguf_files import tiny_gguf

PROMPT, NEW, PREFILL = 64, 40, 256
TARGET = {"decode_x": 1.0, "prefill_x": 1.0}
# A name -> (family, its sizes)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "qwen3_5_text",
        {"layers": 12, "hidden": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2}
        | {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    ),
    "lfm2": (
        "lfm2",
        {"layers": 16, "hidden": 1024, "intermediate_size": 6656, "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"block_multiple_of": 256},
    ),
}


def file_of(name: str) -> Path:
    """The shape in Q4_0; written once, in $MANYHANDS_HOME/bench."""
    import llama_cpp

    folder = home_from_env() / "bench" / "states"
    file, (family, sizes) = folder / f"{name}.q4_0.gguf", SHAPES[name]
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        plain, half = folder / f"{name}.gguf", folder / f"{name}.part"
        tiny_gguf(family, plain, context=2048, **sizes)
        given = llama_cpp.llama_model_quantize_default_params()
        given.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
        if llama_cpp.llama_model_quantize(str(plain).encode(), str(half).encode(), ctypes.byref(given)):
            raise RuntimeError(f"llama.cpp did not write {half}")
        half.rename(file)
        plain.unlink()
    return file


def ids(count: int) -> list[int]:
    """A prompt."""
    return [(37 * i * i + 11 * i) % 256 for i in range(count)]


def measure(name: str, reps: int) -> dict[str, list[Figures]]:
    """Figures of each arm, rep by rep; one before them is not counted."""
    file, samples = file_of(name), defaultdict[str, list[Figures]](list)
    folder = gguf_folder(file, file.parent)
    arms: dict[str, Arm] = {
        "ours": Ours(folder, 1, None, "w4", time.process_time),
        "llama_cpp": LlamaCpp(file, 1, time.process_time),
    }
    for rep in range(-1, reps):
        for arm, what in arms.items():
            with measuring(f"{name} {arm} rep {rep}"):
                decode, prefill = what.times(ids(PROMPT), NEW), what.times(ids(PREFILL), 1)
            if rep >= 0:
                samples[arm].append(figures(decode, prefill, PREFILL))
                note(f"  decode {samples[arm][-1].decode_tps:.1f} tok/s, prefill {samples[arm][-1].prefill_tps:.0f}")
    return samples


def main() -> int:
    """Both shapes; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reps", type=int, default=7)
    asked = parser.parse_args()
    out: dict[str, Any] = {"threads": 1, "clock": "cpu", "dtype": "w4, q4_0"}
    holds: dict[str, bool] = {}
    for name in SHAPES:
        samples, found = measure(name, asked.reps), dict[str, Any]()
        for what in ("decode", "prefill"):
            series = {arm: [getattr(one, f"{what}_tps") for one in taken] for arm, taken in samples.items()}
            found[f"{what}_tps"] = {arm: spread(taken) for arm, taken in series.items()}
            found[f"{what}_x"] = paired(series["ours"], series["llama_cpp"])
            holds[f"{name} {what}"] = found[f"{what}_x"]["median"] >= TARGET[f"{what}_x"]
        out[name] = found
    return finish("states", out, TARGET, holds)


if __name__ == "__main__":
    sys.exit(main())
