"""The choice of experts, and experts, in torch (torch.py has the other operations)."""

from functools import singledispatch

import torch
from torch import Tensor

from manyhands.engine.torch_functions import ACTIVATIONS, best, gated, mixed, product, scored
from manyhands.engine.torch_memory import LayerRun
from manyhands.program.ops import ExpertRouting, Experts, Op


def ids_of(rows_ND: Tensor, limit: int) -> Tensor:
    """The ids that the last columns of rows hold (ops.Embed); 0 for what is none of `limit`."""
    digits = (rows_ND[:, -4:] * 256).nan_to_num(0.0)
    digits = torch.where((digits >= 0) & (digits < 256), digits, 0.0).long()
    ids = (digits << torch.tensor([0, 8, 16, 24], device=digits.device)).sum(-1)
    return torch.where(ids < limit, ids, 0)


@singledispatch
def run_experts(op: Op, run: LayerRun) -> None:
    """Does one of these operations."""
    raise AssertionError(f"no way to run {type(op).__name__}")


@run_experts.register
def _(op: ExpertRouting, run: LayerRun) -> None:
    logits = run.registers[op.source]
    scores, ranks = scored(op.score, logits)
    if op.correction is not None:
        ranks = (logits if op.score == "logit" else scores)[:, : op.experts] + run.weights[op.correction, 0]
    if op.table is None:
        chosen = best(ranks[:, : op.experts], op)
    else:
        table = run.weights[op.table, 0]
        chosen = table[ids_of(run.registers[op.ids], len(table))].long()
    always = torch.arange(op.experts, op.experts + op.always, device=chosen.device).expand(len(chosen), -1)
    chosen = torch.cat([always, chosen], -1)
    weights = mixed(logits, chosen, op.epsilon) if op.score == "mixer" else scores.gather(-1, chosen)
    if op.normalise and op.score == "softmax":
        weights = logits.gather(-1, chosen).softmax(-1)
    elif op.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + op.epsilon)
    factors = None if op.factors is None else run.weights[op.factors, 0]
    weights = weights * op.scale * (1.0 if factors is None else factors if len(factors) == 1 else factors[chosen])
    run.registers[op.shares] = weights[:, : op.always]
    run.routes[op.target] = chosen[:, op.always :], weights[:, op.always :]


@run_experts.register
def _(op: Experts, run: LayerRun) -> None:
    chosen_NK, weights_NK = run.routes[op.routes]
    source = (whole := run.registers[op.source])[:, None]
    if op.scales_source:
        source, weights_NK = source * weights_NK[..., None], torch.ones_like(weights_NK)
    source = run.round(source).expand(*chosen_NK.shape, -1)
    each_NKD = source.new_zeros(*chosen_NK.shape, op.down.outputs)
    for expert in sorted(set(chosen_NK.flatten().tolist())):
        rows, ranks = torch.where(chosen_NK == expert)
        is_expert = expert < op.experts
        each_NKD[rows, ranks] = _expert(op, run, expert, source[rows, ranks]) if is_expert else whole[rows]
    total = torch.zeros_like(each_NKD[:, 0])
    for rank in range(chosen_NK.shape[1]):
        total = total + weights_NK[:, rank, None] * each_NKD[:, rank]
    run.registers[op.target] = total


def _expert(op: Experts, run: LayerRun, expert: int, rows: Tensor) -> Tensor:
    w = run.weights
    up = product(rows, w[op.up, expert], w.optional(op.up_bias, expert))
    if op.gate is None:
        inner = ACTIVATIONS[op.gating.activation](up)
    else:
        inner = gated(op.gating, product(rows, w[op.gate, expert], w.optional(op.gate_bias, expert)), up)
    result = product(run.round(inner), w[op.down, expert], w.optional(op.down_bias, expert))
    if op.norm is None:
        return result
    result = result * (1.0 + w[op.norm, 0])
    return result / torch.sqrt(result.square().mean(-1, keepdim=True) + op.norm_eps)
