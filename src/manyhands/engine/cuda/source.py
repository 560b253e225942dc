"""The kernels' source as one text, and how it is compiled: what makes their arithmetic the one of docs/arithmetic.md."""

from functools import cache
from pathlib import Path
from typing import Final

FILES: Final = ("common.cu", "rows.cu", "products.cu", "attention.cu", "experts.cu", "small.cu")
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
