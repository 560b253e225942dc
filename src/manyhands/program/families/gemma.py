"""Recipes of gemma, gemma2, gemma3_text and vaultgemma."""

import math
from dataclasses import dataclass

from manyhands.program.blocks import (
    AttentionStyle,
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    before_each,
    gated,
    head_scale,
    sandwich,
    sequential,
    sliding,
    windows,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.fields import Fields
from manyhands.program.ops import Activation, Program, Rope
from manyhands.program.rope import RopeReader


def _norm(f: Fields) -> NormStyle:
    """1 + weight, which GGUF files hold added."""
    return NormStyle("rms", f.number("rms_norm_eps", 1e-6), offset=0.0 if f.stored("norms_plus_one") else 1.0)


def gemma(f: Fields) -> Program:
    """1 + weight in norms, scaled embedding, tanh-gelu (which an old name of the config also means)."""
    f.only("use_bidirectional_attention", False)
    f.only("hidden_activation", "gelu_pytorch_tanh")
    f.only("hidden_act", "gelu_pytorch_tanh", "gelu", "gelu_new")
    s, bias = Sizes.read(f, head=256), f.flag("attention_bias")
    norm = _norm(f)
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias)
    rope = RopeReader(f)

    def layer(n: TensorNames, i: int) -> Ops:
        block = gated(n, "mlp", s.hidden, s.inner, "gelu_tanh", "h", "m")
        return before_each(n, s, norm, attention(n, s, style, "h", "a"), block)

    return assemble(f, s, norm, rope, [rope.plain(s.head)], _gemma_ends(s), layer)


def _gemma_ends(s: Sizes, soft_cap: float | None = None) -> EndsStyle:
    return EndsStyle(tied=True, embed_scale=math.sqrt(s.hidden), round_scale=True, soft_cap=soft_cap)


@dataclass(frozen=True, slots=True)
class Wrapped:
    """What gemma2 and gemma3 do differently: tables (and which a layer uses), windows, soft caps, norms of heads."""

    ropes: list[Rope]
    tables: list[int]
    windows: list[int | None]
    attention_cap: float | None
    logit_cap: float | None
    head_norm: NormStyle | None = None
    is_wrapped: bool = True  # norms behind as well as before


def gemma2(f: Fields) -> Program:
    """gemma with norms before and behind, windows in every second layer, soft caps."""
    return _capped(f, is_wrapped=True)


def vaultgemma(f: Fields) -> Program:
    """gemma2 without norms behind."""
    return _capped(f, is_wrapped=False)


def _capped(f: Fields, *, is_wrapped: bool) -> Program:
    s, rope = Sizes.read(f, head=256), RopeReader(f)
    window = f.optional_count("sliding_window", 4096)
    f.only("sliding_window_size", window)  # an older name, in the configs of the 9B and 27B
    found = windows(f, s.layers, sliding(s.layers, range(1, s.layers, 2)), window)
    caps = f.optional("attn_logit_softcapping", 50.0), f.optional("final_logit_softcapping", 30.0)
    w = Wrapped([rope.plain(s.head)], [0] * s.layers, found, *caps, is_wrapped=is_wrapped)
    return _wrapped(f, s, rope, w)


def gemma3_text(f: Fields) -> Program:
    """gemma2 with norms of heads instead of soft caps, and a table of its own for sliding layers."""
    s, rope = Sizes.read(f, head=256), RopeReader(f)
    f.only("attn_logit_softcapping", None)
    f.ignore("_sliding_window_pattern")  # transformers writes it beside layer_types, and reads sliding_window_pattern
    every = f.count("sliding_window_pattern", 6)
    found = windows(f, s.layers, sliding(s.layers, range(every - 1, s.layers, every)), f.count("sliding_window", 4096))
    ropes = [
        rope.by_type("full_attention", s.head, theta=1000000.0, field="rope_theta", scaled=True),
        rope.by_type("sliding_attention", s.head, theta=10000.0, field="rope_local_base_freq", scaled=False),
    ]
    norm = _norm(f)
    tables = [0 if window is None else 1 for window in found]
    return _wrapped(f, s, rope, Wrapped(ropes, tables, found, None, f.optional("final_logit_softcapping"), norm))


def _wrapped(f: Fields, s: Sizes, rope: RopeReader, w: Wrapped) -> Program:
    f.only("use_bidirectional_attention", False)
    act: Activation = f.activation("hidden_activation", "gelu_pytorch_tanh")
    f.ignore("hidden_act")  # an older name: transformers reads hidden_activation alone
    norm = _norm(f)
    scale, bias = head_scale(f.count("query_pre_attn_scalar", 256)), f.flag("attention_bias")
    order = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

    def layer(n: TensorNames, i: int) -> Ops:
        style = AttentionStyle(
            scale,
            w.tables[i],
            bias=bias,
            out_bias=bias,
            window=w.windows[i],
            soft_cap=w.attention_cap,
            head_norm=w.head_norm,
        )
        block = gated(n, "mlp", s.hidden, s.inner, act, "h", "m")
        first = attention(n, s, style, "h", "a")
        if w.is_wrapped:
            return sandwich(n, s, norm, order, first, block)
        before = [norm.op(n, name, s.hidden, "x", "h") for name in order[::2]]
        return sequential(Branch(first, "a", before[0]), Branch(block, "m", before[1]))

    return assemble(f, s, norm, rope, w.ropes, _gemma_ends(s, w.logit_cap), layer)
