"""What plans need of a GPU (gpu.py); tests run the kernels on the CPU behind the same interface."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from manyhands.engine.cuda.launch import Launch

Bytes = NDArray[np.uint8]


class CudaMemory(Protocol):
    """Bytes on the device, given back when this is dropped."""

    address: int
    num_bytes: int


class CudaDevice(Protocol):
    """What plans need of a GPU, whose name is "cuda:0"."""

    name: str

    def allocate(self, num_bytes: int) -> CudaMemory:
        """Zeros. Raises ModelError where there is no room."""
        ...

    def staging(self, num_bytes: int) -> Bytes:
        """Host memory that copies to and from the device are made from."""
        ...

    def upload(self, target: CudaMemory, array: NDArray[Any]) -> None:
        """A whole array into the beginning of `target`; done when it returns."""
        ...

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Bytes on the device from one address to another, after what was asked before."""
        ...

    def send(self, target: int, host: Bytes) -> None:
        """Staged bytes to the device, after what was asked before."""
        ...

    def fetch(self, host: Bytes, source: int) -> None:
        """Bytes of the device into staged memory, after what was asked before."""
        ...

    def launch(self, launches: Iterable[Launch]) -> None:
        """Kernels one after the other, after what was asked before."""
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What asks for the same as `work` each time, at once: addresses and sizes are those of now."""
        ...

    def free_bytes(self) -> int:
        """Bytes that are free on the GPU."""
        ...

    def wait(self) -> None:
        """Until all that was asked for is done. Raises ModelError where it failed, DeviceLost where the device will fail from
        now on."""
        ...
