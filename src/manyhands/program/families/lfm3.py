"""The recipe of lfm3: lfm2 with norms behind, gates of heads, and a table for each type of attention, of which one has
windows."""

from typing import Final

from manyhands.program.blocks import (
    AttentionStyle,
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    head_scale,
    sequential,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.linear import short_convolution, w1_w3_w2
from manyhands.program.fields import Fields
from manyhands.program.ops import Multiply, Norm, Part, Product, Program, Rope
from manyhands.program.rope import RopeReader

_FULL, _SLIDING, _CONV = "full_attention", "sliding_attention", "conv"
_ROPES: Final = {
    _FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}


def lfm3(f: Fields) -> Program:
    """Convolutions of seven rows in half of the layers."""
    f.assume(rope_parameters=_ROPES)
    f.only("rope_scaling", None)
    f.ignore("rope_theta")  # tables that say none read it, where layers attend
    s, norm, rope = Sizes.read(f, head=128), NormStyle("rms", _eps(f)), RopeReader(f)
    default = [_FULL if i % 4 == 2 else _SLIDING if i % 4 == 0 and i else _CONV for i in range(s.layers)]
    kinds = f.per_layer("layer_types", s.layers, default, (_FULL, _SLIDING, _CONV))
    tables = {kind: _table(f, rope, kind, s.head) for kind in _ROPES if kind in kinds}
    styles = _styles(f, s, norm, list(tables))
    taps, conv_bias = f.count("conv_L_cache", 7, high=32), f.flag("conv_bias")
    gates, wraps = f.flag("use_attention_gate", True), f.flag("use_sandwich_norm", True)

    def body(n: TensorNames, kind: str) -> Ops:
        if kind == _CONV:
            return short_convolution(n, s, taps, conv_bias, "h", "a")
        ops = attention(n, s, styles[kind], "h", "a")
        return _with_gates(n, s, ops) if gates else ops

    def behind(n: TensorNames, name: str, register: str) -> Norm | None:
        return norm.op(n, name, s.hidden, register, register) if wraps else None

    def layer(n: TensorNames, i: int) -> Ops:
        before = [norm.op(n, name, s.hidden, "x", "h") for name in ("operator_norm", "ffn_norm")]
        first = Branch(body(n, kinds[i]), "a", before[0], behind(n, "post_operator_norm", "a"))
        return sequential(first, Branch(w1_w3_w2(n, s, s.inner), "m", before[1], behind(n, "post_ffn_norm", "m")))

    ends = EndsStyle(tied=True, norm="model.embedding_norm")
    return assemble(f, s, norm, rope, list(tables.values()), ends, layer)


def _eps(f: Fields) -> float:
    """By either of the names that transformers reads it by."""
    eps = f.number("norm_eps", f.number("rms_norm_eps", 1e-5))
    f.only("rms_norm_eps", eps)
    return eps


def _table(f: Fields, rope: RopeReader, kind: str, width: int) -> Rope:
    """The rotary table of a type of layers, which the config must have: transformers takes no other for it."""
    if f.raw("rope_parameters").get(kind) is None:
        raise f.refuse("rope_parameters", f"an object for {kind} is needed, as layers have this type")
    return rope.by_type(kind, width, theta=1000000.0, field="rope_theta", scaled=False)


def _styles(f: Fields, s: Sizes, norm: NormStyle, kinds: list[str]) -> dict[str, AttentionStyle]:
    """How layers of each type attend."""
    bias, window = f.flag("attention_bias"), f.optional_count("sliding_window", 256)
    if window is None and _SLIDING in kinds:
        raise f.refuse("layer_types", f"{_SLIDING} needs sliding_window")
    return {
        kind: AttentionStyle(
            head_scale(s.head),
            kinds.index(kind),
            bias=bias,
            out_bias=bias,
            window=window if kind == _SLIDING else None,
            head_norm=norm,
        )
        for kind in kinds
    }


def _with_gates(n: TensorNames, s: Sizes, ops: Ops) -> Ops:
    """Attention whose heads are each multiplied by a sigmoid, before the product behind them. Checkpoints call it gate_proj."""
    *inner, out = ops
    gate = Part("g", n.linear("self_attn.gate_proj", s.heads, s.hidden), activation="sigmoid")
    return (Product("h", (gate,)), *inner, Multiply("a", "g", "a"), out)
