"""What every benchmark says at the end, and how it takes its samples: arms interleaved, median and spread, one JSON line.

A script prints one JSON object as the last line of stdout (figures, target, holds), stores it with machine, date and
command under bench/results/, and exits with 0 if the targets hold, else 1. Progress goes to stderr: "measuring ARM" and
"measured ARM VALUE" enclose every timed part.
"""

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from manyhands.engine.library import forced, supported

RESULTS = Path(__file__).parent / "results"
BY_SHAPE = ("batch", "step")  # their files name the shape, also where it is the default one
BY_BACK_END = (
    "batch",
    "engine",
    "hop",
    "split",
    "states",
    "step",
)  # scripts that measure the engine: a file for each back end and family of CPUs


def spread(samples: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Median, extremes and number of samples."""
    return {
        "median": round(statistics.median(samples), digits),
        "min": round(min(samples), digits),
        "max": round(max(samples), digits),
        "n": len(samples),
    }


def paired(numerator: Sequence[float], denominator: Sequence[float], digits: int = 3) -> dict[str, float]:
    """The ratio of two arms, taken rep by rep: what slows the whole machine for a while slows both alike.

    From 6 reps on with `low` and `high`, between which its median lies, 95 % sure.
    """
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    low, high = median_interval(ratios)
    known = {"low": round(low, digits), "high": round(high, digits)} if len(ratios) >= 6 else {}
    return {**spread(ratios, digits), **known}


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Between which the true median lies, 95 % sure, however the samples are spread: two of them in their order.

    (-inf, inf) for fewer than 6.
    """
    ordered, below, rank = sorted(samples), 0.0, 0
    while (below := below + math.comb(len(ordered), rank) / 2 ** len(ordered)) <= 0.025:
        rank += 1
    return (ordered[rank - 1], ordered[-rank]) if rank else (-math.inf, math.inf)


@contextmanager
def measuring(arm: str) -> Iterator[None]:
    """Encloses a timed part on stderr."""
    print(f"measuring {arm}", file=sys.stderr, flush=True)
    time.sleep(0.02)  # the reader of this line may still the machine
    try:
        yield
    finally:
        print(f"measured {arm}", file=sys.stderr, flush=True)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Where and when the figures were taken."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "isa": _back_end().upper(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _back_end() -> str:
    """The one that serves here: the best, or the one that MANYHANDS_ENGINE names."""
    return forced() or supported()[0]


def _cpu_name() -> str:
    return _cpu_info().get("model name") or platform.processor()


def cpu_family() -> str:
    """The CPU's vendor and family ("amd25" is Zen 3 and Zen 4, "amd26" Zen 5); elsewhere than on x86 the architecture."""
    info = _cpu_info()
    vendors = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}
    vendor = info.get("vendor_id", "")
    return f"{vendors.get(vendor, vendor)}{info['cpu family']}" if "cpu family" in info else platform.machine()


def _cpu_info() -> dict[str, str]:
    """What /proc/cpuinfo says of the first core; empty where there is none."""
    path = Path("/proc/cpuinfo")
    first = path.read_text().partition("\n\n")[0] if path.exists() else ""
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def finish(script: str, figures: Mapping[str, Any], target: Mapping[str, Any], holds: Mapping[str, bool]) -> int:
    """Print the last line, store it, and give the exit code. `holds` names every target; all must hold."""
    last = {**figures, "target": target, "holds_each": holds, "holds": all(holds.values())}
    command = " ".join(["python", "-m", f"bench.{script}", *sys.argv[1:]])
    RESULTS.mkdir(exist_ok=True)
    stored = {"command": command, "machine": machine(), **last}
    (RESULTS / f"{_name(script, figures)}.json").write_text(json.dumps(stored, indent=1) + "\n")
    print(json.dumps(last), flush=True)
    return 0 if last["holds"] else 1


def _name(script: str, figures: Mapping[str, Any]) -> str:
    """One file for each thing measured, so that --shape 1.1b does not overwrite 0.5b, nor a quick run a full one, nor one back
    end's or family of CPUs' figures another's."""
    shape = [
        sys.argv[i + 1]
        for i, a in enumerate(sys.argv[:-1])
        if a in ("--shape", "--fault", "--dtype", "--called", "--temperature", "--scene", "--prefill")
    ]
    if script in BY_SHAPE and "--shape" not in sys.argv:
        shape.insert(0, str(figures["shape"]))
    return "-".join(
        [
            script,
            *shape,
            *(flag[2:] for flag in ("--standby", "--quick", "--live", "--outliers", "--busy") if flag in sys.argv),
            *((_back_end(), cpu_family()) if script in BY_BACK_END else ()),
        ]
    )
