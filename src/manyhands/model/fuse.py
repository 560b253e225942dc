"""Whole modules of transformers' layers that our own kernels compute in one call, where there are such (tiles.py).

Between two products of a decoded token the caches of a core hold weights, so what costs there is how much code runs, cold, not
how much it computes: five small operations take 0.25 ms. A module is recognised by what it has and by what it computes on
numbers of our own, never by its family; one that is not recognised runs as transformers has it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core import Precision
from manyhands.model import tiles

_WIDTH = 16  # columns that the kernel treats as one
_ROWS = 8
# Relative error of a recognised module's output: its own intermediate roundings to bf16 are worth about 0.004.
_NEAR = 0.02


def fuse(root: nn.Module, precision: Precision) -> None:
    """Give every module below `root` that is recognised a forward of ours; parameters it no longer needs are dropped."""
    if precision != "bf16" or not tiles.available():
        return
    for module in list(root.modules()):
        _fuse_norm(module)
        _fuse_gated(module)


def _fuse_norm(module: nn.Module) -> None:
    """Root mean square norms over the last dimension, weighted by w or by 1 + w."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or not isinstance(epsilon, float) or any(True for _ in module.children()):
        return
    x = _numbers(_ROWS, len(weight))
    with torch.inference_mode():
        for factor in (weight.detach().float(), 1 + weight.detach().float()):
            norm = tiles.Norm(factor, epsilon)
            if _near(norm(x), module(x)):
                module.forward = norm
                return


def _fuse_gated(module: nn.Module) -> None:
    """down(activation(gate(x)) * up(x)), with gate and up apart or one above the other in one matrix."""
    linears = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    others = [child for name, child in module.named_children() if name not in linears]
    first = _gate_above_up(linears)
    activation = _activation(others[0]) if len(others) == 1 and first else None
    if (
        first is None
        or activation is None
        or len(first[0]) % (2 * _WIDTH)
        or any(True for _ in module.parameters(False))
    ):
        return
    product, down = tiles.gated(*first, activation), tiles.Tiled(*_detached(linears["down_proj"]))

    def forward(x: Tensor) -> Tensor:
        return down(product(x.reshape(-1, x.shape[-1]))).view(x.shape)

    x = _numbers(_ROWS, first[0].shape[1])
    with torch.inference_mode():
        if not _near(forward(x), module(x)):
            return
    for name in linears:
        delattr(module, name)
    module.forward = forward


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
    kinds: dict[tiles.Activation, Any] = {
        "silu": nn.functional.silu,
        "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    }
    if any(True for _ in module.parameters()):
        return None
    with torch.inference_mode():
        got = module(x)
    return next((name for name, kind in kinds.items() if torch.allclose(got, kind(x), atol=1e-5)), None)


def _numbers(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()


def _near(got: Tensor, want: Any) -> bool:
    """Whether the two are one up to rounding, all in all."""
    if not isinstance(want, Tensor) or want.shape != got.shape or want.dtype != got.dtype:
        return False
    return bool((got.float() - want.float()).norm() <= _NEAR * want.float().norm())
