"""The kernels' source as one text, and how it is compiled: what makes their arithmetic the one of docs/arithmetic.md."""

from functools import cache
from pathlib import Path
from typing import Final

FILES: Final = (
    "common.cu",
    "rows.cu",
    "products.cu",
    "many.cu",
    "attention.cu",
    "many_attention.cu",
    "experts.cu",
    "small.cu",
    "many_small.cu",
    "states.cu",
)
PRELUDE: Final = r"""
#define KERNEL_OF(name, threads, blocks) \
    static __device__ __forceinline__ void body_##name(const Args &a); \
    extern "C" __global__ void __launch_bounds__(threads, blocks) mh_##name(const __grid_constant__ Args a) \
    { \
        let_next_begin(); \
        body_##name(a); \
    } \
    static __device__ __forceinline__ void body_##name(const Args &a)
#define KERNEL(name) KERNEL_OF(name, THREADS, 1)
#if __CUDA_ARCH__ >= 900
#define let_next_begin() asm volatile("griddepcontrol.launch_dependents;")
#define await_rows() asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define let_next_begin()
#define await_rows()
#endif

/* A warp's products of 16 x 32 codes of rows with 32 x 8 of columns: sums of integers, exact. Whose is which: mma.m16n8k32. */
static __device__ __forceinline__ void products_of_codes(int *found, const int *rows, const int *columns)
{
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(columns[0]), "r"(columns[1]), "r"(0));
#else
    for (int i = 0; i < 4; i++)
        found[i] = 0;
    for (int i = 0; i < 4; i++)
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+r"(found[i % 2 * 2]), "+r"(found[i % 2 * 2 + 1]) : "r"(rows[i]), "r"(columns[i / 2]));
#endif
}
"""
# Denormals are zero; nothing is contracted; divisions and roots are rounded to nearest.
OPTIONS: Final = (
    "--std=c++17",
    "--split-compile=0",
    "--ftz=true",
    "--fmad=false",
    "--prec-div=true",
    "--prec-sqrt=true",
)


@cache
def text() -> str:
    """All kernels, without the prelude that says what a kernel is."""
    here = Path(__file__).parent
    return "".join(here.joinpath(name).read_text(encoding="utf-8") for name in FILES)
