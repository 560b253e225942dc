"""Whole modules of transformers' layers that our own kernels compute in one call, where there are such (tiles.py).

Between two products of a decoded token the caches of a core hold weights, so what costs there is how much code runs, cold, not
how much it computes: five small operations take 0.25 ms. A module is recognised by what it has and by what it computes on
numbers of our own, never by its family; one that is not recognised runs as transformers has it.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from manyhands.core import Precision
from manyhands.model import tiles
from manyhands.model.fuse_attention import fuse_attention

_WIDTH = 16  # columns that the kernel treats as one
# Relative errors of the worst row: a module's own roundings to bf16 are worth 0.004 in a norm, up to 0.01 in a block.
_NEAR_NORM, _NEAR_BLOCK = 0.008, 0.03


def fuse(root: nn.Module, precision: Precision) -> None:
    """Give every module below `root` that is recognised a forward of ours; parameters it no longer needs are dropped."""
    if precision != "bf16" or not tiles.available():
        return
    for module in list(root.modules()):
        _fuse_norm(module)
        _fuse_gated(module)
        fuse_attention(module)


def _fuse_norm(module: nn.Module) -> None:
    """Root mean square norms over the last dimension, weighted by w or by 1 + w."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or not isinstance(epsilon, float) or any(True for _ in module.children()):
        return
    if weight.dtype != torch.bfloat16 or not _takes_one(module):
        return
    stock, (width,) = module.forward, weight.shape
    # Rows about zero and rows far from it, where norms that subtract the mean differ; small ones show where epsilon stands.
    x = torch.cat(
        [_numbers(width) * scale + mean * scale for scale in (1e-3, 0.1, 1, 30) for mean in (0, 2)]
    ).bfloat16()
    norms = [tiles.NormKernel(factor, epsilon) for factor in (weight.detach().float(), 1 + weight.detach().float())]
    errors = [_error(norm, stock, x) for norm in norms]
    if min(errors) <= _NEAR_NORM:
        norm = norms[errors.index(min(errors))]
        module.forward = lambda x: norm(x) if x.dtype == torch.bfloat16 else stock(x)
        vars(module)["kernel"] = norm  # for an attention that norms its heads with it


def _fuse_gated(module: nn.Module) -> None:
    """down(activation(gate(x)) * up(x)), with gate and up apart or one above the other in one matrix."""
    linears = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    others = [child for name, child in module.named_children() if name not in linears]
    first = _gate_above_up(linears)
    activation = _activation(others[0]) if len(others) == 1 and first else None
    if first is None or activation is None or not _takes_one(module) or any(True for _ in module.parameters(False)):
        return
    (inner, width), last = (len(first[0]) // 2, first[0].shape[1]), linears["down_proj"].weight
    if inner % _WIDTH or last.shape != (width, inner) or {first[0].dtype, last.dtype} != {torch.bfloat16}:
        return
    product, down = tiles.gated(*first, activation), tiles.Tiled(*_detached(linears["down_proj"]))

    def forward(x: Tensor) -> Tensor:
        return down(product(x.reshape(-1, x.shape[-1]))).view(x.shape)

    # Large numbers show a limit on gate or up.
    x = torch.cat([_numbers(width) * scale for scale in (1, 30, 300)]).bfloat16()
    if _error(forward, module.forward, x) > _NEAR_BLOCK:
        return
    for name in linears:
        delattr(module, name)
    module.forward = forward
    vars(module)["kernel"] = product, down


def _gate_above_up(linears: dict[str, nn.Linear]) -> tuple[Tensor, Tensor | None] | None:
    if set(linears) == {"gate_up_proj", "down_proj"}:
        return _detached(linears["gate_up_proj"])
    if set(linears) != {"gate_proj", "up_proj", "down_proj"}:
        return None
    (gate, gate_bias), (up, up_bias) = _detached(linears["gate_proj"]), _detached(linears["up_proj"])
    if gate.shape != up.shape or (gate_bias is None) != (up_bias is None):
        return None
    return torch.cat([gate, up]), None if gate_bias is None or up_bias is None else torch.cat([gate_bias, up_bias])


def _detached(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()


def _activation(module: nn.Module) -> tiles.Activation | None:
    x = torch.linspace(-9, 9, 1024)
    kinds: dict[tiles.Activation, Callable[[Tensor], Tensor]] = {
        "silu": nn.functional.silu,
        "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    }
    if any(True for _ in module.parameters()):
        return None
    with torch.inference_mode():
        got = module(x)
    return next((name for name, kind in kinds.items() if torch.allclose(got, kind(x), atol=1e-5)), None)


def _takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def _numbers(columns: int) -> Tensor:
    return torch.randn(4, columns, generator=torch.Generator().manual_seed(0))


def _error(ours: Callable[[Tensor], Tensor], stock: Callable[[Tensor], object], x: Tensor) -> float:
    """The relative error of the worst row; infinite where `stock` computes something else altogether."""
    with torch.inference_mode():
        try:
            want = stock(x)
        except Exception:  # an unknown module: what it does not take, it is not what we look for
            return float("inf")
        if not isinstance(want, Tensor) or want.shape != x.shape or want.dtype != x.dtype:
            return float("inf")
        off = (ours(x).float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)
    return float(off.nan_to_num(nan=float("inf")).max())
