"""Row-invariant exp, sigmoid, tanh and their kin.

ATen computes elementwise functions in vectors of two registers and the rest of a range one by one, with another exp: an
element's bits depend on whether it falls into that tail, which moves with the number of rows and of threads (found where
three mixture-of-experts families failed in fp32; in bf16 the rounding hides all but a few). So these functions run on
flat tensors padded to whole vectors, and in pieces that one thread takes alone where a split would not fall on a vector.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyhands.model.linear import invariant_linear

# Two AVX-512 registers of fp32 (bf16 is computed as fp32 pairs: 64 elements a step).
_VECTOR = 64
# at::internal::GRAIN_SIZE: shorter ranges are never split among threads, longer ones into at most one part a grain ...
_GRAIN = 32768
# ... except by GELU, which splits what is longer than this among all threads (ATen's Activation.cpp).
_PIECE = 16384


def is_tail_free(num_elements: int, num_threads: int) -> bool:
    """Whether ATen covers a contiguous range of so many elements in whole vectors, on that many threads."""
    splits = {1} if num_elements <= _PIECE else {num_threads, min(num_threads, math.ceil(num_elements / _GRAIN))}
    return all(num_elements % (_VECTOR * parts) == 0 for parts in splits)


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), its bits independent of x's other elements. `function` must act on each element alone."""
    flat = x.reshape(-1)  # a copy where x is a slice of a fused product
    count = flat.numel()
    if is_tail_free(count, torch.get_num_threads()):
        return function(flat).view(x.shape)
    padded = F.pad(flat, (0, -count % _VECTOR))
    pieces = [function(padded[at : at + _PIECE]) for at in range(0, padded.numel(), _PIECE)]
    return torch.cat(pieces)[:count].view(x.shape)


class InvariantActivation(nn.Module):
    """Stands in for an MLP's activation function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return elementwise(self.function, x)


_ELEMENTWISE = {
    getattr(place, name)
    for place in (torch, Tensor, F)
    for name in ("exp", "sigmoid", "tanh", "cos", "sin", "silu", "gelu", "softplus")
    if hasattr(place, name)
}


class InvariantMode(TorchFunctionMode):
    """Inside a `with`, on this thread: products and elementwise functions that a module calls by itself are invariant."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is F.linear:
            return invariant_linear(*args, **kwargs)
        if func in _ELEMENTWISE:
            return elementwise(lambda x: func(x, *args[1:], **kwargs), args[0])
        return func(*args, **kwargs)


def guard(root: nn.Module) -> None:
    """Make what the modules of `root` compute by themselves row-invariant.

    Activations are replaced; rotary embeddings, routers (a bare matrix) and mixture-of-experts blocks run in InvariantMode.
    """
    for module in list(root.modules()):
        for name, child in module.named_children():
            if "act" in name and not any(True for _ in child.parameters()):
                setattr(module, name, InvariantActivation(child))
        if _computes_by_itself(module):
            module.forward = _guarded(module.forward)


def _computes_by_itself(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear | nn.Embedding):
        return False
    bare = any(p.dim() >= 2 for p in module.parameters(recurse=False))
    return bare or "Rotary" in type(module).__name__ or hasattr(module, "experts")


def _guarded(forward: Callable[..., object]) -> Callable[..., object]:
    def guarded(*args: object, **kwargs: object) -> object:
        with InvariantMode():
            return forward(*args, **kwargs)

    return guarded
