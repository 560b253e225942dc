"""Random lives of requests in one process: whatever befalls nodes and lines, a text is what a lone node gives. For the night.

    PYTHONPATH=src .venv/bin/python -m tools.fuzz_requests --count 300 --seed 1

Each draw is a swarm of a few nodes over memory links under a virtual clock, and a few requests of one or two origins: with
drafts, stop strings, log probabilities and common beginnings, adopted, left by their clients, in rings and stars, with ends at
the origin or at the edges (request_lives.py). Nodes, lines and devices fail meanwhile (request_faults.py). Every text, or what
came of it, is compared with what a node that holds all layers answers; a request that fails must have met what it may fail of;
none hangs; no node holds anything of a session in the end, and nothing was logged as an error (request_checks.py). Prints one
JSON line for each draw that fails, with what befell it, and a summary as the last line; exits with 1 if any failed.
"""

import argparse
import gc
import json
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from tests.kill import Models, kept_models
from tools.request_faults import LAYERS
from tools.request_lives import Life

FAMILIES: Final = ("qwen3", "qwen3", "qwen3", "qwen3_next", "qwen3_next", "deepseek_v4")
OPTIONS: Final[dict[str, dict[str, Any]]] = {"deepseek_v4": {"hc_mult": 1, "mlp_layer_types": ["moe"] * LAYERS}}
MAX_TURNS: Final = 4_000_000  # of the event loop in a life


class Folders:
    """A checkpoint of each family, made as it is asked for."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def of(self, family: str) -> Path:
        if not (folder := self._home / family).exists():
            make_tiny(family, folder, seed=4, layers=LAYERS, **OPTIONS.get(family, {}))
            gc.collect()
            gc.freeze()  # each life looks for what it has left behind
        return folder


def lived(seed: int, folder: Path, models: Models) -> Life:
    """The life of `seed`, when it is over."""
    life = Life(seed, folder, models)
    try:
        run_virtual(life.live(), max_turns=MAX_TURNS)
    except Exception as error:
        life.problems.append("".join(traceback.format_exception(error)))
    return life


def lives(seeds: Sequence[int], families: Sequence[str] = FAMILIES) -> tuple[Counter[str], int]:
    """What happened in the lives of `seeds`, and in how many what must not be, which is printed."""
    tally, failed = Counter[str](), 0
    with tempfile.TemporaryDirectory() as home, kept_models() as models:
        folders = Folders(Path(home))
        for seed in seeds:
            family = Random(f"family of {seed}").choice(families)
            life = lived(seed, folders.of(family), models)
            tally += life.tally
            if life.problems:
                failed += 1
                told = {"told": life.told, "requests": list(map(str, life.asked))}
                shown = {"seed": seed, "family": family, "problems": life.problems, **told}
                sys.stdout.write(json.dumps(shown) + "\n")
                sys.stdout.flush()
    return tally, failed


def main() -> int:
    """Draws --count lives from --seed on. See the module's text."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--count", type=int, default=100)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    tally, failed = lives(range(given.seed, given.seed + given.count))
    sys.stdout.write(json.dumps({"lives": given.count, "failed": failed, **tally}) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
