"""Recipes of granite's kin: granitemoeshared, granite_swa, granitemoe_swa, hyperclovax."""

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
    gated,
    head_scale,
    router,
    sequential,
    sliding,
    stacked_experts,
    windows,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import granite_experts, top_k
from manyhands.program.families.llama import granite_ends
from manyhands.program.fields import LARGEST, Fields
from manyhands.program.ops import Activation, ExpertRouting, Program, Rope
from manyhands.program.rope import RopeReader

Routed = Callable[[TensorNames, Sizes, ExpertRouting, Activation], Ops]  # from "h" to "m"


def granitemoeshared(f: Fields) -> Program:
    """granitemoe with an expert that every row takes, if it has any columns."""
    s, rope = Sizes.read(f, kv=False), RopeReader(f)
    styles = [_style(f)] * s.layers
    return _with_experts(f, s, rope, [rope.plain(s.head)], styles, _granitemoe)


def granite_swa(f: Fields) -> Program:
    """granite with sinks; windows in three of four layers; tables by layer, or no positions."""
    s, act, rope, norm = (
        Sizes.read(f, kv=False),
        f.activation(),
        RopeReader(f),
        NormStyle("rms", f.number("rms_norm_eps", 1e-5)),
    )
    (ropes, styles), bias, scale = _by_layer(f, s, rope), f.flag("mlp_bias"), f.number("residual_multiplier", 1.0)

    def layer(n: TensorNames, i: int) -> Ops:
        block = gated(n, "mlp", s.hidden, s.inner, act, "h", "m", bias=bias)
        return _layer(n, s, norm, _sunk(n, s, styles[i]), Branch(block, "m"), scale)

    return assemble(f, s, norm, rope, ropes, replace(granite_ends(f), tied=True), layer)


def granitemoe_swa(f: Fields) -> Program:
    """granitemoeshared with granite_swa's attention, and other names of its experts."""
    s, rope = Sizes.read(f, kv=False), RopeReader(f)
    return _with_experts(f, s, rope, *_by_layer(f, s, rope), _renamed, sinks=True)


def _granitemoe(n: TensorNames, s: Sizes, route: ExpertRouting, act: Activation) -> Ops:
    return granite_experts(n, s, route, act, is_separate=False)


def _renamed(n: TensorNames, s: Sizes, route: ExpertRouting, act: Activation) -> Ops:
    path = "block_sparse_moe"
    return *router(n, f"{path}.router", s, route), stacked_experts(n, f"{path}.experts", s, s.inner, route.experts, act)


def _with_experts(
    f: Fields,
    s: Sizes,
    rope: RopeReader,
    ropes: list[Rope],
    styles: list[AttentionStyle],
    routed: Routed,
    *,
    sinks: bool = False,
) -> Program:
    """A family of experts, perhaps beside a block that every row takes, with one style of attention a layer."""
    act, count = f.activation(), f.count("num_local_experts", 8, high=4096)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 2), "softmax", normalise=True)
    norm, scale = NormStyle("rms", f.number("rms_norm_eps", 1e-6)), f.number("residual_multiplier", 1.0)
    shared = f.count("shared_intermediate_size", 0, low=0, high=1 << 20)

    def layer(n: TensorNames, i: int) -> Ops:
        style = _sunk(n, s, styles[i]) if sinks else styles[i]
        return _layer(n, s, norm, style, _beside(n, s, routed(n, s, route, act), act, shared), scale)

    return assemble(f, s, norm, rope, ropes, granite_ends(f), layer)


def _beside(n: TensorNames, s: Sizes, routed: Ops, act: Activation, shared: int) -> Branch:
    """Experts beside a block of `shared` columns, if it has any."""
    if not shared:
        return Branch(routed, "m")
    beside = gated(n, "shared_mlp", s.hidden, shared, act, "h", "s", fused="input_linear", down_name="output_linear")
    return Branch((*routed, *beside), "m", terms=("m", "s"))


def _layer(n: TensorNames, s: Sizes, norm: NormStyle, style: AttentionStyle, block: Branch, scale: float) -> Ops:
    first = Branch(attention(n, s, style, "h", "a"), "a", norm.op(n, "input_layernorm", s.hidden, "x", "h"))
    return sequential(first, replace(block, before=norm.op(n, "post_attention_layernorm", s.hidden, "x", "h")), scale)


def _style(f: Fields) -> AttentionStyle:
    bias = f.flag("attention_bias")
    return AttentionStyle(f.number("attention_multiplier", 1.0), bias=bias, out_bias=bias)


def _sunk(n: TensorNames, s: Sizes, style: AttentionStyle) -> AttentionStyle:
    return replace(style, sinks=n.vector("self_attn.sinks", s.heads))


def _by_layer(f: Fields, s: Sizes, rope: RopeReader) -> tuple[list[Rope], list[AttentionStyle]]:
    """Tables, one for each base frequency, and styles: a layer whose base is 0 has no positions."""
    found = windows(f, s.layers, sliding(s.layers, range(0, s.layers, 4)), f.optional_count("sliding_window", 128))
    bases, base = f.raw("layer_rope_theta"), _style(f)
    plain = rope.plain(s.head)
    if bases is None:
        return [plain], [replace(base, window=window) for window in found]
    good = isinstance(bases, list) and len(bases) == s.layers
    if not good or not all(type(one) in (int, float) and (one == 0 or 1 < one <= LARGEST) for one in bases):
        raise f.refuse("layer_rope_theta", f"0 or a number above 1 for each of the {s.layers} layers is needed")
    used = sorted({one for one in bases if one})
    tables = [rope.with_base(s.head, float(one)) for one in used] or [plain]
    rows = [used.index(one) if one else None for one in bases]
    return tables, [replace(base, rope=row, window=window) for row, window in zip(rows, found, strict=True)]


def hyperclovax(f: Fields) -> Program:
    """granite whose branches may be normed before they join, and whose logits are multiplied."""
    s, act, bias = Sizes.read(f, kv=False), f.activation(), f.flag("attention_bias")
    norm, is_normed = NormStyle("rms", f.number("rms_norm_eps", 1e-6)), f.flag("use_post_norm", True)
    scale, block_bias, rope = f.number("residual_multiplier", 1.0), f.flag("mlp_bias"), RopeReader(f)
    style = AttentionStyle(f.optional("attention_multiplier") or head_scale(s.head), bias=bias, out_bias=bias)

    def branch(n: TensorNames, body: Ops, target: str, before: str, after: str) -> Branch:
        behind = norm.op(n, after, s.hidden, target, target) if is_normed else None
        return Branch(body, target, norm.op(n, before, s.hidden, "x", "h"), behind)

    def layer(n: TensorNames, i: int) -> Ops:
        block = gated(n, "mlp", s.hidden, s.inner, act, "h", "m", bias=block_bias)
        first = branch(n, attention(n, s, style, "h", "a"), "a", "input_layernorm", "post_norm1")
        return sequential(first, branch(n, block, "m", "post_attention_layernorm", "post_norm2"), scale)

    ends = EndsStyle(embed_scale=f.number("embedding_multiplier", 1.0), scale=f.number("logits_scaling", 1.0))
    return assemble(f, s, norm, rope, [rope.plain(s.head)], ends, layer)
