"""Recipes of families that norm what a branch computed before it joins the residual stream: olmo2, olmo3, exaone4, glm4."""

from manyhands.program.blocks import (
    AttentionStyle,
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    gated,
    head_scale,
    sandwich,
    sequential,
    sliding,
    windows,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.fields import Fields
from manyhands.program.ops import Program, Rope
from manyhands.program.rope import RopeReader


def olmo2(f: Fields) -> Program:
    """Norms behind attention and block, and over all heads of q and of k at once."""
    s = Sizes.read(f, kv=False)
    rope = RopeReader(f)
    return _olmo(f, s, rope, [rope.plain(s.head)], [0] * s.layers, [None] * s.layers)


def olmo3(f: Fields) -> Program:
    """olmo2 with windows in three of four layers, which have a table of their own."""
    s = Sizes.read(f, kv=False)
    rope = RopeReader(f, theta=500000.0)
    full = range(3, s.layers, 4)
    found = windows(f, s.layers, sliding(s.layers, full), f.count("sliding_window", 4096))
    ropes = [
        rope.by_type("full_attention", s.head, theta=500000.0, scaled=True),
        rope.by_type("sliding_attention", s.head, theta=500000.0, scaled=False),
    ]
    return _olmo(f, s, rope, ropes, [0 if window is None else 1 for window in found], found)


def exaone4(f: Fields) -> Program:
    """Norms of heads; where some layers have windows, the others have no positions."""
    s, window = Sizes.read(f), f.optional_count("sliding_window", 4096)
    if f.has("layer_types"):
        f.ignore("sliding_window_pattern")  # "LLLG" in published configs
    every = s.layers if window is None or f.has("layer_types") else f.count("sliding_window_pattern", 4)
    full = range(s.layers) if window is None else range(every - 1, s.layers, every)
    found, rope = windows(f, s.layers, sliding(s.layers, full), window), RopeReader(f)
    norm = NormStyle("rms", f.number("rms_norm_eps", 1e-5))
    styles = [
        AttentionStyle(head_scale(s.head), None if window and w is None else 0, window=w, head_norm=norm) for w in found
    ]
    return _behind(f, s, norm, rope, [rope.plain(s.head)], styles)


def _olmo(
    f: Fields, s: Sizes, rope: RopeReader, ropes: list[Rope], tables: list[int], found: list[int | None]
) -> Program:
    norm, bias = NormStyle("rms", f.number("rms_norm_eps", 1e-5)), f.flag("attention_bias")
    styles = [
        AttentionStyle(head_scale(s.head), table, bias=bias, out_bias=bias, window=w, head_norm=norm, wide_norm=True)
        for table, w in zip(tables, found, strict=True)
    ]
    return _behind(f, s, norm, rope, ropes, styles)


def _behind(
    f: Fields, s: Sizes, norm: NormStyle, rope: RopeReader, ropes: list[Rope], styles: list[AttentionStyle]
) -> Program:
    """A family with norms behind attention and block, with one style of attention a layer."""
    act = f.activation()

    def layer(n: TensorNames, i: int) -> Ops:
        first, block = attention(n, s, styles[i], "x", "a"), gated(n, "mlp", s.hidden, s.inner, act, "x", "m")
        return sequential(
            Branch(first, "a", after=norm.op(n, "post_attention_layernorm", s.hidden, "a", "a")),
            Branch(block, "m", after=norm.op(n, "post_feedforward_layernorm", s.hidden, "m", "m")),
        )

    return assemble(f, s, norm, rope, ropes, EndsStyle(), layer)


def glm4(f: Fields) -> Program:
    """Norms before and behind; pairs of the first half of a head turn; fused gate and up."""
    s, bias, act = Sizes.read(f, head=128), f.flag("attention_bias", True), f.activation()
    norm = NormStyle("rms", f.number("rms_norm_eps", 1.5625e-07))
    style = AttentionStyle(head_scale(s.head), pairs=True, bias=bias)
    order = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    rope = RopeReader(f, fraction=f.number("partial_rotary_factor", 0.5))

    def layer(n: TensorNames, i: int) -> Ops:
        block = gated(n, "mlp", s.hidden, s.inner, act, "h", "m", fused="gate_up_proj")
        return sandwich(n, s, norm, order, attention(n, s, style, "h", "a"), block)

    return assemble(f, s, norm, rope, [rope.plain(s.head, partial=True)], EndsStyle(), layer)
