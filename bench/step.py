"""How fast is a token on one node, against transformers, against llama.cpp, and against what the memory can deliver?

Arms, interleaved, on one checkpoint in bf16 and with the same number of threads:
  transformers  `generate`, sdpa, greedy, in a process of its own with torch's own settings
  ours          in this process, without a network: embedding, layers, logits, argmax, by the engine that serves here
  node          the product: an origin here, one `serve` process, TLS on loopback
  llama_cpp     llama-cpp-python where it is importable (the same weights as GGUF, bench/gguf.py)
Decode: tokens/s after the first of NEW tokens that follow a prompt of 64. Prefill: 256 tokens (--prefill) over the time
to the first.
  ENGINE        with --engine: the same by that one (torch-cpu, or a back end of the native engine)
With --dtype w8 or w4 (--shape 1.1b, say): `ours` at that precision, `bf16` ours at bf16, llama_cpp at q8_0 or q4_0. With
--dtype q4_k_m, q5_k_m, q6_k, iq4_xs, q3_k_m or q2_k: `ours` and llama_cpp on one file of llama.cpp's.
The floor is the machine's read bandwidth over the bytes of weights that a token reads; it is measured before and after each
repetition, and the faster counts for it.
Holds if `ours` decodes at 1.6x transformers and prefills at 1.0x (medians of the ratios rep by rep), and `node` likewise;
if `ours` decodes at 0.9x llama.cpp and prefills at 1.0x, where it is importable; and at 1.1B decodes at 0.8 of the floor.
On the back end avx512 prefill is judged at 0.6x llama.cpp, whose AVX512-BF16 sums in another order. Transformers takes
what the CPU has, whatever back end is forced: its prefill is judged on amx, and on CPUs without AVX512-BF16.
At w8 and w4 it holds at 1.0x llama.cpp in both (where it is importable), at w4 with decode at 2.5x our bf16 besides; on a
file of K-quants at 0.85x llama.cpp's decode, with weights in 1.3x the file.
Run: python -m bench.step [--dtype bf16|w8|w4|q4_k_m|q5_k_m|q6_k|iq4_xs|q3_k_m|q2_k] [--shape 0.5b|1.1b] [--prefill N]
     [--reps N] [--quick] [--cpu]
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, Protocol

import torch
from torch import Tensor

from bench.report import finish, measuring, note, paired, spread
from bench.shapes import checkpoint
from bench.stock import Stopwatch
from bench.swarm import base, generate, origin, prompt_ids
from manyhands.checkpoint.config_fields import read_facts
from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.partition import ends_bytes, layer_bytes
from manyhands.cli.options import run as run_loop
from manyhands.core import Precision, Span
from manyhands.engine import golden
from manyhands.engine.library import FORCED
from manyhands.engine.span import Cache, Piece
from manyhands.worker.runner import load_ends, load_span

PROMPT, NEW = 64, 32
TARGET = {"decode_x": 1.6, "prefill_x": 1.0, "decode_of_llama_cpp": 0.9, "prefill_of_llama_cpp": 1.0, "of_floor": 0.8}
SMALL_TARGET = {"decode_x": 1.0, "prefill_x": 1.0, "w4_of_bf16_x": 2.5}
FILE_TARGET = {"decode_x": 0.85, "held_of_file_x": 1.3}
LIKE = {"w8": "q8_0", "w4": "q4_0"}  # what llama.cpp calls the like of it
MIXTURES = ("q4_k_m", "q5_k_m", "q6_k", "iq4_xs", "q3_k_m", "q2_k")  # of llama.cpp's


Clock = Callable[[], float]


class Arm(Protocol):
    """`times`: seconds from the request to each of `new` tokens. Called on the compute thread."""

    def times(self, ids: list[int], new: int) -> list[float]: ...


class Transformers:
    """Stock `generate`, in a process without our settings (bench/stock.py)."""

    def __init__(self, folder: Path, threads: int) -> None:
        ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        command = [sys.executable, "-m", "bench.stock", str(folder), str(threads)]
        self._process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment, text=True)

    def times(self, ids: list[int], new: int) -> list[float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([ids, new]), file=self._process.stdin, flush=True)
        times: list[float] = json.loads(self._process.stdout.readline())
        return times


class Ours:
    """What serves here, or the engine that MANYHANDS_ENGINE would name, in one plain loop."""

    def __init__(
        self,
        folder: Path,
        threads: int,
        engine: str | None = None,
        precision: Precision = "bf16",
        clock: Clock = time.perf_counter,
    ) -> None:
        self._clock = clock
        before = os.environ.get(FORCED)
        if engine is not None:
            os.environ[FORCED] = engine
        try:
            span = Span(0, read_facts(folder).num_layers)
            self.ends, self.span = load_ends(folder, precision, threads), load_span(folder, span, precision, threads)
        finally:
            if engine is not None:
                os.environ.pop(FORCED)
            if engine is not None and before is not None:
                os.environ[FORCED] = before
        self._threads = threads

    def times(self, ids: list[int], new: int) -> list[float]:
        cache = self.span.new_cache(len(ids) + new)
        clock = Stopwatch(self._clock)
        for _ in range(new):
            ids = [self.next(cache, ids)]
            clock.put(None)
        return clock.at

    def next(self, cache: Cache, ids: list[int]) -> int:
        """Run `ids` at the end of the cache; the greedy token after them."""
        rows = self.span.step(self.ends.embed(ids).tobytes(), [Piece(cache, cache.length, len(ids))], self._threads)
        return int(self.ends.logits(rows[-1:], 1, self._threads)[0].argmax())


def llama_cpp(folder: Path, threads: int, kind: str | None = None, clock: Clock = time.perf_counter) -> Arm | None:
    """llama.cpp on the same weights, in bf16 or as `kind`; None where it is not installed."""
    if find_spec("llama_cpp") is None:
        return None
    from bench.gguf import LlamaCpp, gguf, quantised

    return LlamaCpp(quantised(folder, kind) if kind else gguf(folder), threads, clock)


@dataclass(frozen=True, slots=True)
class Figures:
    """One repetition of one arm."""

    decode_tps: float
    prefill_tps: float


def figures(decode: list[float], prefill: list[float], prompt: int) -> Figures:
    return Figures((len(decode) - 1) / (decode[-1] - decode[0]), prompt / prefill[0])


def bandwidth_gbs(buffer: Tensor) -> float:
    """Bytes/s of reading a buffer far larger than the caches: the best of three sums on all threads."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - began)
    return buffer.numel() * buffer.element_size() / best / 1e9


def has_bf16() -> bool:
    """Whether this CPU has AVX512-BF16."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx512_bf16" in cpuinfo.read_text(encoding="utf-8").split()


def bytes_per_token(folder: Path) -> int:
    """Bytes of weights that one decoded token reads: everything but an embedding that is not the head too."""
    tied = bool(json.loads((folder / "config.json").read_bytes()).get("tie_word_embeddings", False))
    return sum(len(e) for e in read_entries(folder) if tied or "embed_tokens" not in e.name)


def held_as(dtype: str, folder: Path) -> tuple[Precision, Path]:
    """At which precision `ours` computes, and the folder that it loads."""
    if dtype == "w8":
        return "w8", folder
    if dtype in LIKE:
        return "w4", folder
    from bench.gguf import quantised, served

    return "w4", served(quantised(folder, dtype))


def measure_small(options: argparse.Namespace, folder: Path) -> dict[str, list[Any]]:
    """Arms in this process, without a network."""
    samples: dict[str, list[Any]] = defaultdict(list)
    clock = time.process_time if options.cpu else time.perf_counter
    precision, given = held_as(options.dtype, folder)
    arms: dict[str, Arm] = {"ours": Ours(given, options.threads, options.engine, precision, clock)}
    if options.dtype in LIKE:
        arms["bf16"] = Ours(folder, options.threads, options.engine, "bf16", clock)
    if (other := llama_cpp(folder, options.threads, LIKE.get(options.dtype, options.dtype), clock)) is not None:
        arms["llama_cpp"] = other
    buffer = torch.ones(1 << 28)
    for rep in range(-1, options.reps):
        for name, arm in arms.items():
            with measuring(f"{name} rep {rep}"):
                decode = arm.times(prompt_ids(PROMPT), NEW if rep >= 0 else 4)
                prefill = arm.times(prompt_ids(options.prefill, 1), 1)
            if rep >= 0:
                samples[name].append(figures(decode, prefill, options.prefill))
                note(f"  decode {samples[name][-1].decode_tps:.1f} tok/s, prefill {samples[name][-1].prefill_tps:.0f}")
        samples["bandwidth"].append(bandwidth_gbs(buffer))
    return samples


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[Any]]:
    samples: dict[str, list[Any]] = defaultdict(list)
    decode_ids, prefill_ids = prompt_ids(PROMPT), prompt_ids(options.prefill, 1)
    async with AsyncExitStack() as stack:
        home = await stack.enter_async_context(base(folder, options.threads))
        node = await origin(stack, home, 1, options.threads)
        arms: dict[str, Arm | None] = {
            "transformers": await home.device.run(lambda: Transformers(folder, options.threads)),
            "ours": await home.device.run(lambda: Ours(folder, options.threads)),
            "node": None,
        }
        if options.engine:
            arms[options.engine] = await home.device.run(lambda: Ours(folder, options.threads, options.engine))
        if (other := await home.device.run(lambda: llama_cpp(folder, options.threads))) is not None:
            arms["llama_cpp"] = other
        buffer = torch.ones(1 << 28)  # 1 GiB of float32

        async def times(arm: Arm | None, ids: list[int], new: int) -> list[float]:
            if arm is not None:
                return await home.device.run(lambda: arm.times(ids, new))
            run = await generate(node, ids, new)
            return [at - run.began for at in run.at]

        for rep in range(-1, options.reps):  # the first one warms up
            for name, arm in arms.items():
                with measuring(f"{name} rep {rep}"):
                    decode = await times(arm, decode_ids, NEW if rep >= 0 else 4)
                    prefill = await times(arm, prefill_ids, 1)
                if rep >= 0:
                    samples[name].append(figures(decode, prefill, options.prefill))
                    note(
                        f"  decode {samples[name][-1].decode_tps:.1f} tok/s, prefill {samples[name][-1].prefill_tps:.0f}"
                    )
            with measuring(f"bandwidth rep {rep}"):
                gbs = await home.device.run(lambda: bandwidth_gbs(buffer))
            samples["bandwidth"].append(gbs)
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["0.5b", "1.1b", "tales"], default="0.5b")
    parser.add_argument("--reps", type=int, default=0, help="default: 7, or 3 with --quick")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine", help="one more arm: torch-cpu, avx2, avx512, neon or scalar")
    parser.add_argument("--dtype", choices=["bf16", *LIKE, *MIXTURES], default="bf16")
    parser.add_argument(
        "--cpu", action="store_true", help="unless --dtype is bf16, --threads 1: CPU seconds, where others compute"
    )
    parser.add_argument(
        "--prefill", type=int, default=256, help="tokens of the prompt whose first token is timed: below 2,048"
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.reps = options.reps or (3 if options.quick else 7)
    folder = checkpoint(options.shape)
    torch.set_num_threads(options.threads)
    if options.dtype == "bf16":
        return report(options, folder, run_loop(measure(options, folder)))
    return report_small(options, folder, measure_small(options, folder))


def report_small(options: argparse.Namespace, folder: Path, samples: dict[str, list[Any]]) -> int:
    gbs, size = samples.pop("bandwidth"), small_bytes_per_token(*held_as(options.dtype, folder)[::-1])
    out: dict[str, Any] = {
        "shape": options.shape,
        "dtype": options.dtype,
        "threads": options.threads,
        "clock": "cpu" if options.cpu else "wall",
    }
    out |= {"read_gbs": spread(gbs), "mb_per_token": round(size / 1e6)}
    ratios: dict[str, dict[str, float]] = {}
    for what in ("decode", "prefill"):
        series = {arm: [getattr(f, f"{what}_tps") for f in taken] for arm, taken in samples.items()}
        out[f"{what}_tps"] = {arm: spread(taken) for arm, taken in series.items()}
        out[f"{what}_x"] = {arm: paired(series["ours"], series[arm]) for arm in series if arm != "ours"}
        ratios[what] = {arm: found["median"] for arm, found in out[f"{what}_x"].items()}
    out["weights_gbs"] = round(out["decode_tps"]["ours"]["median"] * size / 1e9, 2)
    holds = {f"{what}_llama_cpp": found["llama_cpp"] >= 1 for what, found in ratios.items() if "llama_cpp" in found}
    if options.dtype == "w4":
        holds["decode_bf16"] = ratios["decode"]["bf16"] >= SMALL_TARGET["w4_of_bf16_x"]
    if options.dtype in MIXTURES:
        _, given = held_as(options.dtype, folder)
        held, stored = held_bytes(given), next(given.glob("*.gguf")).stat().st_size
        out |= {"held_of_file_x": round(held / stored, 3)}
        holds = {"held": held / stored <= FILE_TARGET["held_of_file_x"]}
        if "llama_cpp" in ratios["decode"]:
            holds["decode_llama_cpp"] = ratios["decode"]["llama_cpp"] >= FILE_TARGET["decode_x"]
        return finish("step", out, FILE_TARGET, holds)
    return finish("step", out, SMALL_TARGET, holds)


def held_bytes(folder: Path) -> int:
    """Bytes of the weights of a file as they are held, embedding included."""
    entries = read_entries(folder)
    return ends_bytes(entries, "w4") + sum(layer_bytes(entries, read_facts(folder).num_layers, "w4"))


def small_bytes_per_token(folder: Path, precision: Precision) -> int:
    """As bytes_per_token, as `precision` holds them."""
    tied = bool(json.loads((folder / "config.json").read_bytes()).get("tie_word_embeddings", False))
    used = [entry for entry in read_entries(folder) if tied or "embed_tokens" not in entry.name]
    return ends_bytes(used, precision) + sum(layer_bytes(used, read_facts(folder).num_layers, precision))


def report(options: argparse.Namespace, folder: Path, samples: dict[str, list[Any]]) -> int:
    gbs = samples.pop("bandwidth")
    size = bytes_per_token(folder)
    floors = [max(both) * 1e9 / size for both in itertools.pairwise(gbs)]
    out: dict[str, Any] = {"shape": options.shape, "threads": options.threads, "prompt": options.prefill}
    out |= {"read_gbs": spread(gbs)}
    target, judged = dict(TARGET), ["decode", "prefill"]
    if golden.choose() == "avx512":
        target["prefill_of_llama_cpp"] = 0.6
    if golden.choose() != "amx" and has_bf16():
        del target["prefill_x"], judged[1]
    out |= {"mb_per_token": round(size / 1e6), "floor_tps": spread(floors)}
    ratios: dict[str, dict[str, float]] = {}
    for what in ("decode", "prefill"):
        series = {arm: [getattr(f, f"{what}_tps") for f in taken] for arm, taken in samples.items()}
        out[f"{what}_tps"] = {arm: spread(taken) for arm, taken in series.items()}
        others = [arm for arm in series if arm != "transformers"]
        ratios[what] = {arm: paired(series[arm], series["transformers"])["median"] for arm in others}
        out[f"{what}_x"] = {arm: paired(series[arm], series["transformers"]) for arm in others}
        if what == "decode":
            out["of_floor"] = {arm: paired(taken, floors) for arm, taken in series.items()}
        if "llama_cpp" in series:
            out.setdefault("of_llama_cpp", {})[what] = paired(series["ours"], series["llama_cpp"])
    holds = {f"{what}_{arm}": ratios[what][arm] >= TARGET[f"{what}_x"] for what in judged for arm in ("ours", "node")}
    for what, found in out.get("of_llama_cpp", {}).items():
        holds[f"{what}_llama_cpp"] = found["median"] >= target[f"{what}_of_llama_cpp"]
    if options.shape == "1.1b":
        holds["floor"] = out["of_floor"]["ours"]["median"] >= TARGET["of_floor"]
    return finish("step", out, target, holds)


if __name__ == "__main__":
    sys.exit(main())
