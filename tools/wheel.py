"""Build wheels for Linux on x86-64 and aarch64 and for macOS on arm64, each for any Python 3.11 or newer, with the C kernels
inside.

    python -m tools.wheel [--to dist] [x86_64] [aarch64] [arm64]

ziglang (extra `test`) compiles for all of them, for Linux against glibc 2.17, so the wheels fit Debian 8, Ubuntu 14.04 and
newer, and for macOS 11. Fails if a wheel lacks its kernels, or they need another machine or a newer system than its tag says.
"""

import argparse
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLIBC, MACOS = (2, 17), (11, 0)
MACHINES = {  # the wheel's tag and zig's target
    **{
        machine: (f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}", f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}")
        for machine in ("x86_64", "aarch64")
    },
    "arm64": (f"macosx_{MACOS[0]}_{MACOS[1]}_arm64", f"aarch64-macos.{MACOS[0]}.{MACOS[1]}"),
}
KERNELS = "manyhands/engine/_native.so"
ELF_MACHINE = {"x86_64": 62, "aarch64": 183}  # e_machine
MACH_O_64, ARM_64, BUILD_VERSION = 0xFEEDFACF, 0x0100000C, 0x32  # magic, cputype and a load command of macOS's files


def build(machine: str, to: Path) -> Path:
    """The wheel for `machine`, in folder `to`. Raises CalledProcessError, or ValueError for a wheel that is not right."""
    tag, target = MACHINES[machine]
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
            command, cwd=source, env=os.environ | {"MANYHANDS_WHEEL": tag} | _compiler(room, target), check=True
        )
        (made,) = Path(room).glob("*.whl")
        to.mkdir(parents=True, exist_ok=True)
        wheel = Path(shutil.copy(made, to))
    check(wheel, machine)
    return wheel


def _compiler(room: str, target: str) -> dict[str, str]:
    """zig as the C compiler, as a program of one word; and no flags of the Python that builds."""
    program = Path(room) / "zigcc"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang cc -target {target} "$@"\n')
    program.chmod(0o755)
    return {"CC": str(program), "LDSHARED": f"{program} -shared", "CFLAGS": "-g0", "LDFLAGS": ""}


def check(wheel: Path, machine: str) -> None:
    """Raises ValueError if the wheel is not for any Python 3, lacks kernels, or they need another machine or newer system."""
    if f"-py3-none-{MACHINES[machine][0].split('_')[0]}" not in wheel.name:
        raise ValueError(f"{wheel.name}: not for any Python 3 on {machine}")
    with zipfile.ZipFile(wheel) as content:
        if KERNELS not in content.namelist():
            raise ValueError(f"{wheel.name} has no {KERNELS}")
        kernels = content.read(KERNELS)
    wrong = _wrong_on_macos(kernels) if machine == "arm64" else _wrong_on_linux(kernels, machine)
    if wrong:
        raise ValueError(f"{wheel.name}: {KERNELS} {wrong}")


def _wrong_on_linux(kernels: bytes, machine: str) -> str:
    if (found := int.from_bytes(kernels[18:20], "little")) != ELF_MACHINE[machine]:
        return f"is for ELF machine {found}, not {machine}"
    newest = max((int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", kernels))
    return f"needs glibc {newest[0]}.{newest[1]}" if newest > GLIBC else ""


def _wrong_on_macos(kernels: bytes) -> str:
    """By its load commands: mach-o/loader.h, `mach_header_64`, `build_version_command`."""
    magic, cpu, _, _, commands = struct.unpack_from("<5I", kernels)
    if (magic, cpu) != (MACH_O_64, ARM_64):
        return "is not for arm64 under macOS"
    at = 32
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", kernels, at)
        if command == BUILD_VERSION:
            needs = struct.unpack_from("<I", kernels, at + 12)[0]
            newest = needs >> 16, needs >> 8 & 255
            return f"needs macOS {newest[0]}.{newest[1]}" if newest > MACOS else ""
        at += size
    return "does not say which macOS it needs"


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
