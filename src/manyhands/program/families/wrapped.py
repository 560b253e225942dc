"""Recipes of families that norm what a branch computed before it joins the residual stream: olmo2, olmo3, flex_olmo, exaone4,
glm4."""

from collections.abc import Callable
from dataclasses import replace

from manyhands.program.blocks import (
    AttentionStyle,
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    each_expert,
    gated,
    head_scale,
    router,
    sandwich,
    sequential,
    sliding,
    windows,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import GATE_UP_DOWN, top_k
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import ExpertRouting, Program, Rope
from manyhands.program.rope import RopeReader

Block = Callable[[TensorNames], Ops]  # a layer's second branch, from "x" to "m"


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
        rope.by_type("full_attention", s.head, theta=500000.0, field="rope_theta", scaled=True),
        rope.by_type("sliding_attention", s.head, theta=500000.0, scaled=False),
    ]
    return _olmo(f, s, rope, ropes, [0 if window is None else 1 for window in found], found)


def flex_olmo(f: Fields) -> Program:
    """olmo2 with experts."""
    f.assume(rms_norm_eps=1e-6)
    s, act = Sizes.read(f, kv=False), f.activation()
    count = f.count("num_local_experts" if f.has("num_local_experts") else "num_experts", 7, high=MOST_EXPERTS)
    f.only("num_experts", count)
    normalise, rope = f.flag("norm_topk_prob"), RopeReader(f, theta=500000.0)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 5), "softmax", normalise)

    def block(n: TensorNames) -> Ops:
        experts = each_expert(n, "mlp.experts", GATE_UP_DOWN, s, s.inner, count, act)
        return *router(n, "mlp.gate", s, route, source="x"), replace(experts, source="x")

    return _olmo(f, s, rope, [rope.plain(s.head)], [0] * s.layers, [None] * s.layers, block)


def exaone4(f: Fields) -> Program:
    """Attention as `exaone_styles` says."""
    s, rope, norm = Sizes.read(f), RopeReader(f), NormStyle("rms", f.number("rms_norm_eps", 1e-5))
    return _behind(f, s, norm, rope, [rope.plain(s.head)], exaone_styles(f, s, norm))


def exaone_styles(f: Fields, s: Sizes, norm: NormStyle) -> list[AttentionStyle]:
    """Norms of heads; where some layers have windows, the others have no positions."""
    window = f.optional_count("sliding_window", 4096)
    if f.has("layer_types"):
        f.ignore("sliding_window_pattern")  # "LLLG" in published configs
    every = s.layers if window is None or f.has("layer_types") else f.count("sliding_window_pattern", 4)
    full = range(s.layers) if window is None else range(every - 1, s.layers, every)
    found = windows(f, s.layers, sliding(s.layers, full), window)
    rows = [None if window and one is None else 0 for one in found]
    base = AttentionStyle(head_scale(s.head), head_norm=norm)
    return [replace(base, rope=row, window=one) for row, one in zip(rows, found, strict=True)]


def _olmo(
    f: Fields,
    s: Sizes,
    rope: RopeReader,
    ropes: list[Rope],
    tables: list[int],
    found: list[int | None],
    block: Block | None = None,
) -> Program:
    norm, bias = NormStyle("rms", f.number("rms_norm_eps", 1e-5)), f.flag("attention_bias")
    styles = [
        AttentionStyle(head_scale(s.head), table, bias=bias, out_bias=bias, window=w, head_norm=norm, wide_norm=True)
        for table, w in zip(tables, found, strict=True)
    ]
    return _behind(f, s, norm, rope, ropes, styles, block)


def _behind(
    f: Fields,
    s: Sizes,
    norm: NormStyle,
    rope: RopeReader,
    ropes: list[Rope],
    styles: list[AttentionStyle],
    block: Block | None = None,
) -> Program:
    """A family with norms behind attention and block (None: gated), with one style of attention a layer."""
    act = f.activation()

    def layer(n: TensorNames, i: int) -> Ops:
        first = attention(n, s, styles[i], "x", "a")
        second = gated(n, "mlp", s.hidden, s.inner, act, "x", "m") if block is None else block(n)
        return sequential(
            Branch(first, "a", after=norm.op(n, "post_attention_layernorm", s.hidden, "a", "a")),
            Branch(second, "m", after=norm.op(n, "post_feedforward_layernorm", s.hidden, "m", "m")),
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
