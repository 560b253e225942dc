"""Whole attention modules in one native call: one product for queries, keys and values, norms of the heads, rotary
embedding, the caches, attention, and the product behind.

A module is recognised at its first call (the probe step of a load), by its parts, by the queries, keys and values that it
hands to attention, and by what it makes of the answer, on numbers of our own. One that is not runs as transformers has it.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.model import tiles
from manyhands.model.attend import AttentionKind, Front, Module, front, serves
from manyhands.model.attention import CallRecorder, RecordedCall, current, running
from manyhands.model.cache import CacheProbe, LayerShape

# Relative error of the worst head of a row: a module's own roundings to bf16 are worth up to 0.006.
_NEAR = 0.015
_NORMS = ("q_norm", "k_norm")
# Positions of the trial, where they are given: what depends on them beyond the rotation shows far from zero.
_FAR = 99_991

Forward = Callable[..., tuple[Tensor, None]]


def fuse_attention(module: nn.Module) -> None:
    """If `module` may be an attention, decide at its first call, inside `attention.running`, and give it a forward of ours."""
    if _linears(module) is None or list(inspect.signature(module.forward).parameters)[:2] != [
        "hidden_states",
        "position_embeddings",
    ]:
        return
    stock = module.forward

    def decide(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(stock).bind(*args, **kwargs)
        fused = _recognised(module, stock, _arguments(call))
        module.forward = fused.forward if fused else stock
        vars(module)["kernel"] = fused and fused.module
        return module.forward(*args, **kwargs)

    module.forward = decide


def _arguments(call: inspect.BoundArguments) -> dict[str, Any]:
    names = [p.name for p in call.signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    rest = {key: value for name in names for key, value in call.arguments.get(name, {}).items()}
    return {**{name: value for name, value in call.arguments.items() if name not in names}, **rest}


def _linears(module: nn.Module) -> tuple[list[nn.Linear], nn.Linear] | None:
    """The projections into queries, keys and values, in order, and the one out of attention."""
    children = {name: child for name, child in module.named_children() if name not in _NORMS}
    first = [name for name in ("qkv_proj", "q_proj", "k_proj", "v_proj") if name in children]
    linears = [child for name in [*first, "o_proj"] if type(child := children.get(name)) is nn.Linear]
    if first not in (["qkv_proj"], ["q_proj", "k_proj", "v_proj"]) or len(linears) != len(first) + 1:
        return None
    others = [child for name, child in children.items() if name not in first and name != "o_proj"]
    if any(p is not None for child in others for p in child.parameters()):
        return None
    return linears[:-1], linears[-1]


def _joined(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One matrix of several, and its bias if any has one."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases = [weight.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in linears]
    return weight, torch.cat(biases)


@dataclass(slots=True)
class _Fused:
    """What takes the place of one module: [N, hidden] to the same."""

    module: Module
    layer: int
    shape: LayerShape

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: object, **__: object
    ) -> tuple[Tensor, None]:
        plan = current()
        assert not isinstance(plan, CallRecorder)
        if isinstance(plan, CacheProbe):
            plan.shapes[self.layer] = self.shape
            return torch.zeros_like(hidden_states), None
        return self.module(plan, hidden_states[0], *position_embeddings)[None], None


def _recognised(module: nn.Module, stock: Forward, call: dict[str, Any]) -> _Fused | None:
    found = _linears(module)
    turn = call.get("position_embeddings")
    if found is None or not isinstance(turn, tuple) or len(turn) != 2 or call["hidden_states"].dtype != torch.bfloat16:
        return None
    given = [value for name, value in call.items() if isinstance(value, Tensor) and name != "hidden_states"]
    if any(value.is_floating_point() for value in given):
        return None  # a scale by position, say, which a trial need not show
    product, out = tiles.Tiled(*_joined(found[0])), tiles.Tiled(*_joined([found[1]]))
    chosen: _Fused | None = None
    for scale in (1.0, 30.0, 1e4):  # great ones show a limit on queries, keys and values
        trial = _trial(call, scale)
        listener = CallRecorder()
        try:
            with running(listener), torch.inference_mode():
                result = stock(**trial)
        except Exception:  # an unknown module: what it does not take, it is not what we look for
            return None
        heard = listener.heard
        if heard is None or not isinstance(result, tuple) or len(result) != 2 or result[1] is not None:
            return None
        if any(parameter is not heard.sinks for parameter in module.parameters(recurse=False)):
            return None
        candidates = [chosen] if chosen else _candidates(module, heard, product, out, trial)
        chosen = next((fused for fused in candidates if _does_the_same(fused, trial, heard, result[0])), None)
        if chosen is None:
            return None
    assert chosen is not None
    for name, _ in list(module.named_children()):
        delattr(module, name)
    return chosen


def _trial(call: dict[str, Any], scale: float) -> dict[str, Any]:
    """The same call with numbers of ours; a rotation whose halves are equal stays such."""
    generator = torch.Generator().manual_seed(int(scale))
    hidden, (cos, _) = call["hidden_states"], call["position_embeddings"]
    angles = torch.rand(cos.shape, generator=generator) * 6.3
    if _is_doubled(cos):
        angles = angles.chunk(2, -1)[0].repeat(1, 1, 2)
    far = {
        name: torch.arange(1, value.numel() + 1).view(value.shape).to(value.dtype) * _FAR
        for name, value in call.items()
        if isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64)
    }
    x = (torch.randn(hidden.shape, generator=generator) * scale).to(hidden.dtype)
    turn = angles.cos().to(cos.dtype), angles.sin().to(cos.dtype)
    return {**call, **far, "hidden_states": x, "position_embeddings": turn}


def _is_doubled(cos: Tensor) -> bool:
    first, second = cos.chunk(2, -1) if cos.shape[-1] % 2 == 0 else (cos, cos[..., :0])
    return torch.equal(first, second)


def _candidates(
    module: nn.Module, heard: RecordedCall, product: tiles.Tiled, out: tiles.Tiled, trial: dict[str, Any]
) -> Iterator[_Fused]:
    heads, key_heads, dim, value_dim = heard.query.shape[1], *heard.key.shape[1::2], heard.value.shape[3]
    width = (heads + key_heads) * dim + key_heads * value_dim
    children = [getattr(module, name, None) for name in _NORMS]
    norms = [getattr(child, "kernel", None) for child in children]
    cos = trial["position_embeddings"][0]
    turns = cos.shape[-1] // 2 if _is_doubled(cos) else cos.shape[-1]
    if any(child is not None and norm is None for child, norm in zip(children, norms, strict=True)):
        return
    if any(norm is not None and len(norm.weight) != dim for norm in norms):
        return
    if width != product.shape[0] or 2 * turns > dim or not serves(cos.dtype, dim, heard.scale):
        return
    kind = AttentionKind(
        heard.layer, heads, key_heads, dim, value_dim, heard.window or 0, scale=heard.scale, softcap=heard.softcap or 0
    )
    shape = LayerShape(key_heads, dim, value_dim, torch.bfloat16)
    for pairs in (False, True):
        before = Front.of(turns, pairs, norms[0], norms[1], heard.sinks)
        yield _Fused(Module(kind, before, product, out), heard.layer, shape)


def _does_the_same(fused: _Fused, trial: dict[str, Any], heard: RecordedCall, result: Tensor) -> bool:
    module = fused.module
    rows = module.first(trial["hidden_states"][0])
    front(module.kind, module.front, rows, *trial["position_embeddings"])
    wanted = [x[0].transpose(0, 1) for x in (heard.query, heard.key, heard.value)]
    got = torch.split(rows, [x.shape[1] * x.shape[2] for x in wanted], 1)
    near = all(_error(x.reshape(y.shape), y) <= _NEAR for x, y in zip(got, wanted, strict=True))
    return near and _error(module.last(heard.answer[0].flatten(1)), result[0]) <= _NEAR


def _error(got: Tensor, want: Tensor) -> float:
    """The relative error of the worst row; infinite where shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    off = (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)
    return float(off.nan_to_num(nan=float("inf")).max())
