"""The recipe of bitnet (BitNet b1.58): llama with a norm of what the last product of attention, and of a block, reads.

Its checkpoints are for products by a scale times -1, 0 or 1: how these are stored checkpoint/quantised.py has. The rows that
they read are not rounded to 8 bits for it.
"""

from manyhands.program.blocks import (
    AttentionStyle,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    before_each,
    gated,
    head_scale,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.fields import Fields
from manyhands.program.ops import Program
from manyhands.program.rope import RopeReader


def bitnet(f: Fields) -> Program:
    """Squared relu; biases of attention alone."""
    f.assume(num_key_value_heads=5)
    s, act, bias = (
        Sizes.read(f, kv=False, free_head=False),
        f.activation("hidden_act", "relu2"),
        f.flag("attention_bias"),
    )
    norm, rope = NormStyle("rms", f.number("rms_norm_eps", 1e-5)), RopeReader(f, theta=500000.0)
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias)

    def layer(n: TensorNames, i: int) -> Ops:
        *heads, out = attention(n, s, style, "h", "a")
        *gates, down = gated(n, "mlp", s.hidden, s.inner, act, "h", "m")
        first = (*heads, norm.op(n, "self_attn.attn_sub_norm", s.hidden, "a", "a"), out)
        second = (*gates, norm.op(n, "mlp.ffn_sub_norm", s.inner, "up", "up"), down)
        return before_each(n, s, norm, first, second)

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer)
