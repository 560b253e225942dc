"""Programs on a device of torch (engine/torch.py), behind the interface of engine/span.py: `--device torch-cpu|mps|xpu`.

Imported by runner.py alone, and only where such a device is named: torch takes seconds and 275 MB. No mps and no xpu has run
this so far; everything is tested on torch-cpu.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.core import UNPROVEN, Precision, Span
from manyhands.engine.span import Piece, Rows
from manyhands.engine.torch import TorchEnds, TorchSpan
from manyhands.engine.torch_memory import TorchCache
from manyhands.engine.weights import WHOLE, Read, Stored, held
from manyhands.errors import ContextOverflow, ModelError
from manyhands.program.ops import Program

DTYPES: Final[dict[Precision, torch.dtype]] = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Of what is free on a device once weights are there, what sessions' caches may take. The rest is for a step's own numbers,
# and for the second copy of a layer's cache while that grows.
CACHE_SHARE: Final = 0.5
TORCH_CPU: Final = "torch-cpu"
_MOST_NAME: Final = 48  # letters of a device's name in records and arithmetic classes


class Here(NamedTuple):
    """A device that torch finds on this machine. `free_bytes`: None where torch does not tell."""

    name: str
    what: str
    free_bytes: int | None


def devices_here() -> list[Here]:
    """Every device of torch on this machine, its CPU first."""
    return [Here(name, describe_device(name), free_memory(name)) for kind in _KINDS for name in _names(kind)]


def _names(kind: str) -> list[str]:
    return [f"{kind}:{index}" if kind == "xpu" else kind for index in range(_count(kind))]


_KINDS: Final = (TORCH_CPU, "mps", "xpu")


def _count(kind: str) -> int:
    """Devices of a kind that torch finds."""
    if kind == TORCH_CPU:
        return 1
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return int(torch.xpu.device_count()) if torch.xpu.is_available() else 0


@cache
def open_device(name: str) -> str:
    """torch's name of a device. Raises ModelError where this machine has no such device, or torch does not find it."""
    kind, _, index = name.partition(":")
    if int(index or 0) >= _count(kind):
        raise ModelError(
            f"--device {name}: torch {torch.__version__} finds {', '.join(here.name for here in devices_here())} on this "
            "machine: name one of these, install the build of torch for that device, or leave --device out"
        )
    return "cpu" if kind == TORCH_CPU else name


def describe_device(name: str) -> str:
    """What a device is called, as its maker says."""
    kind, _, index = name.partition(":")
    if kind == "xpu":
        said = str(torch.xpu.get_device_name(int(index or 0)))
        return "".join(letter for letter in said if letter.isprintable() and letter != "/")[:_MOST_NAME]
    return "Apple GPU" if kind == "mps" else "CPU"


def free_memory(name: str) -> int | None:
    """Bytes that are free on a device; None where torch does not tell, and of the CPU, whose memory the system knows."""
    kind, _, index = name.partition(":")
    if kind == "mps":
        return max(0, int(torch.mps.recommended_max_memory()) - int(torch.mps.driver_allocated_memory()))
    if kind == TORCH_CPU:
        return None
    try:
        return int(torch.xpu.mem_get_info(int(index or 0))[0])
    except (RuntimeError, NotImplementedError):  # some drivers do not count
        return None


def arithmetic_class(program: Program, precision: Precision, name: str) -> str:
    """precision / torch and its version / the device: what rows are depends on their company, so it is never E0."""
    open_device(name)
    kind = name.partition(":")[0]
    what = describe_device(name)
    device = kind if what == "CPU" else f"{kind} {what}"
    return f"{precision}/torch-{torch.__version__}/{device}{UNPROVEN}"


class DeviceSpan:
    """A SpanRunner over a TorchSpan. Raises ModelError for a device that is missing, and as TorchSpan."""

    shares_blocks = False

    def __init__(self, program: Program, span: Span, read: Read, precision: Precision, device: str) -> None:
        self.back_end = device
        self._span = TorchSpan(program, span, _Tensors(read, precision), DTYPES[precision], open_device(device))
        self.num_layers, self.hidden_size, self.vocab_size = len(program.layers), program.hidden, program.vocab
        self._context = program.context

    @property
    def bytes_per_token(self) -> int:
        """Exactly what a position takes: caches hold no more positions than are leased."""
        return sum(sum(layer.cache_widths) for layer in self._span.layers) * self._span.dtype.itemsize

    @property
    def session_bytes(self) -> int:
        return 0

    @property
    def cache_room(self) -> int | None:
        free = free_memory(self.back_end)
        return None if free is None else int(free * CACHE_SHARE)

    def new_cache(self, capacity: int, span: Span | None = None, mark: int = 0) -> TorchCache:
        return self._span.new_cache(capacity, span)

    @torch.inference_mode()
    def fork(self, source: TorchCache, positions: int, capacity: int, mark: int = 0) -> TorchCache:
        fork = self._span.new_cache(capacity, source.span)
        fork.take(source, positions)
        return fork

    def step(self, rows: bytes, pieces: Sequence[Piece], threads: int) -> Rows:
        """Raises ContextOverflow, ModelError, and what torch raises (too little memory, say): then caches may hold some of the
        step's positions, which the next step writes again."""
        end = max(piece.start + piece.count for piece in pieces)
        if end > self._context:
            raise ContextOverflow(f"position {end - 1} is beyond the {self._context} that the model was built for")
        count = sum(piece.count for piece in pieces)
        given_ND = _tensor(rows, count, self.hidden_size, self._span.dtype)
        with _given(threads, self._span.device):
            return _bytes(self._span.step(given_ND, pieces))

    def is_ready(self, num_rows: int) -> bool:
        """Never: a device has a queue of its own, and tables and caches grow."""
        return False


class DeviceEnds:
    """An EndsRunner over TorchEnds."""

    def __init__(
        self, program: Program, read: Read, precision: Precision, device: str, *, embed: bool, head: bool
    ) -> None:
        self.back_end = device
        opened = open_device(device)
        self._ends = TorchEnds(program, _Tensors(read, precision), DTYPES[precision], opened, embed=embed, head=head)
        self.hidden_size, self.vocab_size, self.holds_numbers = program.hidden, program.vocab, program.holds_numbers

    def embed(self, ids: Sequence[int]) -> Rows:
        # Looked at here: on some devices an index out of range ends the whole process's use of them.
        if wrong := [one for one in ids if not 0 <= one < self.vocab_size]:
            raise ModelError(f"token id {wrong[0]} is not among the model's {self.vocab_size}")
        return _bytes(self._ends.embed(torch.tensor(ids)))

    def logits(self, rows: bytes | Rows, count: int, threads: int) -> NDArray[np.float32]:
        given_ND = _tensor(rows, count, self.hidden_size, self._ends.dtype)
        with _given(threads, self._ends.device):
            found: NDArray[np.float32] = self._ends.logits(given_ND).cpu().numpy()
        return found


class _Tensors:
    """Tensors of a checkpoint in memory of their own, as torch has them; of quantised ones the numbers that blocks store.

    The last one is kept: several operations take parts of it.
    """

    def __init__(self, read: Read, precision: Precision) -> None:
        self._read, self._precision = read, precision
        self._last: tuple[str, Tensor] | None = None

    def __call__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, _as_torch(self._read(name), self._precision)
        return self._last[1]


def _as_torch(stored: Stored, precision: Precision) -> Tensor:
    if stored.type in BLOCKS:
        stored = held(stored, precision)
    array = np.array(stored.array)  # a copy: the file may change or shrink while the model serves
    if stored.type in ("f32", *WHOLE):
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16 if stored.type == "bf16" else torch.float16)


def _tensor(rows: bytes | Rows, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Row bytes as a tensor [count, width]. Raises ModelError if they are not so many."""
    raw = bytearray(rows) if isinstance(rows, bytes) else bytearray(np.ascontiguousarray(rows).data)
    if len(raw) != count * width * dtype.itemsize:
        raise ModelError(f"{len(raw)} bytes are not {count} rows of {width * dtype.itemsize}")
    return torch.frombuffer(raw, dtype=dtype).view(count, width)


def _bytes(tensor_ND: Tensor) -> Rows:
    found: Rows = tensor_ND.cpu().contiguous().view(torch.uint8).numpy()
    return found


@contextmanager
def _given(threads: int, device: str) -> Iterator[None]:
    """Within, torch computes with so many threads, if it is on the CPU."""
    before = torch.get_num_threads()
    if device != "cpu" or before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
