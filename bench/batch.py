"""How many tokens/s does one node give to 1, 2, 4 and 8 requests at once, and how long does the last one wait to begin?

Arms, interleaved: that many requests at the same moment to one node process (TLS on loopback), and transformers'
`generate` for one request (it serves several one by one, at the same rate). Each: a prompt of 64 tokens, 32 new, greedy;
the rate counts all tokens from the first request to the last token, prefill included.
Holds if 8 requests together get 3x the tokens/s of one (median of the ratios rep by rep).
Run: python -m bench.batch [--shape 0.5b|1.1b] [--reps N] [--quick]
"""

import argparse
import sys
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.report import finish, measuring, note, paired, spread
from bench.shapes import checkpoint
from bench.step import Transformers
from bench.swarm import aggregate_tps, base, generate_all, origin, prompt_ids
from manyhands.cli.options import run as run_loop

TARGET = {"eight_x": 3.0}
REQUESTS = (1, 2, 4, 8)
PROMPT, NEW = 64, 32


async def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens/s, and the longest time to a first token in seconds, by arm."""
    rates: dict[str, list[float]] = defaultdict(list)
    waits: dict[str, list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        home = await stack.enter_async_context(base(folder, options.threads))
        node = await origin(stack, home, 1, options.threads)
        stock = await home.device.run(lambda: Transformers(folder, options.threads))
        for rep in range(-1, options.reps):
            if rep == 0:
                rates.clear()  # the first one warmed up
                waits.clear()
            new = NEW if rep >= 0 else 3
            for count in REQUESTS:
                with measuring(f"{count} requests rep {rep}"):
                    runs = await generate_all(node, [prompt_ids(PROMPT, i) for i in range(count)], new)
                rates[str(count)].append(aggregate_tps(runs))
                waits[str(count)].append(max(run.ttft_s for run in runs))
            with measuring(f"transformers rep {rep}"):
                began = time.perf_counter()
                at = await home.device.run(partial(stock.times, prompt_ids(PROMPT), new))
                rates["transformers"].append(new / (time.perf_counter() - began))
            waits["transformers"].append(at[0])
            note("  " + ", ".join(f"{arm} {taken[-1]:.1f} tok/s" for arm, taken in rates.items()))
    return rates, waits


def report(options: argparse.Namespace, rates: dict[str, list[float]], waits: dict[str, list[float]]) -> int:
    top = str(REQUESTS[-1])
    one_by_one = [
        (REQUESTS[-1] - 1) * NEW / r + w for r, w in zip(rates["transformers"], waits["transformers"], strict=True)
    ]
    out: dict[str, Any] = {
        "shape": options.shape,
        "threads": options.threads,
        "tps": {arm: spread(taken) for arm, taken in rates.items()},
        "ttft_max_s": {arm: spread(taken) for arm, taken in waits.items()} | {"transformers_8th": spread(one_by_one)},
        "of_one_x": {str(n): paired(rates[str(n)], rates["1"]) for n in REQUESTS[1:]},
        "of_transformers_x": {str(n): paired(rates[str(n)], rates["transformers"]) for n in REQUESTS},
    }
    return finish("batch", out, TARGET, {"eight": out["of_one_x"][top]["median"] >= TARGET["eight_x"]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["0.5b", "1.1b"], default="0.5b")
    parser.add_argument("--reps", type=int, default=0, help="default: 5, or 2 with --quick")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.reps = options.reps or (2 if options.quick else 5)
    return report(options, *run_loop(measure(options, checkpoint(options.shape))))


if __name__ == "__main__":
    sys.exit(main())
