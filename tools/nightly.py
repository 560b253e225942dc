"""What is too long for `.ci/run`, one step after the other: `make nightly`.

    python -m tools.nightly [--only NAME ...] [--minutes 60] [--seed N]      `--minutes`: of each fuzzer

Steps: tests marked `nightly`, `model/` on AVX2, mutations of the code, both fuzzers, the siege, the busy machine,
the soak. Each step's outcome and seconds go to bench/nightly.json together with the commit; the last line on stdout is the
same as JSON. Exits with 1 if a step failed.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from bench.report import machine

ROOT: Final = Path(__file__).parents[1]
RESULT: Final = ROOT / "bench/nightly.json"


def steps(minutes: int, seed: int) -> dict[str, list[str]]:
    """Name and command of each step."""
    seeded = ["--seed", str(seed)]  # the day's: what failed is drawn again with it
    python = [sys.executable, "-m"]
    # model/ with the libraries held to AVX2, as on most laptops.
    avx2 = ["env", "ONEDNN_MAX_CPU_ISA=AVX2", "ATEN_CPU_CAPABILITY=avx2", *python, "pytest"]
    both = ["tests/model/test_linear.py", "tests/model/test_exactness.py"]
    return {
        "tests": [*python, "pytest", "-m", "nightly", "-n", "2", "--dist", "worksteal"],
        "model/ on avx2": [*avx2, *both, "-k", "test_linear or (tiles and bf16)"],
        "mutations": [*python, "tools.mutate"],
        "fuzz kernels": [*python, "tools.fuzz_kernels", "--minutes", str(minutes), *seeded],
        "fuzz configs": [*python, "tools.fuzz_configs", "--count", str(5 * minutes), *seeded],
        "siege": [*python, "bench.siege", "--minutes", "10"],
        "busy": [*python, "bench.busy"],
        "soak": [*python, "bench.soak", "--minutes", "30"],
    }


def commit() -> str:
    """The commit of the working tree, with "+" behind it if files differ from it."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    return head.stdout.strip() + ("+" if status.stdout.strip() else "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.nightly", description=(__doc__ or "").split("\n")[0])
    every = steps(60, 0)
    parser.add_argument("--only", nargs="+", choices=every, help="run these steps only; nothing is stored")
    parser.add_argument("--minutes", type=int, default=60, help="of each fuzzer")
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    asked = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    for name, command in steps(asked.minutes, asked.seed).items():
        if asked.only and name not in asked.only:
            continue
        print(f"== {name}: {' '.join(command[1:])}", flush=True)
        began = time.monotonic()
        code = subprocess.run(command, cwd=ROOT).returncode
        results[name] = {"passed": code == 0, "seconds": round(time.monotonic() - began)}
    holds = all(result["passed"] for result in results.values())
    summary = {
        "command": "python -m tools.nightly",
        "machine": machine(),
        "commit": commit(),
        "minutes": asked.minutes,
        "seed": asked.seed,
        "steps": results,
        "holds": holds,
    }
    if not asked.only:
        RESULT.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
