"""On which device a process computes: this machine's CPU by the native engine, or one of torch's. Imports neither.

MANYHANDS_ENGINE names it (a device of torch, or a back end of the native engine); `--device` sets that for the process and
those that it starts.
"""

import os
import re
from typing import Final

from manyhands.errors import BadRequest

FORCED: Final = "MANYHANDS_ENGINE"
CPU: Final = "cpu"
FORMS: Final = "cpu, torch-cpu, cuda[:N], mps or xpu[:N]"
_TORCH: Final = re.compile(r"torch-cpu|mps|(cuda|xpu)(:\d{1,3})?")


def is_torch_device(name: str) -> bool:
    """Whether this is a name of a device that torch computes on."""
    return _TORCH.fullmatch(name) is not None


def torch_device() -> str | None:
    """The device of torch that this process computes on; None: the native engine computes."""
    name = os.environ.get(FORCED, "")
    return name if is_torch_device(name) else None


def use(device: str) -> None:
    """Compute on `device` from now on. "cpu": as MANYHANDS_ENGINE says. Raises BadRequest for what is no device's name, and
    where MANYHANDS_ENGINE names another one."""
    if device == CPU:
        return
    if not is_torch_device(device):
        raise BadRequest(f"--device is {device!r:.40}; it is one of {FORMS}")
    named = os.environ.get(FORCED)
    if named and named != device:
        raise BadRequest(f"--device {device} and {FORCED}={named} name two back ends: leave one of them out")
    os.environ[FORCED] = device
