"""The engine's sources with instructions that this CPU lacks replaced, built, and compared with the digests and plain C."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.engine.conftest import NATIVE, ROOT

FLAGS = [
    "-O1",
    "-std=gnu11",
    "-D_GNU_SOURCE",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-pthread",
    "-w",
    "-Wno-psabi",
]
EXPANDED = ["-mavx2", "-mfma", "-mf16c"]  # of what the emulation is made
MODELS = ("llama", "gpt_oss", "deepseek_v3")
SECONDS = 10
HAS_DOT = "EMULATED_DOT"  # set in the environment: the CPU has a dot product of bytes
RUN = """
import sys
from pathlib import Path
from manyhands.engine import golden, golden_models, library
from tools.fuzz_kernels import fuzz

library.PATH, target, seed, seconds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
found = dict(golden_models.digests(golden_models.OfCpu(target), sys.argv[5:]))
assert found == {case: golden.recorded().get(case) for case in found}, found
fuzz(library.PATH, seed, seconds)
assert library.calls(target) > 0
"""


def build(folder: Path, target: str, replaced: Mapping[str, Mapping[str, str]], header: Path | None = None) -> Path:
    """The library with plain C and `target`, texts of its sources replaced: {file: {old: new}}, each old one there once.

    `header` defines emulated_* for each _mm512_* of the headers.
    """
    native = Path(shutil.copytree(NATIVE, folder / "native"))
    for name, texts in replaced.items():
        text = (native / name).read_text()
        for old, new in texts.items():
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        if name.endswith(".h") and header:
            text = re.sub(r"\b_mm512_(\w+)", r"emulated_\1", text)
            text = text.replace("#include <immintrin.h>", f'#include "{header}"')
        (native / name).write_text(text)
    objects = []
    for name, flags in {"scalar": [], target: [*EXPANDED, f"-DLANES_{target.upper()}"]}.items():
        objects.append(str(folder / f"{name}.o"))
        command = ["gcc", *FLAGS, *flags, f"-DTARGET={name}", "-c", str(native / "kernels.c"), "-o", objects[-1]]
        subprocess.run(command, check=True)
    rest = [str(source) for source in sorted(native.glob("*.c")) if source.name != "kernels.c"]
    subprocess.run(["gcc", *FLAGS, "-shared", *rest, *objects, "-o", str(folder / "_native.so")], check=True)
    return folder / "_native.so"


def check(library: Path, target: str, has_dot: bool) -> None:
    """All digests of operations, whole models, and random plans of `target` against plain C."""
    environment = {name: value for name, value in os.environ.items() if name != HAS_DOT}
    environment |= {HAS_DOT: "1"} if has_dot else {}
    command = [sys.executable, "-c", RUN, str(library), target, "7", str(SECONDS), *MODELS]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{target}, scalar" in done.stdout
