"""AVX2 with a dot product of bytes (AVX-VNNI), the instruction emulated, against the digests and plain C."""

import platform
import shutil
from pathlib import Path

import pytest

from tests.engine import emulated

DOT = "static inline __m256i dot_unsigned(__m256i sums, __m256i codes, const int8_t *row)\n"
IN_C = """static inline __m256i dot_in_c(__m256i sums, __m256i codes, __m256i x)
{
    int32_t sum[8];
    uint8_t code[32];
    int8_t number[32];
    memcpy(sum, &sums, 32), memcpy(code, &codes, 32), memcpy(number, &x, 32);
    for (int i = 0; i < 32; i++)
        sum[i / 4] += code[i] * number[i];
    memcpy(&sums, sum, 32);
    return sums;
}
"""
REPLACED = {
    "quants.h": {
        DOT: IN_C + DOT,
        '    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(codes), "x"(x));': "    sums = dot_in_c(sums, codes, x);",
    },
    "machine.c": {
        "mh_has_avx_dot = has_avx_dot();": f'mh_has_avx_dot = getenv("{emulated.HAS_DOT}") != 0;',
        "(char)(1 + (find(target) != 0))": "(char)(1 + (target == 1 || target == 0))",
        '#include "plan.h"': '#include <stdlib.h>\n#include "plan.h"\nconst Kernels kernels_avx512;',
    },
}


@pytest.mark.nightly
@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("gcc") is None, reason="NOT RUN: AVX2 is compiled for x86-64, by gcc"
)
def test_its_dot_product_computes_the_same(tmp_path: Path) -> None:
    """All digests of operations, whole models, random plans. CPUs that have the instruction prove it at each start."""
    emulated.check(emulated.build(tmp_path, "avx2", REPLACED), "avx2", has_dot=True)
