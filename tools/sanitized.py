"""Builds the engine's library under gcc's sanitizers: what tools/fuzz_kernels.py runs on."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from manyhands.engine import library

ROOT: Final = Path(__file__).parents[1]
NATIVE: Final = ROOT / "src/manyhands/engine/native"


class Sanitizers(NamedTuple):
    """The compiler's flags, the libraries that must be loaded before Python, what these read from the environment; and whether
    one back end alone is built: the others are its kernels by other names, and are not called."""

    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    options: dict[str, str]
    is_alone: bool

    def preloads(self) -> list[str]:
        """The libraries' paths; empty where gcc lacks one."""
        if shutil.which("gcc") is None:
            return []
        asked = [["gcc", f"-print-file-name={name}"] for name in self.libraries]
        found = [subprocess.run(command, capture_output=True, text=True).stdout.strip() for command in asked]
        return found if all(map(os.path.isabs, found)) else []

    def missing(self) -> str:
        """Why nothing can be built with them here; "" if it can."""
        return "" if self.preloads() else f"gcc with {' and '.join(self.libraries)} is not installed"


# Reads and writes outside of arrays, and what C does not define; not leaks: Python frees little at its end.
MEMORY: Final = Sanitizers(
    ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    ("libasan.so", "libubsan.so"),
    {"ASAN_OPTIONS": "detect_leaks=0"},
    False,
)
# Races between members of a team, each of which has tasks of the smallest job (native/run.c, native/team.c).
RACES: Final = Sanitizers(
    ("-fsanitize=thread", "-DSHARES_ALL"), ("libtsan.so",), {"TSAN_OPTIONS": "halt_on_error=1:exitcode=66"}, True
)
# In a process: setuptools takes the place of distutils in the one that imports it.
_TELLS: Final = """
import json, runpy, setuptools
setuptools.setup = lambda **_: None
found = runpy.run_path("setup.py")
print(json.dumps((found["FLAGS"], found["targets"])))
"""


@cache
def _told() -> tuple[list[str], dict[str, list[str]]]:
    """setup.py's own flags for this machine, and those of each target, without running setup()."""
    done = subprocess.run([sys.executable, "-c", _TELLS], cwd=ROOT, capture_output=True, text=True, check=True)
    flags, found = json.loads(done.stdout)
    return flags, found


def targets(use: Sanitizers, sanitized: str = "") -> dict[str, list[str]]:
    """Flags of what is built, "" for what is common; sanitizers for all targets, or for `sanitized` alone."""
    flags, found = _told()
    each: dict[str, list[str]] = {"": [], **found}
    if use.is_alone:
        each = {"": [], sanitized: found[sanitized]}
    elif "amx" in each and runs("avx512") and not runs("amx"):
        each["amx"] = [*each["avx512"], "-UTARGET", "-DTARGET=amx", "-DTILES", "-DTILES_EMULATED"]
        each[""] = ["-DTILES_EMULATED"]
    if sanitized and "avx512" in each and not runs("avx512"):
        each["avx512"] = ["-DTARGET=avx512"]  # it is linked and never called: plain C is compiled in less time
        each.pop("amx", None)
    watched = {"", sanitized} if sanitized else set(each)
    added = [*use.flags, "-fno-omit-frame-pointer", "-g1"]
    return {name: [*flags, *own, "-O1", *(added if name in watched else [])] for name, own in each.items()}


def runs(target: str) -> bool:
    """Whether this machine has what a target's kernels need."""
    return bool(library.load().mh_supports(library.BACK_ENDS.index(target)))


def quick() -> str:
    """The back end that is compiled soonest, of those of this machine in lanes: kernels do not differ in what threads share."""
    return library.supported()[-2:][0]


def build(folder: Path, native: Path = NATIVE, sanitized: str = "", use: Sanitizers = MEMORY) -> Path:
    """The library under sanitizers: all of it, or what is common and the kernels of the back end `sanitized` (not "amx").

    Raises CalledProcessError where gcc cannot build it.
    """
    objects, each = [], targets(use, sanitized)
    named = [f"-Wl,--defsym=kernels_{name}=kernels_{sanitized}" for name in {*_told()[1]} - {*each, "amx"}]
    for name, flags in each.items():
        sources = [native / "kernels.c"] if name else sorted(set(native.glob("*.c")) - {native / "kernels.c"})
        for source in sources:
            objects.append(folder / f"{source.stem}{name}.o")
            subprocess.run(["gcc", *flags, "-fPIC", "-c", source, "-o", objects[-1]], check=True)
    library = folder / "_native.so"
    subprocess.run(["gcc", "-shared", *use.flags, *named, "-o", library, *objects, "-pthread"], check=True)
    return library
