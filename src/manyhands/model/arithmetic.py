"""Which bits this machine computes: the arithmetic class, part of a span's identity.

Two nodes of the same class give the same bits for the same input. Classes differ by instruction set (AVX2, AVX-512 and
AMX kernels round differently), by torch build and by precision (runtime.md §3, "ISA").
"""

import os
from functools import cache

import torch
import transformers

from manyhands.core import Precision
from manyhands.model import tiles
from manyhands.model.linear import has_bf16_products

# Environment variables with which a user may hold the libraries back: other kernels, other bits.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


@cache
def instruction_set() -> str:
    """The widest bf16-relevant instruction set oneDNN will use here."""
    cpu = torch.cpu
    for name in ("amx_tile", "avx512_bf16", "avx512", "avx2"):
        probe = getattr(cpu, f"_is_{name}_supported", None)
        if probe is not None and probe():
            return name
    return str(torch.backends.cpu.get_cpu_capability()).lower()


def arithmetic_class(precision: Precision) -> str:
    versions = f"torch-{torch.__version__}/transformers-{transformers.__version__}/v{tiles.VERSION}"
    limits = [f"/{name}={os.environ[name]}" for name in _LIMITS if name in os.environ]
    if instruction_set() == "amx_tile" and not tiles.available():
        limits.append("/no-tiles")
    if precision != "fp32" and not has_bf16_products():
        limits.append("/fp32-products")
    return f"{precision}/{instruction_set()}/{versions}{''.join(limits)}"
