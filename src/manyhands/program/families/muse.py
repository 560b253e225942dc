"""The recipe of muse_glimmer_text: norms of heads without weights, gates of attention's result, layers without positions."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    sliding,
    windows,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.unweighted import Unweighted
from manyhands.program.fields import LARGEST, Fields
from manyhands.program.ops import Multiply, Norm, Op, Program
from manyhands.program.rope import RopeReader

_EVERY: Final = 4  # of so many layers one has neither window nor positions, counted from the last one


@dataclass(frozen=True, slots=True)
class _Heads:
    """Attention, layer by layer: queries are multiplied by `factor` behind their norm."""

    sizes: Sizes
    styles: Sequence[AttentionStyle]
    factor: float

    @classmethod
    def read(cls, f: Fields, s: Sizes, rope: RopeReader, eps: float, factor: float) -> "_Heads":
        """`eps`: of norms of heads; `factor`: where the config has none."""
        full, bias = range((s.layers - 1) % _EVERY, s.layers, _EVERY), f.flag("attention_bias")
        found = windows(f, s.layers, sliding(s.layers, full), f.optional_count("sliding_window", 2048))
        is_stored = f.stored("scaled_head_norms")  # the factor, in the weights of queries' norms
        turning = _turning(f, s, rope, [i not in full for i in range(s.layers)])
        styles = [
            AttentionStyle(
                head_scale(s.head),
                pairs=f.stored("interleaved_rope"),
                rope=0 if turns else None,
                bias=bias,
                out_bias=bias,
                window=window,
                head_norm=NormStyle("rms", eps) if is_stored else Unweighted("rms", eps),
                gate_name="self_attn.gate_proj",
            )
            for window, turns in zip(found, turning, strict=True)
        ]
        return cls(s, styles, 1.0 if is_stored else f.number("qk_scale_factor", factor))

    def ops(self, n: TensorNames, i: int) -> Ops:
        """Those of layer `i`, from "h" to "a"."""
        out: list[Op] = []
        for op in attention(n, self.sizes, self.styles[i], "h", "a"):
            out.append(op)
            if isinstance(op, Norm) and op.target == "q" and self.factor != 1.0:
                out.append(Multiply("q", self.factor, "q"))
        return tuple(out)


def _turning(f: Fields, s: Sizes, rope: RopeReader, default: Sequence[bool]) -> Sequence[bool]:
    """Which layers have positions: 0 for those without. For the others transformers uses the base frequency that
    rope_parameters gives whatever the list says, which must be that one."""
    bases = f.raw("layer_rope_theta")
    if bases is None:
        return default
    good = isinstance(bases, list) and len(bases) == s.layers
    good = good and all(type(base) in (int, float) and (base == 0 or 1 < base <= LARGEST) for base in bases)
    if not good or {rope.with_base(s.head, float(base)) for base in bases if base} - {rope.plain(s.head)}:
        needed = f"0 or the base frequency of rope_parameters for each of the {s.layers} layers is needed"
        raise f.refuse("layer_rope_theta", needed)
    return [base != 0 for base in bases]


def muse_glimmer_text(f: Fields) -> Program:
    """gemma2's layers; norms behind have an epsilon of their own, and the embedding one without weights."""
    s, act, rope = Sizes.read(f, head=128), f.activation("hidden_activation"), RopeReader(f)
    eps = f.number("rms_norm_eps", 1e-5)
    offset = 0.0 if f.stored("norms_plus_one") else 1.0
    before, behind = (NormStyle("rms", each, offset) for each in (eps, f.number("post_norm_eps", 1e-8)))
    heads = _Heads.read(f, s, rope, eps, factor=3.87)

    def layer(n: TensorNames, i: int) -> Ops:
        def branch(body: Ops, target: str, first: str, second: str) -> Branch:
            norms = before.op(n, first, s.hidden, "x", "h"), behind.op(n, second, s.hidden, target, target)
            return Branch(body, target, *norms)

        block = gated(n, "mlp", s.hidden, s.inner, act, "h", "m")
        ops = sequential(
            branch(heads.ops(n, i), "a", "input_layernorm", "post_attention_layernorm"),
            branch(block, "m", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        )
        return ops if i else (_embedding_norm(n, s, eps), *ops)

    norm, ends = NormStyle("rms", eps), _ends(f, multiplier=0.19611613513818404)
    return assemble(f, s, norm, rope, [rope.plain(s.head)], ends, layer)


def _embedding_norm(n: TensorNames, s: Sizes, eps: float) -> Norm:
    return Unweighted("rms", eps).op(n, "", s.hidden, "x", "x")


def _ends(f: Fields, multiplier: float) -> EndsStyle:
    """`multiplier`: of logits, where the config has none."""
    cap = f.number("final_logit_softcapping", 20.0)
    return EndsStyle(scale=f.number("output_multiplier", multiplier), soft_cap=cap)
