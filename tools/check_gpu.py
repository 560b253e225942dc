"""Does an NVIDIA GPU have the CPU's bits, beyond the digests that each start compares, and when its memory is full?

    python -m tools.check_gpu [--gpu 0] [--turns 400] [--context 4096] [--seed 1]

Parts, each against the native engine's best back end here:
  models    golden digests of whole models, every family that a GPU computes in every precision
  sizes     steps of 1 to 300 rows, twice each (the second is recorded), at widths that are no multiples of a panel's side
  contexts  a prompt up to --context positions in chunks of 256, then single rows, of families with windows, soft caps, sinks,
            experts, latents and states
  sessions  --turns random steps of up to four sessions at once: rollbacks, forks that share blocks, ends; with states too
  full      sessions that grow until the GPU has no room: each step that fails says so, and no session loses a position; with
            states too

Needs `manyhands[cuda]`, nothing else. The last line is JSON: what was compared, what differed, seconds; exits with 1 if
anything differed.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.core import Precision, Span
from manyhands.engine import golden, golden_models
from manyhands.engine.cpu import CpuSpan
from manyhands.engine.cuda.proof import OfGpu
from manyhands.engine.cuda.span import CudaSpan
from manyhands.engine.golden_cases import reals, stored
from manyhands.engine.library import Team
from manyhands.engine.span import Piece
from manyhands.errors import ModelError
from manyhands.program.families import build_program
from manyhands.program.ops import Program
from manyhands.worker.gpu import Gpu, open_gpu

Bytes = NDArray[np.uint8]
WITH_STATES = ("qwen3_next", "granitemoehybrid_mamba")  # the delta rule, and Mamba 2
# Windows, caps, sinks, experts, latents.
FAMILIES = ("llama", "gemma2", "gpt_oss", "mixtral", "deepseek_v3", "qwen3", "lfm2", *WITH_STATES)
SIZES = (*range(1, 20), 31, 32, 33, 47, 48, 63, 64, 65, 96, 127, 128, 129, 200, 255, 256, 257, 300)
CHUNK = 256
PIECE = 1 << 30  # bytes of what fills a GPU


class Both:
    """One model on the GPU and on the CPU. Counts the rows that were compared and those that differed, and positions that one
    of them alone can go back to."""

    def __init__(self, gpu: Gpu, program: Program, precision: Precision = "bf16") -> None:
        read, whole = golden_models.tensors(program, precision).__getitem__, Span(0, len(program.layers))
        self.there = CudaSpan(program, whole, read, precision, gpu)
        self.here = CpuSpan(program, whole, read, precision, Team(4))
        self._hidden, self.rows, self.wrong = program.hidden, 0, 0

    def drawn(self, count: int, seed: int) -> Bytes:
        rows = stored(reals(seed, count, self._hidden, around=0), "bf16")
        return np.ascontiguousarray(rows).view(np.uint8).reshape(count, -1)

    def session(self, source: tuple[Any, Any] | None = None, at: int = 0) -> tuple[Any, Any]:
        """A session's caches on both; a fork of another's first `at` positions."""
        if source is None:
            return self.there.new_cache(), self.here.new_cache()
        return self.there.fork(source[0], at, 0), self.here.fork(source[1], at, 0)

    def step(self, rows: Bytes, parts: list[tuple[tuple[Any, Any], int, int]]) -> None:
        """Rows of (session, start, count) on both. Raises ModelError where the GPU has no room; then the CPU did nothing."""
        found = self.there.step(rows.copy(), [Piece(caches[0], start, count) for caches, start, count in parts], 1)
        wanted = self.here.step(rows.copy(), [Piece(caches[1], start, count) for caches, start, count in parts], 4)
        self.rows += len(rows)
        self.wrong += int((found != wanted).any(axis=1).sum())
        self.wrong += sum(there.reachable(at) != here.reachable(at) for (there, here), at, _ in parts)


def made(family: str, positions: int, **changed: object) -> Program:
    return build_program({**golden_models.configs()[family], "max_position_embeddings": positions, **changed})


def lacks(program: Program) -> bool:
    """Whether no GPU computes it."""
    return program.has_index or program.has_entries or program.has_scans or program.has_streams or program.has_biases


def sizes(gpu: Gpu) -> Iterator[Both]:
    for hidden, inner in ((32, 48), (208, 336)):
        for precision in golden_models.PRECISIONS[:1] + golden_models.PRECISIONS[2:]:
            both = Both(gpu, made("llama", 1024, hidden_size=hidden, intermediate_size=inner), precision)
            for count in SIZES * 2:
                both.step(both.drawn(count, count), [(both.session(), 0, count)])
            yield both


def contexts(gpu: Gpu, positions: int) -> Iterator[Both]:
    for family in FAMILIES:
        both = Both(gpu, made(family, positions))
        session, at = both.session(), 0
        while at < positions:
            count = min(CHUNK, positions - 8 - at) if at < positions - 8 else 1
            both.step(both.drawn(count, at), [(session, at, count)])
            at += count
        yield both


def sessions(gpu: Gpu, turns: int, seed: int) -> Iterator[Both]:
    for family in ("gemma2", *WITH_STATES):
        both, chance = Both(gpu, made(family, 4096)), random.Random(seed)
        live = [both.session()]
        both.step(both.drawn(200, seed), [(live[0], 0, 200)])
        for turn in range(turns):
            source = chance.choice(live)
            if chance.random() < 0.4:
                live.append(both.session(source, source[0].reachable(chance.randint(0, source[0].length))))
            del live[8:], live[: chance.random() < 0.1 and len(live) > 2]
            parts, room = [], 400
            for caches in chance.sample(live, chance.randint(1, min(4, len(live)))):
                back = chance.choice([0, 0, 0, 0, 5, 70, 4096])
                count = chance.choice([1, 1, 3, 17, 90])
                start = caches[0].reachable(max(0, min(caches[0].length, 4096 - count) - back))
                parts.append((caches, start, count))
                room -= count
            both.step(both.drawn(400 - room, turn), parts)
        yield both


def full(gpu: Gpu) -> Iterator[Both]:
    """The GPU's memory is taken, but for a little; sessions take the rest."""
    sides = {"num_key_value_heads": 16, "num_attention_heads": 16, "head_dim": 128}
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128}
    yield _filled(gpu, Both(gpu, made("llama", 1 << 15, **sides)))
    both = made("qwen3_5_text", 1 << 15, **{**sides, "num_key_value_heads": 32, "num_attention_heads": 32, **heads})
    yield _filled(gpu, Both(gpu, both))


def _filled(gpu: Gpu, both: Both) -> Both:
    live, taken, failed = [both.session() for _ in range(3)], [], 0
    for session in live:
        both.step(both.drawn(70, 1), [(session, 0, 70)])
    with suppress(ModelError):
        while True:
            taken.append(gpu.allocate(PIECE))
    for turn in range(400):
        session = live[turn % len(live)]
        count = min(CHUNK, (1 << 15) - session[0].length)
        try:
            both.step(both.drawn(count, turn), [(session, session[0].length, count)])
        except ModelError:
            failed += 1
            with suppress(ModelError):  # there may not even be room to list the blocks that came
                both.step(both.drawn(1, turn), [(session, session[0].length - 1, 1)])
        if failed == 3:
            break
    assert failed == 3, "the GPU's memory was never full"
    del taken
    for session in live:
        both.step(both.drawn(CHUNK, 2), [(session, session[0].length, CHUNK)])
    return both


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.check_gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    gpu = open_gpu(asked.gpu)
    parts: dict[str, Callable[[], Iterator[Both]]] = {
        "sizes": lambda: sizes(gpu),
        "contexts": lambda: contexts(gpu, asked.context),
        "sessions": lambda: sessions(gpu, asked.turns, asked.seed),
        "full": lambda: full(gpu),
    }
    began = time.monotonic()
    families = [name for name in golden_models.configs() if not lacks(made(name, 128))]
    wrong = golden_models.failures(OfGpu(gpu), families)
    models = {"digests": len(families) * len(golden_models.PRECISIONS), "wrong": len(wrong)}
    found = {"models": {**models, "seconds": round(time.monotonic() - began, 1)}}
    for name, part in parts.items():
        began, rows, differed = time.monotonic(), 0, 0
        for both in part():
            rows, differed = rows + both.rows, differed + both.wrong
        found[name] = {"rows": rows, "wrong": differed, "seconds": round(time.monotonic() - began, 1)}
        print(name, found[name], file=sys.stderr, flush=True)
    holds = not any(part["wrong"] for part in found.values())
    print(json.dumps({"gpu": gpu.what, "cpu": golden.choose(), "seed": asked.seed, **found, "holds": holds}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
