"""Attention of a device step on our own kernel (native/attend.c): all its segments in one call a layer.

What the kernel reads of segments and caches is written down once a step (StepPlan.table) and once a session, so that a layer
hands over little more than addresses.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from manyhands.model import threads, tiles
from manyhands.model.cache import StepPlan


class AttentionKind(ctypes.Structure):
    """One kind of attention, as native/attend.h has it."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layer", "heads", "key_heads", "key_dim", "value_dim", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class Front(ctypes.Structure):
    """What comes before attention, as native/attend.h has it."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("turns", "pairs")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm", "sinks")),
        ("query_epsilon", ctypes.c_float),
        ("key_epsilon", ctypes.c_float),
    ]

    keeps: list[Tensor | None]  # which the pointers point to

    @classmethod
    def of(
        cls,
        turns: int,
        pairs: bool,
        query: tiles.NormKernel | None,
        key: tiles.NormKernel | None,
        sinks_H: Tensor | None,
    ) -> "Front":
        """`turns` rotations of a head, of its halves or of its pairs; norms of a head."""
        tensors = [None if norm is None else norm.weight for norm in (query, key)]
        tensors.append(None if sinks_H is None else sinks_H.detach().to(torch.bfloat16).contiguous())
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        front = cls(turns, pairs, *pointers, *(0 if norm is None else norm.epsilon for norm in (query, key)))
        front.keeps = tensors
        return front


def front(kind: AttentionKind, front: Front, rows_NW: Tensor, cos_1NR: Tensor, sin_1NR: Tensor) -> None:
    """Norms and rotation, in place, on rows [queries | keys | values] of all heads (contiguous)."""
    count, turn = threads.available(), RotationTables(cos_1NR, sin_1NR)
    where = tiles.team(count).handle, count, ctypes.addressof(kind), ctypes.addressof(front)
    tiles.kernel().tiles_front(*where, rows_NW.data_ptr(), len(rows_NW), *turn.pointers)


class ModuleStruct(ctypes.Structure):
    """A Module, as native/module.h has it."""

    _fields_ = [
        ("kind", AttentionKind),
        ("front", Front),
        ("first", tiles.ProductStruct),
        ("last", tiles.ProductStruct),
    ]


class Module:
    """A product into queries, keys and values, attention of one layer, and a product out of it."""

    def __init__(self, kind: AttentionKind, front: Front, first: tiles.Tiled, last: tiles.Tiled) -> None:
        self.kind, self.front, self.first, self.last = kind, front, first, last
        self.struct = ModuleStruct(kind, front, first.struct(), last.struct())
        self.scratch = first.shape[0] + last.shape[1]
        self._address, self._run = ctypes.addressof(self.struct), tiles.kernel().tiles_module

    def __call__(self, plan: StepPlan, x_NK: Tensor, cos_1NR: Tensor, sin_1NR: Tensor) -> Tensor:
        """[N, hidden] to the same. Writes the sessions' caches. Raises ValueError if a segment does not fit its cache."""
        first, last, num_rows = self.first, self.last, x_NK.shape[0]
        x_NK = tiles.rows_of(x_NK, first.shape[1])
        segments, turn = (plan.table(), len(plan.segments)), RotationTables.of(plan, cos_1NR, sin_1NR)
        scratch = _empty(plan, num_rows, num_rows * self.scratch)
        out = torch.empty(num_rows, last.shape[0], dtype=torch.bfloat16)
        first.comes_next(last)
        counts = threads.available(), *(threads.for_product(num_rows, *product.shape) for product in (first, last))
        where = tiles.team(counts[0]).handle, *counts, self._address
        rows = x_NK.data_ptr(), x_NK.stride(0), num_rows, *turn.pointers
        check(self._run(*where, *segments, *rows, scratch.data_ptr(), out.data_ptr(), *last.then))
        return out


class RotationTables:
    """Cosines and sines as the kernel takes them, and their addresses."""

    @classmethod
    def of(cls, plan: StepPlan, cos_1NR: Tensor, sin_1NR: Tensor) -> "RotationTables":
        """Made once a step for the layers that share them."""
        return plan.once(cos_1NR, lambda: cls(cos_1NR, sin_1NR))

    def __init__(self, cos_1NR: Tensor, sin_1NR: Tensor) -> None:
        if cos_1NR.stride() != sin_1NR.stride() or cos_1NR.stride(2) != 1:
            cos_1NR, sin_1NR = cos_1NR.contiguous(), sin_1NR.contiguous()
        self._keeps = cos_1NR, sin_1NR
        self.pointers = cos_1NR.data_ptr(), sin_1NR.data_ptr(), cos_1NR.stride(1)


def _empty(plan: StepPlan, num_rows: int, *shape: int) -> Tensor:
    """Zero if rows belong to no segment of the plan, whose table is made."""
    make = torch.empty if plan.num_rows == num_rows else torch.zeros
    return make(shape, dtype=torch.bfloat16)


def check(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for attention") if failed == 1 else ValueError("a segment does not fit its cache")


@lru_cache(maxsize=4096)
def _kind(*values: float) -> tuple[AttentionKind, int]:
    kind = AttentionKind(*values)
    return kind, ctypes.addressof(kind)


def serves(dtype: torch.dtype, key_dim: int, scale: float) -> bool:
    return dtype == torch.bfloat16 and key_dim % 2 == 0 and scale > 0 and tiles.available()


def attend(
    plan: StepPlan,
    layer: int,
    qkv: Sequence[Tensor],
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Queries, keys, values [heads, N, width] -> [N, H, Dv]; zeros for rows of no segment.

    Keys and values of the new rows are written to the sessions' caches.

    Raises ValueError if a segment does not fit its cache. Only where it `serves`.
    """
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in qkv)
    (heads, num_rows, key_dim), (key_heads, _, value_dim) = query.shape, value.shape
    _, kind = _kind(layer, heads, key_heads, key_dim, value_dim, window or 0, scale, softcap or 0)
    sinks = None if sinks_H is None else sinks_H.to(torch.bfloat16).contiguous()
    segments, count = (plan.table(), len(plan.segments)), threads.available()
    out = _empty(plan, num_rows, num_rows, heads, value_dim)
    failed = tiles.kernel().tiles_attend(
        tiles.team(count).handle,
        count,
        kind,
        *segments,
        num_rows,
        *(number for x in (query, key, value) for number in (x.data_ptr(), x.stride(0), x.stride(1))),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
    )
    check(failed)
    return out
