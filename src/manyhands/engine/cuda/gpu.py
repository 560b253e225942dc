"""An NVIDIA GPU by its driver: memory, copies, kernels, recorded steps. One step at a time; any thread may make it.

NVIDIA's own packages are used: `cuda-bindings` for the driver, and its compiler NVRTC for the kernels, once for each GPU and
version (`pip install 'manyhands[cuda]'`). Imported only where `--device cuda` is named.
"""

import ctypes
import hashlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from threading import RLock
from typing import Any

import numpy as np
from cuda.bindings import driver, nvrtc
from numpy.typing import NDArray

from manyhands.config import home_from_env
from manyhands.engine.cuda import source
from manyhands.engine.cuda.device import Bytes, CudaMemory
from manyhands.engine.cuda.launch import Launch
from manyhands.errors import DeviceLost, ModelError
from manyhands.files import private_folder, write_atomic

logger = logging.getLogger(__name__)

# After these every call fails until the process ends (what each means: CUresult in NVIDIA's driver API).
LASTING = frozenset(
    int(getattr(driver.CUresult, f"CUDA_ERROR_{name}"))
    for name in (
        "DEINITIALIZED",
        "ECC_UNCORRECTABLE",
        "NVLINK_UNCORRECTABLE",
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "CONTAINED",
        "CONTEXT_IS_DESTROYED",
        "ASSERT",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "EXTERNAL_DEVICE",
        "UNKNOWN",
    )
)


class GpuMemory:
    """As CudaMemory, out of the GPU's pool. Any thread may drop it, also while a step is being recorded: the GPU gives it back
    with the next memory that is asked for, or the next wait."""

    def __init__(self, gpu: "Gpu", address: int, num_bytes: int) -> None:
        self._dropped, self.address, self.num_bytes = gpu.dropped, address, num_bytes

    def __del__(self) -> None:
        self._dropped.append(self.address)


class Gpu:
    """The GPU of a number: as CudaDevice. Raises ModelError where there is none, or its kernels cannot be made."""

    def __init__(self, index: int) -> None:
        self.name, self._lock = f"cuda:{index}", RLock()
        self.dropped: deque[int] = deque()
        count = _count()
        if index >= count:
            here = f"GPUs 0 to {count - 1}" if count else "no NVIDIA GPU"
            raise ModelError(
                f"--device cuda:{index}: this machine has {here}; name one that is there, or leave --device out"
            )
        self._device = _check(*driver.cuDeviceGet(index))
        self._context = _check(*driver.cuDevicePrimaryCtxRetain(self._device))
        self._enter()
        self._stream = _check(*driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self.what = _name(self._device)
        self._config = self._launching()
        self._image = np.frombuffer(self._compiled(), np.uint8)
        self._module = _check(*driver.cuModuleLoadData(self._image.ctypes.data))
        self._kernels: dict[str, Any] = {}

    def _capability(self) -> tuple[int, int]:
        kind = driver.CUdevice_attribute
        major = _check(*driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self._device))
        minor = _check(*driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self._device))
        return int(major), int(minor)

    def _launching(self) -> Any:
        """What each launch says: on Hopper and later a kernel may begin before the previous one has ended (common.cu)."""
        config = driver.CUlaunchConfig()
        config.hStream, config.blockDimY, config.blockDimZ, config.sharedMemBytes = self._stream, 1, 1, 0
        if self._capability() >= (9, 0):
            early = driver.CUlaunchAttribute()
            early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [early], 1
        return config

    def _compiled(self) -> bytes:
        """The kernels for this GPU, kept in $MANYHANDS_HOME: to compile them takes some twenty seconds."""
        major, minor = self._capability()
        options = [*source.OPTIONS, f"--gpu-architecture=sm_{major}{minor}"]
        version = _check(*nvrtc.nvrtcVersion())
        whole = source.PRELUDE + source.text()
        digest = hashlib.sha256(repr((whole, options, version)).encode()).hexdigest()[:32]
        path = home_from_env() / "cuda" / f"{digest}.cubin"
        if not path.exists():
            logger.info("compiling kernels device=%s architecture=sm_%d%d; kept in %s", self.name, major, minor, path)
            private_folder(path.parent)
            write_atomic(path, _compile(whole, options), is_private=True)
        return path.read_bytes()

    def _enter(self) -> None:
        """Make the calling thread one that uses this GPU."""
        _check(*driver.cuCtxSetCurrent(self._context))

    def free_bytes(self) -> int:
        """Bytes that are free on the GPU."""
        with self._lock:
            self.wait()
            return int(_check(*driver.cuMemGetInfo())[0])

    def _give_back(self) -> None:
        while self.dropped:
            driver.cuMemFreeAsync(self.dropped.popleft(), self._stream)

    def allocate(self, num_bytes: int) -> GpuMemory:
        with self._lock:
            self._enter()
            self._give_back()
            size = max(1, num_bytes)
            status, found = driver.cuMemAllocAsync(size, self._stream)
            if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise ModelError(
                    f"{self.name}: {num_bytes} bytes are not free on the GPU ({self.free_bytes()} are): give the node fewer "
                    "layers, or end what else uses the GPU"
                )
            _check(status)
            memory = GpuMemory(self, int(found), num_bytes)
            _check(*driver.cuMemsetD8Async(memory.address, 0, size, self._stream))
            return memory

    def staging(self, num_bytes: int) -> Bytes:
        with self._lock:
            self._enter()
            size = max(1, num_bytes)
            address = int(_check(*driver.cuMemHostAlloc(size, 0)))
            held = (ctypes.c_uint8 * size).from_address(address)
            weakref.finalize(held, driver.cuMemFreeHost, address)
            return np.ctypeslib.as_array(held)[:num_bytes]

    def upload(self, target: CudaMemory, array: NDArray[Any]) -> None:
        if array.nbytes > target.num_bytes:
            raise ModelError(f"{array.nbytes} bytes do not fit {target.num_bytes} on the GPU")
        with self._lock:
            self._enter()
            given = np.ascontiguousarray(array)
            _check(*driver.cuMemcpyHtoDAsync(target.address, given.ctypes.data, given.nbytes, self._stream))
            self.wait()

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        with self._lock:
            self._enter()
            _check(*driver.cuMemcpyDtoDAsync(target, source, num_bytes, self._stream))

    def send(self, target: int, host: Bytes) -> None:
        with self._lock:
            self._enter()
            _check(*driver.cuMemcpyHtoDAsync(target, host.ctypes.data, host.nbytes, self._stream))

    def fetch(self, host: Bytes, source: int) -> None:
        with self._lock:
            _check(*driver.cuMemcpyDtoHAsync(host.ctypes.data, source, host.nbytes, self._stream))

    def launch(self, launches: Iterable[Launch]) -> None:
        with self._lock:
            self._enter()
            config = self._config
            for launch in launches:
                argument = ctypes.c_void_p(ctypes.addressof(launch.args))
                config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
                config.blockDimX = launch.threads
                kernel = self._kernel(launch.kernel)
                _check(*driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(argument), 0))

    def _kernel(self, name: str) -> Any:
        if name not in self._kernels:
            self._kernels[name] = _check(*driver.cuModuleGetFunction(self._module, f"mh_{name}".encode()))
        return self._kernels[name]

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        with self._lock:  # what another thread asks for must not become part of it
            self._enter()
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            _check(*driver.cuStreamBeginCapture(self._stream, mode))
            try:
                work()
            finally:
                graph = _check(*driver.cuStreamEndCapture(self._stream))
            return _Recorded(self, graph)

    def play(self, graph: Any) -> None:
        """Ask for what a recorded step is."""
        with self._lock:
            self._enter()
            _check(*driver.cuGraphLaunch(graph, self._stream))

    def wait(self) -> None:
        with self._lock:
            self._enter()
            self._give_back()
        _check(*driver.cuStreamSynchronize(self._stream))


class _Recorded:
    """A graph of CUDA."""

    def __init__(self, gpu: Gpu, graph: Any) -> None:
        self._gpu = gpu
        self._graph = _check(*driver.cuGraphInstantiate(graph, 0))
        _check(*driver.cuGraphDestroy(graph))

    def __call__(self) -> None:
        self._gpu.play(self._graph)

    def __del__(self) -> None:
        if hasattr(self, "_graph"):
            driver.cuGraphExecDestroy(self._graph)


def gpus() -> list[tuple[str, str, int]]:
    """Of each GPU here its name, what its maker calls it, its bytes of memory. Raises ModelError where there is no driver."""
    devices = [_check(*driver.cuDeviceGet(index)) for index in range(_count())]
    return [
        (f"cuda:{index}", _name(device), int(_check(*driver.cuDeviceTotalMem(device))))
        for index, device in enumerate(devices)
    ]


def _count() -> int:
    """GPUs of this machine."""
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # its library is not there
        raise ModelError(f"no driver of NVIDIA's is installed here ({str(error).splitlines()[0]:.160})") from error
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        return 0
    _check(status)
    return int(_check(*driver.cuDeviceGetCount()))


def _name(device: Any) -> str:
    said = _check(*driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode(errors="replace")
    return "".join(letter for letter in said if letter.isprintable() and letter != "/")[:48]


def _check(status: Any, *found: Any) -> Any:
    """What a call of the driver or the compiler gave. Raises ModelError with what it says where it failed; DeviceLost where
    all calls after it would."""
    if int(status):
        if isinstance(status, nvrtc.nvrtcResult):
            said = nvrtc.nvrtcGetErrorString(status)[1]
        else:
            said = driver.cuGetErrorString(status)[1]
        kind = DeviceLost if isinstance(status, driver.CUresult) and int(status) in LASTING else ModelError
        raise kind(f"CUDA failed: {said.decode(errors='replace') if said else status}")
    return found[0] if len(found) == 1 else found


def _compile(text: str, options: list[str]) -> bytes:
    program = _check(*nvrtc.nvrtcCreateProgram(text.encode(), b"manyhands.cu", 0, [], []))
    given = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
    if int(status):
        log = b" " * int(_check(*nvrtc.nvrtcGetProgramLogSize(program)))
        _check(*nvrtc.nvrtcGetProgramLog(program, log))
        raise ModelError(f"NVRTC cannot compile the kernels: {log.decode(errors='replace')[:2000]}")
    cubin = b" " * int(_check(*nvrtc.nvrtcGetCUBINSize(program)))
    _check(*nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin
