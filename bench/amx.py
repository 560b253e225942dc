"""Does AMX compute the chain that docs/arithmetic.md defines? Builds and runs bench/amx_probe.c, and says so in JSON.

Where the CPU has AMX the result is stored with its model in bench/results/amx.json; elsewhere nothing is stored.
Run: python -m bench.amx [cases]
"""

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ["-O2", "-ffp-contract=off", "-mfma", "-mavx2", "-mamx-tile", "-mamx-bf16"]
NEEDED = {"amx_tile", "amx_bf16", "fma"}


def cpu() -> tuple[str, set[str]]:
    """The processor's model and its flags, as Linux states them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    pairs = [line.partition(":") for line in lines]
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    return fields.get("model name", platform.processor()), set(fields.get("flags", "").split())


def probe(cases: int) -> dict[str, object]:
    """What the probe found; `amx` is false where it cannot run."""
    model, flags = cpu()
    if not flags >= NEEDED:
        return {"cpu": model, "amx": False, "lacks": sorted(NEEDED - flags)}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "amx_probe"
        subprocess.run(["cc", *FLAGS, "-o", program, HERE / "amx_probe.c"], check=True)
        run = subprocess.run([program, str(cases)], check=True, capture_output=True, text=True)
    return {"cpu": model, **json.loads(run.stdout), "first": run.stderr.splitlines()}


def main() -> None:
    result = probe(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000_000)
    print(json.dumps(result))
    if result["amx"]:
        (HERE / "results" / "amx.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
