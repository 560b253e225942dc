"""The NVIDIA GPUs of this machine (engine/cuda), opened once and proven; `--device cuda[:N]`.

Imports NVIDIA's packages only where a GPU is named or `doctor` asks for them.
"""

from functools import cache
from typing import Any

from manyhands.engine import golden
from manyhands.engine.library import Team
from manyhands.errors import ModelError
from manyhands.worker.choice import needing

Gpu = Any  # engine/cuda/gpu.py's, whose packages may be missing


def found() -> list[tuple[str, str, int]]:
    """The GPUs here: name, what the maker calls it, bytes of memory. Raises ModelError."""
    with needing("--device cuda", "cuda-bindings and nvidia-cuda-nvrtc", "cuda"):
        from manyhands.engine.cuda.gpu import gpus
    return gpus()


@cache
def open_gpu(index: int) -> Gpu:
    """The GPU of a number, once it reproduced the golden digests. Raises ModelError where there is none, where
    NVIDIA's packages or driver are missing, and where it computes other bits."""
    with needing(f"--device cuda:{index}", "cuda-bindings and nvidia-cuda-nvrtc", "cuda"):
        from manyhands.engine.cuda.gpu import Gpu
    return proven(Gpu(index))


def proven(device: Gpu) -> Gpu:
    """The device. Raises ModelError where it computes other bits than docs/arithmetic.md says."""
    from manyhands.engine.cuda.proof import failures

    if wrong := failures(device, Team(1)):
        raise ModelError(
            f"{device.name} ({device.what}) does not reproduce the golden digests of {', '.join(wrong)}: leave --device out, "
            f"and please report this GPU; its class would be {golden.arithmetic()}"
        )
    return device
