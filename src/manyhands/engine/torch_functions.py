"""The functions of ops.py on rows of torch: products, gates, activations, soft caps."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from manyhands.program.ops import Attention, ExpertRouting, Gating, LatentAttention, Score

CONVERTED: Final = 1 << 24  # numbers that become fp32 at once: 64 MB
ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "none": lambda v: v,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda v: functional.relu(v).square(),
    "sigmoid": torch.sigmoid,
}


def heads(rows: Tensor, parts: int) -> Tensor:
    """[..., parts * width] -> [..., parts, width]."""
    return rows.reshape(*rows.shape[:-1], parts, -1)


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows . weight^T + bias in fp32, unrounded."""
    step = max(1, CONVERTED // weight.shape[1])
    found = [functional.linear(rows, weight[at : at + step].float()) for at in range(0, len(weight), step)]
    out = found[0] if len(found) == 1 else torch.cat(found, -1)
    return out if bias is None else out + bias


def soft_capped(values: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(values / cap), if there is a cap."""
    return values if cap is None else cap * torch.tanh(values / cap)


def first_seen(op: Attention | LatentAttention, positions: Tensor) -> Tensor:
    """The first position that rows at `positions` see: the first of all, of a window, or of their chunk."""
    if op.window is None:
        return torch.zeros_like(positions)
    is_chunked = isinstance(op, Attention) and op.is_chunked
    return positions - (positions % op.window if is_chunked else op.window - 1)


def gated(gating: Gating, gate: Tensor, up: Tensor) -> Tensor:
    """ops.Gating's function of two rows."""
    limit, is_silu = gating.limit, gating.activation == "silu"
    if gating.activation == "situ":
        return soft_capped(gate, gating.alpha) * torch.sigmoid(gate) * soft_capped(up, limit)
    if limit is not None:
        gate, up = gate if gating.limits_activated else gate.clamp(max=limit), up.clamp(-limit, limit)
    gate = gate * torch.sigmoid(gating.alpha * gate) if is_silu else ACTIVATIONS[gating.activation](gate)
    if limit is not None and gating.limits_activated:
        gate = gate.clamp(max=limit)
    return gate * (up + gating.up_offset)


def scored(score: Score, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of experts [T, E], and what they are ranked by."""
    if score in ("sigmoid", "root"):
        found = logits.sigmoid() if score == "sigmoid" else logits.sqrt()
        return found, found
    return logits.sigmoid() if score == "logit" else logits.softmax(-1), logits


def best(ranks: Tensor, op: ExpertRouting) -> Tensor:
    """The experts of the highest ranks [T, K], of the best groups, if there are some."""
    if op.groups > 1:
        runs = heads(ranks, op.groups)
        first = runs.topk(1 if op.is_by_best else 2, -1).values.sum(-1).topk(op.top_groups, -1).indices
        kept = torch.zeros_like(runs[..., 0], dtype=torch.bool).scatter(-1, first, True)
        ranks = runs.masked_fill(~kept[..., None], -math.inf).flatten(-2)
    return torch.sort(ranks, dim=-1, descending=True, stable=True).indices[..., : op.top_k]


def mixed(logits: Tensor, chosen: Tensor, threshold: float) -> Tensor:
    """Of a mixer (ops.ExpertRouting): weights [T, K] of the experts `chosen` [T, K], by logits [T, E]."""
    left, out = logits, []
    for i in range(chosen.shape[-1]):
        one = chosen[..., i : i + 1]
        most = logits.gather(-1, one)
        is_far = (most - logits) / torch.maximum(logits.abs(), most) > threshold
        out.append(left.masked_fill(is_far, -math.inf).softmax(-1).gather(-1, one))
        left = left.scatter(-1, one, -math.inf)
    return torch.cat(out, -1)


def xielu(rows: Tensor, rise: Tensor, fall: Tensor, beta: Tensor, epsilon: Tensor) -> Tensor:
    """ops.Xielu's function of rows."""
    above, below = functional.softplus(rise), beta + functional.softplus(fall)
    curve = (torch.expm1(torch.minimum(rows, epsilon)) - rows) * below
    return torch.where(rows > 0, above * rows * rows, curve) + beta * rows
