"""A Program in torch operations: the readable reference, the oracle of the C engine's tests, and the way onto mps and xpu.

Follows `program/ops.py` operation by operation: fp32 between roundings, storage dtype where ops.py says so. Rows are not
independent of their company here (torch's kernels cut sums by size), so what this engine serves is of class E2.
Never run on mps or xpu so far: `device` is passed through, and everything is tested with "cpu" (worker/torch_program.py
serves it); on CUDA engine/cuda computes.

What a step takes beside weights and caches is bounded: matrices become fp32 for a product some numbers at a time
(torch_functions.CONVERTED), and scores of attention are computed for so many rows that they are SCORES numbers, or one row.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from manyhands.core import Span
from manyhands.engine.span import Piece
from manyhands.engine.torch_compressed import by_choice, positions_of, run_compressed, seen_blocks, with_streams
from manyhands.engine.torch_experts import run_experts
from manyhands.engine.torch_functions import ACTIVATIONS, first_seen, gated, heads, product, soft_capped
from manyhands.engine.torch_memory import Read, RopeTable, TorchCache, TorchWeights, turn
from manyhands.engine.torch_rows import run_row
from manyhands.errors import CutError, ModelError
from manyhands.program.ops import (
    RESIDUAL,
    Add,
    Attention,
    Embed,
    EntryIndex,
    ExpertRouting,
    Experts,
    Gate,
    Index,
    LatentAttention,
    Multiply,
    Norm,
    Op,
    Part,
    Product,
    Program,
    Rotary,
    RowOp,
    ScaleByPosition,
    ScaleHeads,
    SharedIndex,
    Softplus,
    Weight,
    Xielu,
)

SCORES: Final = 1 << 24
Angles = tuple[Tensor, Tensor]  # cos and sin [N, width / 2]
Table = tuple[int, Weight | None]  # Rotary.table


class TorchSpan:
    """Layers [span.start, span.end) of a program. Not thread-safe. Raises CutError for layers that it does not have."""

    def __init__(
        self, program: Program, span: Span, read: Read, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        if span.end > len(program.layers):
            raise CutError(f"layers {span} are out of range: the model has layers 0-{len(program.layers) - 1}")
        self.span = span
        self.layers = program.layers[span.start : span.end]
        self.dtype, self.device = dtype, device
        self._weights = [TorchWeights(layer.ops, read, dtype, device) for layer in self.layers]
        self._rotaries = [op for layer in self.layers for op in layer.ops if isinstance(op, Rotary)]
        self._tables = {
            op.table: RopeTable(program.ropes[op.rope], device, op.exponents, read) for op in self._rotaries
        }

    @torch.inference_mode()
    def new_cache(self, capacity: int, span: Span | None = None) -> TorchCache:
        """An empty cache for positions below `capacity` (0: for any) of layers `span`, within this one's (default: all)."""
        return TorchCache(self.layers[self._part(span)], capacity, self.dtype, self.device, span or self.span)

    def _part(self, span: Span | None) -> slice:
        """Where the layers of a part are among these. Raises CutError if some are not."""
        span = span or self.span
        if not self.span.covers(span):
            raise CutError(f"layers {span} are not among layers {self.span}")
        return slice(span.start - self.span.start, span.end - self.span.start)

    @torch.inference_mode()
    def step(self, rows_ND: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """Hidden states [N, hidden] in the storage dtype -> those that leave the last layer, likewise.

        Sets the length of each cache to the end of its piece. Raises ModelError where caches are of different layers.
        """
        assert rows_ND.shape[0] == sum(piece.count for piece in pieces)
        span = pieces[0].cache.span
        if any(piece.cache.span != span for piece in pieces):
            raise ModelError("pieces of one step are on different layers")
        for piece in pieces:
            piece.cache.reserve(piece.start + piece.count)
        positions = torch.cat([torch.arange(p.start, p.start + p.count) for p in pieces]).to(self.device)
        end = max(piece.start + piece.count for piece in pieces)
        backs = {(op.table, op.back) for op in self._rotaries}
        angles = {pair: self._tables[pair[0]]((positions - pair[1]).clamp_min(0), end) for pair in backs}
        x, part = rows_ND.to(self.device).float(), self._part(span)
        for number, (layer, weights) in enumerate(zip(self.layers[part], self._weights[part], strict=True)):
            run = _Layer(weights, angles, positions, [(p, iter(p.cache.layers[number])) for p in pieces])
            x = run(layer.ops, x)
        for piece in pieces:
            piece.cache.length = piece.start + piece.count
        return x.to(self.dtype)


class TorchEnds:
    """Embedding and/or head of a program. Not thread-safe."""

    def __init__(
        self,
        program: Program,
        read: Read,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        *,
        embed: bool = True,
        head: bool = True,
    ) -> None:
        self.dtype, self.device, self._program = dtype, device, program
        tables = (program.embed, program.embed.beside) if embed else ()
        ops: list[Op] = [*program.head.ops] if head else []
        ops += [Product("ids", (Part(RESIDUAL, table.weight),)) for table in tables if table is not None]
        self._weights = TorchWeights(ops, read, dtype, device)

    @torch.inference_mode()
    def embed(self, ids_T: Tensor) -> Tensor:
        """Hidden states [T, hidden] in the storage dtype for token ids [T]."""
        embed = self._program.embed
        rows = self._looked_up(embed, ids_T)
        if rows.shape[1] == self._program.hidden:
            return rows
        whole = torch.zeros(len(ids_T), self._program.hidden, dtype=self.dtype, device=self.device)
        whole[:, : rows.shape[1]] = rows
        if embed.beside is None:
            return whole
        ids_T = ids_T.where(ids_T < embed.beside.weight.outputs, 0)
        whole[:, embed.column : embed.column + embed.beside.weight.inputs] = self._looked_up(embed.beside, ids_T)
        return whole

    def _looked_up(self, embed: Embed, ids_T: Tensor) -> Tensor:
        scale = torch.tensor(embed.scale, dtype=torch.float32)
        if embed.round_scale:
            scale = scale.to(self.dtype).float()
        found = self._weights[embed.weight, 0][ids_T.to(self.device)].float()
        return with_streams(embed, (found * scale.to(self.device)).to(self.dtype), ids_T)

    @torch.inference_mode()
    def logits(self, rows_ND: Tensor) -> Tensor:
        """Logits [N, vocab] in fp32 for hidden states that left the last layer."""
        head = self._program.head
        run = _Layer(self._weights, {}, torch.empty(0), [])
        run.registers[RESIDUAL] = rows_ND.to(self.device).float()
        for op in head.ops:
            run.run(op)
        logits = run.registers["logits"]
        logits = logits * head.scale if head.scale != 1.0 else logits
        return soft_capped(logits, head.soft_cap)


class _Layer:
    """One run of a list of operations: registers by name, rows of fp32."""

    def __init__(
        self,
        weights: TorchWeights,
        angles: Mapping[tuple[Table, int], Angles],
        positions_N: Tensor,
        pieces: Sequence[tuple[Piece, Iterator[Tensor]]],
    ) -> None:
        self.weights, self.angles, self.positions_N, self.pieces = weights, angles, positions_N, pieces
        self.registers: dict[str, Tensor] = {}
        self.routes: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, ops: Sequence[Op], x_ND: Tensor) -> Tensor:
        self.registers[RESIDUAL] = x_ND
        for op in ops:
            self.run(op)
        return self.registers[RESIDUAL]

    def round(self, rows: Tensor) -> Tensor:
        """Rounded to the storage dtype, in fp32."""
        return rows.to(self.weights.dtype).float()

    @functools.singledispatchmethod
    def run(self, op: Op) -> None:
        """Does one operation; each kind has its method below, or a function in torch_compressed.py."""
        run_compressed(op, self)

    @run.register
    def _(self, op: Norm) -> None:
        rows = self.registers[op.source]
        parts = heads(rows, op.groups)
        if op.kind == "layer":
            parts = parts - parts.mean(-1, keepdim=True)
        parts = parts / torch.sqrt(parts.square().mean(-1, keepdim=True) + op.eps)
        if op.weight:
            parts = parts * heads(self.weights.vector(op.weight) + op.offset, len(op.weight))
        if op.bias:
            parts = parts + heads(self.weights.vector(op.bias), len(op.bias))
        self.registers[op.target] = parts.flatten(-2)

    @run.register
    def _(self, op: Product) -> None:
        source = self.round(self.registers[op.source])
        for part in op.parts:
            out = product(source, self.weights[part.weight, 0], self.weights.optional(part.bias))
            self.registers[part.target] = ACTIVATIONS[part.activation](out)

    @run.register
    def _(self, op: Rotary) -> None:
        whole = heads(self.registers[op.target], op.heads).clone()
        turn(whole[..., op.offset :], *self.angles[op.table, op.back], op.pairs)
        self.registers[op.target] = whole.flatten(-2)

    @run.register
    def _(self, op: Attention) -> None:
        query = self.round(self.registers[op.query]).reshape(-1, op.kv_heads, op.heads // op.kv_heads, op.width)
        sinks, out = self.weights.optional(op.sinks), []
        assert not isinstance(op.index, EntryIndex), "worker/choice.py refuses it"
        names = (op.key, op.value, *(() if op.index is None else (op.index.key,)))
        for rows, (keys_LK, values_LK, *index_LI), seen_TL in self._cached(op.heads, names, op):
            seen_TL = seen_TL if op.index is None else seen_blocks(self, op, op.index, rows, index_LI[0], seen_TL)
            keys, values = heads(keys_LK, op.kv_heads), heads(values_LK, op.kv_heads)
            scores = torch.einsum("tkgd,lkd->kgtl", query[rows], keys).flatten(0, 1)
            scores = self._by_distance(op, rows, soft_capped(scores * op.scale, op.soft_cap))
            weights, total = self.softmax(scores, seen_TL, sinks)
            grouped = weights.reshape(op.kv_heads, -1, *weights.shape[1:])
            mixed = torch.einsum("kgtl,lkd->kgtd", grouped, values).flatten(0, 1)
            out.append((mixed / total).transpose(0, 1).flatten(1))
        self.registers[op.target] = torch.cat(out)

    def _by_distance(self, op: Attention, rows: slice, scores_HTL: Tensor) -> Tensor:
        """Scores of some rows, with what is added to them, if anything is."""
        if op.slopes:
            far = self.positions_N[rows, None] - torch.arange(scores_HTL.shape[2], device=scores_HTL.device)
            return scores_HTL - scores_HTL.new_tensor(op.slopes)[:, None, None] * far
        if op.biases is None:
            return scores_HTL
        each = heads(self.registers[op.biases][rows], op.heads).transpose(0, 1)
        distance = self.positions_N[rows, None] - torch.arange(scores_HTL.shape[2], device=each.device)
        near = (distance >= 0) & (distance < each.shape[-1])
        place = distance.clamp(0, each.shape[-1] - 1).expand(op.heads, -1, -1)
        return scores_HTL + each.gather(-1, place).masked_fill(~near, 0.0)

    @run.register
    def _(self, op: LatentAttention) -> None:
        query = heads(self.round(self.registers[op.query]), op.heads)
        plain, rotary = query[..., : op.width], query[..., op.width :]
        key_HWR = self.weights.each_head(op.key_weight, op.heads)
        value_HVR = self.weights.each_head(op.value_weight, op.heads)
        latent = self.round(torch.einsum("nhw,hwr->nhr", plain, key_HWR))
        both, out = torch.cat([latent, rotary], -1), []
        if not op.rotary_width:
            self.registers[op.rotary] = self.registers[op.latent][:, :0]
        names, most = [op.latent, op.rotary], op.heads
        if isinstance(op.index, Index):
            names, most = [*names, op.index.key], max(most, op.index.heads)
            self.registers[op.index.target] = query.new_zeros(len(query), op.index.top_k)
        for rows, (latents_LR, keys_LW, *index_LI), seen_TL in self._cached(most, names, op):
            if isinstance(op.index, SharedIndex):
                seen_TL = by_choice(self.registers[op.index.source][rows], seen_TL)
            elif isinstance(op.index, Index):
                seen_TL = self.chosen(op.index, rows, index_LI[0], seen_TL)
                kept = positions_of(seen_TL, op.index.top_k)
                self.registers[op.index.target][rows, : kept.shape[1]] = kept.float()
            scores = torch.einsum("thc,lc->htl", both[rows], torch.cat([latents_LR, keys_LW], -1)) * op.scale
            weights, total = self.softmax(scores, seen_TL, self.weights.optional(op.sinks))
            out.append((torch.einsum("htl,lr->htr", weights, latents_LR) / total).transpose(0, 1))
        self.registers[op.target] = torch.einsum("nhr,hvr->nhv", self.round(torch.cat(out)), value_HVR).flatten(1)

    def _cached(
        self, scored: int, names: Sequence[str], op: Attention | LatentAttention
    ) -> Iterator[tuple[slice, list[Tensor], Tensor]]:
        """Writes what these registers hold into the caches. By piece, and by blocks of its rows (SCORES, of so many heads):
        the rows, all that is cached, what a row sees."""
        row = 0
        for piece, of_layer in self.pieces:
            last, end = row + piece.count, piece.start + piece.count
            cached = [next(of_layer) for _ in names]
            for tensor, name in zip(cached, names, strict=True):
                tensor[piece.start : end] = self.registers[name][row:last].to(tensor.dtype)
            held = [tensor[:end].float() for tensor in cached]
            other, block = torch.arange(end, device=self.positions_N.device), max(1, SCORES // (scored * end))
            for at in range(row, last, block):
                rows = slice(at, min(at + block, last))
                own = self.positions_N[rows, None]
                yield rows, held, (other <= own) & (other >= first_seen(op, own))
            row = last

    def chosen(self, index: Index | EntryIndex, rows: slice, keys_LI: Tensor, seen_TL: Tensor) -> Tensor:
        """Of what rows see, the positions, or entries, that an index chooses [T, L]."""
        if seen_TL.shape[1] <= index.top_k:
            return seen_TL
        query = heads(self.round(self.registers[index.query][rows]), index.heads)
        products = torch.einsum("thi,li->thl", query, keys_LI).clamp_min(0.0)
        scores = torch.einsum("th,thl->tl", self.registers[index.weight][rows], products)
        scores = scores.nan_to_num(-math.inf, math.inf, -math.inf).masked_fill(~seen_TL, -math.inf)
        first = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, : index.top_k]
        return torch.zeros_like(seen_TL).scatter(-1, first, True) & seen_TL

    def softmax(self, scores_HTL: Tensor, seen_TL: Tensor, sinks_H: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights, rounded but not divided yet, and the sum [H, T, 1] of the unrounded ones that divides them."""
        scores = scores_HTL.masked_fill(~seen_TL, -math.inf)
        most = scores.amax(-1, keepdim=True)
        if sinks_H is not None:
            most = torch.maximum(most, sinks_H[:, None, None])
        weights = torch.exp(scores - most)
        total = weights.sum(-1, keepdim=True)
        if sinks_H is not None:
            total = total + torch.exp(sinks_H[:, None, None] - most)
        return self.round(weights), total

    @run.register
    def _(self, op: Gate) -> None:
        self.registers[op.target] = gated(op.gating, self.registers[op.gate], self.registers[op.up])

    @run.register
    def _(self, op: ExpertRouting | Experts) -> None:
        run_experts(op, self)

    @run.register
    def _(self, op: Multiply) -> None:
        source, by = self.registers[op.source], self.weights[op.by, 0] if isinstance(op.by, Weight) else op.by
        if isinstance(by, str):
            by = self.registers[by].repeat_interleave(source.shape[1] // self.registers[by].shape[1], 1)
        self.registers[op.target] = source * (by + op.offset if op.offset else by)

    @run.register
    def _(self, op: RowOp | ScaleByPosition | ScaleHeads | Softplus | Xielu) -> None:
        run_row(op, self)

    @run.register
    def _(self, op: Add) -> None:
        x = self.registers[op.target]
        for term in op.terms:
            value = self.registers[term.source]
            x = x + (value if term.scale == 1.0 else value * term.scale)
        self.registers[op.target] = self.round(x) if op.target == RESIDUAL else x
