"""manyhands: run a language model that none of your machines could hold alone, and never lose a stream.

core errors config      nouns, the exception tree, configuration
wire net                messages as bytes; links between nodes
checkpoint weights      what a model is on disk; where its bytes come from
program engine model    what a span computes; the native engine; the torch engine
worker                  a hop: sessions on a span of this node
swarm route place       the directory of nodes; which hops; which layers to host
text origin             text and ids; the owner of a request
node host_node          links and message handlers; a node that hosts spans
api member cli          HTTP; a node that is part of a swarm; the command
client                  programs and notebooks: connect, local_swarm (docs/python.md)
local testing           many nodes on one machine; the public test kit
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

_info = Path("/proc/cpuinfo")
_cpu = _info.read_text() if _info.exists() else ""

# Read by OpenMP and MKL when torch loads. Idle compute threads sleep instead of spinning, so that nodes which share a
# machine do not fight (two nodes with two threads each on two cores: 14.5 -> 29 steps/s each).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# They sleep only after a pause longer than those within a layer, though (0.3 ms): to wake one takes 70 to 90 us.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
# MKL's kernels by which a row's bits do not depend on the other rows; which those are depends on the CPU's maker. Measured:
# with AVX2 on an Intel Sapphire Rapids 127 of 336 attention tests fail, with AVX512 none; on AMD Zen 4 AVX2 passes all.
os.environ.setdefault("MKL_CBWR", "AVX512" if "GenuineIntel" in _cpu and "avx512f" in _cpu else "AVX2")
# oneDNN's AMX kernels mix rows. Where ours (model/tiles.py) was not built, oneDNN does without AMX.
if "amx_bf16" in _cpu and not Path(__file__).with_name("model").joinpath("_tiles.so").exists():
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# transformers' bars are noise where a program reports its own progress.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from manyhands.client import Client, Completion, ServedHop, TextDelta, TextStream, connect, local_swarm

__all__ = ["Client", "Completion", "ServedHop", "TextDelta", "TextStream", "__version__", "connect", "local_swarm"]


def __getattr__(name: str) -> Any:
    """What programs use (docs/python.md), loaded when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import manyhands.client

    return getattr(manyhands.client, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
