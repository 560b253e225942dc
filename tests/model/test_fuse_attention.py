"""manyhands.model.fuse_attention: attention that our kernels compute whole, and modules that only look like it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.glm4 import modeling_glm4 as glm4
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb

from manyhands.core import Span
from manyhands.model import attention, tiles
from manyhands.model.attend import AttentionKind, Front, front
from manyhands.model.attention import running
from manyhands.model.cache import CacheProbe, LayerShape, ShardCache, ShardSegment, StepPlan
from manyhands.model.fuse import fuse
from manyhands.model.shard import Shard
from manyhands.testing.tiny import FAMILIES, make_tiny

pytestmark = pytest.mark.skipif(not tiles.available(), reason="no kernel of ours here")

HIDDEN, DIM, LAYER = 48, 16, 1
CONFIG: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": DIM}
# Latent attention (MLA), and norms over all heads at once.
AS_THEY_ARE = {"minicpm3", "deepseek_v3", "olmo2"}

Turn = tuple[Tensor, Tensor]


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def turn(count: int, width: int = DIM, seed: int = 3, doubled: bool = True) -> Turn:
    angles = torch.rand(1, count, width, generator=torch.Generator().manual_seed(seed)) * 6
    if doubled:
        angles = angles[..., : width // 2].repeat(1, 1, 2)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def is_fused(module: nn.Module) -> bool:
    return not hasattr(module, "o_proj")


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    shard = Shard(make_tiny(family, tmp_path / "model"), Span(1, 5), "bf16")
    layers = [layer for layer in shard._layers if hasattr(layer, "self_attn")]
    assert [not hasattr(layer.self_attn, "o_proj") for layer in layers] == [family not in AS_THEY_ARE] * 4
    assert {layer: shape.dtype for layer, shape in shard.shapes.items()} == dict.fromkeys(range(1, 5), torch.bfloat16)


class Plain(Qwen3Attention):  # type: ignore[misc]
    """Norms of the heads with weights of their own, and what a subclass changes on the way."""

    def __init__(self, **options: Any) -> None:
        config = Qwen3Config(**CONFIG, **options)
        config._attn_implementation = attention.NAME
        super().__init__(config, LAYER)
        generator = torch.Generator().manual_seed(4)
        for name, parameter in self.named_parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2 + ("norm" in name)
        self.bfloat16()


class Biased(Plain):
    def __init__(self) -> None:
        super().__init__(attention_bias=True)
        self.o_proj.bias = None
        self.k_proj.bias = None


class Windowed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.sliding_window = 5
        self.scaling = 0.7


def changed(change: Callable[[Any, Tensor, Turn, dict[str, Any]], Any]) -> Qwen3Attention:
    """A module whose forward is `change`, which may call `plain` on the way."""

    class Twin(Plain):
        def plain(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

        def forward(
            self, hidden_states: Tensor, position_embeddings: Turn, attention_mask: Tensor | None = None, **kwargs: Any
        ) -> Any:
            return change(self, hidden_states, position_embeddings, {**kwargs, "attention_mask": attention_mask})

    return Twin()


def scaled(name: str, by: Callable[[Tensor], Tensor]) -> Qwen3Attention:
    """One projection's result changed."""

    def change(self: Any, x: Tensor, turn: Turn, kwargs: dict[str, Any]) -> Any:
        hook = getattr(self, name).register_forward_hook(lambda _, __, out: by(out))
        try:
            return self.plain(x, turn, **kwargs)
        finally:
            hook.remove()

    return changed(change)


class NormLast(Plain):
    """Norms after the rotation."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Turn, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        shape = (1, -1, 2, DIM)
        query = self.q_proj(hidden_states).view(1, -1, 4, DIM).transpose(1, 2)
        key, value = (x(hidden_states).view(shape).transpose(1, 2) for x in (self.k_proj, self.v_proj))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        out, _ = attention.attention(self, self.q_norm(query), self.k_norm(key), value, None, self.scaling)
        return self.o_proj(out.flatten(2)), None


class Gated(Plain):
    """A projection more, as qwen3_next has it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, HIDDEN).bfloat16()


class Centred(Plain):
    """Norms that subtract the mean are not ours."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(DIM).bfloat16()


class ByPosition(Plain):
    """As llama4 and ministral3 scale queries: the same up to 8192 positions."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Turn, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        factor = 1 + 0.1 * (1 + kwargs["position_ids"] // 8192).float().log()
        cos, sin = (x * factor[..., None].to(x.dtype) for x in position_embeddings)
        return super().forward(hidden_states, (cos, sin), attention_mask, **kwargs)


class WithGain(Plain):
    """A parameter of its own, too near to one to show."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0078).bfloat16())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return out * self.gain, weights


TWINS = {
    "a gain near one": WithGain(),
    "wide clip": scaled("v_proj", lambda x: x.clamp(-900, 900)),
    "no rotation": changed(lambda self, x, t, k: self.plain(x, (torch.ones_like(t[0]), torch.zeros_like(t[1])), **k)),
    "turned the other way": changed(lambda self, x, t, k: self.plain(x, (t[0], -t[1]), **k)),
    "norms last": NormLast(),
    "queries scaled": scaled("q_norm", lambda x: x * 1.04),
    "values scaled": scaled("v_proj", lambda x: x * 0.96),
    "values clipped": scaled("v_proj", lambda x: x.clamp(-8, 8)),
    "residual inside": changed(lambda self, x, t, k: (self.plain(x, t, **k)[0] + x, None)),
    "out of clipped": scaled("o_proj", lambda x: x.clamp(-1, 1)),
    "a tensor alone": changed(lambda self, x, t, k: self.plain(x, t, **k)[0]),
    "weights with it": changed(lambda self, x, t, k: (self.plain(x, t, **k)[0], x)),
    "one projection more": Gated(),
    "norms with a mean": Centred(),
    "by position": ByPosition(),
    "fp32": Plain().float(),
}


def load(module: nn.Module, position: Turn | None = None) -> nn.Module:
    """A copy, after what Shard does with it: fuse, then one probe step of four rows."""
    ours = copy.deepcopy(module)
    fuse(ours, "bf16")
    position = position or turn(4)
    x = numbers(1, 4, HIDDEN).to(next(module.parameters()).dtype)
    with running(CacheProbe()), torch.inference_mode():
        ours(x, position_embeddings=position, attention_mask=None, position_ids=torch.arange(4)[None])
    return ours


@pytest.mark.parametrize("module", TWINS.values(), ids=TWINS.keys())
def test_what_only_looks_like_it_stays(module: nn.Module) -> None:
    """And computes what it did."""
    ours = load(module)
    assert not is_fused(ours)
    dtype = next(module.parameters()).dtype
    call = {"position_embeddings": turn(9), "attention_mask": None, "position_ids": torch.arange(9)[None]}
    got, want = (run(x, numbers(1, 9, HIDDEN).to(dtype), **call) for x in (ours, with_our_norms(module)))
    assert torch.equal(got, want)


def test_a_float_given_beside_the_rotation_is_not_left_out() -> None:
    """A scale by position, as beam's models pass it, may be one wherever a trial looks."""
    ours = copy.deepcopy(Plain())
    fuse(ours, "bf16")
    given = {"position_embeddings": turn(4), "attention_mask": None, "scale": torch.ones(1, 4)}
    with running(CacheProbe()), torch.inference_mode():
        ours(numbers(1, 4, HIDDEN).bfloat16(), **given)
    assert not is_fused(ours)


def with_our_norms(module: nn.Module) -> nn.Module:
    out = copy.deepcopy(module)
    for child in (out.q_norm, out.k_norm):
        fuse(child, "bf16")  # type: ignore[arg-type]
    return out


def run(module: nn.Module, x: Tensor, **call: Any) -> Tensor:
    count, dtype = x.shape[1], x.dtype
    cache = ShardCache({LAYER: LayerShape(2, DIM, DIM, dtype)}, count)
    with running(StepPlan([ShardSegment(cache, 0, 0, count)])), torch.inference_mode():
        out = module(x, **call)
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


@pytest.mark.parametrize("kind", [Plain, Biased, Windowed])
def test_it_is_right(kind: type[Plain]) -> None:
    """Against the same module unfused: roundings apart, which products and norms have."""
    module = kind()
    ours = load(module)
    assert is_fused(ours) and not list(ours.parameters())
    x, call = numbers(1, 150, HIDDEN), {"position_embeddings": turn(150), "attention_mask": None}
    got, want = (run(m, x, **call) for m in (ours, module))
    assert (got.float() - want.float()).norm() / want.float().norm() < 0.01


def test_the_model_must_turn_halves_alike() -> None:
    """Our kernel reads one half of cos and sin: a model whose halves differ keeps its own module."""
    assert is_fused(load(Plain(), turn(4)))
    assert not is_fused(load(Plain(), turn(4, doubled=False)))


@pytest.mark.parametrize("turns", [1, 3, 8, 20, 32])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("count", [1, 200])
def test_the_rotation_has_the_bits_of_transformers(turns: int, pairs: bool, count: int) -> None:
    """Whole heads and parts of them, halves (phi3) and pairs (glm4); values are left alone."""
    heads, key_heads, dim = 3, 2, 64
    rows, (cos, sin) = numbers(count, (heads + 2 * key_heads) * dim) * 3, turn(count, 2 * turns)
    parts = rows.clone().view(1, count, -1, dim).transpose(1, 2)
    query, key, value = torch.split(parts, [heads, key_heads, key_heads], 1)
    apply = (glm4 if pairs else phi3).apply_rotary_pos_emb
    want = torch.cat([*apply(query, key, cos, sin), value], 1).transpose(1, 2).reshape(count, -1)
    kind = AttentionKind(LAYER, heads, key_heads, dim, dim, 0, scale=1.0, softcap=0)
    front(kind, Front.of(turns, pairs, None, None, None), rows, cos, sin)
    assert torch.equal(rows, want)


def test_whole_heads_turn_as_in_most_families() -> None:
    rows, (cos, sin) = numbers(5, 3 * DIM), turn(5)
    query, key = torch.split(rows.clone().view(1, 5, 3, DIM).transpose(1, 2), [1, 2], 1)
    want = torch.cat(qwen3.apply_rotary_pos_emb(query, key, cos, sin), 1).transpose(1, 2).reshape(5, -1)
    kind = AttentionKind(LAYER, 1, 2, DIM, 0, 0, scale=1.0, softcap=0)
    front(kind, Front.of(DIM // 2, False, None, None, None), rows, cos, sin)
    assert torch.equal(rows, want)


def test_rows_of_no_segment_come_out_as_zeros() -> None:
    ours, x = load(Plain()), numbers(1, 5, HIDDEN)
    cache = ShardCache({LAYER: LayerShape(2, DIM, DIM, torch.bfloat16)}, 9)
    with running(StepPlan([ShardSegment(cache, 4, 1, 3)])), torch.inference_mode():
        out, _ = ours(x, position_embeddings=turn(5), attention_mask=None)
    assert not out[0, 0].any() and not out[0, 4].any() and bool(out[0, 1:4].any(1).all())
    assert not cache.keys[LAYER][:, :, :4].any() and not cache.keys[LAYER][:, :, 7:].any()


def test_inputs_apart_in_memory() -> None:
    """Hidden states that are columns of something wider, cosines that are no block: as their copies."""
    ours, (cos, sin) = load(Plain()), turn(20)
    wide = numbers(1, 20, HIDDEN + 7)[..., 3 : 3 + HIDDEN]
    strided = cos.transpose(1, 2).contiguous().transpose(1, 2), sin
    want = run(ours, wide.contiguous(), position_embeddings=(cos, sin), attention_mask=None)
    assert torch.equal(run(ours, wide, position_embeddings=strided, attention_mask=None), want)
