"""Row-invariant attention over the sessions' caches, plugged into transformers by name.

The rows of a step belong to different sessions; each segment attends to its own session's cache. A row's bits must not
depend on the other rows of its segment (prefill chunk, verify window, single token), so:
- keys are seen as a view rounded up to KEY_BLOCK, the block of torch's CPU flash kernel, under an additive mask;
- the query heads that share a key head become rows (token-major), padded to a multiple of 4;
- a single key head is shown to the kernel as two, each with half of the query heads: a lone task would run outside any
  parallel region, where MKL splits its products among the threads by their size (gemma3-1b has one key head).
Checked bit for bit in tests/model/test_attention.py for 1..700 rows at block borders, on 1 and 2 threads.

Attention sinks (gpt_oss) are applied to the kernel's result by its log-sum-exp: out * sigmoid(lse - sink) is the softmax
with one more key of value zero. Soft-capped scores (gemma2) need tanh before the softmax, so they take `_softcapped`.
"""

import threading
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from manyhands.errors import ModelError
from manyhands.model import threads
from manyhands.model.attend import attend, serves
from manyhands.model.cache import KEY_BLOCK, CacheProbe, LayerShape, ShardSegment, StepPlan
from manyhands.model.elementwise import elementwise
from manyhands.model.linear import invariant_linear

NAME = "manyhands"
_ROW_BLOCK = 4
_running = threading.local()


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of attention: queries, keys, values [1, heads, N, width], its options, and the answer [1, N, heads, Dv]."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    softcap: float | None
    window: int | None
    sinks: Tensor | None
    answer: Tensor


@dataclass(slots=True)
class CallRecorder:
    """Stands in for a StepPlan: keeps what attention is given, and answers with numbers of its own."""

    heard: RecordedCall | None = None


Plan = StepPlan | CacheProbe | CallRecorder


class running:  # as threads.using: contextlib would cost 10 us
    """Make `plan` the step that attention on this thread serves."""

    __slots__ = ("_before", "_plan")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __enter__(self) -> None:
        self._before = getattr(_running, "plan", None)
        _running.plan = self._plan

    def __exit__(self, *_: object) -> None:
        _running.plan = self._before


def current() -> Plan:
    """The step that attention on this thread serves."""
    plan: Plan = _running.plan
    return plan


def attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Keys and values of the new rows are written to the sessions' caches.

    Returns [1, N, heads, value_dim]; padding rows are zero.
    """
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} makes an attention mask of its own: it is not supported")
    _, heads, count, key_dim = query_1HND.shape
    value_dim = value_1HND.shape[3]
    plan = current()
    layer = cast(int, module.layer_idx)
    if isinstance(plan, CacheProbe):
        plan.shapes[layer] = LayerShape(key_1HND.shape[1], key_dim, value_dim, key_1HND.dtype)
        return query_1HND.new_zeros(1, count, heads, value_dim), None
    scale = key_dim**-0.5 if scaling is None else scaling
    if isinstance(plan, CallRecorder):
        answer = torch.randn(1, count, heads, value_dim, generator=torch.Generator().manual_seed(layer)).to(
            query_1HND.dtype
        )
        given = query_1HND, key_1HND, value_1HND, scale, softcap, sliding_window, s_aux
        plan.heard = RecordedCall(layer, *given, answer)
        return answer, None
    if serves(key_1HND.dtype, key_dim, scale):
        qkv = query_1HND[0], key_1HND[0], value_1HND[0]
        out_NHD = attend(plan, layer, qkv, scale, softcap, sliding_window, s_aux)
        return out_NHD[None], None
    if key_1HND.shape[1] == 1 and heads % 2:
        query_1HND = F.pad(query_1HND, (0, 0, 0, 0, 0, 1))
        s_aux = None if s_aux is None else F.pad(s_aux, (0, 1))
    run_heads = query_1HND.shape[1]
    parts: list[Tensor] = []
    for s in plan.segments:
        rows = slice(s.row, s.row + s.count)
        keys, values = _store(s, layer, key_1HND[:, :, rows], value_1HND[:, :, rows])
        if keys.shape[1] == 1:
            keys, values = keys.expand(-1, 2, -1, -1), values.expand(-1, 2, -1, -1)
        query = _token_major(query_1HND[:, :, rows], keys.shape[1], keys.shape[3])
        mask = _mask(plan, s, run_heads // keys.shape[1], sliding_window, query.dtype)
        num_rows = query.shape[1] * query.shape[2]
        with threads.using(threads.for_attention(num_rows, keys.shape[2], keys.shape[3])):
            if softcap is None:
                packed = _flash(query, keys, values, mask, scale, s_aux)
            else:
                packed = _softcapped(query, keys, values, mask, scale, softcap)
        parts.append(_head_major(packed, s.count, run_heads)[:, :, :heads, :value_dim])
    if missing := count - sum(s.count for s in plan.segments):
        parts.append(query_1HND.new_zeros(1, missing, heads, value_dim))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)), None


AttentionInterface.register(NAME, attention)


def _store(s: ShardSegment, layer: int, key_1HTD: Tensor, value_1HTD: Tensor) -> tuple[Tensor, Tensor]:
    """Write a segment's new keys and values; return the session's, up to its end rounded up to KEY_BLOCK."""
    keys, values = s.cache.keys[layer], s.cache.values[layer]
    stop = s.start + s.count
    for cached, new in ((keys, key_1HTD), (values, value_1HTD)):
        cached.narrow(2, s.start, s.count).narrow(3, 0, new.shape[3]).copy_(new)
    end = -(-stop // KEY_BLOCK) * KEY_BLOCK
    return keys.narrow(2, 0, end), values.narrow(2, 0, end)


def _token_major(query_1HTD: Tensor, key_heads: int, width: int) -> Tensor:
    """[1, H, T, D] -> [1, key_heads, T * group (padded), width]: row t * group + g is head g of the group at token t."""
    _, heads, count, dim = query_1HTD.shape
    group = heads // key_heads
    packed = query_1HTD.view(1, key_heads, group, count, dim).transpose(2, 3).reshape(1, key_heads, count * group, dim)
    missing = -(count * group) % _ROW_BLOCK
    return F.pad(packed, (0, width - dim, 0, missing)) if missing or width > dim else packed


def _head_major(packed_1GRD: Tensor, count: int, heads: int) -> Tensor:
    """Inverse of _token_major, as [1, T, H, D]."""
    _, key_heads, _, dim = packed_1GRD.shape
    group = heads // key_heads
    rows = packed_1GRD[:, :, : count * group].view(1, key_heads, count, group, dim)
    return rows.transpose(1, 2).reshape(1, count, heads, dim)


def _mask(plan: StepPlan, s: ShardSegment, group: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask [1, 1, rows (padded), keys], made once per step and shared by the layers."""
    key = (s.row, group, window, dtype)
    if key not in plan.masks:
        end = -(-(s.start + s.count) // KEY_BLOCK) * KEY_BLOCK
        position = torch.arange(s.start, s.start + s.count).repeat_interleave(group)
        missing = -len(position) % _ROW_BLOCK
        position = torch.cat([position, position[:1].expand(missing)])[:, None]
        column = torch.arange(end)[None]
        hidden = column > position
        if window is not None:
            hidden |= column <= position - window
        plan.masks[key] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[None, None]
    return plan.masks[key]


def _flash(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, sinks_H: Tensor | None) -> Tensor:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    if sinks_H is None:
        return out  # type: ignore[no-any-return]
    group = len(sinks_H) // keys.shape[1]
    rows = torch.arange(query.shape[2]) % group
    sinks = sinks_H.float().view(keys.shape[1], group)[:, rows][None]
    kept = elementwise(torch.sigmoid, lse.float() - sinks)
    return (out.float() * kept[..., None]).to(out.dtype)  # type: ignore[no-any-return]


def _softcapped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention with scores capped to softcap * tanh(score / softcap), in fp32, values summed block by block in order."""
    out = torch.zeros(*query.shape[:3], values.shape[3], dtype=torch.float32)
    for head in range(keys.shape[1]):
        scores = invariant_linear(query[0, head].float(), keys[0, head].float()) * scale
        scores = elementwise(torch.tanh, scores / softcap) * softcap + mask[0, 0].float()
        weights = torch.softmax(scores, -1)
        for block in range(0, keys.shape[2], KEY_BLOCK):
            part = slice(block, block + KEY_BLOCK)
            out[0, head] += invariant_linear(weights[:, part], values[0, head, part].float().t())
    return out.to(query.dtype)
