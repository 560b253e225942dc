"""Row-invariant matrix products: a row's result never depends on how many other rows share the call.

bf16 on CPUs with AMX runs on a kernel of our own (tiles.py). Everywhere else products go through oneDNN with packed
weights and at least MIN_ROWS rows: measured (docs/exactness.md), it gives a row the same bits for every M >= 4, on any
number of threads; M = 1..3 use other kernels, and MKL changes bits with M, threads and alignment. Packing is also 1.8x
faster than F.linear at one row.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from manyhands.core import Precision
from manyhands.errors import ModelError
from manyhands.model import threads, tiles

EXPERTS = "manyhands"  # our name in transformers' registry of experts implementations

# 4 rows: the smallest M of the oneDNN class that prefill uses; rows 1 to 6 cost the same (memory-bound).
MIN_ROWS = 4

DTYPES: dict[Precision, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
}


@cache
def has_bf16_products() -> bool:
    """Whether oneDNN, within the instruction sets it may use, multiplies bf16 matrices on this CPU."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 32, dtype=torch.bfloat16), 16)
    except RuntimeError:
        return False
    return True


def _widened(tensor: Tensor) -> Tensor:
    """The operand of a product in a dtype that oneDNN multiplies here: bf16 becomes fp32 on CPUs without bf16 products."""
    return tensor.float() if tensor.dtype == torch.bfloat16 and not has_bf16_products() else tensor


def _call(x_MK: Tensor, weight: Tensor, bias_N: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, weight, bias_N, "none", [], "")
    return out


def _product(x_MK: Tensor, weight: Tensor, bias_N: Tensor | None) -> Tensor:
    """x @ weight.T + bias, [M, N], in the dtype of `x_MK`; a row's bits depend neither on M nor on the threads.

    `weight` and `bias_N` are `_widened`.
    """
    count = x_MK.shape[0]
    with threads.using(threads.for_product(count, *weight.shape)):
        out = _call(_widened(pad_rows(x_MK)), weight, bias_N)
    return (out[:count] if out.shape[0] > count else out).to(x_MK.dtype)


def pad_rows(x_MK: Tensor) -> Tensor:
    """Rows of zeros up to MIN_ROWS where products run on oneDNN; the caller cuts them off again."""
    missing = 0 if _on_tiles(x_MK.dtype) else MIN_ROWS - x_MK.shape[0]
    return F.pad(x_MK, (0, 0, 0, missing)) if missing > 0 else x_MK


def invariant_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias with unpacked weights, for small matrices such as MoE routers. Shapes as F.linear.

    A parameter's tiles are kept with it: it is never changed, and always goes with the same bias.
    """
    x_MK = x.reshape(-1, x.shape[-1])
    if _on_tiles(weight_NK.dtype):
        product = getattr(weight_NK, "tiles", None) or tiles.Tiled(weight_NK, bias_N)
        if isinstance(weight_NK, nn.Parameter):
            setattr(weight_NK, "tiles", product)  # noqa: B010 - tensors have no such field
        out = product(x_MK)
    else:
        out = _product(x_MK, _widened(weight_NK).contiguous(), None if bias_N is None else _widened(bias_N))
    return out.view(*x.shape[:-1], weight_NK.shape[0])


class Packed:
    """One weight matrix [N, K] in oneDNN's blocked layout. Call with [M, K], M >= 1; gives [M, N]."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        # 16 is the row count that oneDNN is told to lay the blocks out for; the bits do not depend on it.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(_widened(weight_NK).contiguous(), 16)
        self.bias = None if bias_N is None else _widened(bias_N).clone()

    def __call__(self, x_MK: Tensor) -> Tensor:
        return _product(x_MK, self.weight, self.bias)


Product = Packed | tiles.Tiled


def pack(weight_NK: Tensor, bias_N: Tensor | None) -> Product:
    return tiles.Tiled(weight_NK, bias_N) if _on_tiles(weight_NK.dtype) else Packed(weight_NK, bias_N)


def _on_tiles(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and tiles.available()


class InvariantLinear(nn.Module):
    """Stands in for nn.Linear; the original weight is dropped once packed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.product = pack(linear.weight.detach(), _detached(linear.bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class FusedProduct:
    """Several nn.Linear that are called with the very same tensor, as one product (q, k, v; gate and up)."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.cat([_bias_or_zeros(linear) for linear in linears])
        self.product = pack(weight, bias)
        self.widths = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._parts: list[Tensor] = []

    def part(self, x: Tensor, index: int) -> Tensor:
        """Columns of linear `index`. The first part asked for with a new `x` computes all; the last one forgets it."""
        if self._input is not x:
            out = self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            self._input, self._parts = x, list(torch.split(out, self.widths, dim=-1))
        part = self._parts[index]
        if index == len(self.widths) - 1:
            self._input, self._parts = None, []
        return part


class FusedPart(nn.Module):
    """Stands in for one nn.Linear of a FusedProduct."""

    def __init__(self, fused: FusedProduct, index: int) -> None:
        super().__init__()
        self.fused, self.index = fused, index

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.part(x, self.index)


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _bias_or_zeros(linear: nn.Linear) -> Tensor:
    if linear.bias is not None:
        return linear.bias.detach()
    return torch.zeros(linear.out_features, dtype=linear.weight.dtype)


def replace_linears(root: nn.Module, order: Iterable[tuple[nn.Linear, int]]) -> None:
    """Replace every nn.Linear below `root`. `order` is a trace of calls: (linear, id of the input tensor).

    Neighbours in the trace that are children of one module and got the same tensor are fused, whatever their names.
    """
    parents = {id(c): (p, n, c) for p in root.modules() for n, c in p.named_children() if type(c) is nn.Linear}
    for group in _fusible(order, parents):
        fused = FusedProduct([parents[key][2] for key in group])
        for index, key in enumerate(group):
            parent, name, _ = parents.pop(key)
            setattr(parent, name, FusedPart(fused, index))
    for parent, name, linear in parents.values():
        setattr(parent, name, InvariantLinear(linear))


def _fusible(
    order: Iterable[tuple[nn.Linear, int]], parents: dict[int, tuple[nn.Module, str, nn.Linear]]
) -> list[list[int]]:
    groups: list[list[int]] = []
    last: tuple[int, int] | None = None
    seen: set[int] = set()
    for linear, tensor in order:
        if id(linear) not in parents or id(linear) in seen:
            last = None
            continue
        seen.add(id(linear))
        here = (id(parents[id(linear)][0]), tensor)
        if here == last:
            groups[-1].append(id(linear))
        else:
            groups.append([id(linear)])
        last = here
    return [group for group in groups if len(group) > 1]


def pack_experts(root: nn.Module) -> None:
    """Give every fused-experts module below `root` one Packed product per expert and drop the 3-D parameters."""
    for module in root.modules():
        if not isinstance(getattr(module, "down_proj", None), nn.Parameter):
            continue
        if getattr(module, "has_post_expert_norm", True):  # absent: experts that are not dispatched by name
            raise ModelError(f"{type(module).__name__} computes its experts in a way that is not supported")
        setattr(module.config, "_experts_implementation", EXPERTS)  # noqa: B010 - mypy does not know the config
        first = "gate_up_proj" if module.has_gate else "up_proj"
        for name in (first, "down_proj"):
            weights = getattr(module, name).detach()
            biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
            products = [pack(w.t() if module.is_transposed else w, b) for w, b in zip(weights, biases, strict=True)]
            delattr(module, name)
            setattr(module, "first_products" if name == first else "second_products", products)


def _invariant_experts(module: Any, hidden_ND: Tensor, top_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """Mixture of experts, expert by expert, each token's experts summed in their top-k order in fp32."""
    out = torch.zeros(*top_NK.shape, hidden_ND.shape[1], dtype=hidden_ND.dtype)
    for expert in torch.unique(top_NK).tolist():
        rows, ranks = torch.where(top_NK == expert)
        y = module.first_products[expert](hidden_ND[rows])
        y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
        y = module.second_products[expert](y)
        out[rows, ranks] = (y * weight_NK[rows, ranks, None]).to(out.dtype)
    return out.float().sum(1).to(hidden_ND.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _invariant_experts)
