"""Does manyhands still reach its targets? Runs every benchmark quickly, one after the other, and sums up (`make bench`).

A quick run has few repetitions: a figure near its target wants the full one, `python -m bench.NAME`.
Run: python -m bench.run [NAME ...]
"""

import json
import subprocess
import sys
from typing import Any

RUNS = {
    "step": ["step", "--quick"],
    "step 1.1b": ["step", "--quick", "--shape", "1.1b"],
    "split": ["split", "--quick"],
    "split tales": ["split", "--quick", "--shape", "tales"],
    "hop": ["hop", "--quick"],
    "batch": ["batch", "--quick"],
    "wire": ["wire"],
    "sample": ["sample"],
    "wan": ["wan"],
    "reuse": ["reuse", "--quick", "--shape", "tales"],
    "upkeep": ["upkeep", "--quick"],
    "gateway": ["gateway", "--quick"],
    "join": ["join", "--quick"],
    "churn": ["churn", "--quick"],
    "nat": ["nat", "--quick"],
    "route": ["route", "--quick"],
    "plan": ["plan", "--quick"],
    "balance": ["balance"],
    "directory gossip": ["directory", "--quick"],
    "directory dht": ["directory", "--quick", "--shape", "dht"],
}


def run_one(arguments: list[str]) -> dict[str, Any]:
    """The last line of one benchmark; {"holds": False} if it broke."""
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{arguments[0]}", *arguments[1:]], stdout=subprocess.PIPE, text=True
    )
    try:
        last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"holds": False, "error": f"exit code {done.returncode} without a last line of JSON"}
    return {**last, "holds": bool(last.get("holds")) and done.returncode == 0}


def main() -> int:
    wanted = sys.argv[1:] or list(RUNS)
    results: dict[str, dict[str, Any]] = {}
    for name in wanted:
        print(f"== {name}", flush=True)
        results[name] = run_one(RUNS.get(name) or name.split())
        print(json.dumps(results[name]), flush=True)
    holds = {name: result["holds"] for name, result in results.items()}
    print(json.dumps({"holds_each": holds, "holds": all(holds.values())}))
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
