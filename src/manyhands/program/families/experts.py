"""Recipes of families whose blocks are experts: mixtral, qwen2_moe, qwen3_moe, olmoe, minimax_m2, granitemoe, gpt_oss."""

from collections.abc import Sequence
from dataclasses import replace
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
    router,
    sequential,
    sliding,
    windows,
)
from manyhands.program.ends import EndsStyle, assemble, with_clip
from manyhands.program.families.llama import granite_ends
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import (
    EXPERT,
    Activation,
    ExpertRouting,
    Experts,
    Gating,
    Multiply,
    Part,
    Product,
    Program,
    Rows,
    Weight,
)
from manyhands.program.rope import RopeReader

_OSS_YARN: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def top_k(f: Fields, experts: int, default: int | None) -> int:
    """How many experts a row takes."""
    return f.count("num_experts_per_tok", default, high=experts)


def mixtral(f: Fields) -> Program:
    """Experts in every layer."""
    s, act = Sizes.read(f), f.activation()
    norm = NormStyle("rms", f.number("rms_norm_eps", 1e-5))
    count = f.count("num_local_experts", 8, high=MOST_EXPERTS)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 2), "softmax", normalise=True)
    pairs, window = f.stored("interleaved_rope"), f.optional_count("sliding_window")
    style = AttentionStyle(head_scale(s.head), pairs=pairs, window=window)
    rope = RopeReader(f, theta=1000000.0)

    def layer(n: TensorNames, i: int) -> Ops:
        chosen = router(n, "block_sparse_moe.gate", s, route)
        experts = each_expert(n, "block_sparse_moe.experts", ("w1", "w3", "w2"), s, s.inner, count, act)
        return before_each(n, s, norm, attention(n, s, style, "h", "a"), (*chosen, experts))

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer)


def stacked_experts(
    names: TensorNames,
    path: str,
    s: Sizes,
    inner: int,
    count: int,
    activation: Activation | Gating,
    *,
    parts: tuple[str, ...] = ("gate_up_proj", "down_proj"),
    transposed: bool = False,
) -> Experts:
    """Experts whose matrices lie in one tensor of gates above ups and one of downs; transposed: gates beside ups. Of three
    parts the first are gates and ups by themselves. From "h" by "routes" to "m"."""
    gates, down = (2 * inner, s.hidden), (s.hidden, inner)
    if transposed:
        gates, down = gates[::-1], down[::-1]
    *ups, last = (f"{names.path}{path}.{part}" for part in parts)
    gate = Weight(ups[0], (count, *gates), Rows(0, inner), transposed=transposed, stacked=True)
    up = replace(gate, rows=Rows(inner, inner))
    if len(ups) == 2:
        gate, up = (Weight(name, (count, inner, s.hidden), stacked=True) for name in ups)
    return Experts(
        source="h",
        routes="routes",
        target="m",
        experts=count,
        gating=Gating.of(activation),
        gate=gate,
        up=up,
        down=Weight(last, (count, *down), transposed=transposed, stacked=True),
    )


def listed_sparse(f: Fields, layers: int, dense: int) -> list[bool]:
    """Which layers have experts, by a list of kinds; without one all but the first `dense`."""
    default = ["dense" if i < dense else "sparse" for i in range(layers)]
    return [kind == "sparse" for kind in f.per_layer("mlp_layer_types", layers, default, ("dense", "sparse"))]


def sparse_layers(f: Fields, layers: int, dense: Sequence[int] = ()) -> list[bool]:
    """Which layers of qwen have experts; `dense`: those that have none where the config does not list them, or has null."""
    step = f.count("decoder_sparse_step", 1)
    dense = f.whole_numbers("mlp_only_layers") if f.has("mlp_only_layers") else dense
    return [(i + 1) % step == 0 and i not in dense for i in range(layers)]


def beside_gated(n: TensorNames, s: Sizes, route: ExpertRouting, inner: int, shared: int, act: Activation) -> Ops:
    """Experts, from "h" to "m", and one that every row takes, with a gate of its own, to "s"."""
    gate = Part("by", n.linear("mlp.shared_expert_gate", 1, s.hidden), activation="sigmoid")
    return (
        *router(n, "mlp.gate", s, route),
        each_expert(n, "mlp.experts", GATE_UP_DOWN, s, inner, route.experts, act),
        *gated(n, "mlp.shared_expert", s.hidden, shared, act, "h", "s"),
        Product("h", (gate,)),
        Multiply("s", "by", "s"),
    )


def qwen2_moe(f: Fields) -> Program:
    """Experts in some layers, beside one that every row takes, with a gate of its own."""
    s, act = Sizes.read(f), f.activation()
    count, inner = f.count("num_experts", 60, high=MOST_EXPERTS), f.count("moe_intermediate_size", 1408, high=1 << 20)
    shared = f.count("shared_expert_intermediate_size", 5632, high=1 << 20)
    normalise, bias = f.flag("norm_topk_prob"), f.flag("qkv_bias", True)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 4), "softmax", normalise)
    wanted, first = f.flag("use_sliding_window"), f.count("max_window_layers", 28, low=0)
    window = f.optional_count("sliding_window", 4096) if wanted else None
    f.ignore("sliding_window")
    full = [i for i in range(s.layers) if i % 2 or i >= first or not window]
    found, sparse = windows(f, s.layers, sliding(s.layers, full), window), sparse_layers(f, s.layers)
    norm, rope = NormStyle("rms", f.number("rms_norm_eps", 1e-6)), RopeReader(f)

    def block(n: TensorNames, i: int) -> Branch:
        before = norm.op(n, "post_attention_layernorm", s.hidden, "x", "h")
        if not sparse[i]:
            return Branch(gated(n, "mlp", s.hidden, s.inner, act, "h", "m"), "m", before)
        return Branch(beside_gated(n, s, route, inner, shared, act), "m", before, terms=("m", "s"))

    def layer(n: TensorNames, i: int) -> Ops:
        style = AttentionStyle(head_scale(s.head), bias=bias, window=found[i])
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        return sequential(Branch(attention(n, s, style, "h", "a"), "a", before), block(n, i))

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer)


def qwen3_moe(f: Fields) -> Program:
    """Experts in some layers; norms of heads."""
    s, act, bias = Sizes.read(f), f.activation(), f.flag("attention_bias")
    count = f.count("num_local_experts" if f.has("num_local_experts") else "num_experts", 128, high=MOST_EXPERTS)
    f.only("num_experts", count)
    f.only("qkv_bias", False)  # these three are in the configs of Qwen3-Coder
    f.only("shared_expert_intermediate_size", 0)
    f.only("use_qk_norm", True)
    inner, normalise = f.count("moe_intermediate_size", 768, high=1 << 20), f.flag("norm_topk_prob")
    route = ExpertRouting("r", "routes", count, top_k(f, count, 8), "softmax", normalise)
    window = f.optional_count("sliding_window", 4096) if f.flag("use_sliding_window") else None
    f.ignore("sliding_window", *(() if window else ("max_window_layers",)))
    sparse, norm, rope = sparse_layers(f, s.layers), NormStyle("rms", f.number("rms_norm_eps", 1e-6)), RopeReader(f)
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, head_norm=norm, window=window)

    def layer(n: TensorNames, i: int) -> Ops:
        body = gated(n, "mlp", s.hidden, s.inner, act, "h", "m")
        if sparse[i]:
            body = (*router(n, "mlp.gate", s, route), each_expert(n, "mlp.experts", GATE_UP_DOWN, s, inner, count, act))
        return before_each(n, s, norm, attention(n, s, style, "h", "a"), body)

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer)


def olmoe(f: Fields) -> Program:
    """Norms over all heads of q and of k at once."""
    s, act, bias = Sizes.read(f, kv=False, free_head=False), f.activation(), f.flag("attention_bias")
    clip = f.optional("clip_qkv")
    count, normalise = f.count("num_experts", 64, high=MOST_EXPERTS), f.flag("norm_topk_prob")
    route = ExpertRouting("r", "routes", count, top_k(f, count, 8), "softmax", normalise)
    norm, rope = NormStyle("rms", f.number("rms_norm_eps", 1e-5)), RopeReader(f)
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, head_norm=norm, wide_norm=True)

    def layer(n: TensorNames, i: int) -> Ops:
        body = (*router(n, "mlp.gate", s, route), each_expert(n, "mlp.experts", GATE_UP_DOWN, s, s.inner, count, act))
        return before_each(n, s, norm, attention(n, s, style, "h", "a"), body)

    return with_clip(assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer), clip)


def minimax_m2(f: Fields) -> Program:
    """Norms as in olmoe; a part of a head turns; sigmoids choose, with a correction."""
    s, act = Sizes.read(f, head=128), f.activation()
    count = f.count("num_local_experts", 256, high=MOST_EXPERTS)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 8), "sigmoid", normalise=True)
    norm = NormStyle("rms", f.number("rms_norm_eps", 1e-6))
    style = AttentionStyle(head_scale(s.head), head_norm=norm, wide_norm=True)
    turned = f.count("rotary_dim", s.head, high=s.head) / s.head
    rope = RopeReader(f, theta=5000000.0, fraction=f.number("partial_rotary_factor", turned))
    _minimax_as_trained(f)

    def layer(n: TensorNames, i: int) -> Ops:
        path = "block_sparse_moe"
        chosen = router(n, f"{path}.gate", s, route, correction=f"{path}.e_score_correction_bias")
        experts = each_expert(n, f"{path}.experts", ("w1", "w3", "w2"), s, s.inner, count, act)
        return before_each(n, s, norm, attention(n, s, style, "h", "a"), (*chosen, experts))

    return assemble(f, s, norm, rope, [rope.plain(s.head, partial=True)], EndsStyle(), layer)


def _minimax_as_trained(f: Fields) -> None:
    """Fields of the published configs that transformers does not read: each must say what it computes."""
    if any(kind != 1 for kind in f.whole_numbers("attn_type_list")):
        raise f.refuse("attn_type_list", "only 1 (softmax attention) is supported")
    for name in ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"):
        f.only(name, 1.0)
    f.only("qk_norm_type", "per_layer")
    f.only("scoring_func", "sigmoid")
    f.only("shared_intermediate_size", 0)
    f.only("use_qk_norm", True)
    f.only("use_routing_bias", True)
    f.ignore("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp")


def granitemoe(f: Fields) -> Program:
    """granite's four multipliers; experts are stacked, gates above ups."""
    s, act, bias = Sizes.read(f, kv=False), f.activation(), f.flag("attention_bias")
    count = f.count("num_local_experts", 8, high=MOST_EXPERTS)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 2), "softmax", normalise=True)
    norm, rope = NormStyle("rms", f.number("rms_norm_eps", 1e-6)), RopeReader(f)
    scale, ends = f.number("residual_multiplier", 1.0), granite_ends(f)
    pairs, is_separate = f.stored("interleaved_rope"), f.stored("separate_gate_up")
    style = AttentionStyle(f.number("attention_multiplier", 1.0), pairs=pairs, bias=bias, out_bias=bias)

    def layer(n: TensorNames, i: int) -> Ops:
        body = granite_experts(n, s, route, act, is_separate)
        return before_each(n, s, norm, attention(n, s, style, "h", "a"), body, scale)

    return assemble(f, s, norm, rope, [rope.plain(s.head)], ends, layer)


def granite_experts(n: TensorNames, s: Sizes, route: ExpertRouting, act: Activation, is_separate: bool) -> Ops:
    """Stacked experts, gates above ups, from "h" to "m"; in GGUF files gate, up and down of each by themselves."""
    path, count = "block_sparse_moe", route.experts
    chosen = router(n, f"{path}.router.layer", s, route)
    if is_separate:
        return *chosen, each_expert(n, f"{path}.experts", GATE_UP_DOWN, s, s.inner, count, act)
    parts = ("input_linear.weight", "output_linear.weight")
    return *chosen, stacked_experts(n, path, s, s.inner, count, act, parts=parts)


def gpt_oss(f: Fields) -> Program:
    """Sinks; windows in every second layer; experts with biases and clamps, stacked and transposed."""
    f.assume(rope_parameters=_OSS_YARN)
    s, bias = Sizes.read(f, head=64), f.flag("attention_bias", True)
    f.only("hidden_act", "silu")
    f.ignore("initial_context_length")  # a copy of rope_scaling.original_max_position_embeddings
    count = f.count("num_local_experts", 128, high=MOST_EXPERTS)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 4), "softmax", normalise=True)
    f.only("experts_per_token", route.top_k)
    limit, stacked = f.number("swiglu_limit", 7.0), _blocked if f.quantised("mxfp4") else _stacked
    stacked = _separate if f.stored("separate_gate_up") else stacked
    gating = Gating("silu", alpha=f.number("swiglu_alpha", 1.702), limit=limit, up_offset=1.0)
    found = windows(f, s.layers, sliding(s.layers, range(1, s.layers, 2)), f.count("sliding_window", 128))
    norm, rope = NormStyle("rms", f.number("rms_norm_eps", 1e-5)), RopeReader(f, theta=150000.0)

    def layer(n: TensorNames, i: int) -> Ops:
        style = AttentionStyle(
            head_scale(s.head),
            bias=bias,
            out_bias=bias,
            window=found[i],
            sinks=n.vector("self_attn.sinks", s.heads),
        )
        block = (*router(n, "mlp.router", s, route, bias=True), stacked(n, s, count, gating))
        return before_each(n, s, norm, attention(n, s, style, "h", "a"), block)

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer)


def _stacked(n: TensorNames, s: Sizes, count: int, gating: Gating) -> Experts:
    both, down = f"{n.path}mlp.experts.gate_up_proj", f"{n.path}mlp.experts.down_proj"
    gate, up = Rows(0, 1, 2, s.inner), Rows(1, 1, 2, s.inner)
    matrix, vector = (count, s.hidden, 2 * s.inner), (count, 2 * s.inner)
    return Experts(
        source="h",
        routes="routes",
        target="m",
        experts=count,
        gating=gating,
        gate=Weight(both, matrix, gate, transposed=True, stacked=True),
        up=Weight(both, matrix, up, transposed=True, stacked=True),
        down=Weight(down, (count, s.inner, s.hidden), transposed=True, stacked=True),
        gate_bias=Weight(f"{both}_bias", vector, gate, stacked=True),
        up_bias=Weight(f"{both}_bias", vector, up, stacked=True),
        down_bias=Weight(f"{down}_bias", (count, s.hidden), stacked=True),
    )


def _blocked(n: TensorNames, s: Sizes, count: int, gating: Gating) -> Experts:
    """The same in blocks of MXFP4, which lie along inputs: each expert's matrices by themselves (checkpoint/quantised.py)."""
    plain = _stacked(n, s, count, gating)
    path = f"{n.path}mlp.experts.{EXPERT}"
    both, down = f"{path}.gate_up_proj", f"{path}.down_proj"
    gate, up = (Rows(start, 1, 2, s.inner) for start in (0, 1))
    return replace(
        plain,
        gate=Weight(both, (2 * s.inner, s.hidden), gate),
        up=Weight(both, (2 * s.inner, s.hidden), up),
        down=Weight(down, (s.hidden, s.inner)),
    )


def _separate(n: TensorNames, s: Sizes, count: int, gating: Gating) -> Experts:
    """The same in GGUF files: gate and up by themselves, matrices of each expert, biases of all."""

    def bias(part: str, width: int) -> Weight:
        return Weight(f"{n.path}mlp.experts.{part}.bias", (count, width), stacked=True)

    return replace(
        each_expert(n, "mlp.experts", GATE_UP_DOWN, s, s.inner, count, gating),
        gate_bias=bias("gate_proj", s.inner),
        up_bias=bias("up_proj", s.inner),
        down_bias=bias("down_proj", s.hidden),
    )
