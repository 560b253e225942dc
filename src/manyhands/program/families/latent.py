"""Recipes of families with latent attention: deepseek_v3, glm4_moe_lite, minicpm3, youtu."""

import math
from dataclasses import dataclass

from manyhands.program.blocks import (
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    before_each,
    each_expert,
    gated,
    head_scale,
    router,
    sequential,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import GATE_UP_DOWN
from manyhands.program.fields import Fields
from manyhands.program.ops import ExpertRouting, LatentAttention, Product, Program, Rotary, Rows, Weight
from manyhands.program.rope import RopeReader, yarn_scale

_LATENT_NORM = NormStyle("rms", 1e-6)  # of latents; transformers does not take the config's epsilon there


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Widths of latent attention. `query_rank` None: queries come from the hidden state directly."""

    query_rank: int | None
    rank: int
    plain: int  # columns of a head's query and key without position
    rotary: int
    value: int

    @classmethod
    def read(
        cls, f: Fields, s: Sizes, *, query_rank: int, rank: int, plain: int, rotary: int, value: int
    ) -> "LatentSizes":
        """With the family's defaults. Raises ModelError where heads would share keys."""
        f.only("num_key_value_heads", s.heads)
        out = cls(
            query_rank=f.optional_count("q_lora_rank", query_rank),
            rank=f.count("kv_lora_rank", rank, high=1 << 16),
            plain=f.count("qk_nope_head_dim", plain, high=1 << 14),
            rotary=f.count("qk_rope_head_dim", rotary, high=1 << 14),
            value=f.count("v_head_dim", value, high=1 << 14),
        )
        f.only("qk_head_dim", out.plain + out.rotary)
        f.ignore("head_dim")  # transformers sets it to qk_rope_head_dim, whatever the config says
        return out


def sizes(f: Fields) -> Sizes:
    """Sizes of a config in which head_dim says nothing."""
    hidden, heads = f.count("hidden_size", high=1 << 17), f.count("num_attention_heads", high=4096)
    return Sizes(
        layers=f.count("num_hidden_layers", high=1024),
        hidden=hidden,
        vocab=f.count("vocab_size", high=1 << 22),
        heads=heads,
        kv_heads=heads,
        head=max(1, hidden // heads),
        inner=f.count("intermediate_size", high=1 << 20),
    )


def latent_attention(n: TensorNames, s: Sizes, z: LatentSizes, scale: float, *, pairs: bool, bias: bool) -> Ops:
    """From "h" to "a": queries (by way of a latent of their own, if any), the cached latent and rotary key."""
    width, down = z.plain + z.rotary, "self_attn.kv_a_proj_with_mqa"
    latent = n.part("c", down, z.rank + z.rotary, s.hidden, bias, Rows(0, z.rank))
    rotary = n.part("r", down, z.rank + z.rotary, s.hidden, bias, Rows(z.rank, z.rotary))
    query: Ops = (Product("h", (n.part("q", "self_attn.q_proj", s.heads * width, s.hidden, False), latent, rotary)),)
    if z.query_rank is not None:
        query = (
            Product("h", (n.part("q", "self_attn.q_a_proj", z.query_rank, s.hidden, bias), latent, rotary)),
            _LATENT_NORM.op(n, "self_attn.q_a_layernorm", z.query_rank, "q", "q"),
            Product("q", (n.part("q", "self_attn.q_b_proj", s.heads * width, z.query_rank, False),)),
        )
    stored = (s.heads * (z.plain + z.value), z.rank)
    name, stride = f"{n.path}self_attn.kv_b_proj.weight", z.plain + z.value
    attend = LatentAttention(
        query="q",
        latent="c",
        rotary="r",
        target="a",
        heads=s.heads,
        width=z.plain,
        rotary_width=z.rotary,
        value_width=z.value,
        rank=z.rank,
        scale=scale,
        key_weight=Weight(name, stored, Rows(0, z.plain, stride, s.heads)),
        value_weight=Weight(name, stored, Rows(z.plain, z.value, stride, s.heads)),
    )
    return (
        *query,
        _LATENT_NORM.op(n, "self_attn.kv_a_layernorm", z.rank, "c", "c"),
        Rotary("q", s.heads, width, 0, offset=z.plain, pairs=pairs),
        Rotary("r", 1, z.rotary, 0, pairs=pairs),
        attend,
        Product("a", (n.part("a", "self_attn.o_proj", s.hidden, s.heads * z.value, bias),)),
    )


def latent_scale(rope: RopeReader, width: int) -> float:
    """1 / sqrt(width), times the square of yarn's scale where mscale_all_dim asks for it."""
    mscale, factor = rope.attention_scale()
    return head_scale(width) * (yarn_scale(factor, mscale) ** 2 if mscale else 1.0)


def deepseek_v3(f: Fields) -> Program:
    """Experts in groups, chosen with a correction; one block of shared experts; the first layers dense."""
    s = sizes(f)
    dense = f.count("first_k_dense_replace", 3, low=0)
    return _with_experts(f, s, [i >= dense for i in range(s.layers)])


def glm4_moe_lite(f: Fields) -> Program:
    """deepseek_v3 with defaults of its own; a list says which layers are dense (GLM-4.7-Flash)."""
    f.assume(q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, rms_norm_eps=1e-5, n_group=1, topk_group=1)
    f.assume(n_routed_experts=64, moe_intermediate_size=1536, num_experts_per_tok=4, routed_scaling_factor=1.8)
    s = sizes(f)
    default = ["dense", *["sparse"] * (s.layers - 1)]
    kinds = f.per_layer("mlp_layer_types", s.layers, default, ("dense", "sparse"))
    f.only("first_k_dense_replace", [*kinds, "sparse"].index("sparse"))  # published beside it, not read by transformers
    return _with_experts(f, s, [kind == "sparse" for kind in kinds])


def _with_experts(f: Fields, s: Sizes, sparse: list[bool]) -> Program:
    z = LatentSizes.read(f, s, query_rank=1536, rank=512, plain=128, rotary=64, value=128)
    norm, act, bias = NormStyle("rms", f.number("rms_norm_eps", 1e-6)), f.activation(), f.flag("attention_bias")
    pairs = f.flag("rope_interleave", True)
    count, inner = f.count("n_routed_experts", 256, high=4096), f.count("moe_intermediate_size", 2048, high=1 << 20)
    shared, rope = f.count("n_shared_experts", 1, high=4096), RopeReader(f)
    f.only("num_local_experts", count)
    f.only("scoring_func", "sigmoid")
    f.only("topk_method", "noaux_tc")
    f.only("moe_layer_freq", 1)
    route = _grouped_route(f, count)
    scale = latent_scale(rope, z.plain + z.rotary)

    def block(n: TensorNames, i: int) -> Branch:
        before = norm.op(n, "post_attention_layernorm", s.hidden, "x", "h")
        if not sparse[i]:
            return Branch(gated(n, "mlp", s.hidden, s.inner, act, "h", "m"), "m", before)
        body: Ops = (
            *router(n, "mlp.gate", s, route, correction="mlp.gate.e_score_correction_bias"),
            each_expert(n, "mlp.experts", GATE_UP_DOWN, s, inner, count, act),
            *gated(n, "mlp.shared_experts", s.hidden, inner * shared, act, "h", "s"),
        )
        return Branch(body, "m", before, terms=("m", "s"))

    def layer(n: TensorNames, i: int) -> Ops:
        first = latent_attention(n, s, z, scale, pairs=pairs, bias=bias)
        return sequential(Branch(first, "a", norm.op(n, "input_layernorm", s.hidden, "x", "h")), block(n, i))

    return assemble(f, s, norm, rope, [rope.plain(z.rotary)], EndsStyle(), layer)


def _grouped_route(f: Fields, count: int) -> ExpertRouting:
    groups = f.count("n_group", 8, high=count)
    if count % groups or count // groups < 2:
        raise f.refuse("n_group", f"groups of at least two of the {count} experts are needed")
    best = f.count("topk_group", 4, high=groups)
    return ExpertRouting(
        source="r",
        target="routes",
        experts=count,
        top_k=f.count("num_experts_per_tok", 8, high=best * (count // groups)),
        score="sigmoid",
        normalise=f.flag("norm_topk_prob", True),
        scale=f.number("routed_scaling_factor", 2.5),
        groups=groups,
        top_groups=best,
    )


def youtu(f: Fields) -> Program:
    """Dense, with the attention of deepseek_v3."""
    s = sizes(f)
    z = LatentSizes.read(f, s, query_rank=1536, rank=512, plain=128, rotary=64, value=128)
    norm, act, bias = NormStyle("rms", f.number("rms_norm_eps", 1e-6)), f.activation(), f.flag("attention_bias")
    pairs, rope = f.flag("rope_interleave", True), RopeReader(f)
    f.ignore("embedding_initializer_range")
    scale = latent_scale(rope, z.plain + z.rotary)

    def layer(n: TensorNames, i: int) -> Ops:
        first = latent_attention(n, s, z, scale, pairs=pairs, bias=bias)
        return before_each(n, s, norm, first, gated(n, "mlp", s.hidden, s.inner, act, "h", "m"))

    return assemble(f, s, norm, rope, [rope.plain(z.rotary)], EndsStyle(tied=True), layer)


def minicpm3(f: Fields) -> Program:
    """Dense; scaled embedding, branches and logits."""
    s = sizes(f)
    z = LatentSizes.read(f, s, query_rank=768, rank=256, plain=64, rotary=32, value=max(1, s.hidden // s.heads))
    norm, act, bias = NormStyle("rms", f.number("rms_norm_eps", 1e-5)), f.activation(), f.flag("attention_bias")
    depth, base = f.optional("scale_depth", 1.4), f.optional("dim_model_base", 256.0)
    branch = 1.0 if depth is None else depth / math.sqrt(s.layers)
    rope, block_bias = RopeReader(f), f.flag("mlp_bias")
    scale = latent_scale(rope, z.plain + z.rotary)

    def layer(n: TensorNames, i: int) -> Ops:
        first = latent_attention(n, s, z, scale, pairs=False, bias=bias)
        block = gated(n, "mlp", s.hidden, s.inner, act, "h", "m", bias=block_bias)
        return before_each(n, s, norm, first, block, branch)

    ends = EndsStyle(
        tied=True,
        embed_scale=f.number("scale_emb", 12.0),
        round_scale=True,
        scale=1.0 if base is None else base / s.hidden,
    )
    return assemble(f, s, norm, rope, [rope.plain(z.rotary)], ends, layer)
