"""Recipes of families with layer norms: stablelm, phi, gpt_neox, nemotron, jais2, starcoder2, cohere, cohere2, cohere2_moe."""

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
    before_each,
    each_expert,
    gated,
    head_scale,
    parallel,
    plain,
    router,
    sliding,
    windows,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import GATE_UP_DOWN, listed_sparse
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import Activation, Add, ExpertRouting, Program, Rope, Term
from manyhands.program.rope import RopeReader

MOST_NORMS: Final = 1 << 16  # heads with a norm of their own: 1,280 in the 12B of stablelm, 6,144 in Command R+


def stablelm(f: Fields) -> Program:
    """A quarter of a head turns; norms of heads with weights of each head; sequential or parallel."""
    s, act = Sizes.read(f, free_head=False), f.activation()
    norm = NormStyle("layer", f.number("layer_norm_eps", 1e-5), bias=True)
    heads = NormStyle("layer", norm.eps) if f.flag("qk_layernorm") else None
    _check_norms(f, s, heads, "qk_layernorm")
    names = ("self_attn.q_layernorm.norms.{head}", "self_attn.k_layernorm.norms.{head}")
    style = AttentionStyle(head_scale(s.head), bias=f.flag("use_qkv_bias"), head_norm=heads, norm_names=names)
    f.only("num_heads", s.heads)
    f.only("rotary_scaling_factor", 1.0)
    rope, beside = RopeReader(f, fraction=f.number("partial_rotary_factor", 0.25)), f.flag("use_parallel_residual")

    def layer(n: TensorNames, i: int) -> Ops:
        first, second = attention(n, s, style, "h", "a"), gated(n, "mlp", s.hidden, s.inner, act, "h", "m")
        if not beside:
            return before_each(n, s, norm, first, second)
        return parallel(Branch(first, "a", norm.op(n, "input_layernorm", s.hidden, "x", "h")), Branch(second, "m"))

    return assemble(f, s, norm, rope, [rope.plain(s.head, partial=True)], EndsStyle(), layer)


def _check_norms(f: Fields, s: Sizes, norm: NormStyle | None, switch: str) -> None:
    """Raises ModelError where there are too many heads with norms of their own, if they have any."""
    if norm and s.heads * s.layers > MOST_NORMS:
        raise f.refuse("num_attention_heads", f"with {switch} at most {MOST_NORMS} heads in all layers are read")


def phi(f: Fields) -> Program:
    """Half of a head turns; attention and block side by side behind one norm; biases everywhere, also in the head."""
    s, act = Sizes.read(f, kv=False, free_head=False), f.activation("hidden_act", "gelu_new")
    norm = NormStyle("layer", f.number("layer_norm_eps", 1e-5), bias=True)
    style = AttentionStyle(
        head_scale(s.head),
        bias=True,
        out_bias=True,
        out_name="self_attn.dense",
        fused="self_attn.qkv_proj" if f.stored("qkv_by_part") else None,
        head_norm=norm if f.flag("qk_layernorm") else None,
        norm_names=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    )
    rope = RopeReader(f, fraction=f.number("partial_rotary_factor", 0.5))

    def layer(n: TensorNames, i: int) -> Ops:
        first = Branch(attention(n, s, style, "h", "a"), "a", norm.op(n, "input_layernorm", s.hidden, "x", "h"))
        return parallel(first, Branch(plain(n, ("mlp.fc1", "mlp.fc2"), s, act, "h", "m", bias=True), "m"))

    ends = EndsStyle(norm="model.final_layernorm", head_bias=True)
    return assemble(f, s, norm, rope, [rope.plain(s.head, partial=True)], ends, layer)


def gpt_neox(f: Fields) -> Program:
    """q, k and v of a head side by side in one tensor; attention and block side by side behind norms of their own."""
    f.only("num_key_value_heads", None)
    s, act = Sizes.read(f, kv=False, free_head=False), f.activation("hidden_act", "gelu")
    norm = NormStyle("layer", f.number("layer_norm_eps", 1e-5), bias=True)
    bias = f.flag("attention_bias", True)
    style = AttentionStyle(
        head_scale(s.head),
        bias=bias,
        out_bias=bias,
        out_name="attention.dense",
        fused="attention.query_key_value",
        interleaved=not f.stored("qkv_by_part"),
    )
    base = f.number("rotary_emb_base", 10000.0)
    f.only("rope_theta", base)  # transformers does not read it here
    rope = RopeReader(f, theta=base, fraction=f.number("rotary_pct", 0.25))
    beside, names = f.flag("use_parallel_residual", True), ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")

    def layer(n: TensorNames, i: int) -> Ops:
        first = attention(n, s, style, "h", "a")
        if not beside:
            return before_each(n, s, norm, first, plain(n, names, s, act, "h", "m", bias=True))
        return parallel(
            Branch(first, "a", norm.op(n, "input_layernorm", s.hidden, "x", "h")),
            Branch(
                plain(n, names, s, act, "h", "m", bias=True),
                "m",
                norm.op(n, "post_attention_layernorm", s.hidden, "x", "h"),
            ),
        )

    ends = EndsStyle(
        embed="gpt_neox.embed_in", norm="gpt_neox.final_layer_norm", head="embed_out", layers="gpt_neox.layers"
    )
    return assemble(f, s, norm, rope, [rope.plain(s.head, partial=True)], ends, layer)


def nemotron(f: Fields) -> Program:
    """1 + weight in layer norms, squared relu, half of a head turns."""
    s, act = Sizes.read(f, kv=False), f.activation("hidden_act", "relu2")
    norm = NormStyle("layer", f.number("norm_eps", 1e-5), 0.0 if f.stored("norms_plus_one") else 1.0, bias=True)
    bias, block_bias = f.flag("attention_bias"), f.flag("mlp_bias")
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias)
    rope = RopeReader(f, fraction=f.number("partial_rotary_factor", 0.5))

    def layer(n: TensorNames, i: int) -> Ops:
        block = plain(n, ("mlp.up_proj", "mlp.down_proj"), s, act, "h", "m", bias=block_bias)
        return before_each(n, s, norm, attention(n, s, style, "h", "a"), block)

    return assemble(f, s, norm, rope, [rope.plain(s.head, partial=True)], EndsStyle(), layer)


def jais2(f: Fields) -> Program:
    """llama's attention and squared relu, with biases."""
    s, act = Sizes.read(f, kv=False), f.activation("hidden_act", "relu2")
    norm = NormStyle("layer", f.number("layer_norm_eps", 1e-5), bias=True)
    bias, block_bias, rope = f.flag("attention_bias", True), f.flag("mlp_bias", True), RopeReader(f)
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias)

    def layer(n: TensorNames, i: int) -> Ops:
        block = plain(n, ("mlp.up_proj", "mlp.down_proj"), s, act, "h", "m", bias=block_bias)
        return before_each(n, s, norm, attention(n, s, style, "h", "a"), block)

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer)


def starcoder2(f: Fields) -> Program:
    """One switch for all biases; a window in every layer, if any."""
    s, act = Sizes.read(f), f.activation("hidden_act", "gelu_pytorch_tanh")
    norm, bias = NormStyle("layer", f.number("norm_epsilon", 1e-5), bias=True), f.flag("use_bias", True)
    _starcoder2_as_trained(f, norm)
    window = f.optional_count("sliding_window")
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, window=window)
    rope = RopeReader(f)

    def layer(n: TensorNames, i: int) -> Ops:
        block = plain(n, ("mlp.c_fc", "mlp.c_proj"), s, act, "h", "m", bias=bias)
        return before_each(n, s, norm, attention(n, s, style, "h", "a"), block)

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(tied=True), layer)


def _starcoder2_as_trained(f: Fields, norm: NormStyle) -> None:
    """Fields of the published configs that transformers does not read: each must say what it computes."""
    f.only("layer_norm_epsilon", norm.eps)
    f.only("mlp_type", "default")
    f.only("norm_type", "layer_norm")
    f.only("scale_attn_weights", True)
    f.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")


def cohere(f: Fields) -> Program:
    """One norm without bias, attention and block side by side; pairs turn; norms of heads with weights of each head."""
    s, rope = Sizes.read(f, kv=False), RopeReader(f, theta=500000.0)
    f.ignore("model_max_length")  # 131,072 beside 8,192 positions in Command R, which transformers does not read
    heads = NormStyle("layer", f.number("layer_norm_eps", 1e-5)) if f.flag("use_qk_norm") else None
    _check_norms(f, s, heads, "use_qk_norm")
    style = replace(_cohere_style(f, s), head_norm=heads, norm_rows=True)
    return _side_by_side(f, s, rope, [rope.plain(s.head)], [style] * s.layers, _cohere_ends(f))


def _cohere_ends(f: Fields) -> EndsStyle:
    return EndsStyle(tied=True, scale=f.number("logit_scale", 0.0625))


def cohere2(f: Fields) -> Program:
    """cohere with windows; layers without one have no positions either."""
    s, every, rope = Sizes.read(f, kv=False, free_head=False), f.count("sliding_window_pattern", 4), RopeReader(f)
    full = range(every - 1, s.layers, every)
    found = windows(f, s.layers, sliding(s.layers, full), f.count("sliding_window", 4096))
    _cohere2_as_trained(f, every)
    styles = [replace(_cohere_style(f, s), rope=None if one is None else 0, window=one) for one in found]
    return _side_by_side(f, s, rope, [rope.plain(s.head)], styles, _cohere_ends(f))


def cohere_compass_text(f: Fields) -> Program:
    """cohere2 whose halves turn, by a table of each type of layer, or by none."""
    s, rope = Sizes.read(f, kv=False, free_head=False), RopeReader(f, sectioned=True)
    found = windows(f, s.layers, ["full_attention"] * s.layers, f.optional_count("sliding_window", 4096))
    kinds = ["full_attention" if window is None else "sliding_attention" for window in found]
    tables = rope.by_types(set(kinds), s.head, theta=10000.0, unread=("rope_theta", "rope_type"))
    rows = [list(tables).index(kind) if kind in tables else None for kind in kinds]
    base = replace(_cohere_style(f, s), pairs=False)
    styles = [replace(base, rope=row, window=one) for row, one in zip(rows, found, strict=True)]
    f.ignore("pooling")  # of models that embed or rank texts
    ends = EndsStyle(tied=True, scale=f.optional("logit_scale") or 1.0)
    return _side_by_side(f, s, rope, list(tables.values()), styles, ends)


def _cohere_style(f: Fields, s: Sizes) -> AttentionStyle:
    bias = f.flag("attention_bias")
    return AttentionStyle(head_scale(s.head), pairs=True, bias=bias, out_bias=bias)


def _side_by_side(
    f: Fields, s: Sizes, rope: RopeReader, ropes: list[Rope], styles: Sequence[AttentionStyle], ends: EndsStyle
) -> Program:
    """Attention and a block behind one norm, with one style of attention a layer."""
    act, norm = f.activation(), NormStyle("layer", f.number("layer_norm_eps", 1e-5))

    def layer(n: TensorNames, i: int) -> Ops:
        first = Branch(attention(n, s, styles[i], "h", "a"), "a", norm.op(n, "input_layernorm", s.hidden, "x", "h"))
        return parallel(first, Branch(gated(n, "mlp", s.hidden, s.inner, act, "h", "m"), "m"))

    return assemble(f, s, norm, rope, ropes, ends, layer)


def _cohere2_as_trained(f: Fields, every: int) -> None:
    """Fields of the published configs that transformers does not read: each must say what it computes."""
    f.only("layer_switch", every)
    f.only("order_of_interleaved_layers", "local_attn_first")
    f.only("position_embedding_type", "rope_gptj")
    f.only("rotary_pct", 1.0)
    f.only("use_embedding_sharing", f.flag("tie_word_embeddings", True))
    f.only("use_gated_activation", True)
    f.only("use_parallel_block", True)
    f.only("use_qk_norm", False)
    f.ignore("_sliding_window_pattern", "use_parallel_embedding")


@dataclass(frozen=True, slots=True)
class _Choice:
    """Blocks of cohere2_moe: experts, perhaps beside shared ones, whose sums are added or averaged; dense ones at first."""

    route: ExpertRouting
    act: Activation
    shared: int  # columns of the shared experts together
    dense_inner: int
    sparse: list[bool]
    is_average: bool

    def branch(self, n: TensorNames, s: Sizes, i: int) -> tuple[Ops, tuple[Term, ...]]:
        """From "h": the block of layer `i`, and what it adds."""
        if not self.sparse[i]:
            return gated(n, "mlp", s.hidden, self.dense_inner, self.act, "h", "m"), (Term("m"),)
        experts = each_expert(n, "mlp.experts", GATE_UP_DOWN, s, s.inner, self.route.experts, self.act)
        routed = (*router(n, "mlp.gate", s, self.route), experts)
        if not self.shared:
            return routed, (Term("m"),)
        scale = 0.5 if self.is_average else 1.0
        beside = gated(n, "mlp.shared_experts", s.hidden, self.shared, self.act, "h", "s")
        return (*routed, *beside), (Term("m", scale), Term("s", scale))


def cohere2_moe(f: Fields) -> Program:
    """cohere2 with experts, and layers in front without; norms of either kind.

    Sigmoids rank experts here, in transformers what they are taken of: the same choice, unless two are the same number.
    """
    if f.raw("rope_scaling"):  # the class in transformers does not read it, as all others do
        raise f.refuse("rope_scaling", "it is needed in rope_parameters")
    s, bias, norm = Sizes.read(f, kv=False, head=128), f.flag("attention_bias"), _either_norm(f)
    choice, found, rope = _choice(f, s), _prefixed_windows(f, s.layers), RopeReader(f)
    is_turned = f.count("prefix_dense_sliding_window_pattern", 1) == 1  # dense layers, whatever they see
    _cohere2_as_trained(f, f.count("sliding_window_pattern", 4))

    def layer(n: TensorNames, i: int) -> Ops:
        turns = 0 if found[i] is not None or (is_turned and not choice.sparse[i]) else None
        style = AttentionStyle(head_scale(s.head), turns, pairs=True, bias=bias, out_bias=bias, window=found[i])
        block, terms = choice.branch(n, s, i)
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        return before, *attention(n, s, style, "h", "a"), *block, Add((Term("a"), *terms))

    return assemble(f, s, norm, rope, [rope.plain(s.head)], _cohere_ends(f), layer)


def _either_norm(f: Fields) -> NormStyle:
    """A layer norm, unless there is an epsilon of the other."""
    eps, other = f.number("layer_norm_eps", 1e-5), f.optional("rms_norm_eps")
    return NormStyle("layer", eps) if other is None else NormStyle("rms", other)


def _choice(f: Fields, s: Sizes) -> _Choice:
    count, chosen = f.count("num_experts", 8, high=MOST_EXPERTS), f.raw("expert_selection_fn", "softmax")
    if chosen not in ("softmax", "sigmoid"):
        raise f.refuse("expert_selection_fn", "only softmax or sigmoid is supported")
    normalise = f.flag("norm_topk_prob", True) or chosen == "softmax"
    route = ExpertRouting("r", "routes", count, f.count("num_experts_per_tok", 2, high=count), chosen, normalise)
    f.only("shared_expert_combination_strategy", "average", "sum")
    return _Choice(
        route,
        f.activation(),
        s.inner * f.count("num_shared_experts", 0, low=0, high=4096),
        f.optional_count("prefix_dense_intermediate_size") or s.inner,
        listed_sparse(f, s.layers, f.count("first_k_dense_replace", 0, low=0, high=s.layers)),
        f.raw("shared_expert_combination_strategy", "average") == "average",
    )


def _prefixed_windows(f: Fields, layers: int) -> list[int | None]:
    """The layers in front have a pattern of their own, and so have the others, counted from the first of them."""
    dense = f.count("first_k_dense_replace", 0, low=0, high=layers)
    first, every = f.count("prefix_dense_sliding_window_pattern", 1), f.count("sliding_window_pattern", 4)
    full = [*range(first - 1, dense, first), *range(dense + every - 1, layers, every)]
    return windows(f, layers, sliding(layers, full), f.optional_count("sliding_window", 4096))
