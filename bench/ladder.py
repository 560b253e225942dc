"""What do a ring and drafting win over a long route? As `manyhands benchmark --wan` (testing/ladder.py), with targets.

Six hops, legs of 22 to 75 ms with jitter, emulated; arms interleaved. `known` is a teacher-forced oracle over real compute and
links. Holds if the medians of the ratios to plain, rep by rep, reach TARGET. Run: python -m bench.ladder [--reps N]
"""

import argparse
import sys

from bench.report import finish, note, paired, spread
from manyhands.cli.options import run as run_loop
from manyhands.testing.ladder import climb

TARGET = {"known_x": 16.0, "auto_x": 2.2, "wrong_x": 0.98}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.7)
    options = parser.parse_args()
    rungs = run_loop(climb(options.temperature, options.reps, note))
    ratios = {f"{name}_x": paired(rung.rates, rungs["plain"].rates) for name, rung in rungs.items() if name != "plain"}
    figures = {
        "temperature": options.temperature,
        "tokens_per_s": {name: spread(rung.rates) for name, rung in rungs.items()},
        "tokens_per_traversal": {name: spread(rung.each) for name, rung in rungs.items()},
        **ratios,
    }
    holds = {name: ratios[name]["median"] >= least for name, least in TARGET.items()}
    return finish("ladder", figures, TARGET, holds)


if __name__ == "__main__":
    sys.exit(main())
