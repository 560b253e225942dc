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


class Kind(ctypes.Structure):
    """One kind of attention, as native/attend.h has it."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layer", "heads", "key_heads", "key_dim", "value_dim", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


@lru_cache(maxsize=4096)
def _kind(*values: float) -> tuple[Kind, int]:
    kind = Kind(*values)
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
    make = torch.empty if plan.num_rows == num_rows else torch.zeros
    out = make(num_rows, heads, value_dim, dtype=torch.bfloat16)
    count = threads.available()
    failed = tiles.kernel().tiles_attend(
        tiles.team(count).handle,
        count,
        kind,
        plan.table(),
        len(plan.segments),
        num_rows,
        *(number for x in (query, key, value) for number in (x.data_ptr(), x.stride(0), x.stride(1))),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
    )
    if failed:
        raise MemoryError("no memory for attention") if failed == 1 else ValueError("a segment does not fit its cache")
    return out
