"""On which device a process computes: this machine's CPU or an NVIDIA GPU, in one arithmetic, or a device of torch. Imports
none of them.

MANYHANDS_ENGINE names it (a device, or a back end of the CPU); `--device` sets that for the process and those that it starts.
"""

import os
import re
from typing import Final

from manyhands.errors import BadRequest

FORCED: Final = "MANYHANDS_ENGINE"
CPU: Final = "cpu"
FORMS: Final = "cpu, cuda[:N], torch-cpu, mps or xpu[:N]"
_GPU: Final = re.compile(r"cuda(:\d{1,3})?")
_TORCH: Final = re.compile(r"torch-cpu|mps|xpu(:\d{1,3})?")


def is_device(name: str) -> bool:
    """Whether this is a name of a device that is not the CPU as the native engine computes on it."""
    return _GPU.fullmatch(name) is not None or _TORCH.fullmatch(name) is not None


def named_device() -> str | None:
    """The device that this process computes on; None: the CPU."""
    name = os.environ.get(FORCED, "")
    return name if is_device(name) else None


def torch_device() -> str | None:
    """The device of torch that this process computes on, if it does."""
    name = os.environ.get(FORCED, "")
    return name if _TORCH.fullmatch(name) else None


def gpu() -> int | None:
    """The number of the NVIDIA GPU that this process computes on, if it does."""
    name = os.environ.get(FORCED, "")
    return int(name.partition(":")[2] or 0) if _GPU.fullmatch(name) else None


def use(device: str) -> None:
    """Compute on `device` from now on. "cpu": as MANYHANDS_ENGINE says. Raises BadRequest for what is no device's name, and
    where MANYHANDS_ENGINE names another one."""
    if device == CPU:
        return
    if not is_device(device):
        raise BadRequest(f"--device is {device!r:.40}; it is one of {FORMS}")
    named = os.environ.get(FORCED)
    if named and named != device:
        raise BadRequest(f"--device {device} and {FORCED}={named} name two back ends: leave one of them out")
    os.environ[FORCED] = device
