"""Install manyhands in a new virtual environment, without extras, and print how much room it takes.

    python -m tools.installed [WHEEL]      default: this source tree; exit 1 if a limit is exceeded

Sizes are sums of file lengths in MB (10^6 bytes): the virtual environment with pip, bytecode and every dependency (numpy
alone has 72). Limits are what is reached; lower them when it becomes less. The command is run too: `--version`, `--help`
and `doctor`, which proves the golden digests. torch may not come with it; the source of a GPU's kernels must.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = Path("src/manyhands/engine/cuda")
# From 3.12 on a virtual environment has no setuptools, and numpy no distutils: 14 MB less.
IS_SLIM = sys.version_info >= (3, 12)
LIMITS_MB = {"all": 246, "without iroh": 225} if IS_SLIM else {"all": 260, "without iroh": 240}


def size_mb(folder: Path) -> float:
    """The lengths of all files below `folder`; links are not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()) / 1e6


def installed(what: str, room: Path) -> dict[str, float]:
    """Install `what` below `room`; sizes by name. Raises CalledProcessError."""
    venv = room / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [str(venv / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", what]
    subprocess.run(pip, check=True, cwd=room)
    packages = next(venv.glob("lib/python3*/site-packages"))
    everything = size_mb(venv)
    iroh = sum(size_mb(path) for path in packages.glob("iroh*"))
    return {"all": round(everything, 1), "without iroh": round(everything - iroh, 1)}


def run(venv: Path, room: Path) -> dict[str, float]:
    """Seconds of the commands. Raises CalledProcessError for one that fails, AssertionError for torch, or without kernels."""
    seconds = {}
    for words in (["--version"], ["--help"], ["doctor"]):
        began = time.perf_counter()
        command = [str(venv / "bin" / "manyhands"), *words]
        env = {"HOME": str(room), "MANYHANDS_HOME": str(room / "home"), "PATH": "/usr/bin:/bin"}
        subprocess.run(command, check=True, cwd=room, env=env, stdout=subprocess.DEVNULL)
        seconds[words[0].strip("-")] = round(time.perf_counter() - began, 2)
    packages = next(venv.glob("lib/python3*/site-packages"))
    assert not (packages / "torch").exists(), "torch came with it"
    wanted = {path.name for path in (ROOT / KERNELS).glob("*.cu")}
    lacking = wanted - {path.name for path in (packages / KERNELS.relative_to("src")).glob("*.cu")}
    assert wanted and not lacking, f"kernels did not: {lacking}"
    return seconds


def main() -> int:
    what = str(Path(sys.argv[1]).resolve()) if len(sys.argv) > 1 else str(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        sizes = installed(what, room)
        seconds = run(room / "venv", room)
    holds = all(sizes[name] <= limit for name, limit in LIMITS_MB.items())
    print(json.dumps({"MB": sizes, "limits_MB": LIMITS_MB, "seconds": seconds, "holds": holds}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
