"""What is too long for `.ci/run`, one step after the other: `make nightly`.

    python -m tools.nightly [--only NAME ...] [--minutes 10] [--seed N]      `--minutes`: of each fuzzer

Steps: tests marked `nightly`, mutations of the code, the fuzzers, the siege, the busy machine, the soak. As soon as a step
is over its outcome goes to bench/nightly.json: the commit that it ran on, its command with the seed, whether it passed, its
seconds, which tests failed, and what was skipped and why. A step that takes longer than its limit is ended and has failed;
one for which something is not installed is skipped. The file's `holds` is true if every step passed, or was skipped, on the
one commit in `commit`, and no file differed from it. The last line on stdout is the same as JSON; exits with 1 if a step
failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from bench.report import machine
from tools.sanitized import MEMORY, RACES

ROOT: Final = Path(__file__).parents[1]
RESULT: Final = ROOT / "bench/nightly.json"
WRITTEN: Final = ("bench/nightly.json", "bench/results/")


@dataclass(frozen=True, slots=True)
class Step:
    """A command, the minutes after which it is ended, and why it cannot run here ("" if it can). `tests`: it is pytest's."""

    command: list[str]
    limit_min: float
    missing: str = ""
    tests: bool = False


def seed_of(day: date) -> int:
    """Fuzzers count on from it, one for each draw: so far from other days that none is drawn twice."""
    return 100_000 * int(day.strftime("%Y%m%d"))


def steps(minutes: int, seed: int) -> dict[str, Step]:
    """Each step by name, in the order in which they run."""
    seeded = ["--seed", str(seed)]  # the day's: what failed is drawn again with it
    python = [sys.executable, "-m"]
    kernels = [*python, "tools.fuzz_kernels", "--minutes", str(minutes), *seeded]
    configs = [*python, "tools.fuzz_configs", "--count", str(100 * minutes), *seeded]  # two a second and more
    forms = [*python, "tools.fuzz_forms", "--count", str(1000 * minutes), *seeded]
    requests = [*python, "tools.fuzz_requests", "--count", str(60 * minutes), *seeded]  # one or two a second
    return {
        "tests": Step([*python, "pytest", "-m", "nightly", "-n", "2", "--dist", "worksteal"], 120, tests=True),
        "mutations": Step([*python, "tools.mutate"], 30),
        "fuzz kernels": Step(kernels, minutes + 15, MEMORY.missing()),
        "fuzz races": Step([*kernels, "--races"], minutes + 15, RACES.missing()),
        "fuzz configs": Step(configs, 2 * minutes + 15),
        "fuzz forms": Step(forms, 2 * minutes + 15),
        "fuzz requests": Step(requests, 2 * minutes + 15),
        "siege": Step([*python, "bench.siege", "--minutes", "10"], 30),
        "busy": Step([*python, "bench.busy"], 15),
        "soak": Step([*python, "bench.soak"], 30),
    }


def commit() -> str:
    """The commit of the working tree, with "+" behind it if files differ from it, other than those that steps write."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    others = [line for line in status.stdout.splitlines() if not line[3:].startswith(WRITTEN)]
    return head.stdout.strip() + ("+" if others else "")


def run(step: Step) -> dict[str, Any]:
    """What came of a step: `passed`, `seconds`, and for tests how many there were, those that failed, and reasons to skip."""
    if step.missing:
        return {"passed": True, "seconds": 0, "skipped": {step.missing: 1}}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [*step.command, f"--junitxml={report}"] if step.tests else step.command
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            outcome: dict[str, Any] = {"passed": process.wait(60 * step.limit_min) == 0}
        except subprocess.TimeoutExpired:
            outcome = {"passed": False, "ended": f"it took more than {step.limit_min:g} minutes"}
        finally:
            if process.poll() is None:  # with all that it started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        outcome["seconds"] = round(time.monotonic() - began)
        return {**outcome, **(read_report(report) if report.exists() else {})}


def read_report(report: Path) -> dict[str, Any]:
    """Of pytest's report in JUnit's XML: how many tests ran, those that failed, and how many were skipped for each reason."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    names = {case: f"{case.get('classname')}::{case.get('name')}" for case in cases}
    failed = [names[case] for case in cases if any(case.find(kind) is not None for kind in ("failure", "error"))]
    skips = [found.get("message", "") for case in cases if (found := case.find("skipped")) is not None]
    return {"tests": len(cases) - len(skips), "failed": failed, "skipped": dict(Counter(skips))}


def summary(done: Mapping[str, Mapping[str, Any]], names: list[str]) -> dict[str, Any]:
    """The file's contents: `holds` if every step of `names` passed on one commit, without other changes."""
    commits = {str(step["commit"]) for step in done.values()}
    one = next(iter(commits)) if len(commits) == 1 else ""
    holds = set(done) == set(names) and all(step["passed"] for step in done.values()) and bool(one) and one[-1] != "+"
    return {"command": "python -m tools.nightly", "machine": machine(), "commit": one, "steps": done, "holds": holds}


def main() -> int:
    every = steps(10, 0)
    parser = argparse.ArgumentParser(prog="tools.nightly", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=every, help="run these steps only; others keep what is stored of them"
    )
    parser.add_argument("--minutes", type=int, default=10, help="of each fuzzer")
    parser.add_argument("--seed", type=int, default=seed_of(date.today()))
    asked = parser.parse_args()
    done: dict[str, dict[str, Any]] = json.loads(RESULT.read_text())["steps"] if RESULT.exists() and asked.only else {}
    ran = [name for name in every if not asked.only or name in asked.only]
    told: dict[str, Any] = {}
    for name, step in steps(asked.minutes, asked.seed).items():
        if name not in ran:
            continue
        print(f"== {name}: {' '.join(step.command[1:])}", flush=True)
        before = commit()
        outcome = run(step)
        after = commit()
        ran_on = after if before == after else f"{before}+"
        done[name] = {"commit": ran_on, "command": " ".join(step.command[1:]), **outcome}
        for reason, count in outcome.get("skipped", {}).items():
            print(f"== {name}: {count} skipped: {reason}", flush=True)
        told = summary({each: done[each] for each in every if each in done}, list(every))
        RESULT.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told))
    return 0 if all(done[name]["passed"] for name in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
