"""Builds the engine's library under AddressSanitizer and UndefinedBehaviourSanitizer: what tools/fuzz_kernels.py runs on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from manyhands.engine import library

ROOT: Final = Path(__file__).parents[1]
NATIVE: Final = ROOT / "src/manyhands/engine/native"
SANITIZED: Final = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1"]
# In a process: setuptools takes the place of distutils in the one that imports it.
_TELLS: Final = """
import json, runpy, setuptools
setuptools.setup = lambda **_: None
found = runpy.run_path("setup.py")
print(json.dumps((found["FLAGS"], found["targets"])))
"""


def targets(sanitized: str = "") -> dict[str, list[str]]:
    """setup.py's own flags for this machine, without running setup(); sanitizers for all targets, or for `sanitized` alone."""
    done = subprocess.run([sys.executable, "-c", _TELLS], cwd=ROOT, capture_output=True, text=True, check=True)
    flags, found = json.loads(done.stdout)
    each: dict[str, list[str]] = {"": [], **found}
    if "amx" in each and runs("avx512") and not runs("amx"):
        each["amx"] = [*each["avx512"], "-UTARGET", "-DTARGET=amx", "-DTILES", "-DTILES_EMULATED"]
        each[""] = ["-DTILES_EMULATED"]
    if sanitized and "avx512" in each and not runs("avx512"):
        each["avx512"] = ["-DTARGET=avx512"]  # it is linked and never called: plain C is compiled in less time
        each.pop("amx", None)
    watched = {"", sanitized} if sanitized else set(each)
    return {name: [*flags, *own, "-O1", *(SANITIZED if name in watched else [])] for name, own in each.items()}


def runs(target: str) -> bool:
    """Whether this machine has what a target's kernels need."""
    return bool(library.load().mh_supports(library.BACK_ENDS.index(target)))


def build(folder: Path, native: Path = NATIVE, sanitized: str = "") -> Path:
    """The library under sanitizers: all of it, or what is common and the kernels of the back end `sanitized`.

    Raises CalledProcessError where gcc cannot build it.
    """
    objects = []
    for name, flags in targets(sanitized).items():
        sources = [native / "kernels.c"] if name else sorted(set(native.glob("*.c")) - {native / "kernels.c"})
        for source in sources:
            objects.append(folder / f"{source.stem}{name}.o")
            subprocess.run(["gcc", *flags, "-fPIC", "-c", source, "-o", objects[-1]], check=True)
    library = folder / "_native.so"
    subprocess.run(["gcc", "-shared", *SANITIZED, "-o", library, *objects, "-pthread"], check=True)
    return library


def preloads() -> list[str]:
    """gcc's sanitizers, which must be loaded before Python; empty where they are not installed."""
    if shutil.which("gcc") is None:
        return []
    names = ("libasan.so", "libubsan.so")
    found = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in names
    ]
    return found if all(map(os.path.isabs, found)) else []
