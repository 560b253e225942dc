"""What does one draw cost at V = 32k and V = 152k, greedy and sampled?

    python bench/sample.py

Rows look like a language model's: a normal bulk and a tail of likely tokens. Median of 60 draws at different positions,
from a row in fp32; numpy uses one core. Target at 152k: at most 0.5 ms greedy, 4 ms sampled. Without a target,
for information: logprobs, and the worst case of top_p, a row so flat that it keeps nearly everything. The last line is
JSON: milliseconds, the targets, and whether they hold.
"""

import json
import statistics
import time

import numpy as np
import numpy.typing as npt

from manyhands.core import SamplingParams
from manyhands.origin.sampler import Sampler

SETTINGS = {
    "greedy": SamplingParams(),
    "greedy_logprobs": SamplingParams(logprobs=5),
    "temperature": SamplingParams(temperature=1.0),
    "top_k": SamplingParams(temperature=0.8, top_k=50),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "min_p": SamplingParams(temperature=1.0, min_p=0.05),
    "penalties_top_p": SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.3),
    "top_p_flat_row": SamplingParams(temperature=100.0, top_p=0.95),
}
TARGETS_MS = {"greedy": 0.5, "temperature": 4.0, "top_k": 4.0, "top_p": 4.0, "min_p": 4.0, "penalties_top_p": 4.0}
HISTORY = list(range(2000))
REPEATS = 60


def likely_row(vocab_size: int) -> npt.NDArray[np.float32]:
    """Return logits [V] float32: normal noise, and 200 tokens above it (at 152k, top_p 0.95 keeps six)."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, vocab_size)
    logits[rng.choice(vocab_size, 200, replace=False)] += 8 + rng.exponential(1.5, 200)
    return logits.astype(np.float32)


def median_ms(params: SamplingParams, logits_V: npt.NDArray[np.float32]) -> float:
    """Return the median time of a draw in milliseconds."""
    sampler, times = Sampler(params, len(logits_V), frozenset()), []
    for position in range(REPEATS):
        started = time.perf_counter()
        sampler.draw(logits_V, position, HISTORY, 1000)
        times.append(time.perf_counter() - started)
    return round(1000 * statistics.median(times), 3)


def main() -> None:
    figures: dict[str, dict[str, float]] = {}
    for vocab_size in (32_000, 152_000):
        logits_V = likely_row(vocab_size)
        figures[str(vocab_size)] = {name: median_ms(params, logits_V) for name, params in SETTINGS.items()}
        for name, spent in figures[str(vocab_size)].items():
            print(f"V={vocab_size:6d}  {name:16s} {spent:7.3f} ms")
    holds = all(figures["152000"][name] <= limit for name, limit in TARGETS_MS.items())
    print(json.dumps({"bench": "sample", "ms": figures, "target_ms_at_152000": TARGETS_MS, "holds": holds}))


if __name__ == "__main__":
    main()
