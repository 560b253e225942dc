"""Recipes of families whose norms have no weights: olmo, nanochat."""

from dataclasses import dataclass, replace

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
    plain,
)
from manyhands.program.ends import EndsStyle, assemble, with_clip
from manyhands.program.fields import Fields
from manyhands.program.ops import Norm, Program
from manyhands.program.rope import RopeReader


@dataclass(frozen=True, slots=True)
class Unweighted(NormStyle):
    """Norms that read no tensor, whatever their names."""

    def op(self, names: TensorNames, name: str, width: int, source: str, target: str, groups: int = 1) -> Norm:
        return Norm(source, target, self.kind, self.eps, (), groups=groups)


def olmo(f: Fields) -> Program:
    """llama with layer norms."""
    s, act, bias = Sizes.read(f, kv=False), f.activation(), f.flag("attention_bias")
    norm, rope, clip = Unweighted("layer", 1e-5), RopeReader(f), f.optional("clip_qkv")
    style = AttentionStyle(head_scale(s.head), pairs=f.stored("interleaved_rope"), bias=bias, out_bias=bias)

    def layer(n: TensorNames, i: int) -> Ops:
        block = gated(n, "mlp", s.hidden, s.inner, act, "h", "m")
        return before_each(n, s, norm, attention(n, s, style, "h", "a"), block)

    return with_clip(assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer), clip)


def nanochat(f: Fields) -> Program:
    """Squared relu; the embedding is normed; heads turn the other way round, and are normed behind."""
    s, act, bias = Sizes.read(f, kv=False), f.activation("hidden_act", "relu2"), f.flag("attention_bias")
    norm, rope = Unweighted("rms", f.number("rms_norm_eps", 1e-6)), RopeReader(f)
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, head_norm=norm, norm_last=True)
    table = rope.plain(s.head)
    back = replace(table, frequencies=tuple(-frequency for frequency in table.frequencies))
    ends = EndsStyle(soft_cap=f.optional("final_logit_softcapping", 15.0))

    def layer(n: TensorNames, i: int) -> Ops:
        block = plain(n, ("mlp.fc1", "mlp.fc2"), s, act, "h", "m", bias=False)
        ops = before_each(n, s, norm, attention(n, s, style, "h", "a"), block)
        return ops if i else (norm.op(n, "", s.hidden, "x", "x"), *ops)

    return assemble(f, s, norm, rope, [back], ends, layer)
