"""What the torch engine holds: weights as operations name them, tables of rotary embeddings, caches of sessions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.errors import ModelError
from manyhands.program.ops import EXPERT, Experts, Layer, Op, Rope, Weight
from manyhands.program.tensors import op_weights

Read = Callable[[str], Tensor]  # the tensor of that name, as the checkpoint stores it; KeyError if there is none
Key = tuple[Weight, int]  # a weight, and the expert whose it is (0 for all others)
_ROPE_BLOCK = 1024  # positions of a table that are computed at once


class TorchWeights:
    """The weights of some operations: matrices in the storage dtype, vectors in fp32, rows taken, on one device."""

    def __init__(self, ops: Sequence[Op], read: Read, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self._held: dict[Key, Tensor] = {}
        for op in ops:
            experts = op.experts if isinstance(op, Experts) else 1
            for weight in op_weights(op):
                for expert in range(experts if weight.stacked or EXPERT in weight.name else 1):
                    self._held[weight, expert] = self._take(weight, expert, read).to(device)

    def __getitem__(self, key: Key) -> Tensor:
        return self._held[key]

    def vector(self, weights: Sequence[Weight]) -> Tensor:
        """Some vectors, one behind the other."""
        return torch.cat([self._held[weight, 0] for weight in weights])

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
        found = stored[expert] if weight.stacked else stored
        found = found.T if weight.transposed else found
        if weight.rows is not None:
            r = weight.rows
            starts = torch.arange(r.groups) * r.stride + r.start
            found = found[(starts[:, None] + torch.arange(r.count)).flatten()]
        return found.to(self.dtype if found.dim() == 2 else torch.float32).contiguous()


class TorchCache:
    """What one session has cached on a span: for each layer two tensors [capacity, width] in the storage dtype."""

    def __init__(self, layers: Sequence[Layer], capacity: int, dtype: torch.dtype, device: str) -> None:
        self.capacity = capacity
        self.layers = [
            tuple(torch.zeros(capacity, width, dtype=dtype, device=device) for width in layer.attention.cache_widths)
            for layer in layers
        ]


@dataclass(frozen=True, slots=True)
class TorchSegment:
    """`count` rows of a step: positions [start, start + count) of one session. A step's segments lie one after another.

    A start before the cached end rolls back: what lies beyond the last position written is stale and never read.
    """

    cache: TorchCache
    start: int
    count: int


class RopeTable:
    """cos and sin of one Rope, made by blocks as positions are asked for."""

    def __init__(self, rope: Rope, device: str) -> None:
        self._rope = rope
        self._device = device
        self._made = torch.empty(2, 0, len(rope.frequencies), device=device)

    def __call__(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, width / 2]."""
        needed = int(positions_N.max()) + 1
        if needed > self._made.shape[1]:
            end = -(-needed // _ROPE_BLOCK) * _ROPE_BLOCK
            frequencies = torch.tensor(self._rope.frequencies, dtype=torch.float32)
            angles = (torch.arange(end, dtype=torch.float32)[:, None] * frequencies).double()
            made = torch.stack([angles.cos(), angles.sin()]) * self._rope.factor
            self._made = made.float().to(self._device)
        return self._made[0, positions_N], self._made[1, positions_N]
