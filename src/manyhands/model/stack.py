"""Decoder layers one after the other in one native call (native/stack.c), where all that a layer does is our own kernels'.

A layer is x + attention(norm(x)), then + block(norm(x)), with norms before, behind or on both sides. It is recognised after the
probe step, by giving the same bits as transformers' layer, whose parts already are ours (fuse.py), on numbers of our own.
"""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.model import threads, tiles
from manyhands.model.attend import Module, ModuleStruct, RotationTables, check
from manyhands.model.attention import running
from manyhands.model.cache import LayerShape, ShardCache, ShardSegment, StepPlan

TRIAL_ROWS = 3
FEW_ROWS = 32  # a step of as many runs in memory that stays
_MAX_COUNTS = 256


class _Norm(ctypes.Structure):
    """As native/stack.c has it."""

    _fields_ = [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float)]


class _Decoder(ctypes.Structure):
    """As native/stack.c has it."""

    _fields_ = [
        ("attention", ModuleStruct),
        *((name, tiles.ProductStruct) for name in ("gated", "down")),
        *((name, _Norm) for name in ("before_attention", "after_attention", "before_block", "after_block")),
    ]


@dataclass(frozen=True, slots=True)
class Decoder:
    """One layer. `norms`: before and after attention, before and after the block; None: none."""

    attention: Module
    gated: tiles.Tiled
    down: tiles.Tiled
    norms: tuple[tiles.NormKernel | None, ...]

    def struct(self) -> _Decoder:
        """Valid as long as this is."""
        norms = [_Norm() if norm is None else _Norm(norm.weight.data_ptr(), norm.epsilon) for norm in self.norms]
        return _Decoder(self.attention.struct, self.gated.struct(), self.down.struct(), *norms)

    @property
    def products(self) -> tuple[tiles.Tiled, ...]:
        """In the order in which they run."""
        return self.attention.first, self.attention.last, self.gated, self.down


class _Room(threading.local):
    """Memory of one thread for few rows of `width`."""

    width = 0
    scratch: tuple[Tensor, int] | None = None


_room = _Room()


def _scratch(num_rows: int, width: int) -> tuple[Tensor, int]:
    """Memory for as many rows, and its address. For few it is this thread's, again and again: new one costs 40 us when
    caches are cold."""
    if num_rows > FEW_ROWS:
        return _addressed(torch.empty(num_rows * width, dtype=torch.bfloat16))
    if _room.width < width or _room.scratch is None:
        _room.width, _room.scratch = width, _addressed(torch.empty(FEW_ROWS * width, dtype=torch.bfloat16))
    return _room.scratch


def _addressed(memory: Tensor) -> tuple[Tensor, int]:
    return memory, memory.data_ptr()


class Stack:
    """Layers that follow one another, any stretch of which runs in one call."""

    def __init__(self, layers: Sequence[Decoder]) -> None:
        self._layers = layers
        self._structs = [layer.struct() for layer in layers]
        addresses = [ctypes.addressof(struct) for struct in self._structs]
        self._pointers = (ctypes.c_void_p * len(layers))(*addresses)
        self._address = ctypes.addressof(self._pointers)
        self._run = tiles.kernel().tiles_stack
        self._inner = max(max(layer.attention.scratch, layer.down.shape[1]) for layer in layers)
        self.width = layers[0].attention.first.shape[1]
        self._counts: dict[tuple[int, int], tuple[ctypes.Array[ctypes.c_int64], int]] = {}

    def __call__(self, plan: StepPlan, x_NK: Tensor, stretch: range, turn: RotationTables) -> Tensor:
        """[N, hidden] to the same through layers `stretch` (of these, from 0). Writes the sessions' caches.

        Every row belongs to a segment; `turn` has all positions. Raises ValueError if a segment does not fit its cache.
        """
        x_NK = tiles.rows_of(x_NK, self.width).contiguous()
        plan.table()
        assert plan.num_rows == len(x_NK)
        out = torch.empty(x_NK.shape, dtype=torch.bfloat16)
        self.run(plan, x_NK.data_ptr(), out.data_ptr(), stretch, turn)
        return out

    def run(self, plan: StepPlan, given: int, out: int, stretch: range, turn: RotationTables) -> None:
        """As a call, on the contiguous rows of `plan` at these addresses, which may be one."""
        segments = plan.table(), len(plan.segments)
        num_rows, count = plan.num_rows, threads.available()
        first, last = self._layers[stretch.start].attention.first, self._layers[stretch.stop - 1].down
        first.comes_next(last)
        _alive, scratch = _scratch(num_rows, 2 * self.width + self._inner)
        _, counts = self._counts.get((num_rows, count)) or self._count(num_rows, count)
        layers = counts + 32 * stretch.start, self._address + 8 * stretch.start, len(stretch)
        rows = given, num_rows, self.width, *turn.pointers
        check(self._run(tiles.team(count).handle, count, *layers, *segments, *rows, scratch, out, *last.then))

    def _count(self, num_rows: int, available: int) -> "tuple[ctypes.Array[ctypes.c_int64], int]":
        """How many threads each product of each layer gets, and where that stands."""
        if len(self._counts) >= _MAX_COUNTS:
            self._counts.clear()
        products = [product for layer in self._layers for product in layer.products]
        counts = [threads.for_product(num_rows, *product.shape) for product in products]
        made = (ctypes.c_int64 * len(counts))(*counts)
        self._counts[num_rows, available] = made, ctypes.addressof(made)
        return made, ctypes.addressof(made)


class FewRows:
    """A step of at most FEW_ROWS rows of `width` numbers through stacks: bytes in, bytes out.

    It makes no tensor. With cold caches, as they are when a node has waited for a millisecond, torch's share of a hop is
    100 us, more than small layers take (bench/hop.py). Not thread-safe.
    """

    def __init__(self, width: int) -> None:
        rows_ND = torch.zeros(FEW_ROWS, width, dtype=torch.bfloat16)
        self._bytes = rows_ND.view(torch.uint8).numpy().data.cast("B")  # keeps the memory
        self._address, self._width, self.row_bytes = rows_ND.data_ptr(), width, rows_ND[0].nbytes
        self._bounds, self._measure = (ctypes.c_float * 2)(), tiles.kernel().tiles_measure

    def put(self, row: int, data: bytes | bytearray | memoryview) -> tuple[float, float]:
        """`data` is one or more rows, from `row` on. Returns the least and the largest of their norms (NaN if one is)."""
        begin, num_bytes = row * self.row_bytes, len(data)
        self._bytes[begin : begin + num_bytes] = data
        count = num_bytes // self.row_bytes
        self._measure(self._address + begin, self._width, count, self._width, self._bounds)
        return self._bounds[0], self._bounds[1]

    def run(self, plan: StepPlan, stack: Stack, stretch: range, turn: RotationTables) -> None:
        """A call of `stack` on what was put, or came out of the last one."""
        stack.run(plan, self._address, self._address, stretch, turn)

    def take(self, row: int, count: int) -> bytes:
        """Rows [row, row + count) of what came out."""
        return bytes(self._bytes[row * self.row_bytes : (row + count) * self.row_bytes])


def decoder_of(layer: nn.Module, index: int, shape: LayerShape, call: dict[str, Any]) -> Decoder | None:
    """What does the same as `layer`, the `index`-th of its model, whose parts were fused; None if nothing of ours does.

    `shape` is what it caches; `call` its arguments for rows at positions 0, 1, ... of a session.
    """
    children = [(vars(child).get("kernel"), any(True for _ in child.parameters())) for child in layer.children()]
    kernels = [kernel for kernel, has_weights in children if kernel is not None or has_weights]
    attentions = [kernel for kernel in kernels if isinstance(kernel, Module)]
    blocks = [kernel for kernel in kernels if isinstance(kernel, tuple)]
    norms = [kernel for kernel in kernels if isinstance(kernel, tiles.NormKernel)]
    if (len(attentions), len(blocks)) != (1, 1) or len(norms) not in (2, 4) or len(norms) + 2 != len(kernels):
        return None
    gated, down = blocks[0]
    orders = permutations(norms) if len(norms) == 4 else ((a, None, b, None) for a, b in permutations(norms))
    for order in orders:
        decoder = Decoder(attentions[0], gated, down, order)
        if _gives_the_same_bits(decoder, layer, index, shape, call):
            return decoder
    return None


def _gives_the_same_bits(
    decoder: Decoder, layer: nn.Module, index: int, shape: LayerShape, call: dict[str, Any]
) -> bool:
    scales = torch.tensor([1.0, 30.0, 1000.0])[:, None]  # limits and thresholds show in the larger ones
    width = decoder.attention.first.shape[1]
    x = (torch.randn(TRIAL_ROWS, width, generator=torch.Generator().manual_seed(0)) * scales).bfloat16()
    plan = StepPlan([ShardSegment(ShardCache({index: shape}, TRIAL_ROWS), 0, 0, TRIAL_ROWS)])
    with running(plan):
        want = layer(x[None], **call)
    got = Stack([decoder])(plan, x, range(1), RotationTables(*call["position_embeddings"]))
    return isinstance(want, Tensor) and torch.equal(got, want[0])
