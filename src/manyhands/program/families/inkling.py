"""The recipe of inkling_text (Inkling): attention that adds to scores by distance, without rotary positions; short convolutions
of keys, of values and of what both branches give; experts of which some are of every row.

Tensors have the names of the published checkpoints; gates and ups are stored in turns, row by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from manyhands.program.blocks import NormStyle, Ops, Sizes, TensorNames
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import (
    Add,
    Attention,
    Convolution,
    Copy,
    ExpertRouting,
    Experts,
    Gate,
    Gating,
    GroupedProduct,
    Multiply,
    Part,
    Product,
    Program,
    Rows,
    ScaleByPosition,
    Term,
    Weight,
)
from manyhands.program.rope import RopeReader

_MOST_BIASES: Final = 1 << 20  # of all heads of a row
_ALWAYS: Final = {
    **dict.fromkeys(("use_sconv", "use_embed_norm", "use_gate_bias", "use_global_scale", "norm_after_topk"), True),
    **dict.fromkeys(("q_bias", "o_bias", "tie_word_embeddings"), False),
    **dict.fromkeys(("final_logit_softcapping", "rope_parameters", "rope_scaling")),
    "gate_activation": "sigmoid",
    "shared_expert_sink": True,
}


def inkling_text(f: Fields) -> Program:
    """The head's rows beyond unpadded_vocab_size are left out, as they are of no token."""
    _defaults(f)
    s, inner = _sizes(f)
    norm, rope, act = NormStyle("rms", f.number("rms_norm_eps", 1e-6)), RopeReader(f), Gating(f.activation())
    attends, experts, taps = _attentions(f, s), _Mixture.read(f, s, inner, act), f.count("conv_kernel_size", 4, high=32)
    is_sparse = [kind == "sparse" for kind in _blocks(f, s.layers)]
    vocab = f.count("unpadded_vocab_size", s.vocab, high=1 << 22)

    def layer(n: TensorNames, i: int) -> Ops:
        begins = () if i else (norm.op(TensorNames("model.llm."), "embed_norm", s.hidden, "x", "x"),)
        block = experts.ops(n) if is_sparse[i] else _dense(n, s, act)
        return (
            *(*begins, norm.op(n, "attn_norm", s.hidden, "x", "h"), *attends[i].ops(n, norm, taps)),
            *(_mixed(n, "attn_sconv", s.hidden, taps, "a"), Add((Term("a"), Term("a mixed")))),
            *(norm.op(n, "mlp_norm", s.hidden, "x", "h"), *block),
            *(_mixed(n, "mlp_sconv", s.hidden, taps, "m"), Add((Term("m"), Term("m mixed")))),
        )

    scale = 1.0 / f.number("logits_mup_width_multiplier", 24.0)
    ends = EndsStyle(False, "model.llm.embed", "model.llm.norm", "model.llm.unembed", "model.llm.layers", scale=scale)
    return _without_padding(assemble(f, s, norm, rope, [], ends, layer), min(vocab, s.vocab))


def _sizes(f: Fields) -> tuple[Sizes, int]:
    """With the width of dense blocks; and that of experts, which published configs call intermediate_size."""
    s, inner = Sizes.read(f), f.count("moe_intermediate_size", 3072, high=1 << 20)
    if not f.has("dense_intermediate_size"):
        return s, inner
    return replace(s, inner=f.count("dense_intermediate_size", high=1 << 20)), s.inner


def _defaults(f: Fields) -> None:
    """Fields that a published config has by other names, and such as say what the family always does (_ALWAYS)."""
    f.rename(max_position_embeddings="model_max_length", conv_kernel_size="sconv_kernel_size")
    f.rename(sliding_window_size="sliding_window", n_routed_experts="num_local_experts")
    f.rename(logits_mup_width_multiplier="embedding_multiplier")
    f.assume(vocab_size=201024, hidden_size=6144, num_hidden_layers=66, num_attention_heads=64, num_key_value_heads=8)
    f.assume(head_dim=128, intermediate_size=24576, max_position_embeddings=1 << 17)
    for name, value in _ALWAYS.items():
        f.only(name, value)
    f.ignore("rms_norm_eps_moe_gate", "number_of_conv_states")  # no norm is before the router
    f.ignore("mtp_config", "chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids")


def _blocks(f: Fields, layers: int) -> list[str]:
    dense = f.count("dense_mlp_idx", 0, low=0)
    return f.per_layer(
        "mlp_layer_types", layers, ["dense" if i < dense else "sparse" for i in range(layers)], ("dense", "sparse")
    )


def _mixed(n: TensorNames, name: str, width: int, taps: int, source: str) -> Convolution:
    """To "SOURCE mixed", which joins the source."""
    return Convolution(source, f"{source} mixed", taps, Weight(f"{n.path}{name}.weight", (width, 1, taps)))


def _gates_and_ups(both: Weight, inner: int) -> tuple[Part, Part]:
    """Of a weight that has them in turns."""
    return Part("gate", replace(both, rows=Rows(0, 1, 2, inner))), Part("up", replace(both, rows=Rows(1, 1, 2, inner)))


def _dense(n: TensorNames, s: Sizes, act: Gating) -> Ops:
    """From "h" to "m"."""
    return (
        Product("h", _gates_and_ups(n.linear("mlp.w13_dn", 2 * s.inner, s.hidden), s.inner)),
        Gate("gate", "up", "gate", act),
        Product("gate", (Part("m", n.linear("mlp.w2_md", s.hidden, s.inner)),)),
        Multiply("m", n.vector("mlp.global_scale", 1), "m"),
    )


@dataclass(frozen=True, slots=True)
class _Attention:
    """Of one layer."""

    hidden: int
    heads: int
    kv_heads: int
    width: int
    relative: int  # columns of a head's state of relative positions
    extent: int
    window: int | None
    growth: tuple[ScaleByPosition, ...]

    def ops(self, n: TensorNames, norm: NormStyle, taps: int) -> Ops:
        """From "h" to "a"."""
        query, key, relative = self.heads * self.width, self.kv_heads * self.width, self.heads * self.relative
        sources = zip("qkvr", (query, key, key, relative), ("wq_du", "wk_dv", "wv_dv", "wr_du"), strict=True)
        biases = Weight(f"{n.path}attn.rel_logits_proj.proj", (self.relative, self.extent), transposed=True)
        return (
            Product(
                "h", tuple(n.part(name, f"attn.{stored}", width, self.hidden, False) for name, width, stored in sources)
            ),
            *(_mixed(n, "attn.k_sconv", key, taps, "k"), Add((Term("k mixed"),), "k")),
            *(_mixed(n, "attn.v_sconv", key, taps, "v"), Add((Term("v mixed"),), "v")),
            norm.op(n, "attn.q_norm", self.width, "q", "q", self.heads),
            norm.op(n, "attn.k_norm", self.width, "k", "k", self.kv_heads),
            *self.growth,
            GroupedProduct("r", "biases", biases, self.heads, is_shared=True),
            self._attend(),
            Product("a", (n.part("a", "attn.wo_ud", self.hidden, query, False),)),
        )

    def _attend(self) -> Attention:
        shape = (self.heads, self.kv_heads, self.width, self.width, 1.0 / self.width, self.window)
        return Attention("q", "k", "v", "a", *shape, biases="biases")


def _attentions(f: Fields, s: Sizes) -> list[_Attention]:
    """Of each layer: those with a window have sizes of their own, and scores that do not grow with the position."""
    heads = f.count("swa_num_attention_heads", 64, high=4096)
    kv_heads = f.count("swa_num_key_value_heads", 16, high=4096)
    if heads % kv_heads:
        raise f.refuse("swa_num_key_value_heads", f"a divisor of the {heads} attention heads is needed")
    width, window = f.count("swa_head_dim", 128, high=1 << 14), f.count("sliding_window_size", 512)
    relative, extent = f.count("d_rel", 16, high=1 << 12), f.count("rel_extent", 1024)
    for name, count in (("sliding_window_size", heads * window), ("rel_extent", s.heads * extent)):
        if count > _MOST_BIASES:
            raise f.refuse(name, f"at most {_MOST_BIASES} distances of all heads are needed")
    near = _Attention(s.hidden, heads, kv_heads, width, relative, window, window, ())
    full = _Attention(s.hidden, s.heads, s.kv_heads, s.head, relative, extent, None, _growth(f))
    return [near if is_near else full for is_near in _has_window(f, s.layers)]


def _growth(f: Fields) -> tuple[ScaleByPosition, ...]:
    """Of queries, and of what biases are made of."""
    floor, alpha = f.optional_count("log_scaling_n_floor"), f.number("log_scaling_alpha", 0.1, positive=False)
    if alpha < 0:
        raise f.refuse("log_scaling_alpha", "a number from 0 is needed")
    if floor is None or not alpha:
        return ()
    return tuple(ScaleByPosition(name, alpha, floor, offset=1, growth="lengths") for name in "qr")


def _has_window(f: Fields, layers: int) -> Sequence[bool]:
    ids = f.whole_numbers("local_layer_ids")
    named = [i in ids if f.has("local_layer_ids") else (i + 1) % 6 != 0 for i in range(layers)]
    kinds = f.per_layer(
        "layer_types",
        layers,
        ["hybrid_sliding" if is_near else "hybrid" for is_near in named],
        ("hybrid", "hybrid_sliding"),
    )
    return [kind == "hybrid_sliding" for kind in kinds]


@dataclass(frozen=True, slots=True)
class _Mixture:
    """Experts, of which the last `always` are of every row."""

    hidden: int
    inner: int
    experts: int
    top_k: int
    always: int
    scale: float
    act: Gating

    @classmethod
    def read(cls, f: Fields, s: Sizes, inner: int, act: Gating) -> "_Mixture":
        """Raises ModelError where more are chosen than there are."""
        always, experts = (f.count("n_shared_experts", 2, high=32), f.count("n_routed_experts", 256, high=MOST_EXPERTS))
        if experts + always > MOST_EXPERTS:
            raise f.refuse("n_shared_experts", f"at most {MOST_EXPERTS} experts of both kinds are needed")
        top_k = f.count("num_experts_per_tok", 6, high=experts)
        return cls(s.hidden, inner, experts, top_k, always, f.number("route_scale", 8.0), act)

    def ops(self, n: TensorNames) -> Ops:
        """From "h" to "m"."""
        router = n.linear("mlp.gate", self.experts + self.always, self.hidden)
        route = ExpertRouting(
            "logits",
            "routes",
            self.experts,
            self.top_k,
            "sigmoid",
            normalise=True,
            scale=self.scale,
            correction=n.vector("mlp.gate.bias", self.experts),
            factors=n.vector("mlp.gate.global_scale", 1),
            always=self.always,
            epsilon=2e-38,  # transformers has none: the smallest that is no denormal
        )
        shared = tuple(op for i in range(self.always) for op in self._shared(n, i))
        joined = Add(tuple(Term(f"s{i}") for i in range(self.always)), "m")
        return (Product("h", (Part("logits", router),)), route, *shared, self._routed(n), joined)

    def _routed(self, n: TensorNames) -> Experts:
        both, down = self._stored(n, "mlp.experts.w13_weight", "mlp.experts.w2_weight", self.experts)
        gate, up = (part.weight for part in _gates_and_ups(both, self.inner))
        return Experts("h", "routes", "m", self.experts, self.act, gate, up, down)

    def _shared(self, n: TensorNames, number: int) -> Ops:
        """One of those of every row, to "sNUMBER". Its weight comes before the last product."""
        names = ("mlp.shared_experts.shared_w13_weight", "mlp.shared_experts.shared_w2_weight")
        both, down = (replace(weight, part=number) for weight in self._stored(n, *names, self.always))
        return (
            Product("h", _gates_and_ups(both, self.inner)),
            Gate("gate", "up", "gate", self.act),
            Copy("shares", "share", number, 1),
            Multiply("gate", "share", "gate"),
            Product("gate", (Part(f"s{number}", down),)),
        )

    def _stored(self, n: TensorNames, both: str, down: str, count: int) -> tuple[Weight, Weight]:
        shapes = (count, 2 * self.inner, self.hidden), (count, self.hidden, self.inner)
        return Weight(n.path + both, shapes[0], stacked=True), Weight(n.path + down, shapes[1], stacked=True)


def _without_padding(program: Program, vocab: int) -> Program:
    """Logits of the first `vocab` ids alone."""
    if vocab == program.vocab:
        return program
    (part,) = program.head.product.parts
    product = replace(program.head.product, parts=(replace(part, weight=replace(part.weight, rows=Rows(0, vocab))),))
    return replace(program, vocab=vocab, head=replace(program.head, product=product))
