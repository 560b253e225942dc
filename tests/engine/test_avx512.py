"""The sources of AVX-512 where there is none, each instruction emulated (avx512.h), against the digests and plain C."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.conftest import NATIVE, ROOT

EMULATED = Path(__file__).with_name("avx512.h")
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
HAS_DOT = "EMULATED_DOT"
# What cannot be compiled for, or asked of, a machine without such registers -> what stands for it.
REPLACED = {
    "lanes.h": {'    __asm__("" : "+v"(a));\n': ""},
    "quants.h": {
        '#define IN_ORDER(vector) __asm__("" : "+v"(vector))': "#define IN_ORDER(vector)",
        '    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(x));\n    return sums;': (
            "    return emulated_dpbusd_epi32(sums, codes, x);"
        ),
    },
    "machine.c": {
        "(char)(1 + (find(target) != 0))": "(char)(1 + (target == 2 || target == 0))",
        "mh_has_dot = has_dot();": f'mh_has_dot = getenv("{HAS_DOT}") != 0;',
        '#include "plan.h"': '#include <stdlib.h>\n#include "plan.h"\nconst Kernels kernels_avx2;',
    },
}
RUN = """
import sys
from pathlib import Path
from manyhands.engine import golden, golden_models, library
from tools.fuzz_kernels import fuzz

library.PATH, seed, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
found = dict(golden_models.digests(golden_models.OfCpu("avx512"), sys.argv[4:]))
assert found == {case: golden.recorded().get(case) for case in found}, found
fuzz(library.PATH, seed, seconds)
assert library.calls("avx512") > 0
"""


def build(folder: Path) -> Path:
    """The library with plain C and AVX-512, its instructions emulated."""
    native = Path(shutil.copytree(NATIVE, folder / "native"))
    for name, replaced in REPLACED.items():
        text = (native / name).read_text()
        for old, new in replaced.items():
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        if name.endswith(".h"):
            text = re.sub(r"\b_mm512_(\w+)", r"emulated_\1", text)
            text = text.replace("#include <immintrin.h>", f'#include "{EMULATED}"')
        (native / name).write_text(text)
    objects = []
    for target, flags in {"scalar": [], "avx512": [*EXPANDED, "-DLANES_AVX512"]}.items():
        objects.append(str(folder / f"{target}.o"))
        command = ["gcc", *FLAGS, *flags, f"-DTARGET={target}", "-c", str(native / "kernels.c"), "-o", objects[-1]]
        subprocess.run(command, check=True)
    rest = [str(source) for source in sorted(native.glob("*.c")) if source.name != "kernels.c"]
    subprocess.run(["gcc", *FLAGS, "-shared", *rest, *objects, "-o", str(folder / "_native.so")], check=True)
    return folder / "_native.so"


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("avx512"))


@pytest.mark.nightly
@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("gcc") is None,
    reason="NOT RUN: AVX-512 is emulated on x86-64, by gcc",
)
@pytest.mark.parametrize("has_dot", [False, True])
def test_avx512_computes_the_same(has_dot: bool, emulated: Path) -> None:
    """With its dot product of bytes (VNNI) and without: all digests of operations, whole models, random plans."""
    environment = {name: value for name, value in os.environ.items() if name != HAS_DOT}
    environment |= {HAS_DOT: "1"} if has_dot else {}
    command = [sys.executable, "-c", RUN, str(emulated), "7", str(SECONDS), *MODELS]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "avx512, scalar" in done.stdout
