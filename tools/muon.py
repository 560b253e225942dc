"""Muon (K. Jordan, 2024) for the hidden matrices of a small model, in fp32.

As torch.optim.Muon with adjust_lr_fn="match_rms_adamw", which iterates in bf16: CPUs with neither AMX nor AVX-512 emulate that,
and it then takes longer than the gradients.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # an odd quintic that is steep at zero
ITERATIONS = 5
MOMENTUM = 0.95


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix whose singular values are all about 1 (0.7 to 1.2), same shape."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, then the orthogonal matrix nearest to it, as long as a step of AdamW at the same rate."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": MOMENTUM, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step down the gradients of matrices. `closure` is not called."""
        for group in self.param_groups:
            for matrix in group["params"]:
                self._step(matrix, group)

    def _step(self, matrix: Tensor, group: dict[str, Any]) -> None:
        if matrix.grad is None:
            return
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
        update = orthogonal(matrix.grad.lerp(state["momentum"], group["momentum"]))
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)
