"""Recipes of families some of whose layers are of Mamba 2 in place of attention: granitemoehybrid, bamba."""

import math
from dataclasses import dataclass
from typing import Final, Literal

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
    sequential,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import granite_experts, top_k
from manyhands.program.families.llama import granite_ends
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import (
    Activation,
    Convolution,
    Decay,
    ExpertRouting,
    Gate,
    Gating,
    LinearAttention,
    Multiply,
    Norm,
    Op,
    Product,
    Program,
    Rows,
    Softplus,
    Weight,
)
from manyhands.program.rope import RopeReader

KINDS: Final = ("linear_attention", "mamba", "full_attention", "attention")  # the first two and the last two are one

_MAMBA: Final = (
    "mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads "
    "mamba_proj_bias time_step_limit"
).split()
NO_LIMIT: Final = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # as configs write [0, infinity]


@dataclass(frozen=True, slots=True)
class MambaStyle:
    """A layer of Mamba 2: heads of `width` columns, whose states are `state` rows; groups of heads share keys and queries.

    `norm`: where the norm of groups is, behind the gate, before it, or nowhere. `scales`: multipliers of the product's
    results: gates, values, keys, queries and time steps.
    """

    heads: int
    width: int
    groups: int
    state: int
    taps: int
    eps: float
    activation: Activation
    bias: bool  # of the first product
    conv_bias: bool
    is_log: bool  # A_log, and not rates
    path: str = "mamba"
    out_bias: bool = False
    norm: Literal["behind", "before", "none"] = "behind"
    scales: tuple[float, ...] = (1.0,) * 5

    @classmethod
    def read(cls, f: Fields, inner: int, activation: Activation, eps: float) -> "MambaStyle":
        """From fields named as granitemoehybrid names them; all heads together have `inner` columns. Raises ModelError for
        sizes that do not fit together."""
        heads, groups = f.count("mamba_n_heads", 128, high=1 << 14), f.count("mamba_n_groups", 1, high=1 << 14)
        if inner % heads or heads % groups:
            raise f.refuse("mamba_n_heads", f"a divisor of {inner} and a multiple of the {groups} groups is needed")
        width = inner // heads
        f.only("mamba_d_head", "auto", width)
        f.ignore("mamba_chunk_size")
        f.only("time_step_limit", *NO_LIMIT)
        state, taps = f.count("mamba_d_state", 256, high=1 << 14), f.count("mamba_d_conv", 4, high=32)
        bias, conv_bias = f.flag("mamba_proj_bias"), f.flag("mamba_conv_bias", True)
        is_log = not f.stored("negative_rates")
        return cls(heads, width, groups, state, taps, eps, activation, bias, conv_bias, is_log, out_bias=bias)


def mamba(n: TensorNames, s: Sizes, style: MambaStyle, source: str, target: str) -> Ops:
    """Products; a convolution of values, keys and queries; linear attention by plain sums; a gate and a norm of groups."""
    inner, shared = style.heads * style.width, style.groups * style.state
    widths = {"z": inner, "v": inner, "k": shared, "q": shared, "dt": style.heads}
    outputs, mixed, start = sum(widths.values()), inner + 2 * shared, 0
    parts, ops, path = [], list[Op](), n.path + style.path
    for (name, width), scale in zip(widths.items(), style.scales, strict=True):
        parts.append(n.part(name, f"{style.path}.in_proj", outputs, s.hidden, style.bias, Rows(start, width)))
        ops += scaled(name, scale)
        if name in "vkq":
            rows = Rows(start - inner, width)
            kernel = Weight(f"{path}.conv1d.weight", (mixed, 1, style.taps), rows)
            bias = Weight(f"{path}.conv1d.bias", (mixed,), rows) if style.conv_bias else None
            ops.append(Convolution(name, f"{name} mixed", style.taps, kernel, bias, style.activation))
        start += width
    shift = n.vector(f"{style.path}.dt_bias", style.heads)
    ops.append(Decay("dt", "decay", n.vector(f"{style.path}.A_log", style.heads), shift, style.is_log))
    ops.append(Softplus("dt", "dt", shift))
    shape = (style.heads, style.groups, style.state, style.width)
    skip = n.vector(f"{style.path}.D", style.heads)
    ops.append(LinearAttention("q mixed", "k mixed", "v mixed", "decay", "dt", "o", *shape, is_sum=True, skip=skip))
    out = n.part(target, f"{style.path}.out_proj", s.hidden, inner, style.out_bias)
    return (Product(source, tuple(parts)), *ops, *_gated(path, inner, style), Product("o", (out,)))


def scaled(name: str, scale: float) -> Ops:
    """A register multiplied by a number in place; nothing for 1."""
    return () if scale == 1.0 else (Multiply(name, scale, name),)


def expanded_width(f: Fields, s: Sizes) -> int:
    """Columns of all heads of Mamba together, by mamba_expand. Raises ModelError."""
    return f.count("mamba_expand", 2, high=64) * s.hidden


def _gated(path: str, inner: int, style: MambaStyle) -> Ops:
    gate, size = Gate("z", "o", "o", Gating("silu")), inner // style.groups
    if style.norm == "none":
        return (gate,)
    name = f"{path}.norm.weight"
    weights = tuple(Weight(name, (inner,), Rows(group * size, size)) for group in range(style.groups))
    norm = Norm("o", "o", "rms", style.eps, weights, groups=style.groups)
    return (norm, gate) if style.norm == "before" else (gate, norm)


def granitemoehybrid(f: Fields) -> Program:
    """granite's four multipliers; a block that every row takes, in some models beside experts; mostly no positions."""
    s, act, bias = Sizes.read(f, kv=False), f.activation(), f.flag("attention_bias")
    kinds = f.per_layer("layer_types", s.layers, ["mamba"] * s.layers, KINDS)
    f.ignore("init_method")
    f.only("normalization_function", "rmsnorm")
    f.only("position_embedding_type", None, "rope", "nope")
    rope = 0 if f.raw("position_embedding_type") == "rope" else None
    pairs, is_separate = f.stored("interleaved_rope"), f.stored("separate_gate_up")
    style = AttentionStyle(f.number("attention_multiplier", 1.0), rope, pairs=pairs, bias=bias, out_bias=bias)
    inner, scale = f.count("shared_intermediate_size", 1024, high=1 << 20), f.number("residual_multiplier", 1.0)
    eps = f.number("rms_norm_eps", 1e-6)
    norm, ends, rotary = NormStyle("rms", eps), granite_ends(f), RopeReader(f)
    has_mamba = not {"linear_attention", "mamba"}.isdisjoint(kinds)
    linear = MambaStyle.read(f, expanded_width(f, s), act, eps) if has_mamba else None
    f.ignore(*(() if has_mamba else _MAMBA))
    count = f.count("num_local_experts", 8, low=0, high=MOST_EXPERTS)
    f.ignore(*(() if count else ("num_experts_per_tok",)))
    route = ExpertRouting("r", "routes", count, top_k(f, count, 2), "softmax", normalise=True) if count else None

    def layer(n: TensorNames, i: int) -> Ops:
        if linear is None or kinds[i] in KINDS[2:]:
            first = attention(n, s, style, "h", "a")
        else:
            first = mamba(n, s, linear, "h", "a")
        fused = None if is_separate else "input_linear"
        body = gated(n, "shared_mlp", s.hidden, inner, act, "h", "s", fused=fused, down_name="output_linear")
        experts = () if route is None else granite_experts(n, s, route, act, is_separate)
        return sequential(
            Branch(first, "a", norm.op(n, "input_layernorm", s.hidden, "x", "h")),
            Branch(
                (*experts, *body),
                "s",
                norm.op(n, "post_attention_layernorm", s.hidden, "x", "h"),
                terms=("m", "s") if experts else (),
            ),
            scale,
        )

    return assemble(f, s, norm, rotary, [rotary.plain(s.head)], ends, layer)


def bamba(f: Fields) -> Program:
    """Attention, rotary in half of each head, in the layers of attn_layer_indices; a gated block in each layer."""
    f.assume(num_key_value_heads=8)
    s = Sizes.read(f, kv=False)
    act, eps = f.activation(), f.number("rms_norm_eps", 1e-5)
    bias, mlp_bias = f.flag("attention_bias"), f.flag("mlp_bias")
    norm, rope, full = NormStyle("rms", eps), RopeReader(f, fraction=0.5), f.whole_numbers("attn_layer_indices")
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias)
    linear = MambaStyle.read(f, expanded_width(f, s), act, eps)
    f.only("partial_rotary_factor", 0.5)
    f.only("attn_rotary_emb", s.head // 2)
    f.ignore("num_logits_to_keep", "z_loss_coefficient")

    def layer(n: TensorNames, i: int) -> Ops:
        first = attention(n, s, style, "h", "a") if i in full else mamba(n, s, linear, "h", "a")
        body = gated(n, "feed_forward", s.hidden, s.inner, act, "h", "m", bias=mlp_bias)
        return sequential(
            Branch(first, "a", norm.op(n, "input_layernorm", s.hidden, "x", "h")),
            Branch(body, "m", norm.op(n, "pre_ff_layernorm", s.hidden, "x", "h")),
        )

    ends = EndsStyle(norm="model.final_layernorm")
    return assemble(f, s, norm, rope, [rope.plain(s.head, partial=True)], ends, layer)
