"""The sources of AVX-512 where there is none, each instruction emulated (avx512.h), against the digests and plain C."""

import platform
import shutil
from pathlib import Path

import pytest

from tests.engine import emulated

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
        "mh_has_dot = has_dot();": f'mh_has_dot = getenv("{emulated.HAS_DOT}") != 0;',
        '#include "plan.h"': '#include <stdlib.h>\n#include "plan.h"\nconst Kernels kernels_avx2;',
    },
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    header = Path(__file__).with_name("avx512.h")
    return emulated.build(tmp_path_factory.mktemp("avx512"), "avx512", REPLACED, header)


@pytest.mark.nightly
@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("gcc") is None,
    reason="NOT RUN: AVX-512 is emulated on x86-64, by gcc",
)
@pytest.mark.parametrize("has_dot", [False, True])
def test_avx512_computes_the_same(has_dot: bool, library: Path) -> None:
    """With its dot product of bytes (VNNI) and without: all digests of operations, whole models, random plans."""
    emulated.check(library, "avx512", has_dot)
