"""The recipe of olmo_hybrid: linear attention in three of four layers, with norms before; olmo3's attention in the others."""

from typing import Final

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
from manyhands.program.families.linear import KINDS, LinearStyle, delta_rule
from manyhands.program.fields import Fields
from manyhands.program.ops import Activation, Multiply, Part, Product, Program, Rope, Weight
from manyhands.program.rope import RopeReader

_LINEAR, _FULL = KINDS
_EPS: Final = 1e-5  # of the norms of heads behind the delta rule, whatever rms_norm_eps is


def olmo_hybrid(f: Fields) -> Program:
    """Tensors under the names that published checkpoints have, not those of the class in transformers."""
    s, act, bias = Sizes.read(f, kv=False), f.activation(), f.flag("attention_bias")
    norm, rope, kinds = NormStyle("rms", f.number("rms_norm_eps", 1e-6)), RopeReader(f), _kinds(f, s.layers)
    ropes = _ropes(f, s, rope)
    base = 0 if ropes else None
    style = AttentionStyle(head_scale(s.head), base, bias=bias, out_bias=bias, head_norm=norm, wide_norm=True)
    linear, strength = _linear_style(f, s, act), 2.0 if f.flag("linear_allow_neg_eigval", True) else 1.0
    f.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")

    def layer(n: TensorNames, i: int) -> Ops:
        if kinds[i] == _LINEAR:
            before = [norm.op(n, f"{name}_layer_norm", s.hidden, "x", "h") for name in ("attention", "feedforward")]
            first = _linear_attention(n, s, linear, strength)
            second = gated(n, "mlp", s.hidden, s.inner, act, "h", "m")
            return sequential(Branch(first, "a", before[0]), Branch(second, "m", before[1]))
        after = [
            norm.op(n, f"post_{name}_layernorm", s.hidden, register, register)
            for name, register in (("attention", "a"), ("feedforward", "m"))
        ]
        second = gated(n, "mlp", s.hidden, s.inner, act, "x", "m")
        return sequential(
            Branch(attention(n, s, style, "x", "a"), "a", after=after[0]), Branch(second, "m", after=after[1])
        )

    return assemble(f, s, norm, rope, ropes, EndsStyle(), layer)


def _kinds(f: Fields, layers: int) -> list[str]:
    default = [KINDS[i % 4 == 3] for i in range(layers)]
    if _FULL not in default:
        default[-1] = _FULL
    kinds = f.per_layer("layer_types", layers, default, KINDS)
    if len(set(kinds)) < 2:
        raise f.refuse("layer_types", f"layers of both types, {_LINEAR} and {_FULL}, are needed")
    return kinds


def _ropes(f: Fields, s: Sizes, rope: RopeReader) -> list[Rope]:
    """No table where the base frequency is null, in its table or, if that says none, outside: so in Olmo-Hybrid-7B."""
    table = f.raw("rope_scaling") or f.raw("rope_parameters") or {}
    if table["rope_theta"] is None if "rope_theta" in table else f.is_null("rope_theta"):
        f.ignore("rope_theta")
        return []
    return [rope.plain(s.head)]


def _linear_style(f: Fields, s: Sizes, act: Activation) -> LinearStyle:
    """Sizes that are null are those that the family takes for absent ones."""
    key_heads = f.count("linear_num_key_heads", s.heads, high=4096)
    heads = f.count("linear_num_value_heads", s.heads, high=4096)
    if heads % key_heads:
        raise f.refuse("linear_num_value_heads", f"a multiple of the {key_heads} key heads is needed")
    width = f.count("linear_key_head_dim", int(0.75 * s.hidden / key_heads), high=1 << 14)
    value_width = f.count("linear_value_head_dim", 2 * width, high=1 << 14)
    taps = f.count("linear_conv_kernel_dim", 4, high=32)
    return LinearStyle(key_heads, heads, width, value_width, taps, _EPS, act)


def _linear_attention(n: TensorNames, s: Sizes, style: LinearStyle, strength: float) -> Ops:
    """The gated delta rule between products, each with a tensor of its own; `strength` multiplies the sigmoids."""
    widths = {"q": style.keys, "k": style.keys, "v": style.values}
    parts = [n.part(name, f"linear_attn.{name}_proj", width, s.hidden, False) for name, width in widths.items()]
    parts.append(n.part("z", "linear_attn.g_proj", style.values, s.hidden, False))
    parts.append(Part("b", n.linear("linear_attn.b_proj", style.heads, s.hidden), activation="sigmoid"))
    parts.append(n.part("a", "linear_attn.a_proj", style.heads, s.hidden, False))
    kernels = [
        Weight(f"{n.path}linear_attn.{name}_conv1d.weight", (width, 1, style.taps)) for name, width in widths.items()
    ]
    return (
        Product("h", tuple(parts)),
        *(() if strength == 1.0 else (Multiply("b", strength, "b"),)),
        *delta_rule(n, style, kernels, "linear_attn.o_norm"),
        Product("o", (n.part("a", "linear_attn.o_proj", s.hidden, style.values, False),)),
    )
