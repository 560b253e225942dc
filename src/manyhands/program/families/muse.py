"""Recipes of muse_glimmer_text and muse_spark_text: norms of heads without weights, gates of attention's result, layers without
positions; of muse_spark_text experts whose results are normed, and gates of the residual stream."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    router,
    sequential,
    sliding,
    windows,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import listed_sparse, stacked_experts, top_k
from manyhands.program.families.unweighted import Unweighted
from manyhands.program.fields import LARGEST, MOST_EXPERTS, Fields
from manyhands.program.ops import Activation, Attention, Blend, ExpertRouting, Multiply, Norm, Op, Product, Program
from manyhands.program.rope import RopeReader

_EVERY: Final = 4  # of so many layers one has neither window nor positions, counted from the last one


@dataclass(frozen=True, slots=True)
class _Heads:
    """Attention, layer by layer: queries are multiplied by `factor` behind their norm. `behind`: of heads of its result."""

    sizes: Sizes
    styles: Sequence[AttentionStyle]
    factor: float
    behind: NormStyle | None

    @classmethod
    def read(
        cls, f: Fields, s: Sizes, rope: RopeReader, eps: float, factor: float, *, is_normed: bool = False
    ) -> "_Heads":
        """`eps`: of norms of heads; `factor`: where the config has none; `is_normed`: whether heads of the result are, too."""
        bare = Unweighted("rms", eps)
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
                head_norm=NormStyle("rms", eps) if is_stored else bare,
                gate_name="self_attn.gate_proj",
            )
            for window, turns in zip(found, turning, strict=True)
        ]
        return cls(s, styles, 1.0 if is_stored else f.number("qk_scale_factor", factor), bare if is_normed else None)

    def ops(self, n: TensorNames, i: int) -> Ops:
        """Those of layer `i`, from "h" to "a"."""
        out: list[Op] = []
        for op in attention(n, self.sizes, self.styles[i], "h", "a"):
            out.append(op)
            if isinstance(op, Norm) and op.target == "q" and self.factor != 1.0:
                out.append(Multiply("q", self.factor, "q"))
            if isinstance(op, Attention) and self.behind is not None:
                out.append(self.behind.op(n, "", self.sizes.head, "a", "a", self.sizes.heads))
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
    bare = Unweighted("rms", eps)
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
        return ops if i else (bare.op(n, "", s.hidden, "x", "x"), *ops)

    norm, ends = NormStyle("rms", eps), _ends(f, multiplier=0.19611613513818404)
    return assemble(f, s, norm, rope, [rope.plain(s.head)], ends, layer)


def _ends(f: Fields, multiplier: float) -> EndsStyle:
    """`multiplier`: of logits, where the config has none."""
    cap = f.number("final_logit_softcapping", 20.0)
    return EndsStyle(scale=f.number("output_multiplier", multiplier), soft_cap=cap)


@dataclass(frozen=True, slots=True)
class _Experts:
    """Sparse blocks: experts in so many columns (`width`) between two products; `multiplier`: of what ranks them."""

    route: ExpertRouting
    multiplier: float
    width: int
    inner: int
    act: Activation
    before: NormStyle
    eps: float  # of the norm of each expert's result

    @classmethod
    def read(cls, f: Fields, act: Activation, before: NormStyle, eps: float, multiplier: float) -> "_Experts":
        count = f.count("num_local_experts", 256, high=MOST_EXPERTS)
        chosen, scale = top_k(f, count, 8), f.number("routed_scaling_factor", 1.0)
        route = ExpertRouting("r", "routes", count, chosen, "sigmoid", normalise=True, scale=scale, epsilon=1e-15)
        width = f.count("moe_hidden_size", 4096, high=1 << 17)
        return cls(route, multiplier, width, f.count("moe_intermediate_size", 4096, high=1 << 20), act, before, eps)

    def ops(self, n: TensorNames, s: Sizes) -> Ops:
        """From "h" to "m"."""
        ranks, choice = router(n, "mlp.gate", s, self.route, correction="mlp.gate.e_score_correction_bias")
        narrow = replace(s, hidden=self.width)
        experts = stacked_experts(n, "mlp.experts", narrow, self.inner, self.route.experts, self.act)
        norm = n.vector("mlp.experts.post_expert_norm.weight", self.width)
        return (
            ranks,
            Multiply("r", self.multiplier, "r"),
            choice,
            Product("h", (n.part("l", "mlp.pre_expert_proj", self.width, s.hidden, False),)),
            self.before.op(n, "mlp.pre_expert_norm", self.width, "l", "l"),
            replace(experts, source="l", norm=norm, norm_eps=self.eps),
            Product("m", (n.part("m", "mlp.post_expert_proj", s.hidden, self.width, False),)),
        )


def _spark_rope(f: Fields) -> RopeReader:
    """As in transformers: a config without a table has another base frequency than a table without one, and none beside it."""
    has_table = f.has("rope_parameters") or f.has("rope_scaling")
    if not has_table:
        f.only("rope_theta", 500000.0)
    return RopeReader(f, theta=10000.0 if has_table else 500000.0)


def muse_spark_text(f: Fields) -> Program:
    """What a branch gives is normed without weights, once it was multiplied by 1 + weights behind blocks, and blended in."""
    f.only("tie_word_embeddings", False)
    s, act, rope = Sizes.read(f, head=64), f.activation(), _spark_rope(f)
    eps, last = f.number("rms_norm_eps", 1e-5), f.number("post_norm_eps", 1e-8)
    before, bare, behind = NormStyle("rms", eps, offset=1.0), Unweighted("rms", eps), Unweighted("rms", last)
    heads = _Heads.read(f, s, rope, eps, factor=5.4730064863875, is_normed=True)
    sparse, ends = listed_sparse(f, s.layers, 0), _ends(f, multiplier=0.1767766952966369)
    experts, temperature = _Experts.read(f, act, before, last, ends.scale), f.number("residual_gate_temperature", 0.3)

    def layer(n: TensorNames, i: int) -> Ops:
        block = experts.ops(n, s) if sparse[i] else gated(n, "mlp", s.hidden, s.inner, act, "h", "m")
        scale = n.vector("post_feedforward_layernorm.weight", s.hidden)
        gates = (n.vector(f"post_{name}_residual_gate.gate", s.hidden) for name in ("attention", "feedforward"))
        first, second = (Blend(source, gate, temperature, 1e-3) for source, gate in zip("am", gates, strict=True))
        return (
            *(() if i else (bare.op(n, "", s.hidden, "x", "x"),)),
            before.op(n, "input_layernorm", s.hidden, "x", "h"),
            *heads.ops(n, i),
            behind.op(n, "", s.hidden, "a", "a"),
            first,
            before.op(n, "pre_feedforward_layernorm", s.hidden, "x", "h"),
            *block,
            Multiply("m", scale, "m", offset=1.0),
            behind.op(n, "", s.hidden, "m", "m"),
            second,
        )

    return assemble(f, s, NormStyle("rms", eps), rope, [rope.plain(s.head)], ends, layer)
