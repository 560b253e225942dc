"""A GPU that is not there: CUDA's kernels compiled for the CPU (cuda_host.h), behind the interface of engine/cuda/device.py."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.engine.cuda import source
from manyhands.engine.cuda.device import CudaMemory
from manyhands.engine.cuda.launch import Launch
from manyhands.errors import ModelError

HEADER = Path(__file__).with_name("cuda_host.h")
FLAGS = ["-std=c++17", "-O1", "-mfma", "-mavx2", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w"]
Bytes = NDArray[np.uint8]
GRID_SIDE = 65_535  # blocks of a grid in its second direction, and in its third: CUDA's limit
_ONE = Lock()


@cache
def library(drifts: bool = False, text: str = "") -> ctypes.CDLL:
    """The kernels, compiled once for each source (default: what a GPU runs)."""
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        pytest.skip("g++ is not installed, or this is no x86-64: denormals are flushed by its register")
    text, flags = HEADER.read_text() + (text or source.text()), [*FLAGS, *["-DDRIFTS"][: int(drifts)]]
    name = hashlib.sha256((text + repr(flags)).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"manyhands-cuda-host-{name}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            code, made = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
            code.write_text(text)
            subprocess.run(["g++", *flags, "-fPIC", "-shared", "-o", str(made), str(code)], check=True)
            beside = path.with_suffix(f".{os.getpid()}")  # another process may be at it too
            shutil.copy(made, beside)
            beside.replace(path)
    found = ctypes.CDLL(str(path))
    found.host_launch.restype = ctypes.c_long
    return found


class HostBytes:
    """What a GPU has of one allocation. Beyond its end lie bytes that must stay as they are; so must all once it is dropped,
    when they are numbers that are none."""

    GUARD = 256

    def __init__(self, num_bytes: int) -> None:
        self._bytes = np.full(num_bytes + 2 * self.GUARD + 64, 0xA5, np.uint8)
        self.address = -(-(self._bytes.ctypes.data + self.GUARD) // 64) * 64
        first = self.address - self._bytes.ctypes.data
        self._inside = self._bytes[first : first + num_bytes]
        self._outside = self._bytes[:first], self._bytes[first + num_bytes :]
        self._inside[:] = 0
        self.is_dropped = False

    def __len__(self) -> int:
        return len(self._inside)

    def drop(self) -> None:
        self.is_dropped, self._inside[:] = True, 0xFF

    def is_whole(self) -> bool:
        """Whether nothing wrote before its beginning, beyond its end, or after its time."""
        late = self.is_dropped and not (self._inside == 0xFF).all()
        return not late and all(bool((part == 0xA5).all()) for part in self._outside)


class HostMemory:
    """As CudaMemory."""

    def __init__(self, lying: HostBytes, num_bytes: int) -> None:
        self._lying, self.address, self.num_bytes = lying, lying.address, num_bytes

    def __del__(self) -> None:
        self._lying.drop()


class HostDevice:
    """As CudaDevice; counts its kernels, and remembers all memory, also what was dropped. drifts: see cuda_host.h; text: other
    kernels than a GPU runs."""

    name, what = "cuda:0", "a GPU made of this CPU"

    def __init__(self, *, drifts: bool = False, text: str = "") -> None:
        self.room: int | None = None  # bytes that are left; None: as many as are asked for
        self._library = library(drifts, text)
        self.memories: list[HostBytes] = []
        self.launched: list[str] = []
        self.recorded = 0

    def allocate(self, num_bytes: int) -> HostMemory:
        if self.room is not None:
            if num_bytes > self.room:
                raise ModelError(f"{self.name}: {num_bytes} bytes are not free on the GPU")
            self.room -= num_bytes
        self.memories.append(HostBytes(num_bytes))
        return HostMemory(self.memories[-1], num_bytes)

    def staging(self, num_bytes: int) -> Bytes:
        return np.zeros(num_bytes, np.uint8)

    def upload(self, target: CudaMemory, array: NDArray[Any]) -> None:
        assert array.nbytes <= target.num_bytes
        ctypes.memmove(target.address, np.ascontiguousarray(array).ctypes.data, array.nbytes)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    def send(self, target: int, host: Bytes) -> None:
        ctypes.memmove(target, host.ctypes.data, host.nbytes)

    def fetch(self, host: Bytes, source: int) -> None:
        ctypes.memmove(host.ctypes.data, source, host.nbytes)

    def launch(self, launches: Iterable[Launch]) -> None:
        for launch in launches:
            kernel = getattr(self._library, f"mh_{launch.kernel}")
            self.launched.append(launch.kernel)
            assert max(launch.grid[1:]) <= GRID_SIDE and min(launch.grid) > 0, (
                f"{launch.kernel}: a grid of {launch.grid}"
            )
            with _ONE:  # threads of a block are coroutines of one
                missed = self._library.host_launch(kernel, *launch.grid, launch.threads, ctypes.byref(launch.args))
            assert missed == 0, f"{launch.kernel}: threads left while others wait at a barrier"

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        return work

    def free_bytes(self) -> int:
        return 1 << 30

    def wait(self) -> None:
        pass
