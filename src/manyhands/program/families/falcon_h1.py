"""The recipe of falcon_h1: in each layer attention beside Mamba 2; multipliers of most registers."""

from dataclasses import replace
from typing import Final

from manyhands.program.blocks import AttentionStyle, NormStyle, Ops, Sizes, TensorNames, attention, gated, head_scale
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.mamba import MambaStyle, expanded_width, mamba, scaled
from manyhands.program.fields import Fields
from manyhands.program.ops import Add, Program, Term
from manyhands.program.rope import RopeReader

_SCALES: Final = ("attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out")


def falcon_h1(f: Fields) -> Program:
    """One norm before attention and Mamba, one before the block. key_multiplier is applied to the scores."""
    f.assume(num_key_value_heads=8)
    s = Sizes.read(f, kv=False)
    act, eps = f.activation(), f.number("rms_norm_eps", 1e-5)
    bias, mlp_bias = f.flag("attention_bias"), f.flag("mlp_bias")
    by = {name: f.number(f"{name}_multiplier", 1.0, positive=False) for name in _SCALES}
    gate, down = _numbers(f, "mlp_multipliers", 2)
    norm, rope, linear = NormStyle("rms", eps), RopeReader(f), _mamba(f, s, eps)
    style = AttentionStyle(head_scale(s.head) * by["key"], bias=bias, out_bias=bias)
    f.only("attn_layer_indices", None)
    f.ignore("mlp_expansion_factor", "num_logits_to_keep")

    def layer(n: TensorNames, _: int) -> Ops:
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        again = () if by["ssm_in"] == by["attention_in"] else (before, *scaled("h", by["attention_in"]))
        products, gating, out = gated(n, "feed_forward", s.hidden, s.inner, act, "h", "m", bias=mlp_bias)
        return (
            *(before, *scaled("h", by["ssm_in"]), *mamba(n, s, linear, "h", "s")),
            *(*again, *attention(n, s, style, "h", "a")),
            Add((Term("s", by["ssm_out"]), Term("a", by["attention_out"]))),
            *(norm.op(n, "pre_ff_layernorm", s.hidden, "x", "h"), products, *scaled("gate", gate), gating, out),
            Add((Term("m", down),)),
        )

    ends = EndsStyle(norm="model.final_layernorm", embed_scale=by["embedding"], scale=by["lm_head"])
    return assemble(f, s, norm, rope, [rope.plain(s.head)], ends, layer)


def _mamba(f: Fields, s: Sizes, eps: float) -> MambaStyle:
    f.only("mamba_use_mlp", True)
    expanded = expanded_width(f, s)
    inner = expanded if f.is_null("mamba_d_ssm") else f.count("mamba_d_ssm", 1024, high=1 << 20)
    has_norm, is_before = f.flag("mamba_rms_norm"), f.flag("mamba_norm_before_gate", True)
    return replace(
        MambaStyle.read(f, inner, f.activation(), eps),
        out_bias=f.flag("projectors_bias"),
        norm="none" if not has_norm else "before" if is_before else "behind",
        scales=_numbers(f, "ssm_multipliers", 5),
    )


def _numbers(f: Fields, name: str, count: int) -> tuple[float, ...]:
    """A field's list of `count` numbers; all 1 where it is absent. Raises ModelError for another list."""
    given = f.raw(name, [1.0] * count)
    if not isinstance(given, list) or len(given) != count:
        raise f.refuse(name, f"a list of {count} numbers is needed")
    inner = Fields(dict(zip(map(str, range(count)), given, strict=True)), f"{f.where}: {name}")
    return tuple(inner.number(str(i), positive=False) for i in range(count))
