"""Build wheels for Linux on x86-64 and aarch64, each for any Python 3.11 or newer, with the C kernels inside.

    python -m tools.wheel [--to dist] [x86_64] [aarch64]

ziglang (extra `test`) compiles for both machines against glibc 2.17, so the wheels fit Debian 8, Ubuntu 14.04 and newer.
Fails if a wheel lacks its kernels, or needs a newer glibc than its tag says.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 17)
KERNELS = "manyhands/engine/_native.so"
ELF_MACHINE = {"x86_64": 62, "aarch64": 183}  # e_machine


def build(machine: str, to: Path) -> Path:
    """The wheel for `machine`, in folder `to`. Raises CalledProcessError, or ValueError for a wheel that is not right."""
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
    with tempfile.TemporaryDirectory() as room:
        source = Path(room) / "source"
        skipped = shutil.ignore_patterns("*.so", "__pycache__", "build", "*.egg-info")
        shutil.copytree(ROOT / "src", source / "src", ignore=skipped)
        for name in ("pyproject.toml", "setup.py", "build_backend.py", "MANIFEST.in", "README.md", "LICENSE"):
            if (ROOT / name).exists():
                shutil.copy(ROOT / name, source / name)
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            room,
            ".",
        ]
        subprocess.run(
            command, cwd=source, env=os.environ | {"MANYHANDS_WHEEL": tag} | _compiler(room, machine), check=True
        )
        (made,) = Path(room).glob("*.whl")
        to.mkdir(parents=True, exist_ok=True)
        wheel = Path(shutil.copy(made, to))
    check(wheel, machine)
    return wheel


def _compiler(room: str, machine: str) -> dict[str, str]:
    """zig as the C compiler, as a program of one word; and no flags of the Python that builds."""
    program = Path(room) / "zigcc"
    target = f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang cc -target {target} "$@"\n')
    program.chmod(0o755)
    return {"CC": str(program), "LDSHARED": f"{program} -shared", "CFLAGS": "-g0", "LDFLAGS": ""}


def check(wheel: Path, machine: str) -> None:
    """Raises ValueError if the wheel is not for any Python 3, lacks kernels, or they need another machine or glibc."""
    if "-py3-none-manylinux" not in wheel.name:
        raise ValueError(f"{wheel.name}: not for any Python 3")
    with zipfile.ZipFile(wheel) as content:
        if KERNELS not in content.namelist():
            raise ValueError(f"{wheel.name} has no {KERNELS}")
        kernels = content.read(KERNELS)
    if (found := int.from_bytes(kernels[18:20], "little")) != ELF_MACHINE[machine]:
        raise ValueError(f"{wheel.name}: {KERNELS} is for ELF machine {found}, not {machine}")
    newest = max((int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", kernels))
    if newest > GLIBC:
        raise ValueError(f"{wheel.name}: {KERNELS} needs glibc {newest[0]}.{newest[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help=f"default: {', '.join(MACHINES)}")
    parser.add_argument("--to", type=Path, default=ROOT / "dist")
    wanted = parser.parse_args()
    if unknown := set(wanted.machines) - set(MACHINES):
        parser.error(f"no such machine: {', '.join(unknown)}; there are {', '.join(MACHINES)}")
    for machine in wanted.machines or MACHINES:
        wheel = build(machine, wanted.to)
        print(f"{wheel}  {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
