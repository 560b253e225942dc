"""manyhands: run a language model that none of your machines could hold alone, and never lose a stream.

core errors config     nouns, the exception tree, configuration
wire net               what can be said; who can be reached
model worker           one span of a model; a hop that serves it
swarm route place      who is there; which hops; which layers to host
generate verify text   the loop; auditors; text and ids
api node origin        how strangers ask; the node; a request from text to text
local cli testing      many nodes on one machine; the command; the public test kit
"""

import os
from pathlib import Path


def _mkl_branch() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    return "AVX512" if "GenuineIntel" in text and "avx512f" in text else "AVX2"


# Read by OpenMP and MKL when torch loads. Idle compute threads sleep instead of spinning, so that nodes which share a
# machine do not fight (two nodes with two threads each on two cores: 14.5 -> 29 steps/s each, docs/design.md §6).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# MKL's kernels by which a row's bits do not depend on the other rows: which those are depends on who made the CPU (measured:
# with AVX2 on an Intel Sapphire Rapids 127 of 336 attention tests fail, with AVX512 none; on AMD Zen 4 AVX2 passes all).
os.environ.setdefault("MKL_CBWR", _mkl_branch())
# transformers' bars are noise where a program speaks for itself.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

__version__ = "0.1.0"
