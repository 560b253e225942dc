"""The recipe of apertus: a plain block whose function has two learnt numbers of its own in each layer."""

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
    plain,
    sequential,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.fields import Fields
from manyhands.program.ops import Program, Weight, Xielu
from manyhands.program.rope import RopeReader

_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def apertus(f: Fields) -> Program:
    """Norms of heads; xIELU."""
    if not f.has("rope_scaling"):
        f.assume(rope_parameters=_ROPE)
    s, bias = Sizes.read(f, kv=False), f.flag("attention_bias")
    f.only("hidden_act", "xielu")
    for name, needed in (("mlp_bias", False), ("post_norm", False), ("qk_norm", True)):
        f.only(name, needed)  # published configs have them, transformers does not read them
    norm, rope = NormStyle("rms", f.number("rms_norm_eps", 1e-5)), RopeReader(f, theta=12000000.0)
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, head_norm=norm)

    def layer(n: TensorNames, i: int) -> Ops:
        first = Branch(attention(n, s, style, "h", "a"), "a", norm.op(n, "attention_layernorm", s.hidden, "x", "h"))
        up, down = plain(n, ("mlp.up_proj", "mlp.down_proj"), s, "none", "h", "m", bias=False)
        before = norm.op(n, "feedforward_layernorm", s.hidden, "x", "h")
        return sequential(first, Branch((up, _xielu(n), down), "m", before))

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer)


def _xielu(n: TensorNames) -> Xielu:
    path = "mlp.act_fn"
    constants = (Weight(f"{n.path}{path}.{name}", ()) for name in ("beta", "eps"))
    return Xielu("up", n.vector(f"{path}.alpha_p", 1), n.vector(f"{path}.alpha_n", 1), *constants)
