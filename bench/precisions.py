"""Are the speeds that `manyhands plan` and `model inspect` expect of each precision what one gets? Predicted against measured.

For each precision, in turn: tokens/s from the kernels' speeds, measured afresh (place/kernels.py), and from decode steps of
the loaded model and its ends, one stream. One thread and its CPU seconds, so that others on the machine enter neither more
than through its memory. Holds if the median of predicted / measured is within 25 % of 1 for each.
Run: python -m bench.precisions [--shape 0.5b|1.1b] [--reps N]
"""

import argparse
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from bench.report import finish, measuring, spread
from bench.shapes import checkpoint
from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.folder import read_config, read_entries
from manyhands.core import Precision, Span
from manyhands.engine.span import EndsRunner, Piece, SpanRunner
from manyhands.place.kernels import Kernels, measure_kernels, predict
from manyhands.place.measure import ORIGIN_OVERHEAD_S
from manyhands.worker.runner import load_ends, load_span

TARGET = {"off_by": 0.25}
PRECISIONS: tuple[Precision, ...] = ("bf16", "w8", "w4")
STEPS = 12


def tokens_per_s(span: SpanRunner, ends: EndsRunner) -> float:
    """Of one stream: the fastest step, and the origin's own time."""
    cache, times = span.new_cache(256), []
    for position in range(64, 64 + STEPS):
        began = time.process_time()
        rows = span.step(bytes(ends.embed([position])), [Piece(cache, position, 1)], 1)
        ends.logits(rows, 1, 1)
        times.append(time.process_time() - began)
    return 1 / (min(times) + ORIGIN_OVERHEAD_S)


def predicted(folder: Path, precision: Precision) -> float:
    """Nothing is remembered."""
    config, entries = parse_config(read_config(folder)), read_entries(folder)

    def measured(types: Collection[str]) -> list[Kernels]:
        return [measure_kernels(1, types, time.process_time)]

    return predict(config, entries, measured, ORIGIN_OVERHEAD_S)[precision].tokens_per_s


def main() -> int:
    given = argparse.ArgumentParser()
    given.add_argument("--shape", default="0.5b")
    given.add_argument("--reps", type=int, default=5)
    options = given.parse_args()
    folder = checkpoint(options.shape)
    layers = int(parse_config(read_config(folder))["num_hidden_layers"])
    out: dict[str, Any] = {}
    for precision in PRECISIONS:
        span, ends = load_span(folder, Span(0, layers), precision, 1), load_ends(folder, precision, 1)
        ratios, speeds = [], []
        for _ in range(options.reps):
            with measuring(precision):
                expected = predicted(folder, precision)
                speeds.append(tokens_per_s(span, ends))
                ratios.append(expected / speeds[-1])
        out[precision] = {"predicted_x": spread(ratios), "tokens_per_s": spread(speeds)}
        del span, ends
    holds: dict[str, bool] = {
        name: abs(each["predicted_x"]["median"] - 1) <= TARGET["off_by"] for name, each in out.items()
    }
    return finish("precisions", out, TARGET, holds)


if __name__ == "__main__":
    sys.exit(main())
