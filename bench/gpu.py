"""How fast is a model on an NVIDIA GPU with the bits of the CPU, against transformers there, and what its memory can deliver?

Arms, interleaved, on one GPU and the same random weights in bf16 (8b: 8 of its 32 layers):
  ours          embedding, layers, logits, argmax, by engine/cuda, in this process
  transformers  its model on the GPU, sdpa, a loop of its own here (less than `generate` does a token), cache included
Decode: tokens/s after the first of NEW tokens that follow a prompt of 64. Prefill: 256 and 2,048 tokens over the time to
the first. Rows: what a step of 2 .. 32 rows takes, over one of one row. The floor is the GPU's copy bandwidth, measured in the
same run, over the bytes of weights that a token reads.
`same_bits`: whether the rows of all steps of a short session are those of the CPU's native engine (3 layers).
With --dtype w8 or w4 `ours` is at that precision, transformers at bf16.
Holds if `ours` decodes at 1.0x transformers, at 0.6 of the floor in the 8b shape, and the bits are the same. Prefill has no
target: transformers' products are on tensor cores, which sum reals in an order of their own; the ratio is reported.
Run on a machine with an NVIDIA GPU: python -m bench.gpu [--shape 0.5b|1.1b|8b] [--dtype bf16|w8|w4] [--reps N]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from bench.report import finish, measuring, paired, spread
from bench.shapes import SHAPES, Shape
from manyhands.core import Precision, Span
from manyhands.engine.cpu import CpuSpan
from manyhands.engine.cuda.span import CudaEnds, CudaSpan
from manyhands.engine.library import Team
from manyhands.engine.span import Cache, Piece
from manyhands.engine.weights import Stored
from manyhands.program.families import build_program
from manyhands.worker.gpu import open_gpu

PROMPT, NEW, CONTEXT = 64, 64, 4096
LLAMA_8B = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
EIGHT = Shape("8 layers of Llama-3.1-8B", "llama", 8, 4096, 128256, LLAMA_8B)
TARGET = {"decode_x": 1.0, "of_floor": 0.6}
BITS = {"bf16": (16, 16), "w8": (8.5, 8.5), "w4": (4.5, 8.5)}  # of a number in the layers, and in the head
ROWS = (2, 4, 8, 16, 32)
STEPS = (200, 1, 5, 33, 1)  # rows of the session whose bits are compared


class Loop(Protocol):
    """`times`: seconds from the request to each of `new` tokens."""

    def times(self, ids: list[int], new: int) -> list[float]: ...


class Transformers:
    """The model that stock code would run."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def times(self, ids: list[int], new: int) -> list[float]:
        began, cache, at = time.perf_counter(), DynamicCache(), list[float]()
        given = torch.tensor([ids], device="cuda")
        for _ in range(new):
            out = self._model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            given = out.logits[:, -1:].argmax(-1)
            given.item()
            at.append(time.perf_counter() - began)
        return at


class Ours:
    """engine/cuda in a plain loop."""

    def __init__(self, span: CudaSpan, ends: CudaEnds) -> None:
        self.span, self.ends = span, ends

    def times(self, ids: list[int], new: int) -> list[float]:
        began, cache, at = time.perf_counter(), self.span.new_cache(len(ids) + new), list[float]()
        for _ in range(new):
            ids = [self.next(cache, ids)]
            at.append(time.perf_counter() - began)
        return at

    def next(self, cache: Cache, ids: list[int]) -> int:
        rows = self.span.step(self.ends.embed(ids), [Piece(cache, cache.length, len(ids))], 1)
        return int(self.ends.logits(rows[-1:], 1, 1)[0].argmax())

    def rows_cost(self, count: int) -> float:
        """Seconds of a step of so many rows, the layers alone; the median of 20."""
        cache, rows = self.span.new_cache(256), self.ends.embed([7] * count)
        took = []
        for _ in range(23):
            began = time.perf_counter()
            self.span.step(rows, [Piece(cache, 64, count)], 1)
            took.append(time.perf_counter() - began)
        return statistics.median(took[3:])


def made(shape: Shape) -> tuple[Any, Callable[[str], Stored], dict[str, Any]]:
    """A model with random weights on the GPU, its tensors as a checkpoint would give them, and its config."""
    sizes = {"num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "vocab_size": shape.vocab, **shape.sizes}
    config = AutoConfig.for_model(shape.family, max_position_embeddings=CONTEXT, tie_word_embeddings=False, **sizes)
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    state = model.state_dict()

    def read(name: str) -> Stored:
        return Stored("bf16", state[name].cpu().contiguous().view(torch.int16).numpy().view(np.uint16))

    return model, read, config.to_dict()


def bandwidth() -> float:
    """Bytes a second, read and written, of a copy on the GPU."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    event: Any = torch.cuda.Event
    target, events = torch.empty_like(source), [event(enable_timing=True) for _ in range(2)]
    target.copy_(source)
    events[0].record()
    for _ in range(10):
        target.copy_(source)
    events[1].record()
    torch.cuda.synchronize()
    return 20 * float(1 << 30) / (float(events[0].elapsed_time(events[1])) / 1000)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=["0.5b", "1.1b", "8b"], default="1.1b")
    parser.add_argument("--dtype", choices=["bf16", "w8", "w4"], default="bf16")
    parser.add_argument("--reps", type=int, default=5)
    asked = parser.parse_args()
    precision: Precision = asked.dtype
    shape = EIGHT if asked.shape == "8b" else SHAPES[asked.shape]
    gpu = open_gpu(0)
    model, read, config = made(shape)
    program = build_program(config)
    whole, few = Span(0, len(program.layers)), Span(0, 3)
    ours = Ours(CudaSpan(program, whole, read, precision, gpu), CudaEnds(program, read, precision, Team(1), gpu))
    arms: dict[str, Loop] = {"ours": ours, "transformers": Transformers(model)}
    ids = [(37 * i * i + 11 * i) % shape.vocab for i in range(2048)]

    on_cpu, on_gpu = CpuSpan(program, few, read, precision, Team(8)), CudaSpan(program, few, read, precision, gpu)
    here, there, at, same = on_cpu.new_cache(300), on_gpu.new_cache(300), 0, True
    for count in STEPS:
        rows = ours.ends.embed(ids[at : at + count])
        wanted = on_cpu.step(rows, [Piece(here, at, count)], 8)
        same = same and bool(np.array_equal(on_gpu.step(rows, [Piece(there, at, count)], 1), wanted))
        at += count

    decode: dict[str, list[float]] = {name: [] for name in arms}
    prefill: dict[int, dict[str, list[float]]] = {count: {name: [] for name in arms} for count in (256, 2048)}
    for rep in range(asked.reps + 1):  # the first one warms up
        for name, arm in arms.items():
            with measuring(f"{name} {rep}"):
                times = arm.times(ids[:PROMPT], NEW)
                first = {count: arm.times(ids[:count], 1)[0] for count in prefill}
            if rep:
                decode[name].append((NEW - 1) / (times[-1] - times[0]))
                for count, seconds in first.items():
                    prefill[count][name].append(count / seconds)
    one = ours.rows_cost(1)
    numbers = {name: p.numel() for name, p in model.named_parameters() if "embed" not in name}
    bits, head_bits = BITS[asked.dtype]
    bytes_read = sum(n * (head_bits if "lm_head" in name else bits) / 8 for name, n in numbers.items())
    floor = bandwidth() / bytes_read
    of_floor = spread([tps / floor for tps in decode["ours"]])
    ratio = paired(decode["ours"], decode["transformers"])
    holds = {"decode_x": ratio["median"] >= TARGET["decode_x"], "same_bits": same}
    if asked.shape == "8b":
        holds["of_floor"] = of_floor["median"] >= TARGET["of_floor"]
    figures = {
        "gpu": gpu.what,
        "shape": shape.like,
        "decode_tps": {name: spread(found) for name, found in decode.items()},
        "decode_x": ratio,
        "of_floor": of_floor,
        "floor_tps": round(floor, 1),
        "prefill_tps": {f"{count}": {name: spread(v) for name, v in found.items()} for count, found in prefill.items()},
        "prefill_x": {f"{count}": paired(found["ours"], found["transformers"]) for count, found in prefill.items()},
        "rows_cost": {f"{count}": round(ours.rows_cost(count) / one, 2) for count in ROWS},
        "same_bits": same,
    }
    return finish("gpu", figures, TARGET, holds)


if __name__ == "__main__":
    raise SystemExit(main())
