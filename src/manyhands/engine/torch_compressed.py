"""Streams, entries and attention over both in torch (torch.py has the other operations)."""

import math
from functools import singledispatch

import torch
from torch import Tensor
from torch.nn import functional

from manyhands.engine.torch_functions import heads, product
from manyhands.engine.torch_memory import LayerRun
from manyhands.program.ops import (
    Attention,
    BlockIndex,
    Collapse,
    Compress,
    CompressedAttention,
    Embed,
    GroupedProduct,
    Op,
    Spread,
)


def with_streams(embed: Embed, rows_TD: Tensor, ids_T: Tensor) -> Tensor:
    """Rows of the embedding as they enter layer 0."""
    digits = (ids_T[:, None] >> torch.tensor([0, 8, 16, 24]) & 255).to(rows_TD)
    parts = [rows_TD] * embed.streams + ([digits / 256] if embed.has_ids else [])
    return torch.cat(parts, -1)


@singledispatch
def run_compressed(op: Op, run: LayerRun) -> None:
    """Does one of these operations."""
    raise AssertionError(f"no way to run {type(op).__name__}")


@run_compressed.register
def _(op: Collapse, run: LayerRun) -> None:
    x, n = run.registers[op.source][:, : op.mix.inputs], op.streams
    mixes = product(run.round(x), run.weights[op.mix, 0]) / torch.sqrt(
        x.square().mean(-1, keepdim=True) + op.norm_epsilon
    )
    sizes = ((n,), (n, n, n * n), (n, n))[op.keeps]
    scales = torch.cat([one.expand(size) for one, size in zip(run.weights[op.scale, 0], sizes, strict=True)])
    found = mixes * scales + run.weights[op.base, 0]
    pre = found[:, :n].sigmoid() + op.epsilon
    kept = [pre]
    if op.magnitude is not None:
        kept.append(op.magnitude * found[:, n:].sigmoid() + op.epsilon)
    elif op.keeps:
        comb = found[:, 2 * n :].view(-1, n, n).softmax(-1) + op.epsilon
        comb = comb / (comb.sum(-2, keepdim=True) + op.epsilon)
        for _ in range(op.iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + op.epsilon)
            comb = comb / (comb.sum(-2, keepdim=True) + op.epsilon)
        kept += [2 * found[:, n : 2 * n].sigmoid(), comb.flatten(1)]
    run.registers[op.target] = (heads(x, n) * pre[..., None]).sum(1)
    run.registers[op.kept] = torch.cat(kept, -1)


@run_compressed.register
def _(op: Spread, run: LayerRun) -> None:
    source, kept, n = run.registers[op.source], run.registers[op.kept], op.streams
    x = run.registers[op.target]
    streams, rest = heads(x[:, : n * source.shape[1]], n), x[:, n * source.shape[1] :]
    mixed = streams if kept.shape[1] == 2 * n else kept[:, 2 * n :].view(-1, n, n).transpose(1, 2) @ streams
    spread = source[:, None] * kept[:, n : 2 * n, None] + mixed
    run.registers[op.target] = torch.cat([run.round(spread).flatten(1), rest], -1)


@run_compressed.register
def _(op: GroupedProduct, run: LayerRun) -> None:
    parts = heads(run.round(run.registers[op.source]), op.groups)
    weight = run.weights[op.weight, 0].float().view(1 if op.is_shared else op.groups, -1, op.weight.inputs)
    run.registers[op.target] = torch.einsum("ngk,gok->ngo", parts, weight.expand(op.groups, -1, -1)).flatten(1)


@run_compressed.register
def _(op: Compress, run: LayerRun) -> None:
    values, gates, row = run.registers[op.values], run.registers[op.gates], 0
    out = values.new_zeros(len(values), op.width)
    for piece, cached in run.pieces:
        kept = next(cached), next(cached)
        for tensor, given in zip(kept, (values, gates), strict=True):
            tensor[piece.start : piece.start + piece.count] = given[row : row + piece.count].to(tensor.dtype)
        for i in range(piece.count):
            if (piece.start + i + 1) % op.rate == 0:
                out[row + i] = _entry(op, run, piece.start + i + 1, *kept)
        row += piece.count
    run.registers[op.target] = out


def _entry(op: Compress, run: LayerRun, end: int, values_LW: Tensor, gates_LW: Tensor) -> Tensor:
    """The entry of the positions before `end`."""
    start = end - op.rate
    values, gates = values_LW[start:end].float(), gates_LW[start:end].float() + run.weights[op.bias, 0].float()
    if op.is_doubled:
        values, gates = values[:, op.width :], gates[:, op.width :]
        if start:
            first = slice(start - op.rate, start)
            bias = run.weights[op.bias, 0].float()[:, : op.width]
            values = torch.cat([values_LW[first, : op.width].float(), values])
            gates = torch.cat([gates_LW[first, : op.width].float() + bias, gates])
    return (gates.softmax(0) * values).sum(0)


@run_compressed.register
def _(op: CompressedAttention, run: LayerRun) -> None:
    query, sinks, out, row = heads(run.round(run.registers[op.query]), op.heads), run.weights.optional(op.sinks), [], 0
    names = [name for name in (op.key, op.entry, op.index and op.index.key) if name]
    for piece, cached in run.pieces:
        rows, end = slice(row, row + piece.count), piece.start + piece.count
        tensors = [next(cached) for _ in names]
        for tensor, name in zip(tensors, names, strict=True):
            tensor[piece.start : end] = run.registers[name][rows].to(tensor.dtype)
        keys, *more = (tensor[:end].float() for tensor in tensors)
        own, other = run.positions_N[rows, None], torch.arange(end, device=keys.device)
        seen = (other <= own) & (other > own - op.window)
        if op.entry is not None:
            entries, *index = (tensor[op.rate - 1 :: op.rate] for tensor in more)
            is_whole = torch.arange(len(entries), device=keys.device) < (own + 1) // op.rate
            if op.index is not None:
                is_whole = run.chosen(op.index, rows, index[0], is_whole)
            keys, seen = torch.cat([keys, entries]), torch.cat([seen, is_whole], -1)
        weights, total = run.softmax(torch.einsum("thc,lc->htl", query[rows], keys) * op.scale, seen, sinks)
        out.append((torch.einsum("htl,lc->htc", weights, keys) / total).transpose(0, 1).flatten(1))
        row += piece.count
    run.registers[op.target] = torch.cat(out)


def seen_blocks(
    run: LayerRun, op: Attention, index: BlockIndex, rows: slice, keys_LI: Tensor, seen_TL: Tensor
) -> Tensor:
    """Of what rows see, the positions of the blocks that an index chooses for each query head [H, T, L]."""
    length = seen_TL.shape[1]
    query = heads(run.round(run.registers[index.query][rows]), index.heads)
    scores = torch.einsum("tki,li->ktl", query, keys_LI).nan_to_num(-math.inf, math.inf, -math.inf)
    scores = functional.pad(scores.masked_fill(~seen_TL, -math.inf), (0, -length % index.block), value=-math.inf)
    best = heads(scores, scores.shape[-1] // index.block).amax(-1)
    own, other = run.positions_N[rows, None] // index.block, torch.arange(best.shape[-1], device=best.device)
    best = best.masked_fill((other <= own) & (other > own - index.local), math.inf)
    first = torch.sort(best, dim=-1, descending=True, stable=True).indices[..., : index.top_k]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, first, True)
    kept = kept.repeat_interleave(index.block, -1)[..., :length] & seen_TL
    return kept.repeat_interleave(op.heads // op.kv_heads, 0)


def positions_of(chosen_TL: Tensor, count: int) -> Tensor:
    """The positions that each row sees [T, count], in order, of rows that see so many; fewer columns if there are fewer."""
    return torch.sort(~chosen_TL, dim=-1, stable=True).indices[:, :count]


def by_choice(chosen_TC: Tensor, seen_TL: Tensor) -> Tensor:
    """Of what rows see the chosen positions [T, L] (ops.Choice)."""
    last_T1 = seen_TL.sum(-1, keepdim=True) - 1
    is_one = (chosen_TC >= 0) & (chosen_TC <= last_T1)
    kept = torch.zeros_like(seen_TL).scatter(-1, chosen_TC.where(is_one, last_T1).long(), True)
    return kept.where(last_T1 >= chosen_TC.shape[1], seen_TL)
