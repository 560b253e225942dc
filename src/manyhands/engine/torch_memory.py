"""What the torch engine holds: weights as operations name them, tables of rotary embeddings, caches of sessions."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from manyhands.core import Span
from manyhands.engine.library import BLOCK
from manyhands.engine.span import Piece
from manyhands.errors import ModelError
from manyhands.program.ops import EXPERT, EntryIndex, Experts, Index, LatentAttention, Layer, Op, Rope, Weight
from manyhands.program.tensors import op_weights

Read = Callable[[str], Tensor]  # the tensor of that name, as the checkpoint stores it; KeyError if there is none
Key = tuple[Weight, int]  # a weight, and the expert whose it is (0 for all others)
_ROPE_BLOCK = 1024  # positions of a table that are computed at once
FIRST_POSITIONS: Final = 256  # for which a cache has memory when it is first written


class TorchWeights:
    """The weights of some operations on one device: vectors in fp32, rows taken.

    Matrices of 16 bits stay as they are stored, those of 32 become what `dtype` says: the numbers that the native engine has.
    """

    def __init__(self, ops: Sequence[Op], read: Read, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self._held: dict[Key, Tensor] = {}
        for op in ops:
            experts = op.experts if isinstance(op, Experts) else op.heads if isinstance(op, LatentAttention) else 1
            for weight in op_weights(op):
                for expert in range(experts if weight.stacked or EXPERT in weight.name else 1):
                    self._held[weight, expert] = self._take(weight, expert, read).to(device)

    def __getitem__(self, key: Key) -> Tensor:
        return self._held[key]

    def vector(self, weights: Sequence[Weight]) -> Tensor:
        """Some vectors, one behind the other."""
        return torch.cat([self._held[weight, 0] for weight in weights])

    def each_head(self, weight: Weight, heads: int) -> Tensor:
        """What a weight holds for each of `heads`, in fp32 [heads, outputs of a head, inputs]."""
        parts = [self._held[weight, head] for head in range(heads if weight.stacked else 1)]
        return torch.stack(parts).float().view(heads, -1, weight.inputs)

    def optional(self, weight: Weight | None, expert: int = 0) -> Tensor | None:
        """The weight if it is there."""
        return None if weight is None else self._held[weight, expert]

    def _take(self, weight: Weight, expert: int, read: Read) -> Tensor:
        name = weight.stored_name(expert)
        try:
            stored = read(name)
        except KeyError:
            raise ModelError(f"the checkpoint lacks {name}") from None
        if tuple(stored.shape) != weight.shape:
            raise ModelError(f"{name} is stored as {list(stored.shape)}, needed is {list(weight.shape)}")
        found = stored[expert + weight.part] if weight.stacked else stored
        found = found.T if weight.transposed else found
        if weight.rows is not None:
            r = weight.rows
            starts = torch.arange(r.groups) * r.stride + r.start
            found = found[(starts[:, None] + torch.arange(r.count)).flatten().repeat_interleave(r.copies)]
        return found.to(self._kept(found)).contiguous()

    def _kept(self, found: Tensor) -> torch.dtype:
        if not found.is_floating_point():
            return found.dtype
        if found.dim() < 2:
            return torch.float32
        return found.dtype if found.dtype in (torch.bfloat16, torch.float16) else self.dtype


class LayerRun(Protocol):
    """One run of a layer's operations (torch.py)."""

    weights: TorchWeights
    registers: dict[str, Tensor]
    routes: dict[str, tuple[Tensor, Tensor]]
    pieces: Sequence[tuple[Piece, Iterator[Tensor]]]  # each operation takes the next tensors that are its own
    positions_N: Tensor

    def round(self, rows: Tensor) -> Tensor: ...

    def chosen(self, index: Index | EntryIndex, rows: slice, keys_LI: Tensor, seen_TL: Tensor) -> Tensor: ...

    def softmax(self, scores_HTL: Tensor, seen_TL: Tensor, sinks_H: Tensor | None) -> tuple[Tensor, Tensor]: ...


class TorchCache:
    """What one session has cached on `span`: for each layer two tensors [positions, width] in the storage dtype.

    Memory for FIRST_POSITIONS positions once there is one; it grows by half, at least to what is asked for and at most to
    `capacity` (0: as asked), so that it never holds more than the session's lease. A lease that has grown itself has whole
    blocks of BLOCK positions, by which the cache grows then. While it grows, one layer is there twice. To roll back is to step
    from an earlier position: what lies beyond `length` is stale and written again before it is read.
    """

    def __init__(
        self, layers: Sequence[Layer], capacity: int, dtype: torch.dtype, device: str, span: Span | None = None
    ) -> None:
        self.span = span or Span(0, len(layers))
        self.capacity = capacity
        self.length = 0
        self.layers: list[tuple[Tensor, ...]] = [
            tuple(torch.zeros(0, width, dtype=dtype, device=device) for width in layer.cache_widths) for layer in layers
        ]

    @property
    def positions(self) -> int:
        """For which there is memory."""
        return self.layers[0][0].shape[0]

    def reachable(self, position: int) -> int:
        """As BlockCache.reachable: each position."""
        return position

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)

    def reserve(self, positions: int) -> None:
        """Memory for the first `positions` positions; what was cached stays."""
        here = self.positions
        if positions <= here:
            return
        if 0 < self.capacity < positions:
            most = -(-positions // BLOCK) * BLOCK
        else:
            wanted = max(positions, here * 3 // 2, FIRST_POSITIONS)
            most = min(wanted, self.capacity or wanted)
        for index, layer in enumerate(self.layers):
            self.layers[index] = tuple(_grown(tensor, most) for tensor in layer)

    def take(self, source: "TorchCache", positions: int) -> None:
        """Copy the first `positions` positions of another cache of the same span."""
        self.reserve(positions)
        for mine, theirs in zip(self.layers, source.layers, strict=True):
            for target, tensor in zip(mine, theirs, strict=True):
                target[:positions] = tensor[:positions]
        self.length = positions


def _grown(tensor: Tensor, positions: int) -> Tensor:
    grown = tensor.new_zeros(positions, tensor.shape[1])
    grown[: tensor.shape[0]] = tensor
    return grown


class RopeTable:
    """cos and sin of one Rope, with the `exponents` of its frequencies if there are some, made by blocks as positions are asked
    for."""

    def __init__(self, rope: Rope, device: str, exponents: Weight | None, read: Read) -> None:
        self._rope = rope
        self._device = device
        self._frequencies = torch.tensor(rope.frequencies, dtype=torch.float32)
        if exponents is not None:
            self._frequencies *= read(exponents.name).cpu().double().exp().float()
        self._made = torch.empty(2, 0, len(rope.frequencies), device=device)

    def __call__(self, positions_N: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin [N, width / 2] of positions below `end`."""
        if end > self._made.shape[1]:
            end = -(-end // _ROPE_BLOCK) * _ROPE_BLOCK
            angles = (torch.arange(end, dtype=torch.float32)[:, None] * self._frequencies).double()
            made = torch.stack([angles.cos(), angles.sin()]) * self._rope.factor
            self._made = made.float().to(self._device)
        return self._made[0, positions_N], self._made[1, positions_N]


def turn(columns: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> None:
    """ops.Rotary's turn, in place, of the first columns of [N, heads, columns] by cos and sin [N, width / 2]."""
    c, s, turned = cos[:, None, :], sin[:, None, :], columns[..., : 2 * cos.shape[-1]]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if pairs else turned.chunk(2, -1)
    new = a * c - b * s, b * c + a * s
    turned.copy_(torch.stack(new, -1).flatten(-2) if pairs else torch.cat(new, -1))
