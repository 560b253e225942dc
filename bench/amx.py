"""Does AMX compute the chain that docs/arithmetic.md defines? Builds and runs bench/amx_probe.c.

`chain`: of each kind of operands, the results that differ from the definition; `serial`: those that differ from the other
reading of Intel's papers, every product added to what stood there, one after the other (no target: it shows that the cases can
tell the two apart). Holds if none differs from the definition. A CPU without AMX is refused.
Run: python -m bench.amx [cases, 100 million]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.report import finish
from manyhands.engine.library import supported

PROBE = Path(__file__).with_name("amx_probe.c")
FLAGS = ["-O2", "-ffp-contract=off", "-mfma", "-mavx2", "-mamx-tile", "-mamx-bf16"]


def main() -> int:
    if "amx" not in supported():
        raise SystemExit(f"this CPU has no AMX (it runs {', '.join(supported())}): there is nothing to compare")
    cases = sys.argv[1] if len(sys.argv) > 1 else "100000000"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "amx_probe"
        subprocess.run(["cc", *FLAGS, "-o", program, PROBE], check=True)
        run = subprocess.run([program, cases], check=True, capture_output=True, text=True)
    found = {**json.loads(run.stdout), "differing": run.stderr.splitlines()}
    return finish("amx", found, {"chain": 0}, {"chain": not any(found["chain"].values())})


if __name__ == "__main__":
    sys.exit(main())
